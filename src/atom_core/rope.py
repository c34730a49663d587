"""Rotary position embeddings: the variants that checkpoints name, as one table of cosines and sines.

A variant is reduced at construction to ``[max_position, rotary_dim]`` numbers, cosines first, so that kernels know
none of them. Formulas: RoFormer (arXiv 2104.09864), linear and dynamic NTK scaling as Hugging Face
``modeling_rope_utils`` defines them, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1's smoothing.

A serving engine caches keys, so a position's rotation must not depend on the request it is in. Two variants are
defined by sequence length upstream; here:

- ``dynamic``: position ``p`` beyond ``max_position`` takes the base of a sequence of length ``p + 1``, which is what
  Hugging Face computes when it decodes token by token. Within ``max_position`` it equals plain rope.
- ``longrope``: long factors for every position where the engine serves more than the original context, else short
  ones. This is also vLLM's rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """One rope variant. Fields beyond the first four are read by the variants that name them."""

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
    """Pairs are (0, 1), (2, 3), ... as in GPT-J, instead of (0, d/2), (1, d/2 + 1), ... as in NeoX."""


def read_rope(hf: Mapping[str, Any], *, head_dim: int, max_position: int) -> RopeConfig:
    """Read either form: ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling``.

    Args:
        hf: the parsed configuration.
        head_dim: size of an attention head; the rotated part may be smaller (``partial_rotary_factor``).
        max_position: ``max_position_embeddings``.

    Raises:
        ValueError: an unknown variant, or one whose parameters are missing.
    """
    parameters: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    # Of the two names for the variant, `type` is the older; null values mean "not given" throughout.
    given = {key: value for key, value in parameters.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type == "su":  # Phi-3's first name for it
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}.")

    def need(key: str) -> float:
        value = given.get(key, hf.get(key))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"rope type {rope_type!r} needs a number {key!r} in rope_parameters; found {value!r}.")
        return float(value)

    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
    rotary_dim = int(head_dim * partial)
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"head_dim={head_dim} with partial_rotary_factor={partial} rotates {rotary_dim} numbers of a head; "
            "rope needs an even count of at least 2."
        )
    values: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": float(given.get("rope_theta", hf.get("rope_theta") or 10000.0)),
        "rotary_dim": rotary_dim,
        "max_position": max_position,
    }
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = need("factor")
    if rope_type == "llama3":
        values.update({key: need(key) for key in ("low_freq_factor", "high_freq_factor")})
        values["original_max_position"] = int(need("original_max_position_embeddings"))
    if rope_type == "yarn":
        values.update(_read_yarn(given, need, max_position))
    if rope_type == "longrope":
        values.update(_read_longrope(given, hf, max_position, rotary_dim))
    return RopeConfig(**values)


def _read_yarn(given: Mapping[str, Any], need: Any, max_position: int) -> dict[str, Any]:
    original = int(given.get("original_max_position_embeddings", max_position))
    factor = need("factor") if "factor" in given else max_position / original
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": float(attention_factor),
        "beta_fast": float(given.get("beta_fast", 32.0)),
        "beta_slow": float(given.get("beta_slow", 1.0)),
        "truncate": bool(given.get("truncate", True)),
    }


def read_score_factor(hf: Mapping[str, Any]) -> float:
    """What a stretched rope multiplies all attention scores by, where ``mscale_all_dim`` asks for it, else 1.

    It makes up for scores that spread less over longer contexts; DeepSeek's families have it beside what the rotated
    numbers are multiplied by (arXiv 2405.04434, section 3.1.4).

    Raises:
        ValueError: the factor by which the context is stretched is missing.
    """
    parameters: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    mscale = parameters.get("mscale_all_dim")
    if not mscale or (parameters.get("rope_type") or parameters.get("type") or "default") == "default":
        return 1.0
    factor = parameters.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise ValueError(f"mscale_all_dim={mscale} in rope_parameters needs a number 'factor' there; found {factor!r}.")
    return _yarn_mscale(float(factor), float(mscale)) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(
    given: Mapping[str, Any], hf: Mapping[str, Any], max_position: int, rotary_dim: int
) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings", hf.get("original_max_position_embeddings"))
    # Phi-3 keeps the original length beside rope_scaling; where it is nowhere, the config's own length is it.
    factor = max_position / original if original else given.get("factor", 1.0)
    original = int(original or max_position)
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors: dict[str, tuple[float, ...]] = {}
    for key in ("short_factor", "long_factor"):
        values = given.get(key)
        if not isinstance(values, (list, tuple)) or len(values) != rotary_dim // 2:
            count = len(values) if isinstance(values, (list, tuple)) else 0
            raise ValueError(
                f"rope type 'longrope' needs {rotary_dim // 2} numbers in {key!r} (half of the rotated size); "
                f"found {count}."
            )
        factors[key] = tuple(float(value) for value in values)
    return {
        "factor": float(factor),
        "original_max_position": original,
        "attention_factor": float(attention_factor),
        **factors,
    }


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device | None = None) -> torch.Tensor:
    """Cosines and sines of every position.

    Args:
        rope: the variant.
        num_positions: rows of the table: the longest sequence that will be served.
        device: where the table goes.

    Returns:
        float32 ``[num_positions, rotary_dim]``: ``rotary_dim / 2`` cosines, then as many sines, both already
        multiplied by the variant's attention factor.
    """
    with torch.device("cpu"):  # one and the same table on every device, whatever the caller's default is
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
    """Radians a position for each rotated pair, float32 ``[rotary_dim / 2]``; ``num_positions`` matters to longrope."""
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
    wavelengths = 2 * math.pi / plain
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # 0 for wavelengths longer than the original context (divided by the factor), 1 for short ones (left alone).
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns ``rotations`` times over the original context."""
        period = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)
