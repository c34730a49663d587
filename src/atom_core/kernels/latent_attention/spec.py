"""What an attention kernel over latents needs to know of its layer."""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.kernels.latent_cache import LatentSpec


@dataclass(frozen=True)
class LatentAttentionSpec:
    """One attention layer over cached latents, as this rank holds it."""

    latent: LatentSpec
    scale: float
