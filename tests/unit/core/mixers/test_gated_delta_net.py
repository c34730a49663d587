"""The Gated DeltaNet mixer over slots that a scheduler frees and uses again, with NaN in all that no request owns."""

from __future__ import annotations

import pytest
import torch

from atom_core.batch import Batch, BatchShape, Snapshots, States
from atom_core.cache import StateView
from atom_core.kernels import kernel_set
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.select import Target
from atom_core.mixers.base import RadixAttention
from atom_core.mixers.gated_delta_net import GatedDeltaNetMixer
from atom_core.standalone import Step, build_runtime

KEYS, VALUES, K, V, WIDTH = 1, 2, 8, 4, 4
SPEC = GatedDeltaNetSpec(KEYS, VALUES, K, V, WIDTH, torch.float32, torch.float32)
DRAFTS = 3
NAN = float("nan")


class Layer:
    """A bound mixer, and a pool of states with ``slots`` of requests."""

    def __init__(self, slots, drafts=0):
        generator = torch.Generator().manual_seed(0)
        self.weights = GatedDeltaNetWeights(
            torch.randn(SPEC.channels, WIDTH, generator=generator) / 2,
            torch.rand(VALUES, generator=generator) - 2,
            torch.randn(VALUES, generator=generator) - 1,
            torch.rand(V, generator=generator) + 0.5,
            1e-6,
        )
        runtime = build_runtime(torch.device("cpu"), torch.float32, 16)
        self.mixer = GatedDeltaNetMixer("layers.0.linear_attn.attn", 0, SPEC, self.weights, runtime)
        self.attn = RadixAttention(self.mixer, runtime)
        conv, recurrent = self.mixer.cache_spec.shapes
        self.pool = StateView(
            (
                torch.full((slots + 1, conv[0] + drafts, conv[1]), NAN),
                torch.full((slots + 1, *recurrent), NAN),
            )
        )

    def step(self, inputs, slots, has_state, **states):
        """The outputs of requests' new ``inputs``, each ``(qkvz, ba)``, in one batch."""
        new = [len(qkvz) for qkvz, _ in inputs]
        table = torch.tensor(slots, dtype=torch.int32)
        batch = Batch(
            query_start_loc=torch.tensor([0, *new]).cumsum(0).int(),
            seq_lens=torch.tensor([count + had for count, had in zip(new, has_state, strict=True)]),
            num_requests=len(new),
            num_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(new) + 1,
            states=States(table if table.dim() == 2 else table[:, None], **states),
        )
        both = tuple(torch.cat(side) for side in zip(*inputs, strict=True))
        out = self.attn(both, torch.zeros(sum(new)), Step(batch, {0: self.pool}))
        return out.split(new)

    def alone(self, qkvz, ba):
        """The outputs of a request by itself, from the beginning."""
        return Layer(1).step([(qkvz, ba)], [1], [False])[0]


def made_up(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, SPEC.channels + VALUES * V, generator=generator),
        torch.randn(tokens, 2 * VALUES, generator=generator),
    )


def cut(request, start, end):
    return tuple(rows[start:end] for rows in request)


@pytest.mark.parametrize("accepted", range(1, DRAFTS + 2))
def test_a_request_goes_on_from_the_last_accepted_token(accepted):
    layer, request = Layer(slots=12, drafts=DRAFTS), made_up(20, 7)
    # Row 0 verifies drafts, row 1 has a prompt in chunks, of as many tokens as the other has.
    prompt, table = made_up(20, 8), [[1, 2, 3, 4], [5, 6, 7, 8]]
    verifies = torch.tensor([True, False])
    layer.step([cut(request, 0, 5), cut(prompt, 0, 5)], table, [False, False])
    wrong = made_up(4, 9)
    ahead = tuple(
        torch.cat((mine[5 : 5 + accepted], theirs[accepted:])) for mine, theirs in zip(request, wrong, strict=True)
    )
    ones = torch.ones(2, dtype=torch.int32)
    layer.step([ahead, cut(prompt, 5, 9)], table, [True, True], num_accepted=ones, verifies=verifies)
    found = layer.step(
        [cut(request, 5 + accepted, 8 + accepted), cut(prompt, 9, 13)],
        table,
        [True, True],
        num_accepted=torch.tensor([accepted, 1], dtype=torch.int32),
        verifies=verifies,
    )
    torch.testing.assert_close(found[0], layer.alone(*request)[5 + accepted : 8 + accepted], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], layer.alone(*prompt)[9:13], rtol=1e-4, atol=1e-5)
    assert all(tensor[9:].isnan().all() for tensor in layer.pool.tensors)


def test_states_to_be_verified_may_be_written_apart():
    """As SGLang keeps them: a request's slot stays as it was until it is known what was accepted."""
    layer, request = Layer(slots=3), made_up(9, 3)
    layer.step([cut(request, 0, 5)], [2], [False])
    before = [tensor.clone() for tensor in layer.pool.tensors]
    conv, recurrent = layer.mixer.cache_spec.shapes
    apart = (torch.full((1, conv[0] + DRAFTS, conv[1]), NAN), torch.full((1, DRAFTS + 1, *recurrent), NAN))
    layer.pool = StateView(layer.pool.tensors, apart)
    found = layer.step([cut(request, 5, 9)], [2], [True], verifies=torch.tensor([True]))[0]
    torch.testing.assert_close(found, layer.alone(*request)[5:], rtol=1e-4, atol=1e-5)
    for tensor, old in zip(layer.pool.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), old.nan_to_num())
    for token in range(4):
        truth = Layer(slots=1)
        truth.step([cut(request, 0, 6 + token)], [1], [False])
        torch.testing.assert_close(apart[1][0, token], truth.pool.tensors[1][1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(apart[0][0, token : token + WIDTH - 1], truth.pool.tensors[0][1])


@pytest.mark.parametrize("after", [1, 3, 64, 70])
def test_a_snapshot_is_the_state_after_so_many_tokens(after):
    layer, request, truth = Layer(slots=4), made_up(70, 5), Layer(slots=1)
    snapshots = Snapshots(torch.tensor([3, 0], dtype=torch.int32), torch.tensor([after, 2], dtype=torch.int32))
    layer.step([request, made_up(5, 1)], [1, 2], [False, False], snapshots=snapshots)
    truth.step([cut(request, 0, after)], [1], [False])
    for found, expected in zip(layer.pool.tensors, truth.pool.tensors, strict=True):
        torch.testing.assert_close(found[3], expected[1], rtol=1e-4, atol=1e-5)
        assert found[[0, 4]].isnan().all()


def test_kernels_are_chosen_by_name():
    chosen = kernel_set(Target("cpu", ""))
    mixer = Layer(slots=1).mixer
    mixer.select_kernels(chosen)
    names = {choice.op: choice.implementation for choice in chosen.choices()}
    assert names == {"gated_delta_net": "torch"}
    assert mixer.graph_support == "none"


@pytest.mark.parametrize("queries", [(1, 1), (8,), (1, 300)])
def test_one_kernel_runs_every_batch(queries):
    """And says what it is compiled for."""
    mixer, device = Layer(slots=1).mixer, torch.device("cuda")
    mixer.select_kernels(kernel_set(Target("cuda", "sm90")))
    shape = BatchShape(queries, 4096)
    assert mixer.attention_compile_keys(shape, device) == attention_keys(mixer.kernel, shape, device)
