"""Attention of prompts on Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.batch import BatchShape
from tests.gluon_on_cpu import on_cpu
from tests.kernel_cases import ATTENTION_CASES, STORAGE_ORDERS, AttentionCase, attention_batch, check_attention

CPU = torch.device("cpu")
_LONG = ((0, 1), (0, 63), (0, 64), (0, 65), (1, 130), (300, 40), (127, 2), (128, 129), (511, 1), (0, 0), (200, 33))

CASES = (
    *(replace(case, dim=64) for case in ATTENTION_CASES if case.packed and "head size" not in case.name),
    AttentionCase("long", _LONG, heads=8, kv_heads=2, dim=128),
    AttentionCase("long, the largest head", _LONG, heads=8, kv_heads=1, dim=256),
    AttentionCase("long, five query heads a group", _LONG, heads=10, kv_heads=2, dim=128, page_size=32),
    AttentionCase("long, a window", _LONG, heads=14, kv_heads=2, dim=64, window=128, sinks=True, page_size=64),
    AttentionCase("long, a window longer than some", _LONG, heads=8, kv_heads=2, dim=256, window=150, page_size=48),
    AttentionCase("long, a short window", _LONG, heads=8, kv_heads=2, dim=128, window=7, page_size=128),
    AttentionCase("long, soft cap", _LONG, heads=32, kv_heads=2, dim=64, soft_cap=1.5, page_size=256),
    AttentionCase("long, pages longer than a tile", _LONG, heads=8, kv_heads=2, dim=128, page_size=80),
    AttentionCase("long, one token a page", _LONG, heads=2, kv_heads=2, dim=128, page_size=1),
    *(AttentionCase(f"long, {order}", _LONG[4:7], dim=64, storage=order, page_size=8) for order in STORAGE_ORDERS),
)


@pytest.fixture(scope="module")
def prompts():
    """The kernel's module."""
    import atom_core.kernels.attention  # noqa: F401 - it goes on with what it has imported

    with on_cpu() as found:
        yield found["atom_core.kernels.attention.hopper"]


@pytest.mark.parametrize("large", [False, True], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts(prompts, monkeypatch, case, large):
    inputs = attention_batch(case, torch.float16, CPU)
    assert prompts.PromptAttention.takes(inputs.q, inputs.cache, torch.empty_like(inputs.q))
    kernel = prompts.PromptAttention(case.spec(torch.float16), overlap=False)
    monkeypatch.setattr(kernel, "tile", lambda batch, device: prompts._TILES[case.dim][large])
    check_attention(Launches(kernel), inputs)


class Launches:
    """The kernel as one of :class:`~atom_core.kernels.attention.PagedAttentionKernel`."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, q, cache, batch, sinks, out):
        self.kernel(q, cache, batch, sinks, out)


def test_rows_that_are_not_aligned_are_for_the_other_kernel(prompts):
    inputs = attention_batch(AttentionCase("", ((0, 9),), dim=64, packed=False), torch.float16, CPU)
    assert not prompts.PromptAttention.takes(inputs.q, inputs.cache, torch.empty_like(inputs.q))


#: Batches whose tiles were timed on an H200.
TIMED = {
    "128 tokens": BatchShape((128,), 128),
    "512 tokens": BatchShape((512,), 512),
    "2,048 tokens": BatchShape((2048,), 2048),
    "8,192 tokens": BatchShape((8192,), 8192),
    "8 times 512 tokens": BatchShape((512,) * 8, 512),
    "512 tokens behind 8,192": BatchShape((512,), 8704, 8192),
}
#: By query heads, key/value heads and head size: batches of whose two tiles the larger one is faster.
LARGER = {
    (16, 2, 256): {"2,048 tokens", "8,192 tokens", "8 times 512 tokens"},
    (32, 8, 128): {"8,192 tokens", "512 tokens behind 8,192"},
    (32, 4, 128): {"8,192 tokens", "512 tokens behind 8,192"},
    (64, 8, 64): {"512 tokens behind 8,192"},
}


@pytest.mark.parametrize("heads", LARGER, ids=str)
def test_tiles_are_the_fastest_that_were_measured(prompts, monkeypatch, heads):
    monkeypatch.setattr(prompts, "multiprocessors", lambda device: 132)
    kernel = prompts.PromptAttention(AttentionCase("", (), *heads).spec(torch.bfloat16), overlap=False)
    small, large = prompts._TILES[heads[-1]]
    tiles = {name: kernel.tile(batch, CPU) for name, batch in TIMED.items()}
    assert tiles == {name: large if name in LARGER[heads] else small for name in TIMED}


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_outside_of_a_window_do_not_count(prompts, monkeypatch, dim):
    monkeypatch.setattr(prompts, "multiprocessors", lambda device: 132)
    case, batch = AttentionCase("", (), heads=64, kv_heads=8, dim=dim), BatchShape((512,), 40960)
    tiles = [
        prompts.PromptAttention(replace(case, window=window).spec(torch.bfloat16), False).tile(batch, CPU)
        for window in (128, 8192, None)
    ]
    small, large = prompts._TILES[dim]
    assert tiles == [small, large, large]
