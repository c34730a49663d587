"""Norm and router in Triton: each program has one token and some experts.

A program multiplies its token by its experts' rows, like any single row (:mod:`atom_core.kernels.linear.one_row`), and
writes its share of the normed token, or quantises whole groups of it. The router's weight is read once per token, from
the L2 cache. For few tokens this is faster than a separate norm and one product, because a router's weight is too small
for enough programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, empty_quantized
from atom_core.kernels.fp8_linear.quantize import scale_factor, store_groups, unit_of
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import normed_total, row_sums, weight_rows
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2


@entry_kernel
@triton.jit(do_not_specialize=["stride_scales"])
def _norm_and_score(
    x,
    norm,
    weight,
    bias,
    normed,
    quantized,
    scales,
    logits,
    eps,
    E,
    K,
    stride_x,
    stride_scales,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Logits of ``ROWS`` experts for one token, and ``SHARE`` of its normed columns, as they are or quantised."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    row = weight_rows(E, ROWS, False)
    column = tl.arange(0, BLOCK_K)
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    at = weight + row[:, None] * K + column[None, :]
    tile = tl.load(at, mask=known[None, :], other=0.0)
    factors = tl.load(norm + column, mask=known, other=0.0)
    mine = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    my_factors = tl.load(norm + mine, mask=mine < K, other=0.0).to(tl.float32)
    x += token * stride_x
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    numbers = tl.load(x + mine, mask=mine < K, other=0.0).to(tl.float32)
    sums, squares, tile, wide, factors = row_sums(at, x, norm, tile, factors, known, K, ROWS, BLOCK_K, EVEN)
    total, factor = normed_total(sums, squares, tile, wide, factors, eps, K, ROWS, BLOCK_K)
    my_normed = (numbers * (factor * my_factors)).to(x.dtype.element_ty)
    if quantized is not None:
        GROUPS: tl.constexpr = SHARE // GROUP
        first = tl.program_id(0) * GROUPS
        wide = my_normed.to(tl.float32)
        store_groups(
            wide, quantized, scales, token, first, stride_scales, K, GROUPS, GROUP, UNIT, FACTOR, LIMIT, SMALLEST
        )
    else:
        tl.store(normed + token * K + mine, my_normed, mask=mine < K, eviction_policy=EVICT_LAST)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(logits + token * E + out, total.to(logits.dtype.element_ty), mask=out < E, eviction_policy=EVICT_LAST)


class TritonNormedRouter:
    """See :mod:`atom_core.kernels.normed_router`.

    ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    #: For one token, the products after the norm apply it themselves, and nothing is stored.
    tokens = range(2, 17)

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        yield self._rows(shape.num_tokens) if shape.num_tokens in self.tokens else None

    @staticmethod
    def _rows(num_tokens: int) -> int:
        """Rows of the router's weight that a program takes at once; chosen on an H200."""
        return 2 if num_tokens <= 8 else 4

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, router: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.normed_router.NormedRouterKernel`."""
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return normed, self._launch(x, norm, eps, router, normed=normed)

    def quantized(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, router: Operands, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """See :class:`atom_core.kernels.normed_router.NormedRouterKernel`."""
        assert form.group is not None, "a row's scale needs the whole row"
        quantized = empty_quantized(len(x), x.shape[1], form, x.device)
        logits = self._launch(
            x,
            norm,
            eps,
            router,
            quantized=quantized,
            group=form.group,
            unit=unit_of(form.dtype),
            factor=scale_factor(form.dtype, as_values=True),
        )
        return quantized, logits

    def _launch(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        router: Operands,
        *,
        normed: torch.Tensor | None = None,
        quantized: QuantizedInput | tuple[None, None] = (None, None),
        group: int = 1,
        unit: float = 1.0,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """The logits; the norm's result goes to ``normed`` or, in whole groups, to ``quantized``."""
        (tokens, hidden), num_experts = x.shape, len(router.weight)
        assert tokens > 0
        assert x.stride(1) == 1
        assert router.weight.is_contiguous()
        wide = router.float32_result or router.weight.dtype == torch.float32
        logits = torch.empty(tokens, num_experts, dtype=torch.float32 if wide else x.dtype, device=x.device)
        rows, columns = self._rows(tokens), min(2048, max(16, next_power_of_2(hidden)))
        programs = cdiv(num_experts, rows)
        _norm_and_score[(programs, tokens)](
            x,
            norm,
            router.weight,
            router.bias,
            normed,
            *quantized,
            logits,
            eps,
            num_experts,
            hidden,
            x.stride(0),
            tokens,
            ROWS=rows,
            BLOCK_K=columns,
            EVEN=hidden % columns == 0,
            SHARE=max(group, next_power_of_2(cdiv(hidden, programs))),
            GROUP=group,
            UNIT=unit,
            FACTOR=factor,
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            OVERLAP=self.overlap,
            num_warps=4,
            **launch_options(self.overlap),
        )
        return logits
