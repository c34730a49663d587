"""Draft models made of a checkpoint's own layers (multi-token prediction), with SGLang's NextN interface.

SGLang builds the draft as a separate model with its own runner and pool, and sets the target's embedding and head in
it. It runs only the first layer, once for each token of a chain.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.models.draft import DraftModel
from atom_core.models.registry import load_draft_class
from atom_plugin.common.report import startup_table
from atom_plugin.common.settings import load_settings
from atom_plugin.common.versions import framework_line
from atom_plugin.sglang.attention import SglangRadixAttention
from atom_plugin.sglang.body import DraftBody
from atom_plugin.sglang.checkpoint_config import architecture_of_file, values_of
from atom_plugin.sglang.padding import padded
from atom_plugin.sglang.runtime import build_runtime
from atom_plugin.sglang.updates import AtomModel

logger = logging.getLogger("sglang.atom_plugin")


class AtomDraft(AtomModel):
    """The base of the classes that SGLang finds. Their names are SGLang's names for the drafts of architectures."""

    architecture: ClassVar[str] = ""
    """The target's, as in ``config.json``, if SGLang's name stands for one only."""

    def __init__(self, config: Any, quant_config: object = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        architecture = self.architecture or architecture_of_file(config)
        draft_class = load_draft_class(architecture)
        model_config = draft_class.from_hf(values_of(config, architecture))
        settings = load_settings()
        self.runtime = build_runtime(config, quant_config, model_config.num_layers, SglangRadixAttention, settings)
        model_config = padded(model_config, config, self.runtime)
        core: DraftModel = draft_class(model_config, self.runtime, prefix)
        self.wrap(core)
        self.model, self.lm_head = DraftBody(core), core.lm_head
        self.set_up_weights()
        self.logits_processor = LogitsProcessor(config.get_text_config(), skip_all_gather=True)
        self.checkpoint = str(getattr(config, "_name_or_path", "") or architecture)
        if self.runtime.tensor_parallel.rank == self.runtime.data_parallel.rank == 0:
            name = draft_class.__name__
            table = startup_table(framework_line("sglang"), name, SglangRadixAttention.__name__, self.runtime)
            logger.info("atom-plugin drafts for %s\n%s", self.checkpoint, table)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        **others: object,
    ) -> LogitsProcessorOutput:
        """One step; see :class:`DraftModel`. The batch has the target's hidden states, one row for each id."""
        self.weights.check_ready()
        drafted = self.model(input_ids, positions, forward_batch, self._given(input_ids, forward_batch))
        output: LogitsProcessorOutput = self.logits_processor(input_ids, drafted, self.lm_head, forward_batch)
        return output

    def _given(self, input_ids: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """The target's hidden states ``[T, hidden]``; zeros if no target has run, as in warm-ups."""
        given: torch.Tensor | None = getattr(forward_batch.spec_info, "hidden_states", None)
        if given is not None:
            return given
        return torch.zeros(
            input_ids.shape[0], self.core.config.hidden_size, dtype=self.runtime.dtype, device=input_ids.device
        )

    def load_kv_cache_scales(self, quantization_param_path: str) -> None:
        """Nothing: the file has scales only for the target's layers. The draft's stay at 1."""

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Use the target's embedding. SGLang sets the head as a layer, since its weight may be in a kernel's form."""
        config = self.core.config
        shared = TokenEmbedding(config.vocab_size, config.hidden_size, self.runtime, embed)
        self.model.share_embedding(shared)

    def set_lm_head_from_target(self, head: LMHead) -> None:
        """Use the target's head."""
        self.core.lm_head = self.lm_head = head
