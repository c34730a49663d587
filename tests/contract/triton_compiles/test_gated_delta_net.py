"""Gated DeltaNet compiles for each GPU: few tokens a request in one launch, and prompts in chunks."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from atom_core.kernels.gated_delta_net import hopper as hopper_kernel
from atom_core.kernels.gated_delta_net import triton_decode as decode_kernel
from atom_core.kernels.gated_delta_net import triton_prefill as prefill_kernel
from tests.contract.triton_compiles.compiling import CPU, GPUS, KIB, Gpu, compile_launch, compiles, every_gpu, keep
from tests.gated_delta_cases import DeltaCase, Request, delta_batch, drafted

QWEN = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
_DECODES = (Request(1), Request(1, has_state=False))
_PROMPTS = (Request(200), Request(9, has_state=False, snapshot=3))

DECODES = (
    DeltaCase("one request", _DECODES[:1], **QWEN),
    DeltaCase("many requests", _DECODES * 8, **QWEN),
    DeltaCase("drafts", drafted(4, 4), columns=4, drafts=True, **QWEN),
    DeltaCase("drafts kept apart, and copies", drafted(2, 2), columns=2, drafts=True, separate=True, snapshots=True),
    DeltaCase("drafts and copies", drafted(2, 2), columns=2, drafts=True, snapshots=True, **QWEN),
    DeltaCase("odd sizes", _DECODES, key_dim=24, value_dim=40, conv_width=3),
)
PROMPTS = (
    DeltaCase("prompts", _PROMPTS, **QWEN),
    DeltaCase("prompts and copies", _PROMPTS, snapshots=True, **QWEN),
    DeltaCase("many prompts behind drafts", _PROMPTS * 8, drafts=True, **QWEN),
    DeltaCase("odd sizes", _PROMPTS, key_dim=24, value_dim=40, conv_width=3),
)
DTYPES = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=["bfloat16", "bfloat16 states", "float32"],
)


@every_gpu
@DTYPES
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_few_tokens_compile(case, dtype, state_dtype, gpu):
    kernel = decode_kernel.TritonGatedDeltaDecode(case.spec(dtype, state_dtype), gpu.nvidia, gpu.nvidia)
    with compiles(decode_kernel, "_gated_delta_decode", gpu):
        delta_batch(case, dtype, CPU, state_dtype).run(kernel)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_keys_stay_with_few_threads(monkeypatch, state_dtype):
    """How the state lies in registers is the compiler's choice: a bad one has hundreds of shuffles for its 64 sums."""
    case = DeltaCase("64 requests", _DECODES * 32, **QWEN)
    kept = keep(monkeypatch, (decode_kernel, "_gated_delta_decode"))
    kernel = decode_kernel.TritonGatedDeltaDecode(case.spec(torch.bfloat16, state_dtype), True, True)
    delta_batch(case, torch.bfloat16, CPU, state_dtype).run(kernel)
    (launch,) = kept()
    (hopper,) = (gpu for gpu in GPUS if gpu.nvidia)
    assert compile_launch(*launch, hopper).asm["ptx"].count("shfl.sync") < 150


MANY = (
    DeltaCase("two value heads a key head", _DECODES * 32, **QWEN),
    DeltaCase("three", _DECODES * 32, **{**QWEN, "value_heads": 48}),
    DeltaCase(
        "four, behind drafts", (Request(1, accepted=2),) * 64, columns=2, drafts=True, **{**QWEN, "key_heads": 8}
    ),
    DeltaCase("copies", (Request(1, snapshot=1),) * 64, snapshots=True, block_size=64, **QWEN),
)


@DTYPES
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_requests_compile_for_hopper(monkeypatch, case, dtype, state_dtype):
    monkeypatch.setattr(hopper_kernel, "multiprocessors", lambda device: 132)
    (hopper,) = (gpu for gpu in GPUS if gpu.nvidia)
    kernel = hopper_kernel.HopperGatedDeltaDecode(case.spec(dtype, state_dtype), overlap=True)
    with compiles(hopper_kernel, "gated_delta_decode_hopper", hopper):
        delta_batch(case, dtype, CPU, state_dtype).run(kernel)


#: As an L40S and an RTX 4090 are.
SMALL = Gpu(GPUTarget("cuda", 89, 32), 99 * KIB)


@pytest.mark.parametrize("gpu", [*GPUS, SMALL], ids=str)
@DTYPES
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompts_compile(monkeypatch, case, dtype, state_dtype, gpu):
    kept = keep(monkeypatch, *((prefill_kernel, name) for name in ("mix", "solve", "carry", "answer")))
    hopper = gpu.device.is_hopper
    kernel = prefill_kernel.TritonGatedDeltaNet(case.spec(dtype, state_dtype), gpu.nvidia, hopper, hopper)
    delta_batch(case, dtype, CPU, state_dtype).run(kernel)
    launched = kept()
    assert len(launched) == 4
    for launch in launched:
        compile_launch(*launch, gpu)
