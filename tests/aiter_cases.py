"""Every kernel of aiter's that we may choose, on inputs of our own, held against our reference of the same op.

The same cases run over the fake on a CPU, where they also show every call that our code can make, and over the real
aiter on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import Op, Target
from tests.kernel_cases import TOLERANCE

Case = Callable[[Target, torch.device], None]
CASES: dict[str, Case] = {}
DTYPES = (torch.bfloat16, torch.float16)


def case(function: Case) -> Case:
    """Add a case under its function's name."""
    CASES[function.__name__] = function
    return function


def chosen(op: Op[Any, Any], spec: Hashable, target: Target, name: str = "aiter") -> Any:
    """The kernel of aiter's for a call; it is an error if it cannot run."""
    return kernel_set(target, {op.name: name}).select(op, spec)


def reference(op: Op[Any, Any], spec: Hashable) -> Any:
    """The definition."""
    return kernel_set(Target("cpu", ""), {op.name: "reference"}).select(op, spec)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Numbers that are the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, roundings: float = 1.0) -> None:
    """Within what the dtype rounds, as a share of the largest magnitude; NaN is far."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if not found.numel():
        return
    difference = (found.double() - expected.double()).abs().max().item()
    allowed = roundings * TOLERANCE[found.dtype] * expected.double().abs().max().item()
    assert difference <= allowed, f"differs by {difference:.3g}, allowed {allowed:.3g}"


@case
def rms_norm(target: Target, device: torch.device) -> None:
    """With and without a residual; rows with gaps between them, and none."""
    for dtype in DTYPES:
        for rows, size in ((1, 64), (5, 128), (0, 64)):
            spec = RmsNormSpec(size, dtype)
            kernel, expected = chosen(RMS_NORM, spec, target), reference(RMS_NORM, spec)
            x = random(rows, size + 8, dtype=dtype, device=device)[:, :size]
            residual = random(rows, size, dtype=dtype, device=device, seed=1)
            weight = random(size, dtype=dtype, device=device, seed=2)
            assert_near(kernel(x, weight, 1e-5, None)[0], expected(x, weight, 1e-5, None)[0])
            pairs = zip(kernel(x.clone(), weight, 1e-5, residual), expected(x, weight, 1e-5, residual), strict=True)
            for found, wanted in pairs:
                assert_near(found, wanted)


@case
def gated_activation(target: Target, device: torch.device) -> None:
    """Every activation; large gates, where the clamped one differs."""
    for dtype in DTYPES:
        for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
            spec = GatedActivationSpec(activation, 24, dtype)
            for rows in (0, 1, 7):
                x = 6 * random(rows, 48, dtype=dtype, device=device)
                found = chosen(GATED_ACTIVATION, spec, target)(x)
                assert_near(found, reference(GATED_ACTIVATION, spec)(x.float()).to(dtype))


@case
def linear(target: Target, device: torch.device) -> None:
    """With and without a bias."""
    for dtype in DTYPES:
        for rows, bias in ((0, None), (1, True), (9, None), (33, True)):
            spec = LinearSpec(48, 32, bool(bias), dtype)
            x, weight = random(rows, 48, dtype=dtype, device=device), random(32, 48, dtype=dtype, device=device, seed=1)
            offset = random(32, dtype=dtype, device=device, seed=2) if bias else None
            kernel = chosen(LINEAR, spec, target)
            assert not kernel.adopt(weight, offset)
            wide = None if offset is None else offset.float()
            expected = torch.nn.functional.linear(x.float(), weight.float(), wide).to(dtype)
            assert_near(kernel(x, weight, offset), expected)


def assert_rounds_alike(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """``found`` is as far from the product of unrounded activations as the reference is, but for a fifth of that.

    e4m3fnuz has another largest number than e4m3fn, so scales, and with them single roundings, differ.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    for mine, theirs, true in zip(found.float(), expected.float(), exact.float(), strict=True):
        share = (mine - true).norm() / true.norm().clamp_min(1e-9)
        assert share <= max(1.2 * (theirs - true).norm() / true.norm().clamp_min(1e-9), 0.04), share


def e4m3(*shape: int, device: torch.device) -> torch.Tensor:
    """Weights of every magnitude that e4m3 has but NaN, and minus zeros, which other forms of e4m3 have not."""
    bits = torch.randint(256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0x80
    return bits.view(torch.float8_e4m3fn).to(device)


@case
def fp8_linear(target: Target, device: torch.device) -> None:
    """Scales of rows, and one for all that cuts some numbers; a row of zeros; weights that are loaded again."""
    for static in (False, True):
        for bias in (False, True):
            spec = Fp8LinearSpec(160, 48, bias, torch.bfloat16, "static" if static else "dynamic")
            kernel = chosen(FP8_LINEAR, spec, target)
            for seed, rows in enumerate((0, 1, 5, 70)):
                weight = e4m3(48, 160, device=device).roll(seed, 0)
                scale = random(48, dtype=torch.float32, device=device).abs() * 1e-3
                x = random(rows, 160, dtype=torch.bfloat16, device=device, seed=1 + seed)
                x[: rows // 5] = 0
                x[rows // 2 :] *= 50
                given = torch.tensor([5 / 448], device=device) if static else None
                offset = random(48, dtype=torch.bfloat16, device=device, seed=2) if bias else None
                expected = reference(FP8_LINEAR, spec)(x, weight, scale, given, offset)
                # Where a static scale cuts, e4m3fnuz, read at twice the scale, has a little more room.
                limit = 5.0 if target.arch == "gfx950" else 5.0 * 480 / 448
                exact = (x.float().clamp(-limit, limit) if static else x.float()) @ (weight.float() * scale[:, None]).T
                exact = exact if offset is None else exact + offset
                kernel.adopt(weight, scale)
                assert_rounds_alike(kernel(x, weight, scale, given, offset), expected, exact)


@case
def fp8_block_linear(target: Target, device: torch.device) -> None:
    """Blocks whose scales differ a lot; a group of zeros."""
    for bias in (False, True):
        spec = Fp8BlockLinearSpec(384, 256, bias, torch.bfloat16)
        kernel = chosen(FP8_BLOCK_LINEAR, spec, target)
        for rows in (0, 1, 5, 70):
            weight = e4m3(256, 384, device=device)
            scale = torch.tensor([[1e-3, 2e-2, 3e-4], [5e-3, 1e-4, 4e-3]], device=device)
            x = random(rows, 384, dtype=torch.bfloat16, device=device, seed=1)
            x[:, 128:256] *= torch.arange(rows, device=device)[:, None]
            offset = random(256, dtype=torch.bfloat16, device=device, seed=2) if bias else None
            expected = reference(FP8_BLOCK_LINEAR, spec)(x, weight, scale, offset)
            exact = x.float() @ (weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).T
            exact = exact if offset is None else exact + offset
            kernel.adopt(weight, scale)
            assert_rounds_alike(kernel(x, weight, scale, offset), expected, exact)
