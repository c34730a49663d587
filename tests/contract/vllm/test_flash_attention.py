"""FlashAttention 3 as the adapter calls it: vLLM's binding takes the arguments, and they mean what is meant.

A wheel for CPUs has the binding's file, and refuses to import its package, for want of what is compiled.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vllm

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels import OPS
from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3
from atom_core.kernels.attention.long_prompts import DispatchByPrompts
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.mla_absorbed_values import MLA_ABSORBED_VALUES, MlaAbsorbedValuesSpec
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention
from atom_core.kernels.select import KernelSet, Target
from atom_plugin.vllm.flash_attention import VllmFlashAttention3, why_not_here
from atom_plugin.vllm.flash_mla_attention import (
    MAX_QUERY_LEN,
    MIN_REQUESTS,
    MIN_ROWS,
    DispatchByRows,
    FlashMlaAttention3,
    why_no_flash_mla_attention,
)
from atom_plugin.vllm.gpu_kernels import gpu_kernels
from tests.flash_attention_stand_in import attend, batch_of
from tests.kernel_cases import ATTENTION_CASES, AttentionCase, attention_batch, check_attention
from tests.latent_cases import LATENT_CASES, LatentCase, check_absorbed, latent_batch

HOPPER = Target("cuda", "sm90")
SPEC = AttentionCase("", (), dim=128).spec(torch.bfloat16)
LATENT_SPEC = LatentCase("", (), rank=512, rope_dim=64).spec(torch.bfloat16)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file, imported as if it were compiled for a GPU."""
    name = "vllm.vllm_flash_attn"
    file = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location(f"{name}.flash_attn_interface", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package = ModuleType(name)
    package.flash_attn_interface = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, f"{name}.flash_attn_interface", module)
    return module


def stand_in(signature: inspect.Signature, **given: Any) -> torch.Tensor:
    """The binding's meaning, by its docstring, worked out by the reference; it stands in for a GPU's kernel."""
    call = signature.bind(**given)
    call.apply_defaults()
    arguments = call.arguments
    assert arguments["fa_version"] == 3
    assert arguments["causal"]
    q, k, v, out = (arguments[name] for name in ("q", "k", "v", "out"))
    attend(
        *(q, k, v, _batch(arguments), arguments["s_aux"], out),
        scale=arguments["softmax_scale"],
        window=arguments["window_size"],
        soft_cap=arguments["softcap"],
    )
    return out


def stand_in_of_latents(signature: inspect.Signature, **given: Any) -> torch.Tensor:
    """As :func:`stand_in`, with values that are keys too: ``q_v`` meets them."""
    call = signature.bind(**given)
    call.apply_defaults()
    arguments = call.arguments
    assert arguments["fa_version"] == 3
    assert arguments["causal"]
    assert arguments["window_size"] is None
    q, k, v, q_v, out = (arguments[name] for name in ("q", "k", "v", "q_v", "out"))
    assert k.shape[2] == v.shape[2] == 1
    scheduled = {"num_heads_kv": 1, "num_heads_q": q.shape[1], "headdim": k.shape[-1], "headdim_v": v.shape[-1]}
    scheduled |= {"batch_size": len(arguments["seqused_k"]), "page_size": k.shape[1], "qkv_dtype": q.dtype}
    scheduled |= {name: arguments[name] for name in ("max_seqlen_q", "max_seqlen_k", "causal", "num_splits")}
    assert scheduled.items() <= arguments["scheduler_metadata"].items(), "it is scheduled as another call"
    assert arguments["scheduler_metadata"]["cache_seqlens"] is arguments["seqused_k"]
    assert arguments["scheduler_metadata"]["cu_seqlens_q"] is arguments["cu_seqlens_q"]
    shape = replace(LATENT_SPEC.latent, num_heads=q.shape[1], rank=v.shape[-1], rope_dim=k.shape[-1], dtype=q.dtype)
    spec = replace(LATENT_SPEC, latent=shape, scale=arguments["softmax_scale"])
    cache = LatentCacheView(torch.cat([v, k], -1).squeeze(2))
    ReferenceMlaAttention(spec)(torch.cat([q_v, q], -1), cache, _batch(arguments), out)
    return out


def _batch(arguments: dict[str, Any]) -> Batch:
    names = ("q", "cu_seqlens_q", "seqused_k", "block_table", "max_seqlen_q", "max_seqlen_k")
    return batch_of(*(arguments[name] for name in names))


@pytest.mark.parametrize("case", [case for case in ATTENTION_CASES if case.packed and case.dim % 8 == 0], ids=str)
def test_its_arguments_mean_what_is_meant(
    monkeypatch: pytest.MonkeyPatch, binding: ModuleType, case: AttentionCase
) -> None:
    signature = inspect.signature(binding.flash_attn_varlen_func)

    def attend(**given: Any) -> torch.Tensor:
        # Partial results would take memory that nobody has counted.
        assert given["num_splits"] == 1
        return stand_in(signature, **given)

    monkeypatch.setattr(binding, "flash_attn_varlen_func", attend)
    kernel = VllmFlashAttention3(case.spec(torch.bfloat16))
    check_attention(kernel, attention_batch(case, torch.bfloat16, torch.device("cpu")))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, binding: ModuleType) -> Mock:
    """In place of the binding's, and of its attention over latents, for want of a GPU: a schedule is what it is of."""
    signature = inspect.signature(binding.flash_attn_varlen_func)
    monkeypatch.setattr(binding, "flash_attn_varlen_func", partial(stand_in_of_latents, signature))
    scheduling = inspect.signature(binding.get_scheduler_metadata)
    scheduler = Mock(side_effect=lambda **given: scheduling.bind(**given).arguments)
    monkeypatch.setattr(binding, "get_scheduler_metadata", scheduler)
    return scheduler


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("case", [case for case in LATENT_CASES if not case.gap], ids=str)
def test_its_arguments_mean_what_is_meant_of_latents(case: LatentCase) -> None:
    kernel = FlashMlaAttention3(case.spec(torch.bfloat16))
    assert kernel.padded_heads == case.heads
    check_absorbed(case, kernel, latent_batch(case, torch.bfloat16, torch.device("cpu")))


def test_the_layers_of_a_step_are_scheduled_once(scheduler: Mock) -> None:
    (case,) = (case for case in LATENT_CASES if case.name == "decode")
    one, other = (latent_batch(case, torch.bfloat16, torch.device("cpu"), seed) for seed in (0, 1))
    for inputs in (one, one, other):
        check_absorbed(case, FlashMlaAttention3(case.spec(torch.bfloat16)), inputs)
    assert scheduler.call_count == 2


@pytest.mark.parametrize(("heads", "tokens", "parts"), [(16, 4, 32), (16, 256, 32), (128, 256, 4), (128, 4096, 1)])
def test_parts_of_answers_stay_small(scheduler: Mock, heads: int, tokens: int, parts: int) -> None:
    shape = replace(LATENT_SPEC.latent, num_heads=heads)
    case = LatentCase("", ((3, 1),), rank=512, rope_dim=64)
    inputs = latent_batch(case, torch.bfloat16, torch.device("cpu"))
    kernel = FlashMlaAttention3(replace(LATENT_SPEC, latent=shape))
    _, found = kernel._scheduled(torch.empty(tokens, 0), inputs.cache, inputs.batch)
    assert found == scheduler.call_args.kwargs["num_splits"] == parts


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({}, Target("cuda", "sm80"), "written for Hopper"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, HOPPER, "not torch.float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, HOPPER, "queries in the cache's dtype"),
        ({"rank": 256}, HOPPER, "latents of 512 elements with rotated keys of 64, not 256 with 64"),
        ({}, HOPPER, "vLLM's FlashAttention cannot be imported"),
    ],
)
def test_what_latents_it_cannot_run_it_says(changes: dict[str, Any], target: Target, reason: str) -> None:
    spec = replace(LATENT_SPEC, latent=replace(LATENT_SPEC.latent, **changes))
    assert reason in (why_no_flash_mla_attention(spec, target) or "")
    assert gpu_kernels()["mla_attention"].supports(spec, target) is not None


@pytest.mark.parametrize(
    ("heads", "requests", "queries", "many"),
    [
        (MIN_ROWS, MIN_REQUESTS, 1, True),
        (MIN_ROWS // 2, MIN_REQUESTS, 1, False),
        (MIN_ROWS // 2, MIN_REQUESTS, 2, True),
        (MIN_ROWS, MIN_REQUESTS - 1, 1, False),
        (MIN_ROWS, MIN_REQUESTS - 1, 2, False),
        (MIN_ROWS // 8, MIN_REQUESTS, MAX_QUERY_LEN, True),
        (MIN_ROWS, MIN_REQUESTS, MAX_QUERY_LEN + 1, False),
    ],
)
def test_many_rows_that_meet_a_requests_latents_are_read_elsewhere(
    heads: int, requests: int, queries: int, many: bool
) -> None:
    case = LatentCase("", ((9, queries), *((7, 1),) * (requests - 1)), heads=heads)
    spec = case.spec(torch.float32)
    ours, other = (
        Mock(wraps=ReferenceMlaAttention(spec), padded_heads=heads, graph_support="always") for _ in range(2)
    )
    kernel = DispatchByRows(spec, ours, other)
    assert (kernel.padded_heads, kernel.graph_support) == (heads, "always")
    check_absorbed(case, kernel, latent_batch(case, torch.float32, torch.device("cpu")))
    assert (ours.called, other.called) == (not many, many)
    shape, cpu = BatchShape((*(1,) * (requests - 1), queries), 9), torch.device("cpu")
    assert kernel.attention_compile_keys(shape, cpu) == attention_keys(other if many else ours, shape, cpu)


def test_a_wheel_without_it_says_so() -> None:
    reason = why_not_here() or ""
    assert "vLLM's FlashAttention cannot be imported" in reason
    assert gpu_kernels()["attention"].supports(SPEC, HOPPER) == reason


def test_it_can_run_where_vllm_says_so(monkeypatch: pytest.MonkeyPatch, binding: ModuleType) -> None:
    assert "FlashAttention 3 cannot run here" in (why_not_here() or "")
    monkeypatch.setattr(binding, "is_fa_version_supported", lambda version: version == 3)
    assert why_not_here() is None
    assert why_no_flash_mla_attention(LATENT_SPEC, HOPPER) is None
    kernels = KernelSet(HOPPER, OPS, contributed=gpu_kernels())
    assert kernels.chosen(ATTENTION, SPEC) == TRITON_AND_FLASH_ATTENTION_3
    assert isinstance(kernels.select(ATTENTION, SPEC), DispatchByPrompts)
    assert kernels.chosen(ATTENTION, replace(SPEC, cache_dtype=torch.float8_e4m3fn)) == "triton"
    assert isinstance(kernels.select(MLA_ATTENTION, LATENT_SPEC), DispatchByRows)
    separate = ((MLA_ATTENTION.name, TRITON_AND_FLASH_ATTENTION_3),)
    assert kernels.chosen(MLA_ABSORBED_VALUES, MlaAbsorbedValuesSpec(LATENT_SPEC, separate)) == "triton"
    in_fp8 = replace(LATENT_SPEC, latent=replace(LATENT_SPEC.latent, cache_dtype=torch.float8_e4m3fn))
    assert kernels.chosen(MLA_ATTENTION, in_fp8) == "triton"
