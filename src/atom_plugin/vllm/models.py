"""Our model classes for vLLM. vLLM inspects them in another process and caches the result by the contents of this file.
So every property that vLLM asks for (such as pipeline support) is set in this file and not in a base class elsewhere.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors

from atom_core.mixers.base import BaseAttention
from atom_core.models.decoder import Carried, DecoderForCausalLM
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_plugin.common.load_formats import SHARDED_STATE
from atom_plugin.common.report import startup_table
from atom_plugin.common.settings import load_settings
from atom_plugin.common.versions import framework_line
from atom_plugin.vllm.attention import VllmPagedAttention, is_compiled
from atom_plugin.vllm.checkpoint_config import values_of
from atom_plugin.vllm.framework_attention import FrameworkAttention
from atom_plugin.vllm.graphs import set_breakable_mode
from atom_plugin.vllm.routed_experts import routing_sources
from atom_plugin.vllm.runtime import build_runtime
from atom_plugin.vllm.states import COPY_FUNCTIONS, state_dtypes, state_shapes
from atom_plugin.vllm.updates import AtomModel, check_files_of_rank
from atom_plugin.vllm.warmup import register_warm_up

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncsByType
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.worker.gpu.model_states.interface import ModelState

logger = logging.getLogger("vllm.atom_plugin")

_compile = support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0},
    enable_if=is_compiled,
)


class AtomForCausalLM(AtomModel):
    """A model of the core with vLLM's model interface."""

    supports_pp = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        set_breakable_mode(vllm_config)
        model_config = vllm_config.model_config
        settings = load_settings()
        self.config = model_config.hf_config
        architecture = type(self).__name__.removeprefix("Atom")
        config = read_model_config(values_of(model_config, architecture))
        attention = FrameworkAttention if settings.disable_vllm_attention else VllmPagedAttention
        self.routed_experts = routing_sources(vllm_config, config)
        self.runtime = build_runtime(
            vllm_config, model_config, config.num_layers, attention, settings, self.routed_experts
        )
        core: DecoderForCausalLM = load_model_class(architecture)(config, self.runtime, prefix)
        self.wrap(core)
        self.model, self.lm_head = core.model, core.lm_head
        self.checkpoint = str(model_config.model)
        self.set_up_weights(model_config, vllm_config.load_config.download_dir)
        if vllm_config.load_config.load_format == SHARDED_STATE and Path(self.checkpoint).is_dir():
            check_files_of_rank(self, Path(self.checkpoint), vllm_config.load_config)
        register_warm_up(core, self.runtime, vllm_config)
        if self.runtime.tensor_parallel.rank == 0:
            layers = ", ".join(sorted({type(it).__name__ for it in core.modules() if isinstance(it, BaseAttention)}))
            table = startup_table(framework_line("vllm"), type(core).__name__, layers, self.runtime)
            logger.info("atom-plugin serves %s\n%s", self.checkpoint, table)

    def get_model_state_cls(self) -> type[ModelState]:
        """The model state for vLLM's model runner V2."""
        from atom_plugin.vllm.sampling import AtomModelState  # imports runner V2, which may not be in use

        return AtomModelState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, hidden]``."""
        embedded: torch.Tensor = self.core.embed(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """One step; see vLLM's model interface."""
        assert positions.dim() == 1, "M-RoPE of text is served as plain rope"
        carried = None
        if intermediate_tensors is not None:
            carried = Carried(intermediate_tensors["hidden_states"], intermediate_tensors["residual"])
        result: torch.Tensor | Carried = self.model(input_ids, positions, None, inputs_embeds, carried)
        if isinstance(result, Carried):
            return IntermediateTensors({"hidden_states": result.hidden, "residual": result.residual})
        return result

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]``, the rows to sample, to ``[T, vocabulary]``."""
        self.weights.check_ready()
        logits: torch.Tensor = self.core.logits(hidden_states)
        return logits

    def process_weights_after_loading(self) -> None:
        """The last hook that vLLM calls on a loaded model."""
        self.weights.close()
        self._hand_over()

    def weights_written(self) -> None:
        """See :class:`AtomModel`."""
        self._hand_over()

    def _hand_over(self) -> None:
        for layer in self.modules():
            if isinstance(layer, FrameworkAttention):
                layer.hand_over()

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """Zeros with which vLLM profiles a later pipeline stage."""
        shape = (batch_size, self.core.config.hidden_size)
        return IntermediateTensors(
            {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("hidden_states", "residual")}
        )


class AtomHybridForCausalLM(AtomForCausalLM):
    """Of models with layers that keep a state a request, which vLLM calls mamba; see :mod:`.states`."""

    is_hybrid = True
    has_inner_state = True

    def get_model_state_cls(self) -> type[ModelState]:
        """See :class:`AtomForCausalLM`."""
        from atom_plugin.vllm.hybrid_model_state import AtomHybridModelState

        return AtomHybridModelState

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """See vLLM."""
        return state_shapes(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """See vLLM."""
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """See vLLM."""
        return COPY_FUNCTIONS

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[MambaAttentionBackendEnum]) -> MambaStateCopyFuncsByType:
        """See vLLM."""
        return dict.fromkeys(mamba_types, COPY_FUNCTIONS)


@_compile
class AtomDeepseekV2ForCausalLM(AtomForCausalLM):
    """DeepSeek V2 and V2-Lite."""


@_compile
class AtomDeepseekV3ForCausalLM(AtomForCausalLM):
    """DeepSeek V3 and R1, Kimi K2."""


@_compile
class AtomGlm4MoeForCausalLM(AtomForCausalLM):
    """GLM-4.5 and 4.6."""


@_compile
class AtomGptOssForCausalLM(AtomForCausalLM):
    """GPT-OSS."""


@_compile
class AtomLlamaForCausalLM(AtomForCausalLM):
    """Llama 2 and 3.x."""


@_compile
class AtomMistralForCausalLM(AtomForCausalLM):
    """Mistral."""


@_compile
class AtomMixtralForCausalLM(AtomForCausalLM):
    """Mixtral."""


@_compile
class AtomQwen2ForCausalLM(AtomForCausalLM):
    """Qwen2 and Qwen2.5."""


@_compile
class AtomQwen3ForCausalLM(AtomForCausalLM):
    """Qwen3."""


@_compile
class AtomQwen3MoeForCausalLM(AtomForCausalLM):
    """Qwen3-MoE."""


@_compile
class AtomQwen3NextForCausalLM(AtomHybridForCausalLM):
    """Qwen3-Next."""


@_compile
class AtomQwen3_5ForCausalLM(AtomHybridForCausalLM):
    """Qwen3.5 and 3.6, dense."""


@_compile
class AtomQwen3_5MoeForCausalLM(AtomHybridForCausalLM):
    """Qwen3.5, 3.6 and 3.8, mixtures."""


@_compile
class AtomQwen3_5ForConditionalGeneration(AtomHybridForCausalLM):
    """The text of Qwen3.5 and 3.6, dense."""


@_compile
class AtomQwen3_5MoeForConditionalGeneration(AtomHybridForCausalLM):
    """The text of Qwen3.5 and 3.6, mixtures."""
