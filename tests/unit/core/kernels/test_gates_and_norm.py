"""The gates and the gated norm of Gated DeltaNet as launches of their own, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.gated_delta_net.reference import gated_rms_norm, gates

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
#: The interpreter cuts bfloat16 off, where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@every_dtype
@pytest.mark.parametrize(("tokens", "heads"), [(1, 3), (70, 32), (5, 48)])
def test_gates_are_those_of_the_reference(tokens, heads, dtype):
    from atom_core.kernels.gated_delta_net.gates_and_norm import compute_gates

    ba = (10 * torch.randn(tokens, 2 * heads + 16)).to(dtype)[:, : 2 * heads]
    a_log, dt_bias = torch.randn(heads), torch.randn(heads)
    b, a = ba.chunk(2, -1)
    for found, expected in zip(compute_gates(ba, a_log, dt_bias), gates(a, b, a_log, dt_bias), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@every_dtype
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 3, 128), (5, 20, 24), (2, 48, 128)])
def test_the_norm_is_that_of_the_reference_rounded_once(tokens, heads, size, dtype):
    from atom_core.kernels.gated_delta_net.gates_and_norm import norm_and_gate

    x = torch.randn(tokens, heads, size).to(dtype)
    x[0, 0] = 0
    z = (3 * torch.randn(tokens, 40 + heads * size)).to(dtype)[:, 40:]
    weight = torch.randn(size).to(dtype)
    wide = torch.full((tokens, heads * size + 8), float("nan"), dtype=dtype)
    out = wide[:, : heads * size].unflatten(1, (heads, size))
    norm_and_gate(x, z, weight, 1e-3, out)
    expected = gated_rms_norm(x.double(), z.double().view(x.shape), weight.double(), 1e-3)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert wide[:, heads * size :].isnan().all()
