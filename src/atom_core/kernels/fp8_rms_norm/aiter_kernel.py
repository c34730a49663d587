"""A norm that quantises by aiter: of its kernels for two inputs those that take one, which have no holes up to 8192.

What is named for a norm alone (``add_rmsnorm_quant``) refuses groups of 128 in rows of 4097 to 6144 numbers.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, room


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


def _room(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales = room(x.shape[0], x.shape[1], InputForm(dtype, group), x.device)
    # An op of torch's returns tensors alone.
    return values, scales, x.new_empty(0 if residual is None else x.shape)


@custom_op("aiter_fp8_rms_norm", _room)
def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    group: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales, summed = _room(x, weight, eps, residual, dtype, group)
    if not len(x):
        return values, scales, summed
    added = None if residual is None else summed
    if group is None:
        aiter_function("aiter.fused_qk_rmsnorm_per_token_quant")(
            values, scales, x, weight, eps, q_res_out=added, q_residual=residual
        )
    else:
        # It asks for another shape than the bytes then have.
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
