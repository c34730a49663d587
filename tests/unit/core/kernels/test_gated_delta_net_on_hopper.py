"""The kernel of Gated DeltaNet for Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gated_delta_cases import DeltaCase, Request, check_delta, delta_batch
from tests.gluon_on_cpu import on_cpu

CPU = torch.device("cpu")
_ONE, _NEW = Request(1), Request(1, has_state=False)
SIZES = {"key_dim": 128, "value_dim": 128}


@pytest.fixture(scope="module")
def hopper():
    """The kernel's module."""
    import atom_core.kernels.gated_delta_net.triton_decode  # noqa: F401 - it goes on with what it has imported

    with on_cpu() as found:
        yield found["atom_core.kernels.gated_delta_net.hopper"]


CASES = (
    DeltaCase("some without a state", (_ONE, _NEW, _ONE, _ONE, _NEW), **SIZES),
    DeltaCase("one request", (_ONE,), padded_requests=3, padded_tokens=4, **SIZES),
    DeltaCase("three value heads a key head", (_ONE, _NEW, _ONE), value_heads=6, **SIZES),
    DeltaCase("four value heads a key head", (_ONE,) * 3, key_heads=1, **SIZES),
    DeltaCase("channels first", (_ONE, _NEW, _ONE), channels_first=True, **SIZES),
    DeltaCase("blocks of a prefix cache", (_ONE, _NEW), block_size=32, padded_requests=2, **SIZES),
    DeltaCase(
        "copies",
        (Request(1, snapshot=1), _ONE, Request(1, has_state=False, snapshot=1), _ONE),
        snapshots=True,
        padded_requests=1,
        **SIZES,
    ),
    DeltaCase(
        "behind accepted drafts",
        (Request(1, accepted=2), _ONE, Request(1, accepted=3)),
        columns=3,
        drafts=True,
        **SIZES,
    ),
)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [(128, 3, 1, 8), (64, 3, 1, 4), (32, 6, 2, 4), (32, 4, 1, 4)], ids=str)
@pytest.mark.parametrize("programs", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_token_each(monkeypatch, hopper, case, programs, tile, state_dtype):
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 3)
    kernel = hopper.HopperGatedDeltaDecode(
        case.spec(torch.bfloat16, state_dtype), overlap=True, tile=hopper.Tile(*tile, programs)
    )
    check_delta(kernel, delta_batch(case, torch.bfloat16, CPU, state_dtype))


def test_it_takes_what_it_can_copy(monkeypatch, hopper):
    monkeypatch.setattr(hopper, "_MIN_REQUESTS", 3)
    kernel = hopper.HopperGatedDeltaDecode(CASES[0].spec(torch.bfloat16), overlap=False)

    def taken(case):
        inputs = delta_batch(case, torch.bfloat16, CPU)
        return kernel.takes(inputs.cache, inputs.batch)

    assert taken(CASES[0])
    assert not taken(replace(CASES[0], requests=(_ONE, _ONE)))
    assert not taken(replace(CASES[0], requests=(_ONE, _ONE, Request(2))))
    verifying = (Request(1, verifies=True, accepted=2),) * 3
    assert not taken(replace(CASES[0], requests=verifying, drafts=True, columns=2))
    inputs = delta_batch(CASES[0], torch.bfloat16, CPU)
    conv, recurrent = inputs.cache.tensors
    apart = recurrent.new_empty(2 * recurrent.numel()).as_strided(
        recurrent.shape, (recurrent.stride(0) + 4, *recurrent.stride()[1:])
    )
    assert not kernel.takes(replace(inputs.cache, tensors=(conv, apart)), inputs.batch)
