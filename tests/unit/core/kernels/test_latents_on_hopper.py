"""Kernels for Hopper over latents, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import pytest
import torch

from tests.gluon_on_cpu import on_cpu
from tests.latent_cases import LATENT_CASES, LatentCase, check_absorbed, check_mla_fused_decode, latent_batch

CPU = torch.device("cpu")
SIZES = {"rank": 64, "nope_dim": 24, "rope_dim": 16, "value_dim": 16}


@pytest.fixture(scope="module")
def modules():
    """The kernels' modules, by name."""
    import atom_core.kernels.mla_absorbed_values.triton_kernel  # noqa: F401 - it goes on with what it has imported

    with on_cpu() as found:
        yield found


@pytest.fixture
def sharing(monkeypatch):
    """Requests are shared out as on a large GPU."""
    monkeypatch.setattr("atom_core.kernels.attention.splits.multiprocessors", lambda device: 132)


@pytest.mark.parametrize("before", [0, 1, 15, 63, 64, 191, 192, 383, 384, 1100])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [(3, {}), (40, {"interleaved": False, "page_size": 64}), (64, {}), (2, {"nope_dim": 128, "gap": 8})],
    ids=str,
)
@pytest.mark.usefixtures("sharing")
def test_one_token_alone(modules, before, heads, sizes):
    case = LatentCase("", ((before, 1),), heads=heads, **{**SIZES, **sizes})
    kernel = modules["atom_core.kernels.mla_fused_decode.hopper"].MlaFusedDecode(
        case.spec(torch.float16), overlap=False
    )
    check_mla_fused_decode(case, kernel, torch.float16, CPU, max_seq_len=4096)


DECODES = (
    *(case for case in LATENT_CASES if case.rank == 32 and max(new for _, new in case.requests) <= 8),
    LatentCase("some drafted less", ((61, 4), (63, 1), (64, 2), (0, 3), (126, 3)), heads=4),
)


@pytest.mark.parametrize("case", DECODES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
def test_decoding(modules, request, case, shared):
    if shared:
        request.getfixturevalue("sharing")
    case = LatentCase(**{**vars(case), "rank": 64})
    kernel = modules["atom_core.kernels.mla_attention.hopper"].LatentDecode(case.spec(torch.float16), overlap=False)
    inputs = latent_batch(case, torch.float16, CPU)
    assert kernel.takes(inputs.cache, inputs.batch) or case.gap
    check_absorbed(case, kernel, inputs)
