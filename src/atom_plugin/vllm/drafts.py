"""Draft models made of a checkpoint's own layers (multi-token prediction), for vLLM; see :mod:`.models`.

Both of vLLM's runners build the draft after the target and set the target's modules in it: ``embed_tokens`` of
:attr:`AtomDraft.model`, and ``lm_head``. One output of the draft serves for the logits and as the next step's input.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors

from atom_core.models.draft import DraftModel
from atom_core.models.registry import load_draft_class
from atom_plugin.common.report import startup_table
from atom_plugin.common.settings import load_settings
from atom_plugin.common.versions import framework_line
from atom_plugin.vllm.attention import VllmPagedAttention, is_compiled
from atom_plugin.vllm.checkpoint_config import values_of_draft
from atom_plugin.vllm.graphs import set_breakable_mode
from atom_plugin.vllm.runtime import build_runtime
from atom_plugin.vllm.updates import AtomModel
from atom_plugin.vllm.warmup import register_warm_up

logger = logging.getLogger("vllm.atom_plugin")

_compile = support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0}, enable_if=is_compiled
)


class AtomDraft(AtomModel):
    """A draft of the core with vLLM's interface of drafts."""

    #: The target's architecture, as in ``config.json``.
    architecture: str
    #: The target's, set by vLLM.
    lm_head: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        set_breakable_mode(vllm_config)
        # vLLM passes the target's configuration, which contains the draft's.
        assert vllm_config.speculative_config is not None
        model_config = vllm_config.speculative_config.draft_model_config
        self.config = model_config.hf_config
        draft_class = load_draft_class(self.architecture)
        config = draft_class.from_hf(values_of_draft(vllm_config, self.architecture))
        self.runtime = build_runtime(vllm_config, model_config, config.num_layers, VllmPagedAttention, load_settings())
        core: DraftModel = draft_class(config, self.runtime, prefix)
        self.wrap(core)
        self.model = core.model
        self.checkpoint = str(model_config.model)
        self.set_up_weights(model_config, vllm_config.load_config.download_dir)
        register_warm_up(core, self.runtime, vllm_config)
        if self.runtime.tensor_parallel.rank == 0:
            name = type(core).__name__
            table = startup_table(framework_line("vllm"), name, VllmPagedAttention.__name__, self.runtime)
            logger.info("atom-plugin drafts for %s\n%s", self.checkpoint, table)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, hidden]``."""
        embedded: torch.Tensor = self.core.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """One step; see :class:`DraftModel`."""
        assert intermediate_tensors is None, "pipeline stages are refused"
        assert inputs_embeds is None, "multimodal input is refused"
        assert positions.dim() == 1, "M-RoPE of text is served as plain rope"
        drafted: torch.Tensor = self.core(input_ids, positions, hidden_states, None, spec_step_idx)
        return drafted

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """``[T, hidden]``, the rows to draft from, to ``[T, vocabulary]``."""
        self.weights.check_ready()
        logits: torch.Tensor = self.lm_head(hidden_states)
        return logits

    def process_weights_after_loading(self) -> None:
        """The last hook that vLLM calls on a loaded model."""
        self.weights.close()


@_compile
class AtomDeepseekV3Draft(AtomDraft):
    """DeepSeek V3 and R1."""

    architecture = "DeepseekV3ForCausalLM"


@_compile
class AtomQwen3NextDraft(AtomDraft):
    """Qwen3-Next."""

    architecture = "Qwen3NextForCausalLM"


@_compile
class AtomQwen35Draft(AtomDraft):
    """Qwen3.5 and 3.6, dense."""

    architecture = "Qwen3_5ForCausalLM"


@_compile
class AtomQwen35MoeDraft(AtomDraft):
    """Qwen3.5, 3.6 and 3.8, mixtures."""

    architecture = "Qwen3_5MoeForCausalLM"
