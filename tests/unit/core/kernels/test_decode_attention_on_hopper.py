"""Decode attention on Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

from itertools import product

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


@pytest.fixture(params=[(1, 1), (132, 132)], ids=["whole", "shared out"])
def places(request, decodes, monkeypatch):
    """Multiprocessors by which tiles are chosen, and keys are shared out among programs."""
    set_places(decodes, monkeypatch, *request.param)


def set_places(decodes, monkeypatch, of_tiles, of_splits):
    monkeypatch.setattr(decodes, "multiprocessors", lambda device: of_tiles)
    monkeypatch.setattr("atom_core.kernels.attention.splits.multiprocessors", lambda device: of_splits)


@pytest.mark.usefixtures("places")
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
def test_an_fp8_cache_is_widened_in_registers(decodes, case, dtype, cache_dtype):
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


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_answers_as_the_ops_it_is_made_of(decodes, case):
    spec = case.spec(torch.float16)
    check_decode(case, Decodes(decodes.HopperDecodeAttention(spec, overlap=False)), spec, CPU)


@pytest.mark.parametrize("buffers", range(2, 9))
@pytest.mark.parametrize("places", [1, 132], ids=["whole", "shared out"])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_keys_and_values_may_have_any_number_of_buffers(decodes, monkeypatch, buffers, places, cache_dtype):
    case = DecodeCase(AttentionCase("", decoding(0, 64, 700, 1300), heads=4, kv_heads=2, dim=128))
    set_places(decodes, monkeypatch, 1, places)
    kernel = decodes.HopperDecodeAttention(case.spec(torch.float16, cache_dtype), overlap=False)
    monkeypatch.setattr(kernel, "tile", lambda programs, device: decodes.Tile(64, buffers, 4, 1))
    check_decode(case, Decodes(kernel), kernel.spec, CPU)


@pytest.mark.parametrize(
    ("dim", "cache_dtype"), [(64, torch.float16), *product([128, 256], [torch.float16, torch.float8_e4m3fn])], ids=str
)
@pytest.mark.parametrize("group", [1, 4, 8, 9, 16, 17, 32, 33, 64])
def test_tiles_fit_in_shared_memory(decodes, monkeypatch, group, dim, cache_dtype):
    spec = DecodeCase(AttentionCase("", ((0, 1),), heads=group, kv_heads=1, dim=dim)).spec(torch.float16, cache_dtype)
    monkeypatch.setattr(decodes, "multiprocessors", lambda device: 132)
    kernel = decodes.HopperDecodeAttention(spec, overlap=False)
    for programs in (1, 8, 33, 34, 132, 133, 264, 265, 4096):
        tile = kernel.tile(programs, CPU)
        assert tile.buffers >= 3
        assert tile.programs * (kernel._shared_bytes(tile) + 1024) <= 228 * 1024


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
