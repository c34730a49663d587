"""AMD's kernel library aiter: who can use it, and how its functions are reached.

Importing aiter asks the device and may compile, so nothing is imported until a kernel of it is built. Each call stands
in an op of ours (:func:`atom_core.kernels.custom_op.custom_op`): aiter's own ops declare every tensor as written to.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from atom_core.kernels.select import Target

#: The GPUs whose limits the ``supports`` of our ``aiter_kernel`` modules state: MI300 and MI325, MI350 and MI355.
ARCHITECTURES = ("gfx942", "gfx950")

#: What aiter's own kernels multiply and cache as FP8.
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

#: Every function of aiter's that a kernel of ours calls, by the op's name.
CALLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rms_norm": ("aiter.rms_norm", "aiter.rmsnorm2d_fwd_with_add"),
        "fp8_rms_norm": ("aiter.fused_qk_rmsnorm_per_token_quant", "aiter.fused_qk_rmsnorm_group_quant"),
        "linear": ("aiter.tuned_gemm.gemm_a16w16", "aiter.tuned_gemm.hipb_gemm"),
        "fp8_linear": (
            "aiter.ops.shuffle.shuffle_weight",
            "aiter.static_per_tensor_quant",
            "aiter.dynamic_per_token_scaled_quant",
            "aiter.gemm_a8w8_bpreshuffle",
        ),
        "fp8_block_linear": ("aiter.per_group_quant_hip", "aiter.gemm_a8w8_blockscale_bpreshuffle"),
        "qk_norm_rope_cache": ("aiter.fused_qk_norm_rope_cache_pts_quant_shuffle",),
        "attention": (
            "aiter.mha_batch_prefill_func",
            "aiter.ops.triton.attention.unified_attention.unified_attention",
            "aiter.pa_fwd_asm",
            "aiter.pa_decode_gluon",
            "aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits",
            "aiter.get_pa_metadata_info_v1",
            "aiter.get_pa_metadata_v1",
            "aiter.pa_persistent_fwd",
        ),
        "gated_activation": (
            "aiter.silu_and_mul",
            "aiter.gelu_and_mul",
            "aiter.gelu_tanh_and_mul",
            "aiter.swiglu_and_mul",
        ),
        "fp8_gated_activation": (
            "aiter.silu_and_mul_quant",
            "aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul",
        ),
        "moe_routing": (
            "aiter.topk_softmax",
            "aiter.topk_gating",
            "aiter.grouped_topk",
            "aiter.biased_grouped_topk_hip",
        ),
        "mla_attention": (
            "aiter.get_mla_metadata_info_v1",
            "aiter.get_mla_metadata_v1",
            "aiter.mla.mla_decode_fwd",
        ),
        "mla_prefill": ("aiter.flash_attn_varlen_func",),
        "experts": ("aiter.fused_moe.fused_moe",),
        "fp8_experts": ("aiter.fused_moe.fused_moe",),
        "mxfp4_linear": (
            "aiter.utility.fp4_utils.e8m0_shuffle",
            "aiter.quant_mxfp4_hip",
            "aiter.gemm_a4w4",
        ),
        "mxfp4_experts": ("aiter.fused_moe.fused_moe",),
    }
)

_INSTALL = "Install it from https://github.com/ROCm/aiter; AMD's images of vLLM and SGLang have it."


def is_installed() -> bool:
    """Whether there is an aiter to import; it is not imported."""
    return importlib.util.find_spec("aiter") is not None


def why_no_aiter(target: Target) -> str | None:
    """None where aiter's kernels can run on ``target``, else the reason."""
    if target.kind != "rocm":
        return "aiter's kernels are for AMD's GPUs."
    if target.arch not in ARCHITECTURES:
        return f"aiter's kernels are used on {' and '.join(ARCHITECTURES)}, not on {target.arch}."
    if not is_installed():
        return f"aiter is not installed. {_INSTALL}"
    return None


def why_not_fused(separate: Iterable[tuple[str, str]]) -> str | None:
    """None where each of the ops, which come with the implementations chosen for them, is aiter's, else the reason."""
    for op, chosen in separate:
        if chosen != "aiter":
            return f"It fuses kernels of aiter's, and {op} is {chosen} here."
    return None


def check_installed(target: Target) -> None:
    """Refuse to go on without aiter where it is expected.

    Raises:
        ValueError: ``target`` is a GPU that aiter's kernels are for, and it is not installed.
    """
    if target.kind == "rocm" and target.arch in ARCHITECTURES and not is_installed():
        raise ValueError(
            f"aiter, which our models use on {target.arch}, is not installed. {_INSTALL} "
            "Or set ATOM_AITER=0 to run on Triton's kernels."
        )


def aiter_function(path: str) -> Callable[..., Any]:
    """The function that users import as ``path``, "aiter.rms_norm".

    Raises:
        ValueError: the installed aiter has none of that name.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("aiter"):
            raise  # something that aiter itself needs
        raise ValueError(_lacks(path)) from None
    return found


def _lacks(path: str) -> str:
    return (
        f"The installed aiter has no {path}, which a kernel that was chosen for this model calls. Install a "
        "version that has it (`atom-plugin doctor` lists what is missing), or set ATOM_AITER=0 to run on "
        "Triton's kernels."
    )


def aiter_enum(name: str, member: str) -> Any:
    """``aiter.name.member``, of an enum that some functions take.

    Raises:
        ValueError: the installed aiter has none of that name.
    """
    try:
        return getattr(getattr(importlib.import_module("aiter"), name), member)
    except AttributeError:
        raise ValueError(_lacks(f"aiter.{name}.{member}")) from None


def missing() -> dict[str, list[str]]:
    """The functions that the installed aiter lacks, by the op that calls them; asking imports aiter."""
    found: dict[str, list[str]] = {}
    for op, paths in CALLED.items():
        for path in paths:
            try:
                aiter_function(path)
            except ValueError:
                found.setdefault(op, []).append(path)
    return found


def require(*paths: str) -> None:
    """Fail while a model is built, and not at its first request, where functions are missing.

    Raises:
        ValueError: the first that is.
    """
    for path in paths:
        aiter_function(path)
