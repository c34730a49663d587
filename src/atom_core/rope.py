"""Rotary position embeddings: every variant that checkpoints name, as one table of cosines and sines.

Kernels read the table and know no variants. Formulas: RoFormer (arXiv 2104.09864), linear and dynamic NTK scaling as in
Hugging Face's ``modeling_rope_utils``, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1's smoothing.

A serving engine caches keys, so the rotation at a position must not depend on the request. Upstream, two variants
depend on the sequence length; here:

- ``dynamic``: position ``p`` beyond ``max_position`` uses the base for a sequence of length ``p + 1``, as Hugging Face
  does when it decodes token by token. Up to ``max_position`` it is plain rope.
- ``longrope``: long factors for all positions if the engine serves more than the original context, else short factors,
  as in vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from atom_core.hf_config import HfConfig, RopeKeys

#: Types that read the original context length.
_LENGTHENED = ("yarn", "llama3", "longrope")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """One rope variant. Fields after the first four are for some variants only."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    """Rotated pairs are (0, 1), (2, 3), ... as in GPT-J, instead of (0, d/2), (1, d/2 + 1), ... as in NeoX."""


def read_rope(hf: HfConfig, *, head_dim: int, size_key: str = "head_dim") -> RopeConfig:
    """Read ``rope_parameters`` (Transformers 5), or ``rope_theta`` with ``rope_scaling``, as Transformers does.

    ``head_dim`` is the head size, by ``size_key`` of the configuration; ``partial_rotary_factor`` may rotate less.

    Raises:
        ValueError: an unknown variant, or missing or invalid parameters.
    """
    given, max_position = hf.rope_keys, hf.max_position_embeddings
    rope_type = given.rope_type or given.type or "default"
    if rope_type == "su":  # Phi-3's older name
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}.")

    def need(key: str) -> float:
        value = getattr(given, key)
        if value is None:
            raise ValueError(f"rope type {rope_type!r} needs a number {key!r} in rope_parameters; found none.")
        return float(value)

    used = ("rope_theta", *(("original_max_position_embeddings",) if rope_type in _LENGTHENED else ()))
    for key in used:
        if key in given.model_fields_set and getattr(given, key) is None:
            raise ValueError(f"rope type {rope_type!r} needs a number {key!r} in rope_parameters; found null.")
    theta = _first(given.rope_theta, hf.rope_theta, hf.default_theta)
    rotary_dim = _rotary_dim(hf, given, head_dim, size_key)
    values: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": float(theta),
        "rotary_dim": rotary_dim,
        "max_position": max_position,
    }
    # The config's own key overrides the one in rope_parameters; the default is the model's length.
    original = int(_first(hf.original_max_position_embeddings, given.original_max_position_embeddings, max_position))
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = need("factor")
    if rope_type == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        if low == high:
            raise ValueError(f"rope type 'llama3' needs low_freq_factor below high_freq_factor; found {low} for both.")
        values |= {"low_freq_factor": low, "high_freq_factor": high, "original_max_position": original}
    if rope_type == "yarn":
        values.update(_read_yarn(given, float(theta), original, max_position))
    if rope_type == "longrope":
        values.update(_read_longrope(given, original, max_position, rotary_dim))
    if rope_type == "dynamic" and rotary_dim == 2:
        raise ValueError("rope type 'dynamic' needs more than 2 rotated elements per head; found 2.")
    return RopeConfig(**values)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _rotary_dim(hf: HfConfig, given: RopeKeys, head_dim: int, key: str) -> int:
    partial = _first(given.partial_rotary_factor, hf.partial_rotary_factor, hf.default_partial, 1.0)
    if hf.default_partial is None and partial != 1:
        raise ValueError(
            f"The model's config has partial_rotary_factor={partial}, but {hf.architecture} rotates whole heads; "
            "supported: 1.0, or leave it out."
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"{key}={head_dim} with partial_rotary_factor={partial} rotates {rotary_dim} elements per head; "
            "rope needs an even count of at least 2."
        )
    return rotary_dim


def _read_yarn(given: RopeKeys, theta: float, original: int, max_position: int) -> dict[str, Any]:
    if theta == 1:
        raise ValueError("rope type 'yarn' needs a rope_theta other than 1, which rotates all elements alike.")
    if "factor" not in given.model_fields_set:
        raise ValueError("rope type 'yarn' needs a number 'factor' in rope_parameters; found none.")
    factor = max_position / original if given.factor is None else given.factor
    attention_factor = given.attention_factor
    if attention_factor is None:
        if given.mscale and given.mscale_all_dim:
            attention_factor = _yarn_mscale(factor, given.mscale) / _yarn_mscale(factor, given.mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return {
        "factor": float(factor),
        "original_max_position": original,
        "attention_factor": float(attention_factor),
        # Zero and null mean the default.
        "beta_fast": float(given.beta_fast or 32.0),
        "beta_slow": float(given.beta_slow or 1.0),
        # As in Transformers: null means false, a missing key true.
        "truncate": bool(given.truncate) if "truncate" in given.model_fields_set else True,
    }


def read_score_factor(rope: RopeKeys) -> float:
    """The factor of all attention scores that ``mscale_all_dim`` asks for in DeepSeek's families, else 1.

    It sharpens attention over a longer context (arXiv 2405.04434, section 3.1.4), in addition to ``attention_factor``.

    Raises:
        ValueError: ``factor`` is missing.
    """
    if not rope.mscale_all_dim or (rope.rope_type or rope.type or "default") == "default":
        return 1.0
    if rope.factor is None:
        raise ValueError(
            f"mscale_all_dim={rope.mscale_all_dim} in rope_parameters needs a number 'factor' there; found none."
        )
    return _yarn_mscale(float(rope.factor), float(rope.mscale_all_dim)) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(given: RopeKeys, original: int, max_position: int, rotary_dim: int) -> dict[str, Any]:
    factor = max_position / original if given.factor is None else given.factor
    attention_factor = given.attention_factor
    if attention_factor is None:
        if factor > 1 and original == 1:
            raise ValueError("rope type 'longrope' needs an original_max_position_embeddings above 1.")
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors: dict[str, tuple[float, ...]] = {}
    for key in ("short_factor", "long_factor"):
        values = getattr(given, key) or ()
        if len(values) != rotary_dim // 2:
            raise ValueError(
                f"rope type 'longrope' needs {rotary_dim // 2} numbers in {key!r} (half of the rotated size); "
                f"found {len(values)}."
            )
        factors[key] = tuple(float(value) for value in values)
    return {
        "factor": float(factor),
        "original_max_position": original,
        "attention_factor": float(attention_factor),
        **factors,
    }


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device | None = None) -> torch.Tensor:
    """Cosines and sines of ``num_positions`` positions, the longest sequence that is served.

    Returns:
        float32 ``[num_positions, rotary_dim]`` on ``device``: ``rotary_dim / 2`` cosines, then as many sines, both
        multiplied by the variant's attention factor.
    """
    with torch.device("cpu"):  # so that the table is the same on every device
        return _cos_sin(rope, num_positions).to(device)


def _cos_sin(rope: RopeConfig, num_positions: int) -> torch.Tensor:
    positions = torch.arange(num_positions, dtype=torch.float32)
    if rope.rope_type == "dynamic" and num_positions > rope.max_position:
        lengths = torch.clamp(positions + 1, min=rope.max_position)
        stretch = rope.factor * lengths / rope.max_position - (rope.factor - 1)
        theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
        angles = positions[:, None] / theta[:, None] ** _exponents(rope)
    else:
        angles = torch.outer(positions, inverse_frequencies(rope, num_positions))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 ``[rotary_dim / 2]``; longrope reads ``num_positions``."""
    plain = 1.0 / rope.theta ** _exponents(rope)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, plain)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if num_positions > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** _exponents(rope))
    return plain


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Scale long wavelengths by the factor, keep short ones, and interpolate between them."""
    wavelengths = 2 * math.pi / plain
    long, short = (rope.original_max_position / factor for factor in (rope.low_freq_factor, rope.high_freq_factor))
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelengths >= short) & (wavelengths <= long)
    stretched = torch.where(wavelengths > long, plain / rope.factor, plain)
    return torch.where(between, (1 - smooth) * plain / rope.factor + smooth * plain, stretched)


def _yarn_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """The (fractional) pair with ``rotations`` full turns over the original context."""
        period = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # With beta_fast below beta_slow the ramp falls, as in Transformers.
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (0.001 if high == low else high - low)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)
