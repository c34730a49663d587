"""The core's RadixAttention over SGLang's layer of that name: one for every token mixer.

SGLang's layer object is the channel to whatever backend the step runs on. It trims padded rows and steps out of
captured prefill graphs, so ours goes through it too, and passes what the projections gave on to our backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention as SglangAttention

from atom_core.cache import KeyValueSpec
from atom_core.mixers.base import BaseAttention, RadixAttention, Step, TokenMixer
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def has_no_token(step: ForwardBatch) -> bool:
    """Whether all rows are there for the other ranks' sake: of an idle step, or of one that SGLang has made a prompt.

    Such a prompt may be longer than any sequence, so there are no pages to read for it.
    """
    mode = step.forward_mode
    if mode.is_idle():
        return True
    return mode.is_extend() and not mode.is_target_verify() and step.global_num_token_non_padded_cpu == 0


class SglangLayer(BaseAttention):
    """A token mixer with SGLang's layer, which is no submodule: ``self_attn.attn`` is one module, as in SGLang."""

    def hold_sglang_layer(self, num_kv_heads: int) -> None:
        """Make SGLang's layer, once :attr:`mixer` is there."""
        mixer = self.mixer
        layer = SglangAttention(
            mixer.heads[0],
            mixer.query_dim,
            mixer.scale,
            num_kv_heads,
            layer_id=mixer.layer_index,
            logit_cap=mixer.soft_cap or 0.0,
            v_head_dim=mixer.heads[1],
            # SGLang counts the tokens before the query's own.
            sliding_window_size=-1 if mixer.window is None else mixer.window - 1,
            prefix=mixer.name,
        )
        self._sglang_layer = (layer,)

    @property
    def sglang_layer(self) -> SglangAttention:
        """SGLang's."""
        return self._sglang_layer[0]

    @property
    def layer_id(self) -> int:
        """By which SGLang sorts attention layers when it captures graphs."""
        return self.mixer.layer_index

    def empty_step(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of a step without tokens, ``[T, H * V]``: zeros, for a router reads on."""
        return self.mixer.empty_output(inputs).zero_().flatten(1)


class SglangRadixAttention(SglangLayer, RadixAttention):
    """An attention layer on our backend."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        spec = mixer.cache_spec
        self.hold_sglang_layer(spec.num_kv_heads if isinstance(spec, KeyValueSpec) else 1)
        self.query_width = mixer.heads[0] * mixer.query_dim

    def forward(  # type: ignore[override]
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: ForwardBatch
    ) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch."""
        if has_no_token(step):
            return self.empty_step(inputs)
        # SGLang makes the output, and trims rows, by the query's shape.
        q = inputs[0][:, : self.query_width]
        attended: torch.Tensor = self.sglang_layer(
            q, None, None, step, atom_layer=self, atom_inputs=(*inputs, positions)
        )
        return attended

    def attend(self, inputs: Sequence[torch.Tensor], step: Step, out: torch.Tensor | None) -> torch.Tensor:
        """What our backend calls when SGLang's layer has reached it: into ``out [T, H * V]`` if that is given."""
        *mixed, positions = inputs
        return RadixAttention.forward(self, mixed, positions, step, out)
