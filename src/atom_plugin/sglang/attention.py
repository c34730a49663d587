"""The core's RadixAttention over SGLang's layers: RadixAttention, or RadixLinearAttention for mixers with a state.

SGLang's layer object is the channel to whatever backend the step runs on. It trims padded rows and steps out of
captured prefill graphs, so ours goes through it too, and passes what the projections gave on to our backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention as SglangAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.runtime_context import get_exec
from torch import nn

from atom_core.batch import Batch
from atom_core.cache import Cache, KeyValueSpec, StateSpec
from atom_core.mixers.base import BaseAttention, RadixAttention, Step, TokenMixer
from atom_core.mixers.gated_delta_net import GatedDeltaNetMixer
from atom_core.runtime import Binder, Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_plugin.sglang.attention_backend.kv_view import Pools
    from atom_plugin.sglang.attention_backend.states import StatePool


@dataclass(frozen=True)
class WarmUpStep:
    """A step of :mod:`.warmup`, in the place of SGLang's batch. It has all that the core's RadixAttention reads."""

    batch: Batch
    pools: Pools | None
    """None: full attention is another backend's."""
    states: StatePool | None
    """None: no layer has any."""

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """See :class:`atom_core.mixers.base.Step`."""
        index, spec = mixer.layer_index, mixer.cache_spec
        if isinstance(spec, StateSpec):
            assert self.states is not None
            return self.batch, self.states.view(index)
        assert self.pools is not None
        return self.batch, self.pools.cache(spec, index)


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


def check_graphs(mixer: TokenMixer, runtime: Runtime) -> None:
    """Refuse kernels that no graph can capture, where SGLang captures decode steps.

    Raises:
        ValueError: ``mixer`` has such kernels.
    """
    if runtime.device.type == "cpu" or mixer.graph_support != "none":
        return
    if get_exec().graph.cuda_graph_config.decode.backend != GraphBackend.DISABLED:
        raise ValueError(
            f"{mixer.name} runs on kernels that no CUDA graph can capture. Choose others by ATOM_KERNELS (the table "
            "in the log names what runs), or add --disable-cuda-graph."
        )


class SglangRadixAttention(SglangLayer, RadixAttention):
    """An attention layer on our backend."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        check_graphs(mixer, runtime)
        spec = mixer.cache_spec
        self.hold_sglang_layer(spec.num_kv_heads if isinstance(spec, KeyValueSpec) else 1)
        self.query_width = mixer.heads[0] * mixer.query_dim

    def forward(  # type: ignore[override]
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: ForwardBatch | WarmUpStep
    ) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch."""
        if isinstance(step, WarmUpStep):
            return RadixAttention.forward(self, inputs, positions, step)
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


class StateLayer(RadixLinearAttention):
    """SGLang's layer, by which our backend finds ours."""

    def __init__(self, ours: SglangLinearAttention) -> None:
        mixer = ours.mixer
        heads, value_dim = mixer.heads
        super().__init__(mixer.layer_index, heads, heads, heads, mixer.query_dim, mixer.query_dim, value_dim)
        self._ours = (ours,)  # not registered: it is no part of this module

    def attend(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """What our backend calls when SGLang's layer has reached it: into ``out [1, T, Hv, V]``."""
        RadixAttention.forward(self._ours[0], inputs, positions, step, out)


class SglangLinearAttention(RadixAttention):
    """A layer whose mixer keeps a state a request, on our backend. SGLang's layer is no submodule of it."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        check_graphs(mixer, runtime)
        self._sglang_layer = (StateLayer(self),)

    @property
    def layer_id(self) -> int:
        """By which SGLang sorts attention layers when it captures graphs."""
        return self.mixer.layer_index

    @property
    def spec(self) -> StateSpec:
        """What it keeps of a request."""
        spec = self.mixer.cache_spec
        assert isinstance(spec, StateSpec)
        return spec

    def forward(  # type: ignore[override]
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: ForwardBatch | WarmUpStep
    ) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch, which has the positions."""
        if isinstance(step, WarmUpStep):
            return RadixAttention.forward(self, inputs, positions, step)
        if has_no_token(step):
            return self.mixer.empty_output(inputs).zero_().flatten(1)
        first, second = inputs
        # SGLang's layer has three tensors to trim.
        attended: torch.Tensor = self._sglang_layer[0](step, first, second, second)
        return attended.view(len(first), -1)


def linear_layers(model: nn.Module) -> Iterator[SglangLinearAttention]:
    """The layers of a model that keep a state a request."""
    return (module for module in model.modules() if isinstance(module, SglangLinearAttention))


def binder(attention: Binder) -> Binder:
    """What binds the layers of a model whose layers of full attention ``attention`` binds."""

    def bind(mixer: TokenMixer, runtime: Runtime) -> BaseAttention:
        return (SglangLinearAttention if isinstance(mixer, GatedDeltaNetMixer) else attention)(mixer, runtime)

    return bind
