"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

:class:`GatedDeltaNet` has the projections and the weights between them; :class:`GatedDeltaNetMixer` runs convolution,
rule and gated norm over the request's states. Heads are sharded over tensor-parallel ranks by key head.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from atom_core.batch import Batch, BatchShape
from atom_core.cache import StateSpec, StateView
from atom_core.config import GatedDeltaNetConfig, ModelConfig
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetKernel, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.select import KernelSet
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.norm import HeadNorm
from atom_core.layers.parameters import ParameterLayer, Placement, checkpoint_module, one_a_tensor, share
from atom_core.layers.rotary import RotaryTable
from atom_core.mixers.base import TokenMixer
from atom_core.runtime import Runtime
from atom_core.types import GraphSupport


class GatedDeltaNetMixer(TokenMixer):
    """Its inputs are ``qkvz [T, C + Hv * V]`` and ``ba [T, 2 * Hv]``; see :mod:`atom_core.kernels.gated_delta_net`.

    Args:
        name, layer_index: see :class:`TokenMixer`.
        layer: shapes on this rank.
        weights: of the convolution, the gates and the norm.
        runtime: the model's.
    """

    #: Selected by :meth:`select_kernels`.
    kernel: GatedDeltaNetKernel

    def __init__(
        self, name: str, layer_index: int, layer: GatedDeltaNetSpec, weights: GatedDeltaNetWeights, runtime: Runtime
    ) -> None:
        super().__init__(
            name, layer_index, (layer.num_value_heads, layer.value_dim), layer.key_dim, layer.key_dim**-0.5
        )
        self.layer, self.weights = layer, weights
        self.conv_dtype = runtime.conv_state_dtype or runtime.dtype

    @cached_property
    def cache_spec(self) -> StateSpec:
        """The convolution's last inputs ``[W - 1, C]``, and the states ``[Hv, V, K]``."""
        layer = self.layer
        return StateSpec(
            (
                (layer.conv_width - 1, layer.channels),
                (layer.num_value_heads, layer.value_dim, layer.key_dim),
            ),
            (self.conv_dtype, layer.state_dtype),
        )

    @property
    def graph_support(self) -> GraphSupport:
        """The kernel's."""
        return self.kernel.graph_support

    def select_kernels(self, kernels: KernelSet) -> None:
        """Select the kernel of any batch."""
        self.kernel = kernels.select(GATED_DELTA_NET, self.layer)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :meth:`TokenMixer.attention_compile_keys`."""
        return attention_keys(self.kernel, shape, device)

    def profile(self, out: torch.Tensor, max_requests: int) -> None:
        """See :meth:`TokenMixer.profile`."""
        _ = out.new_empty(self.kernel.scratch_bytes(len(out), max_requests), dtype=torch.uint8)

    def scaled(self, cache: StateView) -> StateView:
        """States have no scales."""
        return cache

    def run(
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, batch: Batch, cache: StateView, out: torch.Tensor
    ) -> None:
        """See :meth:`TokenMixer.run`."""
        qkvz, ba = inputs
        if (num_tokens := batch.num_tokens) < qkvz.shape[0]:
            qkvz, ba, out = qkvz[:num_tokens], ba[:num_tokens], out[:num_tokens]
        self.kernel(qkvz, ba, self.weights, cache, batch, out)


class CausalConv(ParameterLayer):
    """The weight of the convolution, ``[C, 1, W]``; see :class:`_Heads` for its order."""

    def __init__(self, config: GatedDeltaNetConfig, heads: _Heads, runtime: Runtime) -> None:
        super().__init__()
        self.heads, self.shape = heads, (config.channels, 1, config.conv_width)
        weight = torch.empty(heads.channels, *self.shape[1:], dtype=runtime.dtype, device=runtime.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """This rank's channels."""

        def each() -> Iterator[tuple[str, str, Placement]]:
            target = 0
            for rows in self.heads.flat_qkv():
                placement = Placement(self.weight, self.shape, source=rows.start, target=target, count=len(rows))
                yield "", "weight", placement
                target += len(rows)

        return one_a_tensor(each())


class _Heads:
    """This rank's heads, and where their rows are in checkpoint tensors. Here rows are flat: q, k, v, z; b, a."""

    def __init__(self, config: GatedDeltaNetConfig, rank: int, ranks: int) -> None:
        self.config = config
        self.keys = share(config.num_key_heads, rank, ranks, "linear_num_key_heads")
        each = config.values_per_key
        self.values = range(self.keys.start * each, self.keys.stop * each)

    @property
    def channels(self) -> int:
        """This rank's channels of the convolution."""
        return 2 * len(self.keys) * self.config.key_dim + len(self.values) * self.config.value_dim

    def flat_qkv(self) -> list[range]:
        """The rows of q, k and v in tensors that have all q, all k, all v."""
        it, total = self.config, self.config.num_key_heads * self.config.key_dim
        q = range(self.keys.start * it.key_dim, self.keys.stop * it.key_dim)
        k = range(total + q.start, total + q.stop)
        first = 2 * total
        return [q, k, range(first + self.values.start * it.value_dim, first + self.values.stop * it.value_dim)]

    def _by_key_head(self, name: str, widths: Sequence[int]) -> Iterator[list[Column]]:
        """Of a tensor in which each key head has rows of several ``widths``: the columns of each width."""
        total = sum(widths)
        for place, width in enumerate(widths):
            first = sum(widths[:place])
            yield [
                Column(name, total * self.config.num_key_heads, range(at + first, at + first + width))
                for at in (head * total for head in self.keys)
            ]

    def qkvz(self) -> list[Column]:
        """The projections of q, k, v and z."""
        it = self.config
        values = it.values_per_key * it.value_dim
        if it.fused_projections:
            return list(chain(*self._by_key_head("in_proj_qkvz", (it.key_dim, it.key_dim, values, values))))
        z = range(self.values.start * it.value_dim, self.values.stop * it.value_dim)
        return [
            *(Column("in_proj_qkv", it.channels, rows) for rows in self.flat_qkv()),
            Column("in_proj_z", it.num_value_heads * it.value_dim, z),
        ]

    def ba(self) -> list[Column]:
        """The projections of b and a."""
        it = self.config
        if it.fused_projections:
            return list(chain(*self._by_key_head("in_proj_ba", (it.values_per_key, it.values_per_key))))
        return [Column(name, it.num_value_heads, self.values) for name in ("in_proj_b", "in_proj_a")]


class GatedDeltaNet(ParameterLayer):
    """The projections around :class:`GatedDeltaNetMixer`, and the parameters of its gates.

    One product computes q, k, v, z, b and a. Where any is quantised b and a have their own: checkpoints leave them.
    """

    module_name = "linear_attn"

    def __init__(self, model: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        config, hidden, group = model.layers[index].mixer, model.hidden_size, runtime.tensor_parallel
        assert isinstance(config, GatedDeltaNetConfig)
        heads = _Heads(config, group.rank, group.world_size)
        self.values, num_values = heads.values, config.num_value_heads
        qkvz, ba = heads.qkvz(), heads.ba()
        quantized = any(
            runtime.quant.linear([checkpoint_module(f"{name}.in_proj", f"../{it.name}")]) is not None
            for it in (*qkvz, *ba)
        )
        first = qkvz if quantized else [*qkvz, *ba]
        self.in_proj = MergedColumnLinear(hidden, first, False, runtime, f"{name}.in_proj")
        self.in_proj_ba = MergedColumnLinear(hidden, ba, False, runtime, f"{name}.in_proj_ba") if quantized else None
        value_size = len(self.values) * config.value_dim
        #: Columns of the first product: qkvz, and b and a where it has them.
        self.widths = [heads.channels + value_size, *([] if quantized else [2 * len(self.values)])]
        self.conv1d = CausalConv(config, heads, runtime)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(len(self.values), dtype=torch.float32, device=runtime.device), requires_grad=False)
            for _ in range(2)
        )
        self.num_values = num_values
        self.norm = HeadNorm(config.value_dim, model.rms_norm_eps, runtime)
        self.out_proj = RowLinear(
            num_values * config.value_dim,
            hidden,
            False,
            runtime,
            "linear_num_value_heads * linear_value_head_dim",
            f"{name}.out_proj",
        )
        layer = GatedDeltaNetSpec(
            num_key_heads=len(heads.keys),
            num_value_heads=len(self.values),
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_width=config.conv_width,
            dtype=runtime.dtype,
            state_dtype=runtime.state_dtype,
        )
        weights = GatedDeltaNetWeights(
            self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias, self.norm.weight, model.rms_norm_eps
        )
        self.attn = runtime.bind(GatedDeltaNetMixer(f"{name}.attn", index, layer, weights, runtime), runtime)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        projected = self.in_proj(x)
        inputs = torch.split(projected, self.widths, -1)
        if self.in_proj_ba is not None:
            inputs = (projected, self.in_proj_ba(x))
        result: torch.Tensor = self.out_proj(self.attn(inputs, positions, step))
        return result

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """One number for each value head."""
        for name in ("A_log", "dt_bias"):
            parameter = getattr(self, name)
            yield "", name, Placement(parameter, (self.num_values,), source=self.values.start, count=len(self.values))
