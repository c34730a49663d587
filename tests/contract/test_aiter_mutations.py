"""A fake that ignores an argument proves nothing: each argument of each call, changed, must turn a case red.

An argument is changed in every call of one function while the cases that call it run: a tensor's numbers are turned
about, others are made something near. Those that cannot change a result are named, each with the reason.
"""

from __future__ import annotations

import enum
import functools
import importlib
import sys

import pytest
import torch

from atom_core.kernels.select import Target
from tests.aiter_cases import CASES, ONLY
from tests.aiter_fake import calls, fake_aiter

CPU = torch.device("cpu")

#: The cases that call a function, for those that more than one does the quickest.
CASES_OF = {
    "aiter.rms_norm": "rms_norm",
    "aiter.rmsnorm2d_fwd_with_add": "rms_norm",
    "aiter.fused_qk_rmsnorm_per_token_quant": "fp8_rms_norm",
    "aiter.fused_qk_rmsnorm_group_quant": "fp8_rms_norm",
    "aiter.silu_and_mul_quant": "fp8_gated_activation",
    "aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul": "fp8_gated_activation",
    "aiter.silu_and_mul": "gated_activation",
    "aiter.gelu_and_mul": "gated_activation",
    "aiter.gelu_tanh_and_mul": "gated_activation",
    "aiter.swiglu_and_mul": "gated_activation",
    "aiter.tuned_gemm.gemm_a16w16": "linear",
    "aiter.tuned_gemm.hipb_gemm": "linear",
    "aiter.ops.shuffle.shuffle_weight": "fp8_linear",
    "aiter.static_per_tensor_quant": "fp8_linear",
    "aiter.dynamic_per_token_scaled_quant": "fp8_linear",
    "aiter.gemm_a8w8_bpreshuffle": "fp8_linear",
    "aiter.per_group_quant_hip": "fp8_block_linear",
    "aiter.gemm_a8w8_blockscale_bpreshuffle": "fp8_block_linear",
    "aiter.fused_qk_norm_rope_cache_pts_quant_shuffle": "qk_norm_rope_cache",
    "aiter.ops.triton.gated_delta_net.build_gated_delta_rule_prefill_metadata": "gated_delta_net",
    "aiter.ops.triton.gated_delta_net.causal_conv1d_split_qkv_triton_fn": "gated_delta_net",
    "aiter.ops.triton.gated_delta_net.chunk_gated_delta_rule_opt_vk": "gated_delta_net",
    "aiter.pa_fwd_asm": "attention_over_shuffled_pages",
    "aiter.get_pa_metadata_info_v1": "attention_over_large_shuffled_pages",
    "aiter.get_pa_metadata_v1": "attention_over_large_shuffled_pages",
    "aiter.pa_persistent_fwd": "attention_over_large_shuffled_pages",
    "aiter.pa_decode_gluon": "attention_over_shuffled_pages",
    "aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits": "attention_over_shuffled_pages",
    "aiter.mha_batch_prefill_func": "attention_by_token",
    "aiter.ops.triton.attention.unified_attention.unified_attention": "attention",
    "aiter.flash_attn_varlen_func": "mla_prefill",
    "aiter.get_mla_metadata_info_v1": "mla_attention",
    "aiter.get_mla_metadata_v1": "mla_attention",
    "aiter.mla.mla_decode_fwd": "mla_attention",
    "aiter.topk_softmax": "moe_routing",
    "aiter.topk_gating": "moe_routing",
    "aiter.grouped_topk": "moe_routing",
    "aiter.biased_grouped_topk_hip": "moe_routing",
    "aiter.fused_moe.fused_moe": "fp8_experts",
    "aiter.utility.fp4_utils.e8m0_shuffle": "mxfp4_linear",
    "aiter.quant_mxfp4_hip": "mxfp4_linear",
    "aiter.gemm_a4w4": "mxfp4_linear",
}
#: Cases of other formats, in which a function is another.
OF_FORMATS = [("aiter.ops.shuffle.shuffle_weight", "mxfp4_linear"), ("aiter.fused_moe.fused_moe", "mxfp4_experts")]

#: What changes no result, and why.
WITHOUT_EFFECT = {
    ("aiter.mha_batch_prefill_func", "kv_indptr"): "a page table is given, and it is checked alone",
    ("aiter.mha_batch_prefill_func", "kv_page_indices"): "a page table is given, and it is checked alone",
    ("aiter.pa_decode_gluon", "max_context_partition_num"): "how work is shared out",
    ("aiter.pa_decode_gluon", "context_partition_size"): "how work is shared out",
    ("aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits", "num_sequences"): "how work is shared out",
    ("aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits", "num_kv_heads"): "how work is shared out",
    ("aiter.get_pa_metadata_info_v1", "batch_size"): "there may be room for more",
    ("aiter.get_pa_metadata_info_v1", "num_head_k"): "there may be room for more",
    ("aiter.get_pa_metadata_v1", "seqlens_qo_indptr"): "that all bring as many tokens is said by uni_seqlen_qo",
    ("aiter.get_pa_metadata_v1", "work_metadata_ptrs"): "addresses that pa_persistent_fwd is not given",
    ("aiter.get_mla_metadata_info_v1", "batch_size"): "there may be room for more",
    ("aiter.get_mla_metadata_v1", "seqlens_qo_indptr"): "that all bring as many tokens is said by uni_seqlen_qo",
    ("aiter.get_mla_metadata_v1", "kv_last_page_lens"): "of pages of one token the last is full",
    ("aiter.get_mla_metadata_v1", "is_causal"): "how work is shared out: keys that nobody sees are left out or masked",
    ("aiter.mla.mla_decode_fwd", "num_kv_splits"): "how much room sums have",
    ("aiter.fused_qk_norm_rope_cache_pts_quant_shuffle", "eps"): "it is as small as what rounding hides",
}
#: Results that are written before they are read.
RESULTS = (
    *("out", "output", "out_", "q_out", "residual_out", "scales", "k_cache", "v_cache"),
    *("q_out_quantized", "q_out_scale", "q_res_out", "scale"),
    *("topk_weights", "topk_ids", "topk_indices", "token_expert_indices", "o"),
)


def changed(value):
    """Something else of the same kind; None where there is nothing to change."""
    if isinstance(value, enum.Enum):
        members = list(type(value))
        return members[members.index(value) - 1]
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.itemsize == 1:
            return value.view(torch.uint8).roll(1, -1).view(value.dtype)
        if value.dtype == torch.uint64:
            return (value.view(torch.int64) + 8).view(value.dtype)
        if value.numel() == 1 or not value.is_floating_point():
            return value + 1 if not value.is_floating_point() else value * 3
        return value.flip(-1) * 2
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 0.1
    if isinstance(value, str):
        others = {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "silu", "sigmoid": "softmax"}
        return others.get(value, "sigmoid")
    if isinstance(value, (tuple, list)):
        return type(value)(max(0, part // 2) if part > 0 else part for part in value)
    return None


def arch_of(case: str) -> str:
    return ONLY.get(case, "gfx942")


def run(case: str) -> None:
    CASES[case](Target("rocm", arch_of(case)), CPU)


@functools.cache
def arguments_of_calls(case: str) -> dict[str, set[str]]:
    """The arguments that our code passes to each function in a case, other than None and dtypes."""
    found: dict[str, set[str]] = {}
    with fake_aiter(arch_of(case)):
        run(case)
        for call in calls():
            given = {name for name, value in call.arguments.items() if changed(value) is not None}
            found.setdefault(call.path, set()).update(given)
    return found


def test_every_function_has_its_case():
    with fake_aiter("gfx942"):
        assert set(CASES_OF) == set(importlib.import_module("aiter._recorded").RECORD)
    assert {path for path, _ in WITHOUT_EFFECT} <= set(CASES_OF)


@pytest.mark.parametrize(("path", "case"), [*CASES_OF.items(), *OF_FORMATS])
def test_no_argument_is_ignored(path, case):
    names = arguments_of_calls(case)[path] - set(RESULTS) - {name for of, name in WITHOUT_EFFECT if of == path}
    ignored = []
    for name in sorted(names):
        with fake_aiter(arch_of(case)):
            recorded = importlib.import_module("aiter._recorded")
            module, _, function = path.rpartition(".")
            inner = getattr(importlib.import_module(module), function)
            signature = recorded.real_signature(path)

            def call(*args, inner=inner, signature=signature, name=name, **kwargs):
                arguments = signature.bind(*args, **kwargs).arguments
                if arguments.get(name) is not None:
                    # What bounds lengths may be more than they are, and not less.
                    value = arguments[name]
                    arguments[name] = value // 2 if name.startswith("max_seqlen") else changed(value)
                return inner(**arguments)

            setattr(sys.modules[module], function, call)
            try:
                run(case)
            except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue
            ignored.append(name)
    assert not ignored, f"{path} gives the same answers whatever {', '.join(ignored)} is"
