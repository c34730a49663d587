"""The part of a model behind SGLang's interface of it: everything but the head.

SGLang looks for it in a model's ``model``, captures prefill graphs of it, takes the attention layers from ``layers``,
and while it replays puts a function of its own in the place of ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from torch import nn

from atom_core.layers.embedding import TokenEmbedding
from atom_core.models.decoder import Carried, Decoder
from atom_core.models.draft import DraftModel
from atom_plugin.sglang.data_parallel import STAND_IN


class Body(nn.Module):
    """A decoder's modules, called as SGLang calls them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = (decoder,)  # not registered: its children are this module's, under the same names
        for name, module in decoder.named_children():
            self.add_module(name, module)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> torch.Tensor | PPProxyTensors:
        """Hidden states ``[T, hidden]`` after the final norm; before the last stage, intermediate tensors."""
        (decoder,) = self._decoder
        count, carried = len(positions), None
        # SGLang captures the first stage's graphs with placeholder tensors of a previous stage.
        if pp_proxy_tensors is not None and not decoder.is_first:
            hidden, residual = pp_proxy_tensors["hidden_states"], pp_proxy_tensors["residual"]
            carried = Carried(or_stand_in(hidden), or_stand_in(residual))
        ids, embeds = (None if each is None else or_stand_in(each) for each in (input_ids, input_embeds))
        result: Any = decoder(ids, or_stand_in(positions), forward_batch, embeds, carried)
        if isinstance(result, Carried):
            return PPProxyTensors({"hidden_states": result.hidden[:count], "residual": result.residual[:count]})
        hidden = result
        return hidden if count else hidden[:0]


class DraftBody(nn.Module):
    """A draft's modules. Of DeepSeek's, ``decoder`` is the layer that drafts, as in SGLang's own; else ``mtp`` has all.

    It has no ``layers``, for SGLang would capture prefill graphs, and a draft reads inputs that those do not have.
    """

    def __init__(self, core: DraftModel) -> None:
        super().__init__()
        self._core = (core,)  # as in :class:`Body`
        self.embed_tokens, self.rotary = core.model.embed_tokens, core.model.rotary
        own = {name: module for name, module in core.named_children() if name not in ("model", "lm_head")}
        if not own:
            first, *others = core.layers
            #: And the layers that SGLang does not run.
            own = {"decoder": first, "others": nn.ModuleList(others)}
        for name, module in own.items():
            self.add_module(name, module)

    def share_embedding(self, embed_tokens: TokenEmbedding) -> None:
        """Read the target's."""
        self._core[0].model.embed_tokens = self.embed_tokens = embed_tokens

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`DraftModel.forward`: hidden states ``[T, hidden]``."""
        given = (or_stand_in(rows) for rows in (input_ids, positions, hidden))
        drafted: torch.Tensor = self._core[0](*given, forward_batch)
        return drafted[: len(input_ids)]


def or_stand_in(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, or something in the place of none: a rank without requests takes part in what others exchange."""
    return rows if len(rows) else rows.new_zeros(STAND_IN, *rows.shape[1:])
