"""Qwen3.5, and 3.6 and 3.8 of the same architecture: Qwen3-Next's layers, dense or with a mixture of experts.

Checkpoints have the projections of linear attention apart. Those with vision (``...ForConditionalGeneration``) have the
language model's configuration in ``text_config`` and its tensors under ``model.language_model.``; their vision part is
not loaded. Positions of text are the same on all axes of M-RoPE, which is then plain rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from atom_core.config import ModelConfig, read_decoder
from atom_core.hf_config import DraftLayers, Experts, MropeKeys, Size, as_mapping
from atom_core.language_model import of_text
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.qwen3_next import HybridKeys, gated_mixture

KeysT = TypeVar("KeysT", bound="Qwen35Keys")

#: What names of a vision part begin with, as Transformers and as vLLM write it. Files that serve as text may have it.
VISION_PREFIXES = ("model.visual.", "visual.")


class Qwen35Keys(HybridKeys):
    """Of a dense model."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    rope_schema = MropeKeys
    fused_projections = False

    num_key_value_heads: int | None = 4
    mtp_num_hidden_layers: DraftLayers | None = None
    mtp_use_dedicated_embeddings: bool = False

    @classmethod
    def read(cls: type[KeysT], source: Mapping[str, Any] | Any) -> KeysT:
        """See :meth:`HfConfig.read`; of a vision-language model, the language model's."""
        return super().read(of_text(as_mapping(source)))


class Qwen35MoeKeys(Qwen35Keys):
    """Of a mixture of experts, in all layers."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        **HybridKeys.fixed,
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
    }
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")

    num_key_value_heads: int | None = 2
    intermediate_size: Size = 512
    """No layer has a dense network."""
    num_experts: Experts = 256
    num_experts_per_tok: Experts = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    """The dense model."""

    schema: type[Qwen35Keys] = Qwen35Keys
    draft_prefix = "mtp."
    vision_prefixes = VISION_PREFIXES

    @classmethod
    def read_config(cls, hf: Qwen35Keys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        return read_decoder(hf, hf.mixers(), zero_centered_norms=True)


class Qwen3_5MoeForCausalLM(DecoderForCausalLM):
    """The mixture of experts."""

    schema: type[Qwen35MoeKeys] = Qwen35MoeKeys
    draft_prefix = "mtp."
    vision_prefixes = VISION_PREFIXES

    @classmethod
    def read_config(cls, hf: Qwen35MoeKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`; chosen experts' weights are always renormalised."""
        moe = gated_mixture(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            hf.shared_expert_intermediate_size,
            renormalize=True,
        )
        mixtures = [moe] * hf.num_hidden_layers
        return read_decoder(hf, hf.mixers(), mixtures=mixtures, zero_centered_norms=True)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The language model of a vision-language checkpoint."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The language model of a vision-language checkpoint."""
