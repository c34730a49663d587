"""Decode over latents by aiter: who takes a batch, what a step works out once, and the slots of its keys."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.aiter_library import FP8
from atom_core.kernels.mla_attention import MLA_ATTENTION, aiter_kernel
from atom_core.kernels.mla_attention.token_slots import TokenSlots, fill_on_device, fill_on_host, token_slots
from atom_core.kernels.select import Target
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.latent_cases import LatentCase, check_absorbed, latent_batch

CPU = torch.device("cpu")
DEEPSEEK = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)


class Others:
    """What takes the batches that aiter does not: it keeps how many requests they have."""

    def __init__(self):
        self.seen = []

    def __call__(self, q, cache, batch, out):
        self.seen.append(batch.num_requests)


def run(case, arch, layers=1, decodes=0, batch=None):
    """The calls of aiter's functions, by name, and the requests of the batches that were others'."""
    inputs = latent_batch(case, torch.bfloat16, CPU)
    batch = batch or replace(inputs.batch, num_decode_requests=decodes, num_decode_tokens=decodes)
    others = Others()
    before = len(calls())
    for _ in range(layers):
        kernel = kernel_set(Target("rocm", arch)).select(MLA_ATTENTION, case.spec(torch.bfloat16))
        kernel.others = others
        kernel(inputs.folded, inputs.cache, batch, torch.empty(*inputs.folded.shape[:2], 512, dtype=torch.bfloat16))
    return Counter(call.path.rpartition(".")[2] for call in calls()[before:]), others.seen


def case_of(*requests, heads=16, **changes):
    return LatentCase("", requests, heads=heads, **DEEPSEEK, **changes)


@every_gpu
@pytest.mark.parametrize(
    ("case", "by_aiter"),
    [
        (case_of((9, 1), (0, 1)), True),
        (case_of((9, 4), (3, 4)), True),
        (case_of((9, 5), (3, 5)), False),  # more tokens than kernels have
        (case_of((9, 2), (3, 1)), False),  # requests differ
        (case_of((9, 1), padded_requests=2, padded_tokens=2), True),
        (case_of((9, 1), padded_requests=1, padded_tokens=2), False),
    ],
)
def test_batches_of_few_and_equally_many_tokens_are_aiters(case, by_aiter, arch):
    with fake_aiter(arch):
        called, others = run(case, arch)
    assert (called["mla_decode_fwd"], len(others)) == ((1, 0) if by_aiter else (0, 1))


def test_drafts_behind_many_heads_are_aiters_on_gfx950_alone():
    for arch, by_aiter in (("gfx942", 0), ("gfx950", 1)):
        with fake_aiter(arch):
            assert run(case_of((9, 2), (3, 2), heads=128), arch)[0]["mla_decode_fwd"] == by_aiter
            assert run(case_of((9, 1), (3, 1), heads=128), arch)[0]["mla_decode_fwd"] == 1


def test_requests_that_decode_are_told_from_those_behind_them():
    with fake_aiter("gfx942"):
        called, others = run(case_of((9, 1), (3, 1), (7, 9)), "gfx942", layers=2, decodes=2)
    assert called == {"get_mla_metadata_info_v1": 1, "get_mla_metadata_v1": 1, "mla_decode_fwd": 2}
    assert others == [1, 1]


def test_work_is_shared_out_once_a_step_and_again_for_a_graph(monkeypatch):
    case = case_of((9, 1), (3, 1))
    batch = latent_batch(case, torch.bfloat16, CPU).batch
    with fake_aiter("gfx950"):
        assert run(case, "gfx950", layers=3, batch=batch)[0]["get_mla_metadata_v1"] == 1
        # Adapters add plans to a step while it runs; the batch is the same.
        assert run(case, "gfx950", batch=batch.with_plans({"other": 1}))[0]["get_mla_metadata_v1"] == 0
        assert run(case, "gfx950", batch=replace(batch, max_seq_len=99))[0]["get_mla_metadata_v1"] == 1
        monkeypatch.setattr(aiter_kernel, "capturing", lambda tensor: True)
        # What a run before the capture made would not be refilled by replays.
        assert run(case, "gfx950", layers=2, batch=batch)[0]["get_mla_metadata_v1"] == 1


def test_what_a_step_keeps_goes_with_it():
    case = case_of((9, 1), (3, 1))
    batch = latent_batch(case, torch.bfloat16, CPU).batch
    with fake_aiter("gfx942"):
        run(case, "gfx942", batch=batch)
    (shares,) = batch.scratch.values()
    gone = weakref.ref(shares)
    del shares, batch
    assert gone() is None, "tables as large as the longest requests wait for the garbage collector"


def test_a_scale_is_not_made_inside_a_graph(monkeypatch):
    case = case_of((9, 1))
    inputs = latent_batch(case, torch.bfloat16, CPU, cache_dtype=FP8["gfx942"])
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16)
    with fake_aiter("gfx942"):
        spec = case.spec(torch.bfloat16, FP8["gfx942"])
        kernel = kernel_set(Target("rocm", "gfx942")).select(MLA_ATTENTION, spec)
        with monkeypatch.context() as patch:
            patch.setattr(aiter_kernel, "capturing", lambda tensor: True)
            with pytest.raises(AssertionError, match="warm up before capturing"):
                kernel(inputs.folded, inputs.cache, inputs.batch, out)
        kernel(inputs.folded, inputs.cache, inputs.batch, out)
        monkeypatch.setattr(aiter_kernel, "capturing", lambda tensor: True)
        kernel(inputs.folded, inputs.cache, inputs.batch, out)


def test_rows_with_gaps_are_no_pages_of_aiters():
    with fake_aiter("gfx942"), pytest.raises(AssertionError, match="consecutive tokens as pages"):
        run(case_of((9, 1), gap=8), "gfx942")


def test_fewer_heads_are_decoded_in_the_room_that_their_queries_have():
    case = case_of((9, 1), (30, 1), heads=5)
    inputs = latent_batch(case, torch.bfloat16, CPU)
    with fake_aiter("gfx942"):
        kernel = kernel_set(Target("rocm", "gfx942")).select(MLA_ATTENTION, case.spec(torch.bfloat16))
        assert kernel.padded_heads == 16
        check_absorbed(case, kernel, inputs)  # without room they are copied
        q = torch.full((2, 16, 576), float("nan"), dtype=torch.bfloat16)[:, :5]
        q.copy_(inputs.folded)
        out = torch.empty(2, 16, 512, dtype=torch.bfloat16)[:, :5]
        kernel(q, inputs.cache, inputs.batch, out)
        given = calls()[-1].arguments
        expected = torch.empty(2, 5, 512, dtype=torch.bfloat16)
        kernel(inputs.folded, inputs.cache, inputs.batch, expected)
    assert given["q"].data_ptr() == q.data_ptr()
    assert given["o"].data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


def test_the_table_says_whose_other_batches_are():
    with fake_aiter("gfx942"):
        kernels = kernel_set(Target("rocm", "gfx942"))
        kernels.select(MLA_ATTENTION, case_of((9, 1)).spec(torch.bfloat16))
        (choice,) = kernels.choices()
    assert (choice.implementation, choice.remark) == ("aiter", "It decodes; other batches over latents are Triton's.")


#: Lengths, tokens of each request, tokens a page, pages of the table.
SLOTS = [
    ((1, 16, 17, 48), 1, 16, 3),
    ((5, 0, 2, 64), 3, 64, 1),  # a padded request, and one that is shorter than its tokens
    ((7, 3), 2, 1, 9),
    ((3000, 1, 2049, 2048), 1, 16, 200),  # more than a program looks up
    ((1,) * 2500, 1, 16, 1),  # more than a program adds up at a time
    ((90, 4), 1, 12, 4),  # longer than its pages
]


@pytest.mark.parametrize(("lengths", "queries", "page_size", "width"), SLOTS)
def test_the_slots_of_a_batch(lengths, queries, page_size, width):
    num_pages = len(lengths) * width + 1
    table = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0)).int() + 1
    table = table.view(len(lengths), width)
    table[-1, -1], table[0, -1] = 2**30, -1  # as rows of nobody's
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    kept = [min(max(length, queries), width * page_size) for length in lengths]
    expected = [
        min(max(int(table[request, at // page_size]), 0), num_pages - 1) * page_size + at % page_size
        for request, length in enumerate(kept)
        for at in range(length)
    ]
    starts = [0, *accumulate(kept)]
    for fill in (fill_on_host, fill_on_device):
        sizes = (len(lengths) + 1, len(lengths) + 1, len(lengths) * width * page_size, len(lengths))
        found = TokenSlots(queries, *(torch.full((size,), -9, dtype=torch.int32) for size in sizes))
        fill(found, seq_lens, table, num_pages, page_size)
        assert found.query_starts.tolist() == [queries * at for at in range(len(lengths) + 1)]
        assert found.key_starts.tolist() == starts
        assert found.slots[: len(expected)].tolist() == expected
        assert set(found.slots[len(expected) :].tolist()) <= {-9}
        assert found.ones.tolist() == [1] * len(lengths)


def test_there_is_room_for_the_longest_requests_that_may_come():
    inputs = latent_batch(case_of((9, 1), (100, 1)), torch.bfloat16, CPU)
    found = token_slots(inputs.batch, 1, inputs.cache.rows.shape[0], 16)
    assert found.slots.shape == (2 * inputs.batch.pages.table.shape[1] * 16,)
