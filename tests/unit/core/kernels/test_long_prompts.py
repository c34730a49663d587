"""Which layers and batches FlashAttention 3 runs, and what a framework's binding of it is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from atom_core.batch import Batch, BatchShape, Pages
from atom_core.kernels import kernel_set
from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3, PagedAttentionSpec
from atom_core.kernels.attention.flash_attention_3 import FlashAttention3, why_no_flash_attention_3
from atom_core.kernels.attention.long_prompts import DispatchByPrompts, triton_and_flash_attention_3
from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.select import Target
from tests.flash_attention_stand_in import attend
from tests.kernel_cases import ATTENTION_CASES, AttentionCase, attention_batch, check_attention

CPU, HOPPER = torch.device("cpu"), Target("cuda", "sm90")
#: Of 8B, of a model with small heads, of a layer with a window, of 0.6B, and of a rank with few heads.
LARGE = AttentionCase("", (), heads=32, kv_heads=8, dim=128).spec(torch.bfloat16)
SMALL, WINDOW = replace(LARGE, head_dim=64), replace(LARGE, window=128)
HALF, FEW = replace(LARGE, num_heads=16), replace(LARGE, num_heads=4, num_kv_heads=1)
FP8 = replace(LARGE, cache_dtype=torch.float8_e4m3fn)


class Reference(FlashAttention3):
    """A binding that is the reference."""

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        attend(q, keys, values, batch, sinks, out, scale=self.scale, window=self.window, soft_cap=self.soft_cap)


@pytest.mark.parametrize("case", [case for case in ATTENTION_CASES if case.packed and case.dim % 8 == 0], ids=str)
def test_a_binding_is_given_what_is_meant(case: AttentionCase) -> None:
    check_attention(Reference(case.spec(torch.bfloat16)), attention_batch(case, torch.bfloat16, CPU))


def test_a_cache_that_it_cannot_copy_from_is_not_read() -> None:
    (case,) = (case for case in ATTENTION_CASES if not case.packed)
    with pytest.raises(AssertionError, match="multiples of 16 bytes"):
        check_attention(Reference(case.spec(torch.bfloat16)), attention_batch(case, torch.bfloat16, CPU))


@pytest.mark.parametrize(
    ("spec", "target", "reason"),
    [
        (LARGE, Target("cuda", "sm80"), "written for Hopper"),
        (LARGE, Target("rocm", "gfx942"), "written for Hopper"),
        (replace(LARGE, dtype=torch.float32, cache_dtype=torch.float32), HOPPER, "not torch.float32"),
        (FP8, HOPPER, "queries in the cache's dtype"),
        (replace(LARGE, head_dim=320), HOPPER, "head sizes up to 256"),
        (replace(LARGE, head_dim=20), HOPPER, "multiples of 8"),
        (replace(LARGE, dtype=torch.float16, cache_dtype=torch.float16, sinks=True), HOPPER, "sinks in bfloat16"),
        (replace(LARGE, num_heads=72, sinks=True), HOPPER, "sinks of up to 64 heads, not of 72"),
    ],
)
def test_what_it_cannot_run_it_says(spec: PagedAttentionSpec, target: Target, reason: str) -> None:
    assert reason in (why_no_flash_attention_3(spec, target) or "")
    assert triton_and_flash_attention_3(lambda: None, Reference).supports(spec, target) is not None


def select(spec: PagedAttentionSpec, why_not_here: str | None = None) -> tuple[str, Any, Any]:
    """The name of the implementation, the kernel, and the row of the table at start-up."""
    kernels = kernel_set(
        HOPPER, contributed={"attention": triton_and_flash_attention_3(lambda: why_not_here, Reference)}
    )
    return kernels.chosen(ATTENTION, spec), kernels.select(ATTENTION, spec), kernels.choices()[0]


def test_it_comes_first_where_the_binding_runs() -> None:
    name, kernel, _ = select(LARGE)
    assert (name, type(kernel), type(kernel.long)) == (TRITON_AND_FLASH_ATTENTION_3, DispatchByPrompts, Reference)
    assert select(FP8)[0] == "triton"
    name, _, row = select(LARGE, "It is not here.")
    assert (name, row.passed_over) == ("triton", ((TRITON_AND_FLASH_ATTENTION_3, "It is not here."),))


@pytest.mark.parametrize(
    ("spec", "queries", "long"),
    [
        (LARGE, (1,) * 1024, False),
        (LARGE, (1024,), True),
        (LARGE, (1023,), False),
        (LARGE, (1, 1023), True),
        (LARGE, (512, 512), True),
        (LARGE, (511, 511, 2), False),
        (LARGE, (128,) * 64, False),
        (SMALL, (2047, 2049), True),
        (SMALL, (2047, 2047, 2), False),
        (SMALL, (2048,), False),
        (WINDOW, (3999, 3999), False),
        (WINDOW, (1, 4000), True),
        (HALF, (2048,), False),
        (HALF, (2048, 2048), True),
        (HALF, (2048, 2047), False),
        (FEW, (3999,) * 8, False),
        (FEW, (1, 4000), True),
    ],
)
def test_long_prompts_are_read_elsewhere(spec: PagedAttentionSpec, queries: tuple[int, ...], long: bool) -> None:
    one, other = (Mock(spec=ReferenceAttention(spec), order="plain", graph_support="always") for _ in range(2))
    other.plan_key.return_value = None
    kernel = DispatchByPrompts(spec, one, other)
    shape = BatchShape(tuple(sorted(queries)), 9000)
    starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    batch = Batch(
        query_start_loc=starts,
        seq_lens=starts.diff(),
        pages=Pages(torch.empty(len(queries), 0), torch.empty(0, dtype=torch.int64)),
        num_requests=len(queries),
        num_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=9000,
    )
    kernel(torch.empty(0), None, batch, None, torch.empty(0))
    assert (one.called, other.called) == (not long, long)
    assert kernel.attention_compile_keys(shape, CPU) == attention_keys(other if long else one, shape, CPU)
