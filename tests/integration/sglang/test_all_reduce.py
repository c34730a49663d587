"""The method of SGLang's group for aiter's all-reduce and norm: what we pass, and when we call it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec
from atom_core.kernels.all_reduce_norm.reference import all_reduce_norm
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.select import Target
from tests.aiter_fake import fake_aiter

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

GFX942 = Target("rocm", "gfx942")
SIZE, EPS = 128, 1e-5
FORM = InputForm(torch.float8_e4m3fnuz, group=64)


class Eight:
    """A group as a spec has it."""

    world_size = 8


class Communicator:
    """aiter's, of ranks of which all others have zeros, with the methods that SGLang asks of it."""

    disabled = False

    def __init__(self):
        self.stages = []

    def should_custom_ar(self, inp):
        return inp.numel() % 8 == 0

    def custom_fused_ar_rms(self, x, residual_inp, weight, eps, use_1stage, out_hidden_dim=0, gemma_norm=False):
        self.stages.append(use_1stage)
        return all_reduce_norm([x], residual_inp, weight, eps)

    def custom_fused_ar_rms_per_group_quant(
        self, x, residual, weight, eps, group_size=128, use_1stage=False, emit_bf16=False, transpose_scale=False
    ):
        self.stages.append(use_1stage)
        normed, summed = all_reduce_norm([x], residual, weight, eps)
        scales = normed.float().view(len(x), -1, group_size).abs().amax(-1) / 240
        values = (normed.float() / scales.repeat_interleave(group_size, 1)).to(FORM.dtype)
        return values, summed, scales.t().contiguous().t() if transpose_scale else scales


@pytest.fixture
def group():
    """SGLang's own class, without the processes."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    group = GroupCoordinator.__new__(GroupCoordinator)
    group.world_size, group.ca_comm = 8, Communicator()
    yield group
    group.ca_comm = None


def select(group):
    from atom_plugin.sglang.all_reduce import aiter_all_reduce_norm

    with fake_aiter("gfx942"):
        kernels = kernel_set(GFX942, contributed={"all_reduce_norm": aiter_all_reduce_norm(group)})
        spec = AllReduceNormSpec(SIZE, torch.bfloat16, Eight())
        return kernels.select(ALL_REDUCE_NORM, spec), kernels.choices()[0]


def test_it_is_one_kernel_for_few_tokens(group):
    kernel, _ = select(group)
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((80, SIZE), (80, SIZE), (SIZE,)))
    assert kernel.takes(x)
    found = kernel(x, residual, weight, EPS)
    for one, expected in zip(found, all_reduce_norm([x], residual, weight, EPS), strict=True):
        assert torch.equal(one, expected)
    assert group.ca_comm.stages == [True]
    assert not kernel.takes(torch.empty(81, SIZE, dtype=torch.bfloat16))
    assert not kernel.takes(torch.empty(0, SIZE, dtype=torch.bfloat16))
    assert not kernel.takes(torch.empty(80, 1024, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 80])
def test_one_kernel_quantises_as_well(group, rows):
    kernel, _ = select(group)
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((rows, SIZE), (rows, SIZE), (SIZE,)))
    assert kernel.takes(x)
    assert kernel.quantizes(x, FORM)
    (values, scales), summed = kernel.quantized(x, residual, weight, EPS, FORM)
    normed, wanted = all_reduce_norm([x], residual, weight, EPS)
    assert torch.equal(summed, wanted)
    assert (scales.shape, scales.is_contiguous()) == ((2, rows), True)
    found = values.float() * scales.t().repeat_interleave(64, 1)
    torch.testing.assert_close(found, normed.float(), rtol=2**-4, atol=float(scales.max()) * 2**-10)
    assert group.ca_comm.stages == [True]


@pytest.mark.parametrize(
    ("communicator", "reason"),
    [
        (None, "--disable-custom-all-reduce"),
        (SimpleNamespace(disabled=True), "--disable-custom-all-reduce"),
        (SimpleNamespace(disabled=False), "SGLANG_USE_AITER_AR=0"),
    ],
)
def test_a_group_without_it_is_told_in_words(group, communicator, reason):
    group.ca_comm = communicator
    kernel, choice = select(group)
    assert kernel is None
    assert reason in dict(choice.passed_over)["aiter"]
