"""Every kernel of aiter's that we may choose, on inputs of our own, held against our reference of the same op.

The same cases run over the fake on a CPU, where they also show every call that our code can make, and over the real
aiter on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from atom_core.kernels import kernel_set
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
