"""The projection from latents to keys and values (MLA's ``kv_b_proj``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from atom_core.config import MlaConfig
from atom_core.kernels.fp8_linear.reference import E4M3, LIMIT
from atom_core.kernels.mxfp4_linear.reference import dequantize, requantize
from atom_core.layers.block_fp8 import check_blocks, num_blocks, place_scales
from atom_core.layers.linear_methods import Fp8Placement, ScalePlacement, Shard, empty_fp8, empty_scales
from atom_core.layers.mxfp4_linear import check_groups, empty_packed, place_packed
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config
from atom_core.quant.mxfp4 import Mxfp4LinearConfig
from atom_core.runtime import Runtime


class LatentExpansion(ParameterLayer):
    """The projection from a latent to keys and values, ``[H * (N + V), L]``, which attention reads in two halves.

    The weight stays in the model's dtype because attention folds it into queries: an FP8 or MXFP4 weight is dequantised
    after loading, FP8 quantisation on loading skips it, and its input is not quantised.
    """

    #: The quantised weight of the checkpoint, until it is dequantised.
    stored: nn.Parameter
    weight_scale: nn.Parameter

    def __init__(self, latent: MlaConfig, num_heads: int, mine: range, runtime: Runtime, name: str) -> None:
        """``num_heads`` is the checkpoint's; heads of ``mine`` (this rank's) beyond it are zeros."""
        super().__init__()
        each = latent.nope_dim + latent.value_dim
        rows = range(mine.start * each, mine.stop * each)
        self.part = Shard("", num_heads * each, latent.rank, rows, range(latent.rank))
        scheme = runtime.quant.linear([name])
        self.scheme = None if isinstance(scheme, Fp8Config) and not scheme.serialized else scheme
        self.weight = empty_parameter(runtime, len(rows), latent.rank)
        if isinstance(self.scheme, Mxfp4LinearConfig):
            check_groups(self.part, name, runtime.tensor_parallel.world_size)
            self.stored, self.weight_scale = empty_packed(runtime, len(rows), latent.rank)
        elif self.scheme is not None:
            self._create_fp8(self.scheme, runtime, name)
        if self.scheme is not None:
            self.stored_shape = self.stored.shape

    def _create_fp8(self, scheme: Fp8Config, runtime: Runtime, name: str) -> None:
        rows, columns = self.weight.shape
        if scheme.block:
            check_blocks(self.part, name, runtime.tensor_parallel.world_size)
        shape = (num_blocks(rows), num_blocks(columns)) if scheme.block else (rows,)
        self.stored, self.weight_scale = empty_fp8(runtime, rows, columns), empty_scales(runtime, *shape)
        if scheme.input_scale == "static":
            self.input_scale = empty_scales(runtime, 1)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weight, and the scales of a quantised checkpoint."""
        scheme = self.scheme
        if scheme is None:
            yield "", "weight", self.part.of_matrix(self.weight)
            return
        if isinstance(scheme, Mxfp4LinearConfig):
            stored, scales = place_packed(self.part, self.stored, self.weight_scale)
        else:
            stored = self.part.of_matrix(self.stored, Fp8Placement)
            scales = (
                place_scales(self.part, self.weight_scale)
                if scheme.block
                else self.part.of_rows(self.weight_scale, ScalePlacement)
            )
        yield "", "weight", replace(stored, parameter_name="stored")
        name = "weight_scale" if isinstance(scheme, Mxfp4LinearConfig) else scheme.scale
        yield "", name, replace(scales, parameter_name="weight_scale")
        if isinstance(scheme, Fp8Config) and scheme.input_scale == "static":
            yield "", "input_scale", ScalePlacement(self.input_scale, (1,), count=1)

    def finalize_weights(self) -> None:
        """Dequantise the weight, and free the quantised one."""
        if self.scheme is None or not self.stored.numel():
            return
        self.weight.data.copy_(self._dequantised(self.scheme))
        self.stored.data = self.stored.new_empty(0)

    def restore_weights(self, whole: bool) -> None:
        """Quantise the weight again; rounding to the nearest element gives the checkpoint's."""
        if self.scheme is None:
            return
        self.stored.data = self.stored.new_empty(self.stored_shape)
        if whole:
            return
        if isinstance(self.scheme, Mxfp4LinearConfig):
            self.stored.data.copy_(requantize(self.weight, self.weight_scale))
        else:
            scale = self._scale_of_each(self.scheme)
            values = torch.where(scale > 0, self.weight.float() / scale, 0.0)
            self.stored.data.copy_(values.clamp(-LIMIT, LIMIT).to(E4M3))

    def _dequantised(self, scheme: Fp8Config | Mxfp4LinearConfig) -> torch.Tensor:
        if isinstance(scheme, Mxfp4LinearConfig):
            return dequantize(self.stored, self.weight_scale, self.weight.dtype)
        return self.stored.float() * self._scale_of_each(scheme)

    def _scale_of_each(self, scheme: Fp8Config) -> torch.Tensor:
        """FP8 scales that broadcast over the whole weight."""
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() == 1 else self.weight_scale
        if scheme.block:
            rows, columns = self.weight.shape
            scale = scale.repeat_interleave(BLOCK_SIZE, 0)[:rows].repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
        return scale
