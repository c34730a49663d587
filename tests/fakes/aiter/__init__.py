"""What AMD's aiter computes, in torch on a CPU, for tests of what we make of it.

Only functions that our kernels call are here, and each does what the real one does with all of its arguments: layouts,
results in place, dtypes of the GPU that ``GPU_ARCHS`` names, and what users trip over. What the real one refuses or
has no kernel for is an error. Signatures are those of ``aiter_signatures.json``; a test holds them against it.
"""

from aiter.ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, silu_and_mul_quant, swiglu_and_mul
from aiter.ops.attention import pa_fwd_asm, pa_persistent_fwd
from aiter.ops.enum import ActivationType, QuantType
from aiter.ops.fused_qk_norm_rope_cache_quant import fused_qk_norm_rope_cache_pts_quant_shuffle
from aiter.ops.fused_qk_rmsnorm_group_quant import fused_qk_rmsnorm_group_quant, fused_qk_rmsnorm_per_token_quant
from aiter.ops.gemm_op_a4w4 import gemm_a4w4, quant_mxfp4_hip
from aiter.ops.gemm_op_a8w8 import gemm_a8w8_blockscale_bpreshuffle, gemm_a8w8_bpreshuffle
from aiter.ops.mha import flash_attn_varlen_func, mha_batch_prefill_func
from aiter.ops.mla_metadata import get_mla_metadata_info_v1, get_mla_metadata_v1
from aiter.ops.pa_metadata import get_pa_metadata_info_v1, get_pa_metadata_v1
from aiter.ops.quant import dynamic_per_token_scaled_quant, per_group_quant_hip, static_per_tensor_quant
from aiter.ops.rmsnorm import rms_norm, rmsnorm2d_fwd_with_add
from aiter.ops.topk import biased_grouped_topk_hip, grouped_topk, topk_gating, topk_softmax
from aiter.ops.triton.gluon.pa_decode_gluon import pa_decode_gluon

__all__ = [
    "ActivationType",
    "QuantType",
    "biased_grouped_topk_hip",
    "dynamic_per_token_scaled_quant",
    "flash_attn_varlen_func",
    "fused_qk_norm_rope_cache_pts_quant_shuffle",
    "fused_qk_rmsnorm_group_quant",
    "fused_qk_rmsnorm_per_token_quant",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemm_a4w4",
    "gemm_a8w8_blockscale_bpreshuffle",
    "gemm_a8w8_bpreshuffle",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "get_pa_metadata_info_v1",
    "get_pa_metadata_v1",
    "grouped_topk",
    "mha_batch_prefill_func",
    "pa_decode_gluon",
    "pa_fwd_asm",
    "pa_persistent_fwd",
    "per_group_quant_hip",
    "quant_mxfp4_hip",
    "rms_norm",
    "rmsnorm2d_fwd_with_add",
    "silu_and_mul",
    "silu_and_mul_quant",
    "static_per_tensor_quant",
    "swiglu_and_mul",
    "topk_gating",
    "topk_softmax",
]
