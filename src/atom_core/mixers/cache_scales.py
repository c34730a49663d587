"""The scales of an attention layer's FP8 cache: their checkpoint names, and how a layer takes them.

A layer has one scale for its keys and one for its values, the same on every rank, 1 by default. A cache in the model's
dtype ignores the scales of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.mixers.base import BaseAttention

#: Checkpoint names of scales, next to the layer's projections, and what each one scales. Written by llm-compressor,
#: ModelOpt, Quark, vLLM and SGLang, and by AutoFP8, which has one scale for both.
SCALE_NAMES: Mapping[str, tuple[str, ...]] = {
    "k_scale": ("key",),
    "v_scale": ("value",),
    "k_proj.k_scale": ("key",),
    "v_proj.v_scale": ("value",),
    "k_proj.output_scale": ("key",),
    "v_proj.output_scale": ("value",),
    "attn.k_scale": ("key",),
    "attn.v_scale": ("value",),
    "kv_scale": ("key", "value"),
    "attn.kv_scale": ("key", "value"),
}


class CacheScales(nn.Module):
    """Sets the cache scales of an ``attention`` layer whose cache has dtype ``cache_dtype``."""

    def __init__(self, attention: BaseAttention, cache_dtype: torch.dtype) -> None:
        super().__init__()
        self._attention = (attention,)  # a tuple, so torch does not register it twice
        self.cache_dtype = cache_dtype

    @property
    def layer_index(self) -> int:
        """The decoder layer's index."""
        return self._attention[0].mixer.layer_index

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set a checkpoint's scales, by names that end in one of :data:`SCALE_NAMES`.

        Raises:
            ValueError: a scale has more than one element, or is not finite and positive.
        """
        if self.cache_dtype in FP8_DTYPES and (given := self._read(tensors)):
            self._set(given.get("key"), given.get("value"))

    def change(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """How :meth:`adopt` would change the scales in use, which captured graphs contain; None: not at all.

        Raises:
            ValueError: as :meth:`adopt`.
        """
        if self.cache_dtype not in FP8_DTYPES or not (given := self._read(tensors)):
            return None
        new, old = self._scales(given.get("key"), given.get("value")), self._in_use()
        return None if new == old else f"{', '.join(sorted(tensors))} would turn scales {old} of the cache into {new}"

    def _read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        given: dict[str, float] = {}
        # Scales for both come first, so that a separate one for keys or values overrides them.
        for name in sorted(tensors, key=lambda name: -len(_sides(name))):
            tensor = tensors[name]
            if tensor.numel() != 1:
                raise ValueError(f"{name} is {list(tensor.shape)}; supported: one scale for keys and one for values.")
            scale = _checked(tensor.item(), name)
            given |= dict.fromkeys(_sides(name), scale)
        return given

    def adopt_one(self, scale: float, source: str) -> None:
        """Set one scale for keys and values, from ``source``; a cache that is not FP8 ignores it.

        Raises:
            ValueError: it is not finite and positive.
        """
        if self.cache_dtype in FP8_DTYPES:
            scale = _checked(scale, source)
            self._set(scale, scale)

    def _set(self, key: float | None, value: float | None) -> None:
        self._attention[0].set_scales(*self._scales(key, value))

    def _scales(self, key: float | None, value: float | None) -> tuple[float, float]:
        # Scales are made for e4m3fn; the same bits mean half the value in e4m3fnuz.
        factor = 2.0 if self.cache_dtype == torch.float8_e4m3fnuz else 1.0
        return 1.0 if key is None else factor * key, 1.0 if value is None else factor * value

    def _in_use(self) -> tuple[float, float]:
        mixer = self._attention[0].mixer
        return mixer.k_scale, mixer.v_scale


def _sides(name: str) -> tuple[str, ...]:
    *_, parent, last = name.split(".")
    return SCALE_NAMES.get(f"{parent}.{last}") or SCALE_NAMES[last]


def _checked(scale: float, source: str) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{source} scales a KV cache by {scale}; a scale is a finite number above 0.")
    return scale
