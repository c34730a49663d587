"""An RMS norm that quantises by aiter: its kernels for two inputs (QK), called with one, support all sizes up to 8192.

aiter's kernel for a single norm (``add_rmsnorm_quant``) refuses groups of 128 in rows of 4097 to 6144 elements.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, empty_quantized


class AiterFp8RmsNorm:
    """See :class:`atom_core.kernels.fp8_rms_norm.Fp8RmsNormKernel`."""

    def __init__(self, form: InputForm) -> None:
        rows, groups = "aiter.fused_qk_rmsnorm_per_token_quant", "aiter.fused_qk_rmsnorm_group_quant"
        require(rows if form.group is None else groups)
        self.form = form

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[QuantizedInput, torch.Tensor | None]:
        """Rows of ``x`` and ``residual`` may have gaps between them."""
        values, scales, summed = _norm(x, weight, eps, residual, self.form.dtype, self.form.group)
        return QuantizedInput(values, scales), None if residual is None else summed


def _empty_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales = empty_quantized(x.shape[0], x.shape[1], InputForm(dtype, group), x.device)
    # A custom op returns tensors only.
    return values, scales, x.new_empty(0 if residual is None else x.shape)


@custom_op("aiter_fp8_rms_norm", _empty_quantized)
def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales, summed = _empty_quantized(x, weight, eps, residual, dtype, group)
    if not len(x):
        return values, scales, summed
    added = None if residual is None else summed
    if group is None:
        aiter_function("aiter.fused_qk_rmsnorm_per_token_quant")(
            values, scales, x, weight, eps, q_res_out=added, q_residual=residual
        )
    else:
        # It asks for the shape [T, groups], although the bytes are [groups, T].
        aiter_function("aiter.fused_qk_rmsnorm_group_quant")(
            values,
            scales.view(len(x), -1),
            x,
            weight,
            eps,
            q_res_out=added,
            q_residual=residual,
            group_size=group,
            transpose_scale=True,
        )
    return values, scales, summed
