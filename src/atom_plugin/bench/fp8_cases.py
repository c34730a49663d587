"""The cases of products with FP8 weights for `atom-plugin bench kernels`; see :mod:`atom_plugin.bench.cases`.

Both formats are measured for every model, whatever its checkpoint has. Contenders get inputs in the model's dtype, and
quantise them within the time that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from atom_core.config import ModelConfig
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_block_linear.reference import block_product, quantize_groups
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.fp8_linear.reference import quantize_input, row_scales, to_e4m3
from atom_core.kernels.fp8_linear.scaled_mm import ScaledMm
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_plugin.bench import vllm_kernels
from atom_plugin.bench.cases import Bench, Case, Contender, Product, Run, products

#: Rows of products.
FP8_ROWS = (1, 8, 64, 256)
BLOCK_ROWS = (1, 8, 64, 256, 1024, 8192)


def fp8_linear_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Products of FP8 weights, with the quantisation of their inputs."""
    for product in products(config)[:-1]:  # without the head, which is not quantised
        N, K = product.out_features, product.in_features
        for rows in FP8_ROWS:
            yield Case(
                "fp8_linear",
                f"{product.name} {N} x {K}, {rows} {'row' if rows == 1 else 'rows'}",
                num_bytes=N * K + 4 * N + rows * (N + K) * itemsize,
                num_operations=2 * rows * N * K,
                operand_bits=8,
                contenders={
                    "atom": partial(_our_fp8_product, product, rows),
                    "torch": partial(_torch_fp8_product, product, rows),
                },
                # A kernel may leave a single row in 16 bits.
                exact=tuple(partial(_exact_fp8_product, product, rows, as_is) for as_is in (False, True)),
            )


def _fp8_buffers(
    product: Product, rows: int, bench: Bench, copies: int
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    N, K = product.out_features, product.in_features
    wide = bench.random(N, K, seed=1, scale=K**-0.5)
    scale = row_scales(wide)
    weight = to_e4m3(wide, scale)
    return bench.random(rows, K, seed=0), [weight, *(weight.clone() for _ in range(copies - 1))], scale[:, 0]


def _our_fp8_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    x, weights, scale = _fp8_buffers(product, rows, bench, copies)
    spec = Fp8LinearSpec(product.in_features, product.out_features, False, bench.dtype, "dynamic")
    kernels = [bench.kernels.select(FP8_LINEAR, spec) for _ in weights]
    for kernel, weight in zip(kernels, weights, strict=True):
        kernel.adopt(weight, scale)
    return lambda index: kernels[index](x, weights[index], scale, None, None)


def _torch_fp8_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    x, weights, scale = _fp8_buffers(product, rows, bench, copies)
    kernel = ScaledMm(Target.of(bench.device))
    for weight in weights:
        kernel.adopt(weight, scale)
    return lambda index: kernel(x, weights[index], scale, None, None)


def _exact_fp8_product(product: Product, rows: int, as_is: bool, bench: Bench, copies: int) -> Run:
    """With the input in 16 bits (``as_is``) or in FP8."""
    x, weights, scale = _fp8_buffers(product, rows, bench, copies)
    stored, x_scale = (x, 1.0) if as_is else quantize_input(x, None)
    return lambda index: (stored.float() @ weights[index].float().T) * x_scale * scale


def fp8_block_linear_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Products of weights that have a scale for each block, with the quantisation of their inputs."""
    for product in products(config)[:-1]:  # without the head, which is not quantised
        N, K = product.out_features, product.in_features
        for rows in BLOCK_ROWS:
            contenders: dict[str, Contender] = {
                "atom": partial(_our_block_product, product, rows),
                "torch": partial(_torch_block_product, product, rows),
            }
            if K % BLOCK_SIZE == 0:
                contenders["vllm"] = partial(_vllm_block_product, product, rows)
            yield Case(
                "fp8_block_linear",
                f"{product.name} {N} x {K}, {rows} {'row' if rows == 1 else 'rows'}",
                num_bytes=N * K + 4 * len(_blocks(N)) * len(_blocks(K)) + rows * (N + K) * itemsize,
                num_operations=2 * rows * N * K,
                operand_bits=8,
                contenders=contenders,
                exact=tuple(partial(_exact_block_product, product, rows, as_is) for as_is in (False, True)),
            )


def _blocks(size: int) -> range:
    return range(0, size, BLOCK_SIZE)


def _block_buffers(
    product: Product, rows: int, bench: Bench, copies: int
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """``x``, a weight for each copy, and the scales of its blocks."""
    N, K = product.out_features, product.in_features
    spread = 100.0  # of values up to 448
    weight = bench.random(N, K, seed=1, scale=spread).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scale = bench.random(len(_blocks(N)), len(_blocks(K)), seed=2).float().sigmoid_().add_(0.5)
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    return bench.random(rows, K, seed=0), weights, scale * K**-0.5 / spread


def _our_block_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    x, weights, scale = _block_buffers(product, rows, bench, copies)
    spec = Fp8BlockLinearSpec(product.in_features, product.out_features, False, bench.dtype)
    kernels = [bench.kernels.select(FP8_BLOCK_LINEAR, spec) for _ in weights]
    for kernel, weight in zip(kernels, weights, strict=True):
        kernel.adopt(weight, scale)
    return lambda index: kernels[index](x, weights[index], scale, None)


def _torch_block_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    """Of weights that were dequantised beforehand."""
    x, (weight, *_), scale = _block_buffers(product, rows, bench, 1)
    wide = dequantized(weight, scale).to(x.dtype)
    weights = [wide, *(wide.clone() for _ in range(copies - 1))]

    return lambda index: F.linear(in_groups(x), weights[index])


def _vllm_block_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    multiply = vllm_kernels.fp8_block_linear(rows, product.out_features, bench.dtype)
    x, weights, scale = _block_buffers(product, rows, bench, copies)
    return lambda index: multiply(x, weights[index], scale)


def _exact_block_product(product: Product, rows: int, as_is: bool, bench: Bench, copies: int) -> Run:
    """With the input in 16 bits (``as_is``) or in FP8."""
    x, (weight, *_), scale = _block_buffers(product, rows, bench, 1)
    if as_is:
        return lambda index: x.float() @ dequantized(weight, scale).T
    return lambda index: block_product(*quantize_groups(x), weight, scale)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """Quantise ``x [T, K]`` in groups and dequantise."""
    quantized, scales = quantize_groups(x)
    return (quantized.float() * scales.repeat_interleave(BLOCK_SIZE, 1)[:, : x.shape[1]]).to(x.dtype)


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``weight [..., N, K]`` with the scales of its blocks, in float32."""
    each = scale.repeat_interleave(BLOCK_SIZE, -2).repeat_interleave(BLOCK_SIZE, -1)
    return weight.float() * each[..., : weight.shape[-2], : weight.shape[-1]]


#: See :data:`atom_plugin.bench.cases.CASES`.
FP8_CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {
    "fp8_linear": fp8_linear_cases,
    "fp8_block_linear": fp8_block_linear_cases,
}
