"""Every Triton kernel compiles for the GPUs that we name, as its launcher launches it; no GPU is needed for that.

What the launcher would launch is recorded, and compiled ahead of time for each architecture. What a block needs of
shared memory must be there: more than the hardware has is an error at the first launch only. On AMD no register may go
to memory, matrices are multiplied by the matrix cores, and docs/amd-kernels.md says what each takes; after a change:

    python -m benchmarks.amd_kernels
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from atom_core.kernels import tuned
from atom_core.kernels.all_reduce_norm import MAX_ROW
from atom_core.kernels.all_reduce_norm import triton_kernel as reducing_kernel
from atom_core.kernels.all_reduce_norm.peer_memory import PROGRAMS, Peers
from atom_core.kernels.attention import splits
from atom_core.kernels.attention import triton_kernel as attention_kernel
from atom_core.kernels.cache_dtypes import FP8_DTYPES, is_foreign
from atom_core.kernels.decode_attention import triton_kernel as decode_kernel
from atom_core.kernels.embedding import triton_kernel as embedding_kernel
from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.experts import few_pairs_hopper as few_pairs_kernel
from atom_core.kernels.experts import few_tokens as few_experts_kernel
from atom_core.kernels.experts import few_tokens_hopper as few_hopper_kernel
from atom_core.kernels.experts import grouped as grouped_kernel
from atom_core.kernels.experts import hopper as hopper_experts_kernel
from atom_core.kernels.experts import pairs_hopper as pairs_kernel
from atom_core.kernels.experts import triton_kernel as experts_kernel
from atom_core.kernels.fp8_block_linear import few_rows as few_block_rows_kernel
from atom_core.kernels.fp8_block_linear import few_rows_hopper as hopper_block_rows_kernel
from atom_core.kernels.fp8_block_linear import many_rows as many_block_rows_kernel
from atom_core.kernels.fp8_block_linear import quantize as groups_kernel
from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_experts import few_tokens as few_fp8_kernel
from atom_core.kernels.fp8_experts import hopper as hopper_fp8_kernel
from atom_core.kernels.fp8_experts import many_tokens as many_fp8_kernel
from atom_core.kernels.fp8_experts import triton_kernel as fp8_experts_kernel
from atom_core.kernels.fp8_linear import one_row as fp8_row_kernel
from atom_core.kernels.fp8_linear import quantize as quantize_kernel
from atom_core.kernels.fp8_linear import triton_kernel as fp8_kernel
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.fp8_linear.scaled_mm import dtype_of
from atom_core.kernels.gated_activation import triton_kernel as activation_kernel
from atom_core.kernels.greedy_tokens import Barred, GreedyTokensSpec
from atom_core.kernels.greedy_tokens import triton_kernel as greedy_kernel
from atom_core.kernels.head_linear import triton_kernel as head_linear_kernel
from atom_core.kernels.latent_attention import hopper as latent_hopper
from atom_core.kernels.latent_attention import token_slots as slots_kernel
from atom_core.kernels.latent_attention import triton_kernel as latent_kernel
from atom_core.kernels.latent_cache import triton_kernel as latent_cache_kernel
from atom_core.kernels.latent_prefill import triton_kernel as prefill_kernel
from atom_core.kernels.latent_queries import triton_kernel as queries_kernel
from atom_core.kernels.latent_token import hopper as latent_token_hopper
from atom_core.kernels.latent_values import triton_kernel as latent_values_kernel
from atom_core.kernels.linear import triton_kernel as linear_kernel
from atom_core.kernels.linear.tiles import Tile, tile_for
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.moe_routing import triton_kernel as routing_kernel
from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_experts import hopper as hopper_mxfp4_kernel
from atom_core.kernels.mxfp4_experts import many_tokens as many_mxfp4_kernel
from atom_core.kernels.mxfp4_experts import triton_kernel as mxfp4_kernel
from atom_core.kernels.mxfp4_linear import few_rows as few_mxfp4_rows_kernel
from atom_core.kernels.mxfp4_linear import inputs as inputs_kernel
from atom_core.kernels.mxfp4_linear import many_rows as many_mxfp4_rows_kernel
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear import triton_kernel as normed_kernel
from atom_core.kernels.normed_router import triton_kernel as normed_router_kernel
from atom_core.kernels.qk_norm_rope_cache import triton_kernel as qkv_kernel
from atom_core.kernels.request_pages import RequestPagesSpec
from atom_core.kernels.request_pages import triton_kernel as pages_kernel
from atom_core.kernels.rms_norm import triton_kernel as norm_kernel
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import why_no_triton_cache
from atom_core.metadata import SHUFFLED
from atom_core.types import RoutingConfig
from atom_plugin.bench.tune import OP_FOLDER
from benchmarks._amd_resources import LDS, Resources
from benchmarks.amd_kernels import PAGE, PROPERTY, page_rows, page_version, rows_of
from tests.decode_cases import DecodeCase, check_decode
from tests.kernel_cases import AttentionCase, QkvCase, attention_batch, check_attention, check_qkv
from tests.latent_cases import (
    LatentCase,
    check_absorbed,
    check_expanded,
    check_head_linear,
    check_latent_cache,
    check_latent_queries,
    check_latent_token,
    latent_batch,
)

CPU = torch.device("cpu")
KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """An architecture and the shared memory that one block may have there."""

    target: GPUTarget
    shared_memory: int

    def __str__(self) -> str:
        return str(self.target.arch)

    @property
    def nvidia(self) -> bool:
        """Whether it is one of NVIDIA's."""
        return self.target.backend == "cuda"

    @property
    def device(self) -> Target:
        """As kernels are chosen for it."""
        return Target("cuda", f"sm{self.target.arch}") if self.nvidia else Target("rocm", str(self.target.arch))

    def has(self, cache_dtype: torch.dtype) -> bool:
        """Whether our kernels say that they take such a cache here."""
        return why_no_triton_cache(torch.bfloat16, cache_dtype, self.device) is None


# CUDA programming guide, technical specifications of compute capability 9.0; for AMD's see benchmarks/_amd_resources.
GPUS = (
    *(Gpu(GPUTarget("hip", arch, 64), size) for arch, (size, _) in LDS.items()),
    Gpu(GPUTarget("cuda", 90, 32), 227 * KIB),
)

FP8_CACHES = tuple((gpu, dtype) for gpu in GPUS for dtype in FP8_DTYPES if gpu.has(dtype))

#: Tiles are of other sizes where each request has one query than where some have many.
BATCHES = {"decode": ((9, 1), (15, 1)), "prefill": ((9, 1), (0, 40))}
ATTENTION = {
    "Qwen3 8B, bfloat16": (AttentionCase("", (), heads=8, kv_heads=2, dim=128), torch.bfloat16),
    "all features, float16": (
        AttentionCase("", (), heads=8, kv_heads=1, dim=64, page_size=64, window=128, soft_cap=30.0, sinks=True),
        torch.float16,
    ),
    "the largest head, bfloat16": (AttentionCase("", (), heads=8, kv_heads=4, dim=256), torch.bfloat16),
    "the largest head, float32": (AttentionCase("", (), heads=8, kv_heads=4, dim=256), torch.float32),
    "Qwen3 8B, float32": (AttentionCase("", (), heads=8, kv_heads=2, dim=128), torch.float32),
    "a group of 64, bfloat16": (AttentionCase("", (), heads=64, kv_heads=1, dim=128), torch.bfloat16),
    "an odd head, one token a page, bfloat16": (AttentionCase("", (), dim=80, page_size=1), torch.bfloat16),
}
#: FP8 keys and values are widened to the queries' dtype: float32 tiles are the largest, 16-bit ones the usual.
FP8_ATTENTION = ("Qwen3 8B, bfloat16", "the largest head, float32")
QKV = {
    "Qwen3 8B, bfloat16": (QkvCase("", heads=8, dim=128, rotary_dim=128, qk_norm=True), torch.bfloat16),
    "interleaved and partial, float16": (QkvCase("", dim=64, rotary_dim=32, interleaved=True), torch.float16),
    "shuffled pages, bfloat16": (
        QkvCase("", heads=8, dim=128, rotary_dim=128, qk_norm=True, storage=SHUFFLED),
        torch.bfloat16,
    ),
    "an odd head, float32": (QkvCase("", dim=80, rotary_dim=80, page_size=64), torch.float32),
}


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


class Launched(Exception):
    """Instead of a launch: its arguments."""

    def __init__(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.arguments, self.constants = arguments, constants


class Recorder:
    """Stands in for a kernel."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            raise Launched(arguments, constants)

        return launch


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}


def type_of(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return POINTERS[argument.dtype]
    if isinstance(argument, TensorDescriptor):
        pointer = POINTERS[argument.base.dtype].removeprefix("*")
        return f"tensordesc<{pointer}{argument.block_shape},{argument.layout!r}>"
    return "fp32" if isinstance(argument, float) else "i32"


def specialized(kernel: JITFunction, positional: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """What a launch tells the compiler of its arguments; without it loads are narrow and take no shared memory."""
    return {
        (at,): [["tt.divisibility", 16]]
        for at, parameter in enumerate(kernel.params)
        if not parameter.do_not_specialize
        and (
            isinstance(value := positional.get(parameter.name), torch.Tensor)
            or (isinstance(value, int) and value % 16 == 0)
        )
    }


def ones_of(kernel: JITFunction, positional: dict[str, Any]) -> list[str]:
    """Numbers that a launch makes constants, for strides of 1 are what lets loads be wide."""
    fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return [name for name, value in positional.items() if type(value) is int and value == 1 and name not in fixed]


def compile_launch(kernel: JITFunction, launched: Launched, gpu: Gpu) -> CompiledKernel:
    assert isinstance(kernel, JITFunction), (
        "with TRITON_INTERPRET set nothing is compiled: run this apart from tests/unit"
    )
    given = {**dict(zip(kernel.arg_names, launched.arguments, strict=False)), **launched.constants}
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    positional = {name: value for name, value in given.items() if name in kernel.arg_names and name not in fixed}
    signature = {name: type_of(value) for name, value in positional.items()}
    constants = {name: value for name, value in launched.constants.items() if name in fixed}
    options = {name: value for name, value in launched.constants.items() if name not in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    constants |= {name: None for name, value in positional.items() if value is None}
    ones = ones_of(kernel, positional)
    signature |= dict.fromkeys(ones, "constexpr")
    constants |= dict.fromkeys(ones, 1)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    order = {name: signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        source(kernel, order, places, specialized(kernel, positional)), target=gpu.target, options=options
    )
    assert compiled.metadata.shared <= gpu.shared_memory
    if not gpu.nvidia:
        resources = Resources.of(str(gpu.target.arch), compiled.metadata, compiled.asm)
        COMPILED.append((f"{kernel.fn.__module__}.{kernel.__name__}".removeprefix("atom_core.kernels."), resources))
        assert not resources.faults()
        assert f"; Occupancy: {resources.waves_by_registers}\n" in compiled.asm["amdgcn"], "LLVM counts other waves"
    return compiled


def amd_instructions(compiled: CompiledKernel) -> str:
    """The instructions alone, a line each, without labels and comments."""
    lines = (line.partition(";")[0] for line in compiled.asm["amdgcn"].splitlines())
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith("."))


#: What the running test compiled for AMD's GPUs, by kernel.
COMPILED: list[tuple[str, Resources]] = []


@pytest.fixture(autouse=True)
def as_the_page_says(request, record_property):
    """Have docs/amd-kernels.md say of what a test compiles what comes out, with the Triton that it was written with."""
    COMPILED.clear()
    yield
    found = list(rows_of(request.node.name, COMPILED)) if COMPILED else []
    for row in found:
        record_property(PROPERTY, astuple(row))
    text = PAGE.read_text(encoding="utf-8")
    if page_version(text) == triton.__version__:
        assert set(found) <= page_rows(text), "docs/amd-kernels.md is out of date: python -m benchmarks.amd_kernels"


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """What several launches have in common is compiled once.

    TRITON_CACHE_DIR names a cache that is kept. Triton finds in it what it has compiled for the same target from the
    same source, with all that it calls, by the same Triton: it is what compiling it once more would give.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_CACHE_DIR" not in os.environ:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize(("gpu", "cache_dtype"), [(gpu, None) for gpu in GPUS], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_compiles(monkeypatch, name, batch, gpu, cache_dtype):
    layer, dtype = ATTENTION[name]
    case = replace(layer, requests=BATCHES[batch])
    kernel = attention_kernel._attention
    monkeypatch.setattr(attention_kernel, "_attention", Recorder())
    with pytest.raises(Launched) as launched:
        check_attention(
            attention_kernel.TritonAttention(case.spec(dtype, cache_dtype), nvidia=gpu.nvidia, overlap=gpu.nvidia),
            attention_batch(case, dtype, CPU, cache_dtype=cache_dtype),
        )
    compile_launch(kernel, launched.value, gpu)


@pytest.mark.parametrize(("heads", "before"), [(16, 200), (128, 200), (16, 5000)])
def test_one_token_over_latents_compiles_for_hopper(monkeypatch, heads, before):
    case = LatentCase("", ((before, 1),), heads=heads, **_DEEPSEEK)
    kernels = [(latent_token_hopper, "latent_token_hopper"), (latent_hopper, "latent_decode_hopper")]
    kept = keep(monkeypatch, *kernels, (latent_values_kernel, "_values_of_parts"))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = latent_token_hopper.LatentToken(case.spec(torch.bfloat16), overlap=True)
    with pytest.raises(AssertionError, match="differs by nan"):  # nothing has run
        check_latent_token(case, launch, torch.bfloat16, CPU)
    launched = kept()
    assert len(launched) == 3
    for kernel, arguments in launched:
        compile_launch(kernel, arguments, GPUS[-1])


@pytest.mark.parametrize(("gpu", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FP8_ATTENTION)
def test_attention_over_an_fp8_cache_compiles(monkeypatch, name, batch, gpu, cache_dtype):
    test_attention_compiles(monkeypatch, name, batch, gpu, cache_dtype)


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", QKV)
def test_qk_norm_rope_cache_compiles(monkeypatch, name, gpu, cache_dtype):
    case, dtype = QKV[name]
    kernel = qkv_kernel._qk_norm_rope_cache
    monkeypatch.setattr(qkv_kernel, "_qk_norm_rope_cache", Recorder())
    launch = partial(qkv_kernel.qk_norm_rope_cache, spec=case.spec(dtype), overlap=gpu.nvidia)
    with pytest.raises(Launched) as launched:
        check_qkv(case, launch, dtype, CPU, cache_dtype=cache_dtype)
    compile_launch(kernel, launched.value, gpu)


every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=str)

_DEEPSEEK: dict[str, Any] = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
LATENTS = {
    "16 heads, bfloat16": (LatentCase("", (), heads=16, **_DEEPSEEK), torch.bfloat16),
    "128 heads, bfloat16": (LatentCase("", (), heads=128, page_size=64, **_DEEPSEEK), torch.bfloat16),
    "16 heads, float32": (LatentCase("", (), heads=16, **_DEEPSEEK), torch.float32),
    "128 heads, float16, one token a page": (LatentCase("", (), heads=128, page_size=1, **_DEEPSEEK), torch.float16),
}
#: A few tokens that share out a request's rows, many tokens each, and more requests than are shared out.
LATENT_BATCHES = {"decode": ((9, 1), (300, 1)), "prefill": ((9, 1), (0, 40)), "many": ((9, 1),) * 300}


@pytest.mark.parametrize(("gpu", "cache_dtype"), [(gpu, None) for gpu in GPUS], ids=str)
@pytest.mark.parametrize("batch", LATENT_BATCHES)
@pytest.mark.parametrize("name", LATENTS)
def test_attention_over_latents_compiles(monkeypatch, name, batch, gpu, cache_dtype):
    layer, dtype = LATENTS[name]
    case = replace(layer, requests=LATENT_BATCHES[batch])
    kernel = latent_kernel._latent_attention
    monkeypatch.setattr(latent_kernel, "_latent_attention", Recorder())
    spec = case.spec(dtype, cache_dtype)
    with pytest.raises(Launched) as launched:
        check_absorbed(
            case,
            latent_kernel.TritonLatentAttention(
                spec,
                nvidia=gpu.nvidia,
                overlap=gpu.nvidia,
                foreign=cache_dtype is not None and is_foreign(cache_dtype, str(gpu.target.arch)),
            ),
            latent_batch(case, dtype, CPU, cache_dtype=cache_dtype),
        )
    compile_launch(kernel, launched.value, gpu)


@pytest.mark.parametrize("queries", [1, 2, 3, 8])
@pytest.mark.parametrize("requests", [1, 10, 300])
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_decoding_over_latents_compiles_for_hopper(monkeypatch, heads, requests, queries):
    case = LatentCase("", ((9, queries),) * (requests - 1) + ((300, queries),), heads=heads, **_DEEPSEEK)
    kernel = latent_hopper.latent_decode_hopper
    monkeypatch.setattr(latent_hopper, "latent_decode_hopper", Recorder())
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = latent_kernel.TritonLatentAttention(case.spec(torch.bfloat16), nvidia=True, overlap=True, hopper=True)
    with pytest.raises(Launched) as launched:
        check_absorbed(case, launch, latent_batch(case, torch.bfloat16, CPU))
    compile_launch(kernel, launched.value, GPUS[-1])


@pytest.mark.parametrize(("heads", "requests"), [(16, 1), (16, 8), (16, 16), (16, 32), (20, 10), (128, 1)])
def test_decoding_to_values_compiles_for_hopper(monkeypatch, heads, requests):
    case = LatentCase("", ((200, 1),) * (requests - 1) + ((300, 1),), heads=heads, **_DEEPSEEK)
    kept = keep(monkeypatch, (latent_hopper, "latent_decode_hopper"), (latent_values_kernel, "_values_of_parts"))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = latent_values_kernel.TritonLatentValues(case.spec(torch.bfloat16), overlap=True)
    batch = latent_batch(case, torch.bfloat16, CPU)
    out = torch.empty(requests, heads, case.value_dim, dtype=torch.bfloat16)
    assert launch.takes(requests, batch.cache, batch.metadata)
    launch(batch.folded, batch.cache, batch.metadata, batch.expand[:, case.nope_dim :].transpose(1, 2), out)
    launched = kept()
    assert len(launched) == 2
    for kernel, arguments in launched:
        compile_launch(kernel, arguments, GPUS[-1])


@pytest.mark.parametrize(("gpu", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("batch", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "16 heads, float32"])
def test_attention_over_latents_in_fp8_compiles(monkeypatch, name, batch, gpu, cache_dtype):
    test_attention_over_latents_compiles(monkeypatch, name, batch, gpu, cache_dtype)


@pytest.mark.parametrize("batch", LATENT_BATCHES)
def test_three_tiles_of_latents_fit_hopper_beside_32_heads(monkeypatch, batch):
    monkeypatch.setitem(LATENTS, "32 heads", (LatentCase("", (), heads=32, **_DEEPSEEK), torch.bfloat16))
    test_attention_over_latents_compiles(monkeypatch, "32 heads", batch, GPUS[-1], None)


@every_gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_of_keys_compile(monkeypatch, page_size, gpu):
    kernel = slots_kernel._token_slots
    monkeypatch.setattr(slots_kernel, "_token_slots", Recorder())
    lengths, table = torch.ones(3, dtype=torch.int32), torch.ones(3, 8, dtype=torch.int32)
    found = slots_kernel.TokenSlots(1, *(torch.empty(8, dtype=torch.int32) for _ in range(4)))
    with pytest.raises(Launched) as launched:
        slots_kernel.fill_on_device(found, lengths, table, 9, page_size)
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("name", LATENTS)
def test_attention_over_expanded_latents_compiles(monkeypatch, name, gpu):
    layer, dtype = LATENTS[name]
    case = replace(layer, requests=((0, 40), (0, 9)))
    kernel = prefill_kernel._latent_prefill
    monkeypatch.setattr(prefill_kernel, "_latent_prefill", Recorder())
    launch = prefill_kernel.TritonLatentPrefill(case.spec(dtype), nvidia=gpu.nvidia, overlap=gpu.nvidia)
    with pytest.raises(Launched) as launched:
        check_expanded(case, launch, latent_batch(case, dtype, CPU))
    compile_launch(kernel, launched.value, gpu)


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "128 heads, float16, one token a page"])
def test_latent_cache_compiles(monkeypatch, name, gpu, cache_dtype):
    case, dtype = LATENTS[name]
    kernel = latent_cache_kernel._latent_cache
    monkeypatch.setattr(latent_cache_kernel, "_latent_cache", Recorder())
    launch = partial(latent_cache_kernel.latent_cache, spec=case.spec(dtype).latent, overlap=gpu.nvidia)
    with pytest.raises(Launched) as launched:
        check_latent_cache(case, launch, dtype, CPU, cache_dtype)
    compile_launch(kernel, launched.value, gpu)


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "128 heads, float16, one token a page"])
@pytest.mark.parametrize("tokens", [7, 100])
def test_folded_queries_compile(monkeypatch, name, gpu, cache_dtype, tokens):
    case, dtype = LATENTS[name]
    kernel = queries_kernel._latent_queries
    monkeypatch.setattr(queries_kernel, "_latent_queries", Recorder())
    launch = queries_kernel.TritonLatentQueries(case.spec(dtype).latent, overlap=gpu.nvidia)
    with pytest.raises(Launched) as launched:
        check_latent_queries(case, launch, dtype, CPU, cache_dtype, min(tokens, launch.max_tokens))
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("sizes", [(128, 512, 64), (512, 128, 0)], ids=["into latents", "out of latents"])
def test_products_for_each_head_compile(monkeypatch, sizes, tokens, gpu):
    kernel = head_linear_kernel._head_linear
    monkeypatch.setattr(head_linear_kernel, "_head_linear", Recorder())
    launch = partial(head_linear_kernel.head_linear, overlap=gpu.nvidia)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(Launched) as launched:
            check_head_linear(launch, (tokens, 16, *sizes), dtype, CPU, transposed=sizes[2] == 0)
        compile_launch(kernel, launched.value, gpu)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@every_gpu
@pytest.mark.parametrize("size", [128, 4096, 16384])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
def test_rms_norm_compiles(monkeypatch, adds, size, gpu):
    kernel = norm_kernel._rms_norm
    monkeypatch.setattr(norm_kernel, "_rms_norm", Recorder())
    residual = zeros(2, size) if adds else None
    with pytest.raises(Launched) as launched:
        norm_kernel.rms_norm(zeros(2, size), zeros(size), 1e-6, residual, overlap=gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)


#: Every wave writes back what it has stored and waits until that is done, then for the other waves, before one signals.
SIGNAL = re.compile(
    r"\b(buffer|global)_store_\w+ (?:(?!_store_|_atomic_).)*?\bbuffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s"
    r"(?:(?!_store_|_atomic_).)*?\bs_barrier\b(?:(?!_store_).)*?\bglobal_atomic_add [^\n]+ sc1\b",
    re.DOTALL,
)


@pytest.mark.parametrize(
    ("size", "gpu"),
    [(size, gpu) for size in (4096, 7168, 16384, 2881) for gpu in GPUS if gpu.nvidia or 2 * size <= MAX_ROW["rocm"]],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_reduce_norm_compiles(monkeypatch, world_size, size, gpu):
    kernel = reducing_kernel._all_reduce_norm
    monkeypatch.setattr(reducing_kernel, "_all_reduce_norm", Recorder())
    peers = Peers(1, torch.zeros(world_size, dtype=torch.int64), torch.zeros(PROGRAMS, dtype=torch.int32))
    with pytest.raises(Launched) as launched:
        reducing_kernel.all_reduce_norm(zeros(3, size), zeros(3, size), zeros(size), 1e-6, peers, nvidia=gpu.nvidia)
    compiled = compile_launch(kernel, launched.value, gpu)
    # A signal and a wait that hold for other GPUs, and parts read in as many bytes as a thread can.
    if gpu.nvidia:
        text = compiled.asm["ptx"]
        assert re.search(r"(red|atom)\.global\.sys\.release\.add", text)
        assert re.search(r"(ld|atom)\.global\.sys\.acquire", text)
        wide = r"ld\.global\.v4\.b32"
    else:
        text = amd_instructions(compiled)
        assert SIGNAL.search(text)
        assert re.search(
            r"(global_atomic_add|global_load_dword) .* sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+buffer_inv sc0 sc1", text
        )
        wide = r"(buffer|global)_load_dwordx4"
    if size % 8 == 0:
        # Of a row: each rank's part and the residual, and this rank's when it is copied.
        assert len(re.findall(wide, text)) >= world_size + 2


@every_gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation_compiles(monkeypatch, activation, gpu):
    kernel = activation_kernel._gated_activation
    monkeypatch.setattr(activation_kernel, "_gated_activation", Recorder())
    with pytest.raises(Launched) as launched:
        activation_kernel.gated_activation(zeros(2, 6144), activation, gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("first", [None, 1000])
def test_embedding_compiles(monkeypatch, first, gpu):
    kernel = embedding_kernel._embedding
    monkeypatch.setattr(embedding_kernel, "_embedding", Recorder())
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(Launched) as launched:
        embedding_kernel.embedding(ids, zeros(10, 4096), first)
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("windowed", [False, True], ids=["one pool", "two pools"])
def test_request_pages_compiles(monkeypatch, page_size, windowed, gpu):
    kernel = pages_kernel._request_pages
    monkeypatch.setattr(pages_kernel, "_request_pages", Recorder())
    ints = partial(torch.zeros, dtype=torch.int32)
    longs = partial(torch.zeros, dtype=torch.int64)
    moved = (longs(1000), ints(3, 8)) if windowed else (None, None)
    with pytest.raises(Launched) as launched:
        pages_kernel.TritonRequestPages(RequestPagesSpec(page_size))(
            ints(9, 8 * page_size), longs(3), longs(3), 1, ints(3), ints(3, 8), *moved
        )
    compile_launch(kernel, launched.value, gpu)


#: Products whose kernels or tiles differ: by rows of x, by the weight's size; one that no tile divides.
PRODUCTS = [
    (1, 4096, 4096),
    (1, 1024, 3072),
    (1, 32768, 4096),
    (8, 6144, 4096),
    (8, 4096, 12288),
    (8, 4096, 1024),
    (3, 100, 1000),
    (1, 65536, 1024),
]


class Recorders(dict):
    """Stands in for the table of kernels; remembers which was asked for."""

    asked = ""

    def __getitem__(self, name: str) -> Any:
        self.asked = name
        return Recorder()


#: What surrounds a product; all of it together compiles the most.
WAYS = [("plain", product) for product in PRODUCTS] + [
    (way, product) for way in ("adding", "normed and activated") for product in (PRODUCTS[0], PRODUCTS[5])
]
#: Of a router whose scores are float32.
WAYS += [(way, (rows, 64, 2048)) for way, rows in (("float32", 1), ("float32", 8), ("normed to float32", 1))]


@every_gpu
@pytest.mark.parametrize(("way", "product"), WAYS, ids=str)
def test_linear_compiles(monkeypatch, way, product, gpu):
    rows, out_features, in_features = product
    kernels, recorders = linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    monkeypatch.setattr(normed_kernel, "rms_norm", lambda x, *_, **__: (x, None))
    x, weight, residual = zeros(rows, in_features), zeros(out_features, in_features), zeros(rows, out_features)
    linear = linear_kernel.TritonLinear(gpu.nvidia, gpu.nvidia)
    normed = normed_kernel.TritonNormedLinear("silu", gpu.nvidia, gpu.nvidia)
    scores = linear_kernel.TritonLinear(gpu.nvidia, gpu.nvidia, float32_result=True)
    normed_scores = normed_kernel.TritonNormedLinear(None, gpu.nvidia, gpu.nvidia)
    launches = {
        "plain": lambda: linear(x, weight, None),
        "adding": lambda: linear.add(x, weight, None, residual),
        "normed and activated": lambda: normed(x, x[0], 1e-6, Operands(weight, None)),
        "float32": lambda: scores(x, weight, None),
        "normed to float32": lambda: normed_scores(x, x[0], 1e-6, Operands(weight, None, float32_result=True)),
    }
    with pytest.raises(Launched) as launched:
        launches[way]()
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [2, 16, 32, 64])
@pytest.mark.parametrize("size", [(6144, 4096), (24576, 4096), (4096, 12288), (2048, 4096), (1024, 256)], ids=str)
@pytest.mark.parametrize("way", ["plain", "gelu_tanh", "clamped_swiglu", "FP8 and a residual"])
def test_products_for_hopper_compile(monkeypatch, way, size, rows):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    fp8 = way == "FP8 and a residual"
    tile = tile_for(rows, *size, 1 if fp8 else 2, nvidia=True, hopper=True)
    if tile is None:
        assert rows > 32
        return
    assert tile.kernel == "hopper" or rows > 32
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    x, weight = zeros(rows, size[1]), zeros(*size)
    others: dict[str, Any] = {} if fp8 or way == "plain" else {"activation": way}
    if fp8:
        x, weight = (matrix.to(torch.float8_e4m3fn) for matrix in (x, weight))
        others = {"scales": torch.ones(size[0]), "input_scales": torch.ones(rows), "residual": zeros(rows, size[0])}
    with pytest.raises(Launched) as launched:
        linear_kernel.product(x, weight, None, tile=tile, overlap=True, dtype=torch.bfloat16, **others)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [64, 100, 256])
@pytest.mark.parametrize("size", [(4096, 1024), (1024, 2048), (2048, 2048), (6144, 1024), (128, 2048)], ids=str)
@pytest.mark.parametrize("way", ["plain", "silu", "adding", "in float32"])
def test_products_by_small_weights_for_hopper_compile(monkeypatch, way, size, rows):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    tile = tile_for(rows, *size, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert tile.tokens or rows == 64
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    others: dict[str, Any] = {"activation": "silu"} if way == "silu" else {}
    if way == "adding":
        others = {"residual": zeros(rows, size[0])}
    if way == "in float32":
        others = {"dtype": torch.float32}
    with pytest.raises(Launched) as launched:
        linear_kernel.product(zeros(rows, size[1]), zeros(*size), None, tile=tile, overlap=True, **others)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


#: A product for each tile that comes with the package, all of them Hopper's.
TUNED = {Tile(**tile): shape for shape, tile in tuned.load(OP_FOLDER, "NVIDIA H200").items()}


@pytest.mark.parametrize(("tile", "shape"), TUNED.items(), ids=str)
def test_tuned_tiles_compile_for_hopper(monkeypatch, tile, shape):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    norm = Norm(zeros(shape.in_features), 1e-6) if tile.norms else None
    # A head's weight is large, and nobody reads it.
    weight = torch.empty(shape.out_features, shape.in_features, dtype=torch.bfloat16)
    with pytest.raises(Launched) as launched:
        linear_kernel.product(zeros(shape.rows, shape.in_features), weight, None, tile=tile, overlap=True, norm=norm)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [2, 16])
def test_products_of_an_odd_number_of_half_tiles_compile_for_hopper(monkeypatch, rows):
    test_products_for_hopper_compile(monkeypatch, "plain", (5120, 2880), rows)


@pytest.mark.parametrize(
    ("case", "dtype", "gpu", "cache_dtype"),
    [
        *((case, torch.bfloat16, gpu, None) for case in DECODES for gpu in GPUS),
        *((case, torch.float32, gpu, None) for case in (DECODES[0], DECODES[3]) for gpu in GPUS),
        *((DECODES[0], torch.bfloat16, gpu, cache_dtype) for gpu, cache_dtype in FP8_CACHES),
    ],
    ids=str,
)
def test_decode_attention_compiles(monkeypatch, case, dtype, gpu, cache_dtype):
    kernel = decode_kernel._decode_attention
    monkeypatch.setattr(decode_kernel, "_decode_attention", Recorder())
    spec = case.spec(dtype, cache_dtype)
    with pytest.raises(Launched) as launched:
        check_decode(case, decode_kernel.TritonDecodeAttention(spec, gpu.nvidia, gpu.nvidia), spec, CPU)
    compile_launch(kernel, launched.value, gpu)


def attend_in_parts(op: str, gpu: Gpu) -> None:
    """Attend to a request that is so long that programs share out its keys."""
    dtype, requests, how = torch.bfloat16, ((9, 1), (3000, 1)), {"nvidia": gpu.nvidia, "overlap": gpu.nvidia}
    layer = replace(DECODES[0].attention, requests=requests)
    if op == "latent_attention":
        case = replace(LATENTS["16 heads, bfloat16"][0], requests=requests)
        absorbed = latent_kernel.TritonLatentAttention(case.spec(dtype), **how)
        check_absorbed(case, absorbed, latent_batch(case, dtype, CPU))
    elif op == "attention":
        attention = attention_kernel.TritonAttention(layer.spec(dtype), **how)
        check_attention(attention, attention_batch(layer, dtype, CPU))
    else:
        decode = replace(DECODES[0], attention=layer)
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
    [("attention", attention_kernel), ("decode_attention", decode_kernel), ("latent_attention", latent_kernel)],
    ids=["attention", "decode", "latents"],
)
def test_parts_are_there_for_programs_on_other_xcds(monkeypatch, op, module, gpu):
    kernel = getattr(module, f"_{op}")
    monkeypatch.setattr(module, f"_{op}", Recorder())
    with pytest.raises(Launched) as launched:
        attend_in_parts(op, gpu)
    assert launched.value.constants["SPLIT"]
    compiled = compile_launch(kernel, launched.value, gpu)
    code = amd_instructions(compiled)
    assert code.count("global_atomic_add") == 1
    assert RELEASE.search(code)


def in_front(way: str, size: int) -> Made:
    """What makes rows of so many numbers that are quantised."""
    norm = linear_kernel.Norm(zeros(size), 1e-6)
    return {
        "alone": Made(),
        "normed": Made(norm),
        "added and normed": Made(norm, zeros(2, size)),
        "activated": Made(activation="silu"),
    }[way]


#: What is normed is as long as a model is wide; the longest row of others is an MLP's.
FRONTS = ("alone", "normed", "added and normed", "activated")
QUANTISED = [(size, way) for size in (1024, 12288) for way in FRONTS] + [
    (16384, "added and normed"),
    (16384, "activated"),
    (53248, "alone"),
]


@every_gpu
@pytest.mark.parametrize("input_scale", [None, torch.ones(1)], ids=["dynamic", "static"])
@pytest.mark.parametrize(("size", "way"), QUANTISED)
def test_quantising_activations_compiles(monkeypatch, size, way, input_scale, gpu):
    kernel = quantize_kernel._quantize
    x = zeros(2, 2 * size if way == "activated" else size)
    monkeypatch.setattr(quantize_kernel, "_quantize", Recorder())
    with pytest.raises(Launched) as launched:
        quantize_kernel.quantize(x, input_scale, dtype_of(gpu.device), gpu.nvidia, in_front(way, size))
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(4096), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("out_features", [4096, 6144, 24576])
def test_one_row_in_fp8_compiles(monkeypatch, out_features, norm, gpu):
    tile = fp8_row_kernel.tile_for(out_features, 4096)
    kernel = fp8_row_kernel._one_row
    monkeypatch.setattr(fp8_row_kernel, "_one_row", Recorder())
    weight = torch.zeros(out_features, 4096, dtype=torch.uint8).view(dtype_of(gpu.device))
    with pytest.raises(Launched) as launched:
        fp8_row_kernel.multiply_row(
            zeros(1, 4096),
            weight,
            torch.ones(out_features),
            None,
            tile=tile,
            native=gpu.nvidia,
            overlap=gpu.nvidia,
            norm=norm,
            activation="silu" if norm else None,
        )
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [*(it for it in PRODUCTS if it[0] > 1), (2, 4096, 4096), (24, 4096, 4096), (40, 4096, 4096)],
)
def test_products_in_fp8_compile(monkeypatch, rows, out_features, in_features, gpu):
    kernels, recorders = linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    dtype = dtype_of(gpu.device)
    monkeypatch.setattr(
        fp8_kernel, "quantize", lambda x, *_: (torch.zeros_like(x, dtype=torch.uint8).view(dtype), torch.ones(rows, 1))
    )
    weight, scales = zeros(out_features, in_features).to(torch.float8_e4m3fn), torch.ones(out_features)
    kernel = fp8_kernel.TritonFp8Linear(gpu.device, gpu.nvidia)
    kernel.adopt(weight, scales)
    with pytest.raises(Launched) as launched:
        kernel(zeros(rows, in_features), weight, scales, None, None)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@every_gpu
@pytest.mark.parametrize(("size", "group"), [(200, 128), (4096, 128), (12288, 128), (768, None)])
@pytest.mark.parametrize("way", [*FRONTS, "rows of slots", "and clears"])
def test_quantising_groups_compiles(monkeypatch, way, size, group, gpu):
    of, numbers = in_front(way, size) if way in FRONTS else Made(), torch.zeros(2, dtype=torch.int32)
    others = {"rows of slots": {"slots": numbers}, "and clears": {"cleared": numbers}}.get(way, {})
    x = zeros(2, 2 * size if way == "activated" else size)
    kernel = groups_kernel._quantize_groups
    monkeypatch.setattr(groups_kernel, "_quantize_groups", Recorder())
    with pytest.raises(Launched) as launched:
        groups_kernel.quantize_groups(x, dtype_of(gpu.device), gpu.nvidia, group=group, of=of, **others)
    compile_launch(kernel, launched.value, gpu)


def in_blocks(rows: int, out_features: int, in_features: int, gpu: Gpu) -> tuple[torch.Tensor, ...]:
    """``x`` and its scales, a weight and its scales."""
    groups, dtype = -(-in_features // 128), dtype_of(gpu.device)
    x, weight = (torch.zeros(size, in_features, dtype=torch.uint8).view(dtype) for size in (rows, out_features))
    return x, torch.ones(groups, rows), weight, torch.ones(-(-out_features // 128), groups)


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(2064), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("in_features", [2048, 2064])
@pytest.mark.parametrize("out_features", [1024, 5120])
def test_one_row_by_blocks_compiles(monkeypatch, out_features, in_features, norm, gpu):
    kernel = fp8_row_kernel._one_row
    monkeypatch.setattr(fp8_row_kernel, "_one_row", Recorder())
    _, _, weight, scales = in_blocks(1, out_features, in_features, gpu)
    with pytest.raises(Launched) as launched:
        fp8_row_kernel.multiply_row(
            zeros(1, in_features),
            weight,
            scales,
            None,
            tile=fp8_row_kernel.tile_for(out_features, in_features),
            block=128,
            native=gpu.nvidia,
            overlap=gpu.nvidia,
            norm=norm,
            activation="silu" if norm else None,
            residual=None if norm else zeros(1, out_features),
        )
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("way", ["plain", "adding", "activated"])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 4096, 4096), (24, 4096, 12288), (64, 1000, 200)])
def test_few_rows_by_blocks_compile(monkeypatch, rows, out_features, in_features, way, gpu):
    kernel = few_block_rows_kernel._few_rows
    monkeypatch.setattr(few_block_rows_kernel, "_few_rows", Recorder())
    with pytest.raises(Launched) as launched:
        few_block_rows_kernel.multiply_few_rows(
            *in_blocks(rows, out_features, in_features, gpu),
            zeros(out_features),
            nvidia=gpu.nvidia,
            overlap=gpu.nvidia,
            dtype=torch.bfloat16,
            activation="silu" if way == "activated" else None,
            residual=zeros(rows, out_features) if way == "adding" else None,
        )
    compile_launch(kernel, launched.value, gpu)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("rows", [2, 32, 64])
@pytest.mark.parametrize("size", [(5120, 2048), (2048, 4096), (24576, 4096), (1000, 128)], ids=str)
def test_few_rows_by_blocks_for_hopper_compile(monkeypatch, size, rows, activation):
    gpu, kernel = GPUS[-1], hopper_block_rows_kernel.few_rows_hopper
    monkeypatch.setattr(hopper_block_rows_kernel, "few_rows_hopper", Recorder())
    monkeypatch.setattr(few_block_rows_kernel, "on_hopper", lambda _: True)
    with pytest.raises(Launched) as launched:
        few_block_rows_kernel.multiply_few_rows(
            *in_blocks(rows, *size, gpu),
            zeros(size[0]),
            nvidia=True,
            overlap=True,
            dtype=torch.bfloat16,
            activation=activation,
            residual=None if activation else zeros(rows, size[0]),
        )
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("bias", [None, zeros(4096)], ids=["plain", "with a bias"])
@pytest.mark.parametrize(("rows", "in_features"), [(80, 4096), (300, 4096), (3000, 4096), (3000, 200)])
def test_many_rows_by_blocks_compile(monkeypatch, rows, in_features, bias, gpu):
    kernel = many_block_rows_kernel._many_rows
    monkeypatch.setattr(many_block_rows_kernel, "_many_rows", Recorder())
    with pytest.raises(Launched) as launched:
        many_block_rows_kernel.multiply_many_rows(
            *in_blocks(rows, 4096, in_features, gpu), bias, nvidia=gpu.nvidia, dtype=torch.bfloat16
        )
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(12288), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("slots", [None, torch.zeros(2, dtype=torch.int32)], ids=["all rows", "rows of slots"])
@pytest.mark.parametrize(("rounds", "parts"), [(False, 2), (True, 4), (True, 1)])
@pytest.mark.parametrize("size", [2880, 12288])
def test_preparing_inputs_for_mxfp4_compiles(monkeypatch, size, rounds, parts, slots, norm, gpu):
    kernel = inputs_kernel._prepare
    monkeypatch.setattr(inputs_kernel, "_prepare", Recorder())
    with pytest.raises(Launched) as launched:
        inputs_kernel.prepare(zeros(2, size), gpu.nvidia, rounds=rounds, parts=parts, norm=norm, slots=slots)
    compile_launch(kernel, launched.value, gpu)


def in_mxfp4(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """``x``, blocks and scales."""
    packed = (torch.zeros(out_features, in_features // unit, dtype=torch.uint8) for unit in (2, 32))
    return zeros(rows, in_features).to(dtype), *packed


@every_gpu
@pytest.mark.parametrize("way", ["plain", "adding", "activated", "float32"])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 4096, 4096), (24, 4096, 12288), (64, 1000, 96)])
def test_few_rows_by_mxfp4_compile(monkeypatch, rows, out_features, in_features, way, gpu):
    kernel = few_mxfp4_rows_kernel._few_rows
    monkeypatch.setattr(few_mxfp4_rows_kernel, "_few_rows", Recorder())
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    with pytest.raises(Launched) as launched:
        few_mxfp4_rows_kernel.multiply_few_rows(
            *in_mxfp4(rows, out_features, in_features, dtype),
            zeros(out_features),
            nvidia=gpu.nvidia,
            overlap=gpu.nvidia,
            activation="silu" if way == "activated" else None,
            residual=zeros(rows, out_features) if way == "adding" else None,
        )
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "in_features"), [(80, 4096), (300, 4096), (3000, 4096), (3000, 96)])
def test_many_rows_by_mxfp4_compile(monkeypatch, rows, in_features, dtype, gpu):
    kernel = many_mxfp4_rows_kernel._many_rows
    monkeypatch.setattr(many_mxfp4_rows_kernel, "_many_rows", Recorder())
    with pytest.raises(Launched) as launched:
        many_mxfp4_rows_kernel.multiply_many_rows(*in_mxfp4(rows, 4096, in_features, dtype), None, nvidia=gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize(
    "spec",
    [
        RoutingConfig(128, 8, "softmax", renormalize=True),
        RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4),
        RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4, shared=1),
        RoutingConfig(64, 6, "softmax", renormalize=False, shared=2),
    ],
    ids=["Qwen3", "DeepSeek V3", "DeepSeek V3, one shared", "DeepSeek V2 Lite, two shared"],
)
def test_routing_compiles(monkeypatch, spec, gpu):
    kernel = routing_kernel._route
    monkeypatch.setattr(routing_kernel, "_route", Recorder())
    correction = torch.zeros(spec.num_experts) if spec.correction else None
    with pytest.raises(Launched) as launched:
        routing_kernel.route(zeros(3, spec.num_experts), correction, spec, gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)


@every_gpu
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize(
    ("num_experts", "hidden", "wide"), [(128, 2048, False), (32, 2880, False), (256, 7168, False), (128, 4096, True)]
)
def test_norm_and_router_compile(monkeypatch, num_experts, hidden, wide, tokens, gpu):
    kernel = normed_router_kernel._norm_and_score
    monkeypatch.setattr(normed_router_kernel, "_norm_and_score", Recorder())
    weight = torch.zeros(num_experts, hidden) if wide else zeros(num_experts, hidden)
    router = Operands(weight, zeros(num_experts), float32_result=not wide)
    with pytest.raises(Launched) as launched:
        normed_router_kernel.TritonNormedRouter(gpu.nvidia)(zeros(tokens, hidden), zeros(hidden), 1e-6, router)
    compiled = compile_launch(kernel, launched.value, gpu)
    if gpu.nvidia:
        # The token is read 16 bytes at a time; a program's own few columns, their norm's and its rows' biases are not.
        narrow = len(re.findall(r"ld\.global\S*\.b16\b", compiled.asm["ptx"]))
        assert narrow <= 2 + launched.value.constants["ROWS"]


class Keeper:
    """Stands in for a kernel, and keeps its launches."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.launches.append(Launched(arguments, constants))


def keep(
    monkeypatch: pytest.MonkeyPatch, *kernels: tuple[Any, str]
) -> Callable[[], list[tuple[JITFunction, Launched]]]:
    """Have these kernels' launches kept: what is returned tells them, each with its kernel."""
    originals = [getattr(module, name) for module, name in kernels]
    keepers = [Keeper() for _ in kernels]
    for (module, name), keeper in zip(kernels, keepers, strict=True):
        monkeypatch.setattr(module, name, keeper)
    return lambda: [(it, launch) for it, kept in zip(originals, keepers, strict=True) for launch in kept.launches]


@every_gpu
@pytest.mark.parametrize("least", [False, True], ids=["all tokens", "some barred"])
def test_greedy_tokens_compile(monkeypatch, least, gpu):
    kept = keep(monkeypatch, (greedy_kernel, "_best_of_parts"), (greedy_kernel, "_best_of_rows"))
    ints = partial(torch.zeros, dtype=torch.int32)
    barred = Barred(ints(8), ints(8), ints(8, 128)) if least else None
    kernel = greedy_kernel.TritonGreedyTokens(GreedyTokensSpec(102_400))
    kernel(zeros(3, 102_400), ints(3), torch.zeros(3, dtype=torch.int64), barred)
    launched = kept()
    assert len(launched) == 2
    for each, launch in launched:
        compile_launch(each, launch, gpu)


SORTING = [(grouped_kernel, name) for name in ("_count", "_arrange", "_place", "_sort", "_combine")]
FEW = [(few_experts_kernel, name) for name in ("_gate_up_of_one", "_down_of_one", "_of_expert")]
#: Whether the kernel has moved the weights' numbers, as on Hopper.
moved = pytest.mark.parametrize("tiled", [False, True], ids=["as loaded", "tiles that lie together"])


def plain_experts(spec, overlap, tiled=False):
    """The kernel, its weights adopted or not."""
    kernel = experts_kernel.TritonExperts(spec, overlap)
    kernel.tiled = tiled
    return kernel


@every_gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (2, 3), (16, 3), (20, 4), (40, 4), (100, 4), (3000, 6)])
def test_experts_compile(monkeypatch, tokens, launches, bias, gpu):
    kernels = [*FEW, (grouped_kernel, "_multiply"), *SORTING]
    kept = keep(monkeypatch, *kernels)
    spec = ExpertsSpec(0, 16, 2048, 768, 8, "clamped_swiglu" if bias else "silu", bias, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(16, 1536, 2048, dtype=torch.bfloat16),
        torch.empty(16, 2048, 768, dtype=torch.bfloat16),
        zeros(16, 1536) if bias else None,
        zeros(16, 2048) if bias else None,
    )
    experts = torch.zeros(tokens, 8, dtype=torch.int32)
    experts_kernel.TritonExperts(spec, gpu.nvidia)(zeros(tokens, 2048), torch.zeros(tokens, 8), experts, layer)
    launched = kept()
    assert len(launched) == launches
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(
    ("size", "tokens", "tiles"),
    [
        (768, 2, [(128, 3), (128, 5)]),
        (768, 16, [(128, 5), (128, 5)]),
        (1408, 4, [(128, 3), (128, 5)]),
        (704, 8, [(128, 5), (64, 9)]),
        (64, 8, [(128, 5), (64, 2)]),
        (1040, 8, [(128, 5), (64, 5)]),
    ],
)
def test_experts_of_few_tokens_compile_for_hopper(monkeypatch, size, tokens, tiles, bias, tiled):
    kept = keep(monkeypatch, (few_experts_kernel, "_of_expert"), (few_hopper_kernel, "down_of_few_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(few_experts_kernel, "on_hopper", lambda device: True)
    monkeypatch.setattr(few_hopper_kernel, "multiprocessors", lambda device: 132)
    spec = ExpertsSpec(0, 16, 2048, size, 8, "silu", bias, torch.bfloat16)
    biases = (zeros(16, 2 * size), zeros(16, 2048)) if bias else ()
    layer = ExpertWeights(zeros(16, 2 * size, 2048), zeros(16, 2048, size), *biases)
    chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    plain_experts(spec, True, tiled)(zeros(tokens, 2048), *chosen, layer)
    launched = kept()
    constants = [launch.constants for _, launch in launched]
    assert [(it.get("BLOCK_K") or it["COLUMNS"], it["STAGES"]) for it in constants] == tiles
    for kernel, launch in launched:
        compile_launch(kernel, launch, GPUS[-1])


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
def test_experts_of_few_pairs_compile_for_hopper(monkeypatch, bias, tiled):
    tokens, gpu = 20, GPUS[-1]
    kept = keep(monkeypatch, (few_pairs_kernel, "few_pairs_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 16, 2048, 768, 8, "clamped_swiglu" if bias else "silu", bias, torch.bfloat16)
    biases = (zeros(16, 1536), zeros(16, 2048)) if bias else (None, None)
    layer = ExpertWeights(zeros(16, 1536, 2048), zeros(16, 2048, 768), *biases)
    chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    run = plain_experts(spec, True, tiled)
    run.add(zeros(tokens, 2048), *chosen, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compiled = compile_launch(kernel, launch, gpu)
        # One wait in the loop and one behind it: a compiler that waits for each product has more.
        assert compiled.asm["ptx"].count("wgmma.wait_group") == 2


@moved
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shared", "tokens", "pairs", "bias"),
    [
        (0, 40, 32, False),
        (0, 40, 32, True),
        (0, 100, 64, True),
        (2, 20, 16, False),
        (2, 33, 32, False),
        (2, 64, 32, False),
        (2, 66, 64, False),
        (2, 256, 64, False),
        (2, 700, 128, False),
    ],
)
def test_experts_of_more_pairs_compile_for_hopper(monkeypatch, shared, tokens, pairs, bias, dtype, tiled):
    """Blocks of up to 64 pairs, larger ones where tokens share experts: each block reads their weights."""
    kept = keep(
        monkeypatch,
        (few_pairs_kernel, "few_pairs_hopper"),
        (pairs_kernel, "pairs_hopper"),
        (hopper_experts_kernel, "grouped_rows_hopper"),
    )
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    count, top_k = (66, 8) if shared else (16, 8)
    activation = "clamped_swiglu" if bias else "silu"
    spec = ExpertsSpec(0, count, 2048, 704, top_k, activation, bias, dtype, count, shared)
    biases = (torch.empty(count, 1408, dtype=dtype), torch.empty(count, 2048, dtype=dtype)) if bias else (None, None)
    weights = torch.empty(count, 1408, 2048, dtype=dtype), torch.empty(count, 2048, 704, dtype=dtype)
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    run = plain_experts(spec, True, tiled)
    x = torch.empty(tokens, 2048, dtype=dtype)
    run.add(x, *chosen, ExpertWeights(*weights, *biases), torch.empty_like(x))
    launched = kept()
    name = {16: "few_pairs_hopper", 128: "grouped_rows_hopper"}.get(pairs, "pairs_hopper")
    assert [kernel.__name__ for kernel, _ in launched] == [name] * 2
    for kernel, launch in launched:
        if name == "pairs_hopper":
            assert launch.constants["PAIRS"] == pairs
            compiled = compile_launch(kernel, launch, GPUS[-1])
            # Three such programs, and what is set aside for each, share a multiprocessor's 228 KiB.
            assert 3 * (compiled.metadata.shared + 1024) <= 228 * 1024
            # A wait in the loop for all and one for half of the pairs: a compiler that waits for each has more.
            assert compiled.asm["ptx"].count("wgmma.wait_group") == 2


def one_token_behind_a_norm(monkeypatch, size, gpu, tiled=False):
    """Compile its experts' launches."""
    kept = keep(monkeypatch, *FEW)
    spec = ExpertsSpec(0, 16, 2048, size, 8, "silu", False, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(16, 2 * size, 2048, dtype=torch.bfloat16), torch.empty(16, 2048, size, dtype=torch.bfloat16)
    )
    chosen = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    plain_experts(spec, gpu.nvidia, tiled).add_behind_norm(zeros(1, 2048), zeros(2048), 1e-6, *chosen, layer)
    for kernel, launch in kept():
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("size", [768, 1408])
def test_experts_of_one_token_compile_behind_a_norm(monkeypatch, size, gpu):
    one_token_behind_a_norm(monkeypatch, size, gpu)


def test_experts_of_one_token_compile_for_tiles_that_lie_together(monkeypatch):
    one_token_behind_a_norm(monkeypatch, 1408, GPUS[-1], tiled=True)


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_of_many_tokens_compile_for_hopper(monkeypatch, dtype, bias, tiled):
    kept = keep(monkeypatch, (hopper_experts_kernel, "grouped_rows_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 16, 2880, 704, 8, "clamped_swiglu" if bias else "silu", bias, dtype)
    layer = ExpertWeights(
        torch.empty(16, 1408, 2880, dtype=dtype),
        torch.empty(16, 2880, 704, dtype=dtype),
        torch.empty(16, 1408, dtype=dtype) if bias else None,
        torch.empty(16, 2880, dtype=dtype) if bias else None,
    )
    chosen = torch.zeros(3000, 8), torch.zeros(3000, 8, dtype=torch.int32)
    plain_experts(spec, True, tiled)(torch.empty(3000, 2880, dtype=dtype), *chosen, layer)
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, GPUS[-1])


#: Of a layer of DeepSeek V3 with its shared expert among the routed ones.
WITH_SHARED = {"count": 257, "top_k": 9}


@every_gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_experts_compile_with_a_shared_one(monkeypatch, tokens, gpu):
    kept = keep(monkeypatch, *FEW, (grouped_kernel, "_multiply"), *SORTING)
    count, top_k = WITH_SHARED.values()
    spec = ExpertsSpec(0, count, 2048, 768, top_k, "silu", False, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(count, 1536, 2048, dtype=torch.bfloat16), torch.empty(count, 2048, 768, dtype=torch.bfloat16)
    )
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    experts_kernel.TritonExperts(spec, gpu.nvidia)(zeros(tokens, 2048), *chosen, layer)
    launched = kept()
    assert len(launched) == (2 if tokens == 1 else 3 if tokens == 16 else 4)
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


def in_mxfp4_experts(count: int, size: int, hidden: int) -> Mxfp4Weights:
    """Zeros, with biases."""
    return Mxfp4Weights(
        torch.zeros(count, 2 * size, hidden // 2, dtype=torch.uint8),
        empty_scales(count, 2 * size, hidden),
        torch.zeros(count, hidden, size // 2, dtype=torch.uint8),
        empty_scales(count, hidden, size),
        zeros(count, 2 * size),
        zeros(count, hidden),
    )


@every_gpu
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (40, 4), (200, 4), (400, 4), (3000, 6)])
def test_experts_in_mxfp4_compile(monkeypatch, tokens, launches, gpu):
    kernels = [(mxfp4_kernel, name) for name in ("_gate_up", "_down", "_multiply")]
    kept = keep(monkeypatch, *kernels, *SORTING)
    hidden, size, count = 2880, 2880, 32
    spec = Mxfp4ExpertsSpec(0, count, hidden, size, 4, "clamped_swiglu", True, torch.bfloat16, rounded_inputs=True)
    keep(monkeypatch, (inputs_kernel, "_prepare"))
    layer = in_mxfp4_experts(count, size, hidden)
    experts = torch.zeros(tokens, 4, dtype=torch.int32)
    x, weights = zeros(tokens, hidden), torch.zeros(tokens, 4)
    mxfp4_kernel.TritonMxfp4Experts(spec, gpu.nvidia)(x, weights, experts, layer)
    mxfp4_kernel.TritonMxfp4Experts(spec, gpu.nvidia).add(x, weights, experts, layer, zeros(tokens, hidden))
    launched = kept()
    assert len(launched) == 2 * launches
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


def compile_mxfp4_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, size: int, top_k: int, *, bias: bool, rounded: bool
) -> None:
    """Both products of a layer of 32 experts."""
    gpu = GPUS[-1]
    widened = [(many_mxfp4_kernel, "_widen"), (hopper_experts_kernel, "grouped_rows_hopper")]
    kept = keep(monkeypatch, (hopper_mxfp4_kernel, "expert_rows_hopper"), *widened)
    keep(monkeypatch, *SORTING, (inputs_kernel, "_prepare"))
    monkeypatch.setattr(mxfp4_kernel, "on_hopper", lambda device: True)
    activation = "clamped_swiglu" if bias else "silu"
    spec = Mxfp4ExpertsSpec(0, 32, hidden, size, top_k, activation, bias, torch.bfloat16, rounded_inputs=rounded)
    layer = in_mxfp4_experts(32, size, hidden)
    if not bias:
        layer = Mxfp4Weights(*layer[:4])
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    mxfp4_kernel.TritonMxfp4Experts(spec, True)(zeros(tokens, hidden), *chosen, layer)
    launched = kept()
    if tokens == 7000 and size % 64 == 0:
        # Eight experts at a time for gate and up, sixteen for down.
        assert [it.__name__ for it, _ in launched] == ["_widen"] * 6 + ["grouped_rows_hopper"] * 6
    else:
        assert [it.__name__ for it, _ in launched] == ["expert_rows_hopper"] * 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize("rounded", [False, True], ids=["as they are", "rounded"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(("hidden", "size"), [(2880, 2880), (2880, 1440)])
@pytest.mark.parametrize("tokens", [1, 9, 40, 200, 600, 3000, 7000])
def test_experts_in_mxfp4_compile_for_hopper(monkeypatch, tokens, hidden, size, bias, rounded):
    compile_mxfp4_for_hopper(monkeypatch, tokens, hidden, size, 4, bias=bias, rounded=rounded)


@pytest.mark.parametrize("tokens", [1, 9, 40, 100, 300])
def test_nine_experts_in_mxfp4_compile_for_hopper(monkeypatch, tokens):
    compile_mxfp4_for_hopper(monkeypatch, tokens, 2048, 768, 9, bias=False, rounded=True)


FEW_FP8 = [(few_fp8_kernel, name) for name in ("_gate_up_of_one", "_down_of_one", "_of_expert")]


def fp8_experts(
    hidden: int, block: bool, gpu: Gpu, count: int = 16, top_k: int = 8
) -> tuple[fp8_experts_kernel.TritonFp8Experts, Fp8ExpertWeights]:
    """A layer of them."""
    groups = -(-hidden // 128)
    scales = ((12, groups), (groups, 6)) if block else ((1536,), (hidden,))
    wide, narrow = (torch.ones(count, *shape) for shape in scales)
    gate_up, down = (
        torch.empty(count, *shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for shape in ((1536, hidden), (hidden, 768))
    )
    spec = Fp8ExpertsSpec(0, count, hidden, 768, top_k, "silu", block, torch.bfloat16)
    kernel = fp8_experts_kernel.TritonFp8Experts(spec, gpu.device, gpu.nvidia)
    return kernel, Fp8ExpertWeights(gate_up, wide, down, narrow)


@every_gpu
@pytest.mark.parametrize("hidden", [2048, 200])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [1, 16, 20, 40, 100, 3000])
def test_fp8_experts_compile(monkeypatch, tokens, block, hidden, gpu):
    kept = keep(monkeypatch, *FEW_FP8, (many_fp8_kernel, "_multiply"))
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    run, layer = fp8_experts(hidden, block, gpu)
    experts = torch.zeros(tokens, 8, dtype=torch.int32)
    run.add(zeros(tokens, hidden), torch.zeros(tokens, 8), experts, layer, zeros(tokens, hidden))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize(("count", "top_k"), [(16, 8), WITH_SHARED.values()])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [2, 16, 20, 40])
def test_fp8_experts_of_few_pairs_compile_for_hopper(monkeypatch, tokens, block, count, top_k):
    gpu = GPUS[-1]
    kept = keep(monkeypatch, (hopper_fp8_kernel, "expert_rows_fp8_hopper"))
    quantised = keep(monkeypatch, (groups_kernel, "_quantize_groups"))
    keep(monkeypatch, *SORTING)
    for module in (few_fp8_kernel, fp8_experts_kernel):
        monkeypatch.setattr(module, "on_hopper", lambda device: True)
    run, layer = fp8_experts(2048, block, gpu, count, top_k)
    experts = torch.zeros(tokens, top_k, dtype=torch.int32)
    run.add(zeros(tokens, 2048), torch.zeros(tokens, top_k), experts, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    # In blocks gate and up quantise what they leave for down.
    assert len(quantised()) == (1 if block else 2)
    gate_up, down = (dict(zip(kernel.arg_names, launch.arguments, strict=False)) for kernel, launch in launched)
    if block:
        assert down["x"] is gate_up["quantized"]
        assert down["x_scales"] is gate_up["out_scales"]
        assert gate_up["arrivals"] is quantised()[0][1].constants["cleared"]
        # Six groups of the middle of each block; where they are not sorted each pair has a block.
        blocks = tokens * top_k if gate_up["slots"] is None else len(gate_up["block_experts"])
        assert len(gate_up["arrivals"]) == 6 * blocks
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize("hidden", [2048, 2176])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
def test_fp8_experts_of_many_tokens_compile_for_hopper(monkeypatch, block, hidden):
    gpu = GPUS[-1]
    kept = keep(monkeypatch, (hopper_experts_kernel, "grouped_rows_hopper"))
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    monkeypatch.setattr(many_fp8_kernel, "on_hopper", lambda device: True)
    run, layer = fp8_experts(hidden, block, gpu)
    experts = torch.zeros(3000, 8, dtype=torch.int32)
    run.add(zeros(3000, hidden), torch.zeros(3000, 8), experts, layer, zeros(3000, hidden))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
def test_fp8_experts_of_one_token_compile_behind_a_norm(monkeypatch, block, gpu):
    kept = keep(monkeypatch, *FEW_FP8)
    run, layer = fp8_experts(2048, block, gpu)
    chosen = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    run.add_behind_norm(zeros(1, 2048), zeros(2048), 1e-6, *chosen, layer)
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_fp8_experts_compile_with_a_shared_one(monkeypatch, tokens, block, gpu):
    kept = keep(monkeypatch, *FEW_FP8)
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    run, layer = fp8_experts(2048, block, gpu, **WITH_SHARED)
    chosen = torch.zeros(tokens, 9), torch.zeros(tokens, 9, dtype=torch.int32)
    run.add(zeros(tokens, 2048), *chosen, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)
