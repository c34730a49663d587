"""A decode's q/k norm, rope, cache write and attention compile in one launch for each GPU."""

from __future__ import annotations

import re

import pytest
import torch

from atom_core.kernels.decode_attention import hopper as decode_hopper
from atom_core.kernels.decode_attention import triton_kernel as decode_kernel
from tests.contract.triton_compiles.compiling import CPU, FP8_CACHES, GPUS, compiles
from tests.decode_cases import DecodeCase, check_decode
from tests.kernel_cases import AttentionCase

_LENGTHS = ((9, 1), (200, 1))

DECODES = (
    DecodeCase(AttentionCase("Qwen3 8B", _LENGTHS, heads=8, kv_heads=2, dim=128)),
    DecodeCase(AttentionCase("one of a batch", _LENGTHS * 40, heads=8, kv_heads=8, dim=64)),
    DecodeCase(AttentionCase("a small head, some of it rotated", _LENGTHS, dim=32), rotary_dim=16),
    DecodeCase(AttentionCase("the largest head", _LENGTHS, heads=8, kv_heads=4, dim=256), rotary_dim=128),
    DecodeCase(
        AttentionCase("an odd head and all features", _LENGTHS, dim=80, window=70, soft_cap=3.0, sinks=True),
        rotary_dim=32,
        interleaved=True,
    ),
    DecodeCase(AttentionCase("groups of eight in a batch", _LENGTHS * 25, heads=32, kv_heads=4, dim=128)),
    DecodeCase(AttentionCase("a group of 64", _LENGTHS, heads=64, kv_heads=1, dim=128)),
    DecodeCase(AttentionCase("GPT OSS", _LENGTHS, heads=16, kv_heads=2, dim=64, window=128, sinks=True), qk_norm=False),
    DecodeCase(AttentionCase("pages of one's own", _LENGTHS, heads=8, kv_heads=2, dim=128), reads="never"),
    DecodeCase(AttentionCase("pages filled anywhere", _LENGTHS, heads=8, kv_heads=2, dim=128), reads="anywhere"),
)


@pytest.mark.parametrize(
    ("case", "dtype", "gpu", "cache_dtype"),
    [
        *((case, torch.bfloat16, gpu, None) for case in DECODES for gpu in GPUS),
        *((case, torch.float32, gpu, None) for case in (DECODES[0], DECODES[3]) for gpu in GPUS),
        *((DECODES[0], torch.bfloat16, gpu, cache_dtype) for gpu, cache_dtype in FP8_CACHES),
    ],
    ids=str,
)
def test_decode_attention_compiles(case, dtype, gpu, cache_dtype):
    spec = case.spec(dtype, cache_dtype)
    with compiles(decode_kernel, "_decode_attention", gpu):
        check_decode(case, decode_kernel.TritonDecodeAttention(spec, gpu.nvidia, gpu.nvidia), spec, CPU)


#: Tiles of one and of two warp groups, groups of 4 to 64 query heads, and what models have besides.
FOR_HOPPER = (
    DecodeCase(AttentionCase("Qwen3 8B", _LENGTHS, heads=32, kv_heads=8, dim=128)),
    DecodeCase(AttentionCase("Qwen3 8B in a batch", _LENGTHS * 40, heads=32, kv_heads=8, dim=128)),
    DecodeCase(AttentionCase("Qwen3 30B", _LENGTHS, heads=32, kv_heads=4, dim=128, page_size=64), reads="never"),
    DecodeCase(AttentionCase("Qwen3.5", _LENGTHS, heads=16, kv_heads=2, dim=256, page_size=528), rotary_dim=64),
    DecodeCase(AttentionCase("Qwen3.5 in a batch", _LENGTHS * 40, heads=24, kv_heads=4, dim=256), rotary_dim=64),
    DecodeCase(AttentionCase("Qwen2", _LENGTHS, heads=14, kv_heads=2, dim=64), qk_norm=False, reads="anywhere"),
    DecodeCase(AttentionCase("GPT OSS", _LENGTHS, heads=64, kv_heads=8, dim=64, window=128, sinks=True), qk_norm=False),
    DecodeCase(AttentionCase("soft cap", _LENGTHS, heads=16, kv_heads=8, dim=256, soft_cap=50.0), interleaved=True),
    DecodeCase(AttentionCase("a group of 64", _LENGTHS, heads=64, kv_heads=1, dim=128, page_size=1)),
    DecodeCase(AttentionCase("a group of 64 of the largest heads", _LENGTHS, heads=64, kv_heads=1, dim=256)),
)


def compile_for_hopper(monkeypatch, case, kernel):
    """A case's kernel, of which a multiprocessor's shared memory has room for as many as its tile says."""
    tiles, choose = [], kernel.hopper.tile
    monkeypatch.setattr(kernel.hopper, "tile", lambda *given: tiles.append(choose(*given)) or tiles[-1])
    with compiles(decode_hopper, "decode_attention_hopper", GPUS[-1]) as found:
        check_decode(case, kernel, kernel.spec, CPU)
    assert (found.compiled.metadata.shared + 1024) * tiles[-1].programs <= 228 * 1024
    return found.compiled


@pytest.mark.parametrize(
    ("case", "dtype", "cache_dtype"),
    [
        (FOR_HOPPER[0], torch.bfloat16, torch.float8_e4m3fn),
        (FOR_HOPPER[1], torch.float16, torch.float8_e4m3fn),
        (FOR_HOPPER[3], torch.bfloat16, torch.float8_e4m3fn),
        (FOR_HOPPER[4], torch.float16, torch.float8_e5m2),
        (FOR_HOPPER[8], torch.bfloat16, torch.float8_e5m2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
def test_hopper_widens_an_fp8_cache_in_registers(monkeypatch, case, dtype, cache_dtype, shared):
    places = 132 if shared else 1
    for module in ("decode_attention.hopper", "attention.splits"):
        monkeypatch.setattr(f"atom_core.kernels.{module}.multiprocessors", lambda device: places)
    spec = case.spec(dtype, cache_dtype)
    assert decode_hopper.HopperDecodeAttention.fits(spec)
    kernel = decode_kernel.TritonDecodeAttention(spec, nvidia=True, overlap=True, hopper=True)
    kernel.hopper = decode_hopper.HopperDecodeAttention(spec, overlap=True)
    ptx = compile_for_hopper(monkeypatch, case, kernel).asm["ptx"]
    assert set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", ptx)) == {"0x10"}, "16 bytes at a time"
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx, "values come transposed, many at a time"


@pytest.mark.parametrize("case", FOR_HOPPER, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
def test_hopper_has_a_kernel_of_its_own(monkeypatch, case, shared):
    places = 132 if shared else 1
    for module in ("decode_attention.hopper", "attention.splits"):
        monkeypatch.setattr(f"atom_core.kernels.{module}.multiprocessors", lambda device: places)
    spec = case.spec(torch.bfloat16)
    kernel = decode_kernel.TritonDecodeAttention(spec, nvidia=True, overlap=True, hopper=True)
    ptx = compile_for_hopper(monkeypatch, case, kernel).asm["ptx"]
    copies = re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", ptx)
    assert set(copies) == {"0x10"}, "16 bytes at a time"
