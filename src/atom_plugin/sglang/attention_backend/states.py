"""SGLang's pool of states, one a request, as the core sees it; linear attention reads and writes them.

The pool is a part of SGLang's pool of requests (``HybridReqToTokenPool``). Each layer has a convolution's last inputs,
``[slots, channels, W - 1]``, and a recurrent state, ``[slots, Hv, V, K]``. Slot 0 belongs to padded requests. Before a
step SGLang clears the slots of new requests and copies those of prefix hits.

While a request verifies drafts its slot stays as it is. What it would hold after each token is written beside it, by
the row of the request in the batch. SGLang then has what was accepted copied to the slot
(:meth:`StatePool.commit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from atom_core.batch import Snapshots, States
from atom_core.cache import StateSpec, StateView

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class StatePool:
    """The states of a runner's requests.

    Args:
        pool: SGLang's, of requests.
    """

    def __init__(self, pool: HybridReqToTokenPool) -> None:
        self.pool = pool
        self._made_of: Any = None
        self._views: dict[int, StateView] = {}

    def slots(self, requests: torch.Tensor) -> torch.Tensor:
        """int32 ``[R]``: the slots of the requests at rows ``requests [R]``."""
        slots: torch.Tensor = self.pool.translate_mamba_indices(self.pool.get_mamba_indices(requests))
        return slots

    def view(self, layer_id: int) -> StateView:
        """A layer's states, once SGLang has fetched them from a slower tier of its cache."""
        index: int = self.pool.mamba2_layer_index(layer_id)
        states = self.pool.mamba_pool.mamba_cache
        if states is not self._made_of:
            self._made_of, self._views = states, {}
        if index not in self._views:
            self._views[index] = _view(states.at_layer_idx(index))
        return self._views[index]

    def check(self, spec: StateSpec, layer_id: int) -> None:
        """Check that the pool has states as a layer's ``spec`` says.

        Raises:
            ValueError: it was made for another layer, or by another configuration.
        """
        if layer_id not in self.pool.mamba_map:
            raise ValueError(
                f"Layer {layer_id} of the model has linear attention, and SGLang's pool of states has no room for it "
                f"(it has layers {sorted(self.pool.mamba_map)}): layer_types of config.json do not say what "
                "full_attention_interval says."
            )
        tensors = self.view(layer_id).tensors
        found = tuple((tuple(each.shape[1:]), each.dtype) for each in tensors)
        wanted = tuple(zip(spec.shapes, spec.dtypes, strict=True))
        if found != wanted:
            raise ValueError(
                f"SGLang's pool of states has {found} for a request in layer {layer_id}, and the model keeps {wanted}."
            )

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Copy to ``slots [R]`` what each request would hold after token ``accepted [R]``; negative: nothing.

        Row ``r`` of both is that of the batch that was verified. For a CPU: it asks which rows there are.
        """
        rows = (accepted >= 0).nonzero(as_tuple=True)[0]
        slots, tokens = slots[rows].long(), accepted[rows].long()
        for layer_id in self.pool.mamba_map:
            cache = self.view(layer_id)
            (inputs, states), (new_inputs, new_states) = cache.tensors, cache.unverified
            window = torch.arange(inputs.shape[1], device=tokens.device)
            inputs[slots] = new_inputs[rows[:, None], tokens[:, None] + window]
            states[slots] = new_states[rows, tokens]


def _view(state: Any) -> StateView:
    """SGLang's tensors of one layer."""
    tensors = state.conv[0].transpose(-1, -2), state.temporal
    windows = getattr(state, "intermediate_conv_window", None)
    if windows is None:
        return StateView(tensors)
    return StateView(tensors, (_inputs_of(windows[0]), state.intermediate_ssm))


def _inputs_of(windows: torch.Tensor) -> torch.Tensor:
    """``windows [R, N, channels, W - 1]``, one a token, as ``[R, N + W - 2, channels]`` that hold each input once.

    On a GPU the windows overlap in memory, so these are the same numbers. On a CPU they do not, and their memory is
    used for fewer numbers: only :meth:`StatePool.commit` reads it.
    """
    rows, tokens, channels, width = windows.shape
    overlap = windows.stride(1) == windows.stride(3)
    strides = (windows.stride(3), windows.stride(2)) if overlap else (channels, 1)
    return windows.as_strided((rows, tokens + width - 1, channels), (windows.stride(0), *strides))


def states_of(forward_batch: ForwardBatch, pool: StatePool) -> States:
    """Where the states of an eager step's requests are, and where SGLang's prefix cache wants copies.

    Args:
        forward_batch: any mode but idle.
        pool: of the runner.
    """
    mode = forward_batch.logical_forward_mode
    slots = pool.slots(forward_batch.req_pool_indices)[:, None]
    every = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
    if mode.is_target_verify():
        return States(slots, verifies=every)
    if mode.is_decode_or_idle():
        return States(slots, snapshots=_snapshots(forward_batch, every.to(torch.int32)))
    return States(slots, snapshots=_snapshots(forward_batch, forward_batch.mamba_track_aligned_lens()))


def _snapshots(forward_batch: ForwardBatch, tokens: torch.Tensor | None) -> Snapshots | None:
    """Copies after ``tokens [R]`` of the requests' new tokens, where SGLang asks for one."""
    mask = forward_batch.mamba_track_mask
    if mask is None or tokens is None:
        return None
    return Snapshots(wanted_slots(forward_batch), torch.where(mask, tokens, 0).to(torch.int32))


def wanted_slots(forward_batch: ForwardBatch) -> torch.Tensor:
    """int32 ``[R]``: the slot that SGLang wants a copy in, 0 for none."""
    return torch.where(forward_batch.mamba_track_mask, forward_batch.mamba_track_indices, 0).to(torch.int32)
