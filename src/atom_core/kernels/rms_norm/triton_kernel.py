"""RMS norm in Triton, with the residual's addition: one program a row, which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import launch_options, next_power_of_2


@entry_kernel
@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    used = columns < N
    scale = tl.load(weight + columns, mask=used, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * stride_x + columns, mask=used, other=0.0)
    if ADD:
        stream = residual + row * stride_residual + columns
        # The norm reads the rounded sum, which is also what the next layer adds to.
        values = (values.to(tl.float32) + tl.load(stream, mask=used, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(stream, values, mask=used, eviction_policy=EVICT_LAST)
    wide = values.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / N + eps)
    tl.store(
        out + row * stride_out + columns,
        (wide * factor * scale).to(out.dtype.element_ty),
        mask=used,
        eviction_policy=EVICT_LAST,
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, *, overlap: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :mod:`atom_core.kernels.rms_norm`; with a residual, ``x`` and ``residual`` are written to in place.

    ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    if residual is None:
        return _norm(x, weight, eps, overlap), None
    _add_and_norm(x, weight, eps, residual, overlap)
    return x, residual


@custom_op("rms_norm", lambda x, weight, eps, overlap: torch.empty_like(x))
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, overlap: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    _launch(x, weight, eps, None, out, overlap)
    return out


@custom_op("add_and_rms_norm", lambda x, weight, eps, residual, overlap: None, mutates=("x", "residual"))
def _add_and_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, overlap: bool) -> None:
    _launch(x, weight, eps, residual, x, overlap)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor, overlap: bool
) -> None:
    num_rows, size = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    block = next_power_of_2(size)
    if num_rows:
        _rms_norm[(num_rows,)](
            x,
            residual,
            weight,
            out,
            eps,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            N=size,
            BLOCK=block,
            ADD=residual is not None,
            OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(overlap),
        )
