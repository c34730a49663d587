"""Decode attention on Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention.hopper_bytes import INSTRUCTIONS
from tests.decode_cases import DECODE_CASES, SAME_STEP_READS, DecodeCase, check_decode, decoding, wide
from tests.gluon_on_cpu import on_cpu
from tests.kernel_cases import AttentionCase, attention_batch
from tests.ptx_on_cpu import run_pairs

CPU = torch.device("cpu")
_LONG = decoding(0, 1, 63, 64, 65, 130, 255, 256, 257, 700, 1300)


CASES = (
    *(wide(case) for case in DECODE_CASES + SAME_STEP_READS if case.attention.packed),
    DecodeCase(AttentionCase("long", _LONG, heads=8, kv_heads=2, dim=128)),
    DecodeCase(AttentionCase("long, a part rotated", _LONG, heads=16, kv_heads=2, dim=256), rotary_dim=64),
    DecodeCase(AttentionCase("long, a window, sinks", _LONG, heads=14, kv_heads=2, dim=64, window=300, sinks=True)),
    DecodeCase(AttentionCase("long, soft cap", _LONG, heads=4, kv_heads=2, dim=128, soft_cap=1.5, page_size=80)),
    DecodeCase(AttentionCase("long, a group of 64", _LONG, heads=64, kv_heads=1, dim=128, page_size=1056)),
)


@pytest.fixture(scope="module")
def decodes():
    """The kernel's module."""
    import atom_core.kernels.decode_attention.triton_kernel  # noqa: F401 - it goes on with what it has imported

    with on_cpu() as found:
        yield found["atom_core.kernels.decode_attention.hopper"]


#: Of caches in FP8: heads whose halves four warps multiply.
FP8_CASES = tuple(wide(case, 128) for case in CASES)


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
        (torch.bfloat16, torch.float8_e5m2),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_an_fp8_cache_is_widened_in_registers(decodes, monkeypatch, case, dtype, cache_dtype, shared):
    if shared:
        monkeypatch.setattr("atom_core.kernels.attention.splits.multiprocessors", lambda device: 132)
    spec = case.spec(dtype, cache_dtype)
    check_decode(case, Decodes(decodes.HopperDecodeAttention(spec, overlap=False)), spec, CPU)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_is_widened_exactly(cache_dtype, dtype, second):
    codes = torch.cartesian_prod(torch.arange(256), torch.arange(256)).to(torch.uint8)
    exponent, wide = (4 if cache_dtype == torch.float8_e4m3fn else 5), (8 if dtype == torch.bfloat16 else 5)
    found = run_pairs(INSTRUCTIONS[exponent, wide][second], codes.contiguous().view(torch.int16)[:, 0], dtype)
    wanted = codes[:, int(second)].contiguous().view(cache_dtype).to(dtype)
    known = wanted.isfinite()
    assert torch.equal(found[known], wanted[known])
    assert torch.equal(found.signbit(), wanted.signbit() | (codes[:, int(second)] > 127))
    if (exponent, wide) == (5, 5):
        assert torch.equal(found[~known].isnan(), wanted[~known].isnan())
    else:
        assert found[~known].abs().min() >= wanted[known].max()


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_answers_as_the_ops_it_is_made_of(decodes, monkeypatch, case, shared):
    if shared:
        monkeypatch.setattr("atom_core.kernels.attention.splits.multiprocessors", lambda device: 132)
    spec = case.spec(torch.float16)
    check_decode(case, Decodes(decodes.HopperDecodeAttention(spec, overlap=False)), spec, CPU)


class Decodes:
    """The kernel as a :class:`~atom_core.kernels.decode_attention.DecodeAttentionKernel`."""

    def __init__(self, kernel):
        self.kernel = kernel

    def takes(self, batch):
        return batch.max_query_len == 1

    def __call__(self, qkv, positions, weights, cache, batch, sinks, out):
        assert self.kernel.takes(cache)
        self.kernel(qkv, positions, weights, cache, batch, sinks, out)


def test_rows_that_are_not_aligned_are_for_the_other_kernel(decodes):
    inputs = attention_batch(AttentionCase("", ((0, 9),), dim=64, packed=False), torch.float16, CPU)
    assert not decodes.HopperDecodeAttention.takes(inputs.cache)
