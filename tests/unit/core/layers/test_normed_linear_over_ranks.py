"""A linear layer in FP8 behind a norm and a sum over ranks, as on AMD: who quantises its inputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from atom_core.fusion.linear import NormedLinear, Stream, StreamNorm
from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Implementation, Target, always
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm
from atom_core.quant.fp8 import Fp8Config
from atom_core.runtime import SingleRank
from atom_core.standalone import build_runtime
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.unit.core.fp8_checkpoints import quantize_blocks

SIZE, OUT, EPS = 256, 64, 1e-5
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
#: What each way to run the layer calls of aiter.
PRODUCT, QUANTISER = "gemm_a8w8_blockscale_bpreshuffle", "per_group_quant_hip"
every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)


#: This rank and another, whose parts are zeros.
TWO = SingleRank(world_size=2)


class Summing:
    """The sum and the norm in one call, of up to eight tokens."""

    def takes(self, x):
        return len(x) <= 8

    def __call__(self, x, residual, weight, eps):
        calls().append("both")
        return rms_norm(x + residual, weight, eps, None)[0], x + residual


class Quantizing(Summing):
    """The same with the quantiser, of up to four tokens."""

    def quantizes(self, x, form):
        return len(x) <= 4 and form.group == 128

    def quantized(self, x, residual, weight, eps, form):
        calls().append(form)
        groups = rms_norm((x + residual).float(), weight.float(), eps, None)[0].view(len(x), -1, form.group)
        scales = groups.abs().amax(-1) / torch.finfo(form.dtype).max
        values = (groups / scales[..., None]).view(x.shape).to(form.dtype)
        return QuantizedInput(values, scales.t().contiguous()), x + residual


def layer(kernel, arch, **forced):
    target = Target("rocm", arch)
    contributed = {"all_reduce_norm": Implementation("aiter", always, lambda spec, target: kernel)}
    quant = Fp8Config(serialized=True, block=True, scale="weight_scale_inv")
    runtime = build_runtime(torch.device("cpu"), torch.bfloat16, 8, target=target, quant=quant)
    runtime = replace(runtime, kernels=kernel_set(target, forced, contributed), tensor_parallel=TWO)
    norm, linear = RMSNorm(SIZE, EPS, runtime), Linear(SIZE, OUT, False, runtime)
    norm.weight.data.copy_(1 + 0.1 * numbers(SIZE))
    weight, scale = quantize_blocks(numbers(OUT, SIZE, seed=1))
    linear.weight.data.copy_(weight)
    linear.weight_scale.data.copy_(scale)
    linear.finalize_weights()
    return NormedLinear(StreamNorm(norm, runtime), linear, None, runtime)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(it, stream):
    """What the layer answers, and what it called for that."""
    with torch.inference_mode():
        it(stream)
        calls().clear()
        y, summed = it(stream)
    seen = [call if isinstance(call, (str, InputForm)) else call.path.rpartition(".")[2] for call in calls()]
    return y.float(), summed, seen


def part(rows):
    return Stream(numbers(rows, SIZE, seed=2).bfloat16(), numbers(rows, SIZE, seed=3).bfloat16(), is_partial=True)


@every_gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_the_sum_the_norm_and_the_quantiser_are_one_call(arch, rows):
    with fake_aiter(arch):
        found, summed, seen = run(layer(Quantizing(), arch), part(rows))
        expected, also_summed, separate = run(layer(Summing(), arch), part(rows))
    assert seen == [InputForm(FP8[arch], 128), PRODUCT]
    assert separate == ["both", QUANTISER, PRODUCT]
    assert torch.equal(summed, also_summed)
    # Here and there a number that was not rounded to 16 bits before falls to another one of FP8.
    assert 0 < (found - expected).norm() <= 0.02 * expected.norm()


def test_what_it_does_not_quantise_is_quantised_behind_it():
    with fake_aiter("gfx942"):
        found, _, seen = run(layer(Quantizing(), "gfx942"), part(5))
        expected, _, _ = run(layer(Summing(), "gfx942"), part(5))
    assert seen == ["both", QUANTISER, PRODUCT]
    assert torch.equal(found, expected)


def test_what_it_does_not_sum_is_quantised_by_the_norm():
    with fake_aiter("gfx942"):
        it = layer(Quantizing(), "gfx942")
        norm = ["fused_qk_rmsnorm_group_quant", PRODUCT]
        assert run(it, part(9))[2] == norm
        assert run(it, part(4)._replace(is_partial=False))[2] == norm
        assert run(it, Stream(None, part(4).residual))[2] == norm


def test_norms_that_are_to_quantise_nothing_do_not():
    with fake_aiter("gfx942"):
        seen = run(layer(Quantizing(), "gfx942", fp8_rms_norm="separate"), part(4))[2]
    assert Counter(seen) == Counter(["both", QUANTISER, PRODUCT])
