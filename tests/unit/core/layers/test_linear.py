"""Linear layers: their share of a group, and kernels that keep a weight in a form of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Implementation, Target, always
from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.layers.linear import Linear, RowLinear, kv_share
from atom_core.layers.parameters import share
from atom_core.standalone import build_runtime
from tests.unit.core.ranks import on_ranks

RUNTIME = build_runtime(torch.device("cpu"), torch.float32, 8)


class Transposed:
    """A kernel that keeps the weight transposed, as packed formats do."""

    def adopt(self, weight, bias):
        self.weight = weight.T.contiguous()
        return True

    def __call__(self, x, weight, bias):
        return x @ self.weight + (0 if bias is None else bias)


def runtime_with(kernel):
    implementation = Implementation("framework", always, lambda spec, target: kernel())
    return replace(RUNTIME, kernels=kernel_set(Target("cpu", ""), contributed={"linear": implementation}))


def filled(layer):
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_that_its_kernel_took_over_is_freed(bias):
    layer = filled(Linear(6, 4, bias, runtime_with(Transposed)))
    x = torch.randn(3, 6)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    layer.finalize_weights()
    assert layer.weight.numel() == 0
    torch.testing.assert_close(layer(x), expected)


def test_a_heads_own_table_may_be_taken_over():
    head = filled(LMHead(9, 6, runtime_with(Transposed)))
    x = torch.randn(3, 6)
    expected = x @ head.weight.T
    head.finalize_weights()
    assert head.weight.numel() == 0
    torch.testing.assert_close(head(x), expected)


def test_a_head_of_the_whole_vocabulary_gives_what_its_kernel_gives(monkeypatch):
    """A slice of all columns would cost the host of a GPU some 10 us a step."""
    head, logits = filled(LMHead(9, 6, runtime_with(Transposed))), torch.zeros(3, 9)
    monkeypatch.setattr(head, "kernel", lambda *args: logits)
    assert head(torch.randn(3, 6)) is logits


def test_a_tied_table_may_not():
    runtime = runtime_with(Transposed)
    head = LMHead(9, 6, runtime, TokenEmbedding(9, 6, runtime))
    with pytest.raises(AssertionError, match="the embedding reads"):
        head.finalize_weights()


def test_a_tied_head_tells_its_kernel_that_the_weight_is_shared():
    specs = []

    def supports(spec, target):
        specs.append(spec)

    implementation = Implementation("framework", supports, lambda spec, target: Transposed())
    runtime = replace(RUNTIME, kernels=kernel_set(Target("cpu", ""), contributed={"linear": implementation}))
    LMHead(9, 6, runtime, TokenEmbedding(9, 6, runtime))
    LMHead(9, 6, runtime)
    assert [spec.shares_weight for spec in specs] == [True, False]


def test_a_row_parallel_bias_enters_the_sum_once():
    x, weight, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)

    def work(group):
        layer = RowLinear(8, 4, True, replace(RUNTIME, tensor_parallel=group), "inputs")
        for _, name, placement in layer.placements():
            placement.load({"weight": weight, "bias": bias}[name])
        return layer(x[:, layer.mine.start : layer.mine.stop])

    for found in on_ranks(4, work):
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("heads", "world_size", "shares"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_every_rank_has_the_key_value_heads_of_its_queries(heads, world_size, shares):
    assert [list(kv_share(heads, rank, world_size)) for rank in range(world_size)] == shares


def test_a_share_that_does_not_divide_names_the_sizes_that_do():
    with pytest.raises(ValueError, match=r"size 4 does not divide heads=6; use one of \[1, 2, 3, 6\]"):
        share(6, 0, 4, "heads")
