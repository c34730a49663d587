"""AMD's kernel library aiter: which targets can use it, and access to its functions.

Importing aiter touches the device and may compile, so it is imported when its first kernel is built. Each call is
inside a custom op of ours (:func:`atom_core.kernels.custom_op.custom_op`): aiter's own ops declare every tensor as
mutated.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.select import Target

#: The GPUs that ``supports`` of the ops with ``aiter_kernel`` modules knows: MI300 and MI325, MI350 and MI355.
ARCHITECTURES = ("gfx942", "gfx950")

#: The FP8 dtype of aiter's kernels and caches.
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

#: Every aiter function that our kernels call, by op name.
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
        "gated_delta_net": (
            "aiter.ops.triton.gated_delta_net.build_gated_delta_rule_prefill_metadata",
            "aiter.ops.triton.gated_delta_net.causal_conv1d_split_qkv_triton_fn",
            "aiter.ops.triton.gated_delta_net.chunk_gated_delta_rule_opt_vk",
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
    """Whether aiter is installed; it is not imported."""
    return importlib.util.find_spec("aiter") is not None


def why_no_aiter(target: Target) -> str | None:
    """Why aiter's kernels cannot run on ``target``, or None."""
    if target.kind != "rocm":
        return "aiter's kernels are for AMD's GPUs."
    if target.arch not in ARCHITECTURES:
        return f"aiter's kernels are used on {' and '.join(ARCHITECTURES)}, not on {target.arch}."
    if not is_installed():
        return f"aiter is not installed. {_INSTALL}"
    return None


def why_not_fused(separate: Iterable[tuple[str, str]]) -> str | None:
    """Why a fused aiter kernel does not replace the (op, implementation) in ``separate``, or None: all are aiter's."""
    for op, chosen in separate:
        if chosen != "aiter":
            return f"It fuses kernels of aiter's, and {op} is {chosen} here."
    return None


def check_installed(target: Target) -> None:
    """Raise if the target needs aiter and it is missing.

    Raises:
        ValueError: ``target`` is a GPU that aiter supports, and aiter is not installed.
    """
    if target.kind == "rocm" and target.arch in ARCHITECTURES and not is_installed():
        raise ValueError(
            f"aiter, which our models use on {target.arch}, is not installed. {_INSTALL} "
            "Or set ATOM_AITER=0 to run on Triton's kernels."
        )


def aiter_function(path: str) -> Callable[..., Any]:
    """The aiter function with the import path ``path``, e.g. "aiter.rms_norm".

    Raises:
        ValueError: the installed aiter does not have it.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("aiter"):
            raise  # a dependency of aiter is missing
        raise ValueError(_lacks(path)) from None
    return found


def _lacks(path: str) -> str:
    return (
        f"The installed aiter has no {path}, which a kernel that was chosen for this model calls. Install a "
        "version that has it (`atom-plugin doctor` lists what is missing), or set ATOM_AITER=0 to run on "
        "Triton's kernels."
    )


def aiter_enum(name: str, member: str) -> Any:
    """The enum member ``aiter.name.member``.

    Raises:
        ValueError: the installed aiter does not have it.
    """
    try:
        return getattr(getattr(importlib.import_module("aiter"), name), member)
    except AttributeError:
        raise ValueError(_lacks(f"aiter.{name}.{member}")) from None


def missing() -> dict[str, list[str]]:
    """The functions that the installed aiter lacks, by the op that calls them; this imports aiter."""
    found: dict[str, list[str]] = {}
    for op, paths in CALLED.items():
        for path in paths:
            try:
                aiter_function(path)
            except ValueError:
                found.setdefault(op, []).append(path)
    return found


def require(*paths: str) -> None:
    """Check the aiter functions ``paths`` when a model is built, not at its first request.

    Raises:
        ValueError: names the first missing function.
    """
    for path in paths:
        aiter_function(path)


class LooksUpTokens:
    """A kernel for which aiter itself looks up the fastest way by the number of tokens."""

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`: one for each power of two."""
        yield (shape.num_tokens - 1).bit_length()
