"""The cases of MoE experts: all experts of a layer on one GPU, with random routing; see :mod:`atom_plugin.bench.cases`.

Every format is measured for every MoE model, whatever its checkpoint has. A case reads each chosen expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from atom_core.config import ModelConfig
from atom_core.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.fp8_experts import FP8_EXPERTS, Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_experts.reference import ReferenceFp8Experts
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.mxfp4_experts import MXFP4_EXPERTS, Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts
from atom_core.kernels.mxfp4_linear.reference import dequantize
from atom_core.kernels.select import Op
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.quant.mxfp4 import GROUP
from atom_core.standalone import random_codes
from atom_core.types import Activation
from atom_plugin.bench import vllm_kernels
from atom_plugin.bench.cases import Bench, Case, Contender, Run
from atom_plugin.bench.fp8_cases import dequantized, in_groups

#: Tokens of a step.
EXPERT_TOKENS = (1, 8, 64, 256)
#: The standard deviation of e4m3 values, whose maximum is 448; the scales bring weights to the usual magnitude.
_FP8_SPREAD = 100.0


@dataclass(frozen=True)
class _Layer:
    """An MoE layer's experts, and the number of tokens."""

    experts: int
    hidden: int
    size: int
    top_k: int
    activation: Activation
    bias: bool
    tokens: int

    @classmethod
    def of(cls, config: ModelConfig) -> Iterator[_Layer]:
        """One for each of :data:`EXPERT_TOKENS`; none for a model without experts."""
        if (moe := next((layer.moe for layer in config.layers if layer.moe is not None), None)) is None:
            return
        routing, hidden = moe.routing, config.hidden_size
        for tokens in EXPERT_TOKENS:
            yield cls(
                routing.num_experts, hidden, moe.intermediate_size, routing.top_k, config.activation, moe.bias, tokens
            )

    def case(
        self,
        op: str,
        bits: float,
        operands: Mapping[str, Contender],
        exact: Contender,
        itemsize: int,
        unrounded: Contender | None = None,
    ) -> Case:
        """``bits``: per weight element, including its share of the scales."""
        used = len(torch.unique(self._chosen()))
        return Case(
            op,
            f"{self.tokens} tokens, {self.top_k} of {self.experts} x 3 x {self.size} x {self.hidden}",
            num_bytes=int(used * 3 * self.size * self.hidden * bits / 8) + 2 * self.tokens * self.hidden * itemsize,
            num_operations=6 * self.tokens * self.top_k * self.size * self.hidden,
            operand_bits=8 if 8 <= bits < 16 else 16,  # MXFP4 is widened
            contenders=operands,
            exact=(exact,),
            unrounded=unrounded,
        )

    def _chosen(self) -> torch.Tensor:
        """int32 ``[T, k]``."""
        scores = torch.rand(self.tokens, self.experts, generator=torch.Generator().manual_seed(0))
        return scores.topk(self.top_k, -1).indices.int()

    def inputs(self, bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [T, H]``, ``weights [T, k]`` and ``experts [T, k]``."""
        x = bench.random(self.tokens, self.hidden, seed=0)
        weights = torch.rand(self.tokens, self.top_k, generator=torch.Generator().manual_seed(1)) + 0.1
        weights /= weights.sum(-1, keepdim=True)
        return x, weights.to(bench.device), self._chosen().to(bench.device)

    def shares(self, bench: Bench) -> torch.Tensor:
        """float32 ``[T, E]``: each expert's weight in each token's output."""
        _, weights, experts = self.inputs(bench)
        return weights.new_zeros(self.tokens, self.experts).scatter_(1, experts.long(), weights)

    def spec(self, bench: Bench) -> ExpertsSpec:
        return ExpertsSpec(0, self.experts, self.hidden, self.size, self.top_k, self.activation, self.bias, bench.dtype)

    def biases(self, bench: Bench) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.bias:
            return None, None
        return bench.random(self.experts, 2 * self.size, seed=4), bench.random(self.experts, self.hidden, seed=5)

    def weights(self, bench: Bench) -> ExpertWeights:
        """In the model's dtype."""
        gate_up = bench.random(self.experts, 2 * self.size, self.hidden, seed=2, scale=self.hidden**-0.5)
        down = bench.random(self.experts, self.hidden, self.size, seed=3, scale=self.size**-0.5)
        return ExpertWeights(gate_up, down, *self.biases(bench))

    def fp8_weights(self, bench: Bench) -> Fp8ExpertWeights:
        """In blocks."""

        def side(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            values = bench.random(self.experts, rows, columns, seed=seed, scale=_FP8_SPREAD).clamp_(-448, 448)
            blocks = -(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE)
            scales = bench.random(self.experts, *blocks, seed=seed + 2).float().sigmoid_().add_(0.5)
            return values.to(torch.float8_e4m3fn), scales * columns**-0.5 / _FP8_SPREAD

        return Fp8ExpertWeights(*side(2 * self.size, self.hidden, 2), *side(self.hidden, self.size, 3))

    def mxfp4_weights(self, bench: Bench) -> Mxfp4Weights:
        def side(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator(bench.device).manual_seed(seed)
            codes = torch.empty(self.experts, rows, columns // 2, dtype=torch.uint8, device=bench.device)
            scales = empty_scales(self.experts, rows, columns, bench.device)
            scales.random_(*random_codes("weight_scale"), generator=generator)
            return codes.random_(*random_codes("weight"), generator=generator), scales

        sides = (*side(2 * self.size, self.hidden, 2), *side(self.hidden, self.size, 3))
        return Mxfp4Weights(*sides, *self.biases(bench))


def expert_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """In the model's dtype."""
    for layer in _Layer.of(config):
        contenders: dict[str, Contender] = {
            "atom": partial(_ours, EXPERTS, _Layer.spec, _Layer.weights, layer),
            "torch": partial(_torch, layer),
        }
        if layer.activation == "silu" and not layer.bias:
            contenders["vllm"] = partial(_vllm, _Layer.weights, layer, True)
            contenders["vllm, untuned"] = partial(_vllm, _Layer.weights, layer, False)
        yield layer.case("experts", 8 * itemsize, contenders, partial(_exact, layer), itemsize)


def _ours(
    op: Op[Any, Any],
    spec: Callable[[_Layer, Bench], object],
    make: Callable[[_Layer, Bench], Any],
    layer: _Layer,
    bench: Bench,
    copies: int,
) -> Run:
    given = layer.inputs(bench)
    sets = [make(layer, bench) for _ in range(copies)]
    # One kernel for each set: it may own a converted form of the weights.
    kernels = [bench.kernels.select(op, spec(layer, bench)) for _ in sets]
    for kernel, weights in zip(kernels, sets, strict=True):
        kernel.adopt(weights)
    return lambda index: kernels[index](*given, sets[index])


def _exact(layer: _Layer, bench: Bench, copies: int) -> Run:
    """In float32."""
    it = layer.weights(bench)
    gate_up_bias, down_bias = _widened(it.gate_up_bias, it.down_bias)
    return _in_float32(layer, bench, ExpertWeights(it.gate_up.float(), it.down.float(), gate_up_bias, down_bias))


def _in_float32(layer: _Layer, bench: Bench, weights: ExpertWeights) -> Run:
    x, shares, experts = layer.inputs(bench)
    kernel = ReferenceExperts(replace(layer.spec(bench), dtype=torch.float32))
    return lambda index: kernel(x.float(), shares, experts, weights)


def _widened(*biases: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if bias is None else bias.float() for bias in biases]


def _torch(layer: _Layer, bench: Bench, copies: int) -> Run:
    x, shares = layer.inputs(bench)[0], layer.shares(bench)
    sets = [layer.weights(bench) for _ in range(copies)]
    return lambda index: _all_experts(layer, x, shares, sets[index])


def _all_experts(
    layer: _Layer,
    x: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda inputs: inputs,
) -> torch.Tensor:
    """All experts on all tokens, which a graph can capture; ``rounded`` quantises the products' inputs."""
    gate_up = torch.bmm(rounded(x).expand(layer.experts, -1, -1), weights.gate_up.transpose(1, 2))
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[:, None]
    activated = rounded(gated_activation(gate_up.flatten(0, 1), layer.activation))
    outputs = torch.bmm(activated.view(layer.experts, -1, layer.size), weights.down.transpose(1, 2)).float()
    if weights.down_bias is not None:
        outputs = outputs + weights.down_bias[:, None].float()
    return torch.einsum("ij,jik->ik", shares, outputs).to(x.dtype)


def _vllm(
    make: Callable[[_Layer, Bench], ExpertWeights | Fp8ExpertWeights],
    layer: _Layer,
    tuned: bool,
    bench: Bench,
    copies: int,
) -> Run:
    given, shape = layer.inputs(bench), (layer.tokens, layer.experts, layer.size, layer.hidden, layer.top_k)
    sets = [make(layer, bench) for _ in range(copies)]
    scales = [(it.gate_up_scale, it.down_scale) if isinstance(it, Fp8ExpertWeights) else None for it in sets]
    launches = [vllm_kernels.fused_experts(*shape, tuned=tuned, scales=each) for each in scales]
    return lambda index: launches[index](*given, sets[index].gate_up, sets[index].down)


def fp8_expert_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """In FP8 with block scales, for experts without biases whose sizes are multiples of a block's."""
    for layer in _Layer.of(config):
        if layer.bias or layer.size % BLOCK_SIZE or layer.hidden % BLOCK_SIZE:
            return
        contenders: dict[str, Contender] = {
            "atom": partial(_ours, FP8_EXPERTS, _fp8_spec, _Layer.fp8_weights, layer),
            "torch": partial(_torch_in_fp8, layer),
        }
        if layer.activation == "silu":
            contenders["vllm"] = partial(_vllm, _Layer.fp8_weights, layer, True)
            contenders["vllm, untuned"] = partial(_vllm, _Layer.fp8_weights, layer, False)
        exact, unrounded = partial(_exact_in_fp8, layer), partial(_of_wide_inputs, layer)
        yield layer.case("fp8_experts", 8 + 32 / BLOCK_SIZE**2, contenders, exact, itemsize, unrounded)


def _fp8_spec(layer: _Layer, bench: Bench) -> Fp8ExpertsSpec:
    sizes = (0, layer.experts, layer.hidden, layer.size, layer.top_k)
    return Fp8ExpertsSpec(*sizes, layer.activation, True, bench.dtype, total=layer.experts)


def _exact_in_fp8(layer: _Layer, bench: Bench, copies: int) -> Run:
    """Products in float32, of inputs and intermediates that are quantised from the model's dtype."""
    given, weights = layer.inputs(bench), layer.fp8_weights(bench)
    kernel = ReferenceFp8Experts(_fp8_spec(layer, bench))
    return lambda index: kernel(*given, weights)


def _of_wide_inputs(layer: _Layer, bench: Bench, copies: int) -> Run:
    """In float32 with the same weights, of unquantised inputs and intermediates."""
    return _in_float32(layer, bench, _wide(layer.fp8_weights(bench), torch.float32))


def _torch_in_fp8(layer: _Layer, bench: Bench, copies: int) -> Run:
    """With weights that were dequantised beforehand."""
    x, shares = layer.inputs(bench)[0], layer.shares(bench)
    wide = _wide(layer.fp8_weights(bench), x.dtype)
    sets = [wide, *(ExpertWeights(wide.gate_up.clone(), wide.down.clone()) for _ in range(copies - 1))]
    return lambda index: _all_experts(layer, x, shares, sets[index], in_groups)


def _wide(weights: Fp8ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    gate_up = dequantized(weights.gate_up, weights.gate_up_scale).to(dtype)
    return ExpertWeights(gate_up, dequantized(weights.down, weights.down_scale).to(dtype))


def mxfp4_expert_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """In MXFP4, inputs in the model's dtype."""
    for layer in _Layer.of(config):
        if layer.size % GROUP or layer.hidden % GROUP:
            return
        contenders: dict[str, Contender] = {
            "atom": partial(_ours, MXFP4_EXPERTS, _mxfp4_spec, _Layer.mxfp4_weights, layer),
            "torch": partial(_torch_in_mxfp4, layer),
        }
        yield layer.case("mxfp4_experts", 4 + 8 / GROUP, contenders, partial(_exact_in_mxfp4, layer), itemsize)


def _mxfp4_spec(layer: _Layer, bench: Bench) -> Mxfp4ExpertsSpec:
    return Mxfp4ExpertsSpec(**vars(layer.spec(bench)))


def _exact_in_mxfp4(layer: _Layer, bench: Bench, copies: int) -> Run:
    """In float32."""
    x, shares, experts = layer.inputs(bench)
    it = layer.mxfp4_weights(bench)
    gate_up_bias, down_bias = _widened(it.gate_up_bias, it.down_bias)
    weights = it._replace(gate_up_bias=gate_up_bias, down_bias=down_bias)
    kernel = ReferenceMxfp4Experts(replace(_mxfp4_spec(layer, bench), dtype=torch.float32))
    return lambda index: kernel(x.float(), shares, experts, weights)


def _torch_in_mxfp4(layer: _Layer, bench: Bench, copies: int) -> Run:
    """With weights that were dequantised beforehand."""
    x, shares = layer.inputs(bench)[0], layer.shares(bench)
    it = layer.mxfp4_weights(bench)
    gate_up, down = (
        torch.stack([dequantize(codes, scale, x.dtype) for codes, scale in zip(*side, strict=True)])
        for side in ((it.gate_up, it.gate_up_scale), (it.down, it.down_scale))
    )
    biases = it.gate_up_bias, it.down_bias
    wide = ExpertWeights(gate_up, down, *biases)
    sets = [wide, *(ExpertWeights(gate_up.clone(), down.clone(), *biases) for _ in range(copies - 1))]
    return lambda index: _all_experts(layer, x, shares, sets[index])


#: See :data:`atom_plugin.bench.cases.CASES`.
EXPERT_CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {
    "experts": expert_cases,
    "fp8_experts": fp8_expert_cases,
    "mxfp4_experts": mxfp4_expert_cases,
}
