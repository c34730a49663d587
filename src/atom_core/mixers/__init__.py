"""Token mixers: the part of a decoder layer in which a token's state depends on other tokens.

:mod:`.base` has the contract, each other module one kind. :data:`MIXERS` says which kind runs a configuration.
"""

from __future__ import annotations

from atom_core.config import AttentionConfig, GatedDeltaNetConfig, MlaConfig
from atom_core.mixers.attention import Attention
from atom_core.mixers.gated_delta_net import GatedDeltaNet
from atom_core.mixers.mla import MultiHeadLatentAttention

MIXERS: dict[type, type[Attention] | type[MultiHeadLatentAttention] | type[GatedDeltaNet]] = {
    AttentionConfig: Attention,
    MlaConfig: MultiHeadLatentAttention,
    GatedDeltaNetConfig: GatedDeltaNet,
}
