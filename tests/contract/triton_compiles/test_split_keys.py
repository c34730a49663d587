"""Programs on other XCDs see the partial results of a request whose keys are split."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from atom_core.kernels.attention import triton_kernel as attention_kernel
from atom_core.kernels.decode_attention import triton_kernel as decode_kernel
from atom_core.kernels.mla_attention import triton_kernel as latent_kernel
from tests.contract.triton_compiles.compiling import CPU, GPUS, LATENTS, Gpu, amd_instructions, compiles
from tests.decode_cases import DecodeCase, check_decode
from tests.kernel_cases import AttentionCase, attention_batch, check_attention
from tests.latent_cases import check_absorbed, latent_batch


def attend_in_splits(op: str, gpu: Gpu) -> None:
    """Attend to a request whose keys are split among programs."""
    dtype, requests, how = torch.bfloat16, ((9, 1), (3000, 1)), {"nvidia": gpu.nvidia, "overlap": gpu.nvidia}
    layer = AttentionCase("Qwen3 8B", requests, heads=8, kv_heads=2, dim=128)
    if op == "mla_attention":
        case = replace(LATENTS["16 heads, bfloat16"][0], requests=requests)
        absorbed = latent_kernel.TritonMlaAttention(case.spec(dtype), **how)
        check_absorbed(case, absorbed, latent_batch(case, dtype, CPU))
    elif op == "attention":
        attention = attention_kernel.TritonAttention(layer.spec(dtype), **how)
        check_attention(attention, attention_batch(layer, dtype, CPU))
    else:
        decode = DecodeCase(layer)
        spec = decode.spec(dtype)
        check_decode(decode, decode_kernel.TritonDecodeAttention(spec, **how), spec, CPU)


#: What decides what other programs see, from a program's stores to its loads, where they may be on another XCD: every
#: wave waits for its own stores and then for the others, one writes back what the XCD holds and drops what may be old.
RELEASE = re.compile(
    r"\bglobal_store_dword\w* .*?s_waitcnt vmcnt\(0\)(?:(?!global_store).)*?\bs_barrier\b(?:(?!global_store).)*?"
    r"\bbuffer_wbl2 sc1\s+s_waitcnt vmcnt\(0\)\s+global_atomic_add [^\n]+ sc0\s+s_waitcnt vmcnt\(0\)\s+buffer_inv sc1"
    r"(?:(?!global_load).)*?\bs_barrier\b.*?\bs_barrier\b.*?\bglobal_load_dword",
    re.DOTALL,
)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if not gpu.nvidia], ids=str)
@pytest.mark.parametrize(
    ("op", "module"),
    [("attention", attention_kernel), ("decode_attention", decode_kernel), ("mla_attention", latent_kernel)],
    ids=["attention", "decode", "latents"],
)
def test_splits_are_there_for_programs_on_other_xcds(op, module, gpu):
    with compiles(module, f"_{op}", gpu) as found:
        attend_in_splits(op, gpu)
    assert found.launched.constants["SPLIT"]
    code = amd_instructions(found.compiled)
    assert code.count("global_atomic_add") == 1
    assert RELEASE.search(code)
