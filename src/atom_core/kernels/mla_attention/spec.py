"""What an attention kernel over latents needs to know of its layer."""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.kernels.mla_cache import MlaSpec


@dataclass(frozen=True)
class MlaAttentionSpec:
    """One attention layer over cached latents, as this rank holds it."""

    latent: MlaSpec
    scale: float
