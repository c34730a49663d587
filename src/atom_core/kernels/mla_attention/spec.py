"""The spec of an attention layer over latents."""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.kernels.mla_cache import MlaSpec


@dataclass(frozen=True)
class MlaAttentionSpec:
    """One attention layer over cached latents, with this rank's heads."""

    latent: MlaSpec
    scale: float
