"""The contract of token mixers holds for one that keeps a state a request, and neither pages nor kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from atom_core.batch import NO_PAGES, Batch, States
from atom_core.cache import StateSpec, StateView
from atom_core.mixers.base import BaseAttention, RadixAttention, TokenMixer
from atom_core.standalone import Step, mixers, plan

DECAY = 0.5


class DecayingSum(TokenMixer):
    """``s = DECAY * s + x``, ``s`` being the request's state and the token's output: a linear recurrence."""

    graph_support = "always"

    @property
    def cache_spec(self):
        return StateSpec((self.heads,), (torch.float32,))

    def select_kernels(self, kernels):
        pass

    def scaled(self, cache):
        return cache

    def run(self, inputs, positions, batch, cache, out):
        (pool,), states, starts = cache.tensors, batch.states, batch.query_start_loc.tolist()
        for request, (slot, length) in enumerate(zip(states.slots[:, 0].tolist(), batch.seq_lens, strict=True)):
            known = length > starts[request + 1] - starts[request]
            state = pool[slot] if known else torch.zeros(self.heads)
            for token in range(starts[request], starts[request + 1]):
                state = DECAY * state + inputs[0][token].view(self.heads)
                out[token] = state
            pool[slot] = state


def batch(slots, new, before):
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return Batch(
        query_start_loc=starts,
        seq_lens=torch.tensor(new) + torch.tensor(before),
        num_requests=len(new),
        num_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(new),
        states=States(torch.tensor(slots, dtype=torch.int32)[:, None]),
    )


def test_a_framework_s_own_attention_is_neither_planned_for_nor_given_a_cache():
    class Theirs(BaseAttention):
        def forward(self, inputs, positions, step):
            raise NotImplementedError

    model = torch.nn.ModuleList([Theirs(DecayingSum("theirs", 0, (2, 3), 3, 1.0))])
    assert mixers(model) == []
    assert plan(model, batch((1,), (1,), (1,))).plans == {}


def test_a_state_goes_on_where_the_request_has_one_and_begins_with_zeros_where_not():
    mixer = DecayingSum("model.layers.0.linear_attn.attn", 0, (2, 3), 3, 1.0)
    layer = RadixAttention(mixer, SimpleNamespace(kernels=None))
    (shape,), (dtype,) = mixer.cache_spec.shapes, mixer.cache_spec.dtypes
    pool = torch.full((4, *shape), float("nan"), dtype=dtype)
    x = torch.randn(2, 5, 6)

    def run(tokens, slots, before):
        step = batch(slots, [len(it) for it in tokens], before)
        assert step.pages is NO_PAGES
        found = layer(
            (torch.cat(list(tokens)),), torch.arange(step.num_tokens), Step(plan(layer, step), {0: StateView((pool,))})
        )
        return found.split([len(it) for it in tokens])

    whole = run(x, (3, 1), (0, 0))
    pool.fill_(float("nan"))
    first = run((x[0, :2], x[1, :3]), (1, 2), (0, 0))
    second = run((x[1, 3:], x[0, 2:]), (2, 1), (3, 2))
    torch.testing.assert_close(torch.cat((first[0], second[1])), whole[0])
    torch.testing.assert_close(torch.cat((first[1], second[0])), whole[1])
    assert pool[[0, 3]].isnan().all(), "other requests' slots are left alone"
