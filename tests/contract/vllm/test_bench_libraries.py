"""The libraries beside which `bench kernels` times ours are called as vLLM's own attention backends call them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vllm
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.utils import deep_gemm, flashinfer
from vllm.v1.attention.ops import flashmla

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear, quantize_groups
from atom_core.kernels.select import Target
from atom_plugin.bench.agreement import distance
from atom_plugin.bench.cases import Bench
from atom_plugin.bench.grid import Cell
from atom_plugin.bench.grid_contenders import Inputs, libraries, make_inputs, ours
from atom_plugin.bench.vllm_kernels import DEEP_GEMM_ROWS, Unavailable, fp8_block_linear
from tests.contract.vllm.test_flash_attention import binding, stand_in, stand_in_of_latents

PACKAGE = Path(vllm.__file__).parent
BACKENDS = PACKAGE / "v1" / "attention" / "backends"
BLOCK_PRODUCTS = PACKAGE / "model_executor" / "kernels" / "linear" / "scaled_mm" / "flashinfer.py"
CPU = torch.device("cpu")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
#: Arguments of vLLM's backends that say nothing of a cell: no window, no ranks that share a context, no softmax sums.
UNUSED = {"cp_rank", "cp_tot_seqused_k", "cp_world_size", "return_softmax_lse", "window_size"}

__all__ = ["binding"]


def calls(file: str | Path, function: str) -> list[set[str]]:
    """The keywords of each call of a function in a file, by its path or that from the backends' folder."""
    tree = ast.parse((BACKENDS / file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [node for node in found if isinstance(node.func, ast.Name) and node.func.id == function]
    return [{str(it.arg) for it in node.keywords} for node in named]


def cell(op: str, cache_dtype: torch.dtype) -> Cell:
    """A small one."""
    if op == "mla_attention":
        return Cell(op, 3, 70, 4, 1, 512, 64, BF16, cache_dtype, rope_dim=64)
    return Cell(op, 3, 70, 10, 2, 64, 16, BF16, cache_dtype)


def inputs_of(op: str, cache_dtype: torch.dtype) -> Inputs:
    """Of a CPU, in a graph for more tokens than there are."""
    return make_inputs(cell(op, cache_dtype), Bench(CPU, BF16, kernel_set(Target.of(CPU))), 1, 256)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch, binding: ModuleType) -> ModuleType:
    """The binding as on Hopper; schedules are what they are made of."""
    monkeypatch.setattr(binding, "is_fa_version_supported", lambda version: version == 3)
    signature = inspect.signature(binding.get_scheduler_metadata)
    scheduler = Mock(side_effect=lambda **given: signature.bind(**given).arguments)
    monkeypatch.setattr(binding, "get_scheduler_metadata", scheduler)
    return binding


def test_keys_and_values_go_to_flash_attention_3_as_in_vllms_backend(
    monkeypatch: pytest.MonkeyPatch, interface: ModuleType
) -> None:
    seen: list[dict[str, Any]] = []
    signature = inspect.signature(interface.flash_attn_varlen_func)

    def attend(**given: Any) -> torch.Tensor:
        seen.append(given)
        return stand_in(signature, **given, window_size=[-1, -1])

    monkeypatch.setattr(interface, "flash_attn_varlen_func", attend)
    inputs = inputs_of("attention", BF16)
    found = libraries(inputs.cell)["FlashAttention 3"](inputs)(0)
    assert distance(found.float(), ours(inputs)(0).float()) < 0.01
    (given,) = seen
    asked = interface.get_scheduler_metadata.call_args.kwargs
    # vLLM captures with the longest sequence there may be, and schedules each replay with the longest that there is.
    assert (given["max_seqlen_k"], asked["max_seqlen_k"]) == (256, 70)
    assert given["scheduler_metadata"]["cache_seqlens"] is given["seqused_k"]
    assert asked["num_splits"] == given["num_splits"] == 32
    (theirs,) = calls("flash_attn.py", "get_scheduler_metadata")
    assert set(asked) == theirs - UNUSED


def test_an_fp8_cache_goes_to_flash_attention_3_with_queries_and_scales(
    monkeypatch: pytest.MonkeyPatch, interface: ModuleType
) -> None:
    signature = inspect.signature(interface.flash_attn_varlen_func)
    seen: list[dict[str, Any]] = []

    def noted(**given: Any) -> torch.Tensor:
        seen.append(signature.bind(**given).arguments)
        return given["out"]

    monkeypatch.setattr(interface, "flash_attn_varlen_func", noted)
    inputs = inputs_of("decode_attention", E4M3)
    libraries(inputs.cell)["FlashAttention 3"](inputs)(0)
    (given,) = seen
    assert {given[name].dtype for name in "qkv"} == {E4M3}
    assert given["out"].dtype == BF16
    assert {given[f"{name}_descale"].shape for name in "qkv"} == {(3, 2)}
    assert interface.get_scheduler_metadata.call_args.kwargs["qkv_dtype"] == E4M3


def test_latents_go_to_flash_attention_3_as_in_vllms_backend(
    monkeypatch: pytest.MonkeyPatch, interface: ModuleType
) -> None:
    signature = inspect.signature(interface.flash_attn_varlen_func)
    seen: list[dict[str, Any]] = []

    def attend(**given: Any) -> torch.Tensor:
        seen.append(given)
        # The stand-in wants one length for both; here a graph has another one than its replay.
        schedule = {**given["scheduler_metadata"], "max_seqlen_k": given["max_seqlen_k"]}
        out = torch.empty(*given["q_v"].shape, dtype=BF16)
        return stand_in_of_latents(signature, **{**given, "scheduler_metadata": schedule, "out": out})

    monkeypatch.setattr(interface, "flash_attn_varlen_func", attend)
    inputs = inputs_of("mla_attention", BF16)
    found = libraries(inputs.cell)["FlashAttention 3"](inputs)(0)
    assert distance(found.float(), ours(inputs)(0).float()) < 0.01
    (given,) = seen
    (theirs, *_) = calls("mla/flashattn_mla.py", "flash_attn_varlen_func")
    assert set(given) == theirs - UNUSED
    (scheduled,) = calls("mla/flashattn_mla.py", "get_scheduler_metadata")
    asked = interface.get_scheduler_metadata.call_args.kwargs
    assert set(asked) == scheduled
    assert (given["max_seqlen_k"], asked["max_seqlen_k"]) == (256, 70)


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=str)
def test_latents_go_to_flash_mla_as_in_vllms_backend(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype) -> None:
    fp8 = cache_dtype == E4M3
    name = "flash_mla_with_kvcache_fp8" if fp8 else "flash_mla_with_kvcache"
    schedule, splits = Mock(), Mock()
    called = Mock(side_effect=lambda **given: (torch.zeros(*given["q"].shape[:-1], given["head_dim_v"]), None))
    of_fp8 = inspect.signature(flashmla.get_mla_metadata_dense_fp8)
    signature = inspect.signature(flashmla.flash_mla_with_kvcache_fp8)
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))
    monkeypatch.setattr(flashmla, "get_mla_metadata", lambda *given, **named: (schedule, None))
    monkeypatch.setattr(
        flashmla, "get_mla_metadata_dense_fp8", lambda *given: of_fp8.bind(*given) and (schedule, splits)
    )
    monkeypatch.setattr(flashmla, name, called)
    inputs = inputs_of("mla_attention", cache_dtype)
    assert libraries(inputs.cell)["FlashMLA"](inputs)(0).shape == (3, 4, 512)
    given = called.call_args.kwargs
    (theirs,) = calls("mla/flashmla.py", name)
    assert set(given) == theirs
    assert given["tile_scheduler_metadata"] is schedule
    assert given["q"].shape == (3, 1, 4, 576)
    assert given["q"].dtype == given["k_cache"].dtype == cache_dtype
    assert given["k_cache"].shape == (6, 64, 1, 576)
    if fp8:
        signature.bind(**given)
        assert given["num_splits"] is splits


class BlockProduct:
    """A weight in blocks with what multiplies by it, and the keywords that vLLM's functions were called with."""

    def __init__(self) -> None:
        self.weight = torch.randn(64, 256).to(E4M3)
        self.scale = torch.rand(1, 2) + 0.5
        self.seen: dict[str, dict[str, Any]] = {}

    def flashinfer(self, **given: Any) -> torch.Tensor:
        """In place of `flashinfer_fp8_blockscale_gemm`."""
        self.seen["flashinfer_fp8_blockscale_gemm"] = given
        assert given["out_dtype"] == BF16
        return ReferenceFp8BlockLinear()(given["input"], given["weight"], given["weight_scale"], None)

    def quantize(self, x: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of `per_token_group_quant_fp8`."""
        self.seen["per_token_group_quant_fp8"] = given
        return quantize_groups(x)

    def deep_gemm(self, x: Any, weight: Any, out: torch.Tensor, **given: Any) -> None:
        """In place of `fp8_gemm_nt`."""
        self.seen["fp8_gemm_nt"] = given
        (values, scales), (stored, stored_scales) = x, weight
        wide = (values.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
        out.copy_(wide @ (stored.float() * stored_scales.repeat_interleave(128, 1)).T)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> BlockProduct:
    """vLLM's functions as on Hopper."""
    it = BlockProduct()
    monkeypatch.setattr(flashinfer, "is_flashinfer_fp8_blockscale_gemm_supported", lambda: True)
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_supported", lambda: True)
    monkeypatch.setattr(flashinfer, "flashinfer_fp8_blockscale_gemm", it.flashinfer)
    monkeypatch.setattr(fp8_utils, "per_token_group_quant_fp8", it.quantize)
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", it.deep_gemm)
    return it


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (DEEP_GEMM_ROWS - 1, ["flashinfer_fp8_blockscale_gemm"]),
        (DEEP_GEMM_ROWS, ["per_token_group_quant_fp8", "fp8_gemm_nt"]),
    ],
)
def test_fp8_in_blocks_is_multiplied_as_vllm_does(product: BlockProduct, rows: int, names: list[str]) -> None:
    x = torch.randn(rows, 256, dtype=BF16)
    found = fp8_block_linear(rows, 64, BF16)(x, product.weight, product.scale)
    assert distance(found.float(), ReferenceFp8BlockLinear()(x, product.weight, product.scale, None).float()) < 0.01
    assert list(product.seen) == names
    assert f"input.shape[0] < {DEEP_GEMM_ROWS}" in BLOCK_PRODUCTS.read_text()
    for name in names:
        assert set(product.seen[name]) in calls(BLOCK_PRODUCTS, name)


@pytest.mark.parametrize(("out_features", "dtype"), [(72, BF16), (64, torch.float16)])
def test_fp8_in_blocks_that_deep_gemm_does_not_have_is_not_timed(out_features: int, dtype: torch.dtype) -> None:
    with pytest.raises(Unavailable, match=f"not {out_features} of them in {dtype}"):
        fp8_block_linear(64, out_features, dtype)


@pytest.mark.parametrize(("rows", "library"), [(1, "FP8 product of FlashInfer"), (64, "DeepGEMM")])
def test_a_cpu_has_none_of_vllms_fp8_products(rows: int, library: str) -> None:
    with pytest.raises(Unavailable, match=f"vLLM finds no {library} for this GPU"):
        fp8_block_linear(rows, 64, BF16)
