"""vLLM's op for aiter's all-reduce and norm, over its own group of two ranks, with the aiter of tests/fakes behind."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import multiprocessing

from atom_core.kernels import kernel_set
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec
from atom_core.kernels.all_reduce_norm.reference import all_reduce_norm
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.select import Target
from atom_plugin.common.aiter_all_reduce import is_one_kernel
from tests.aiter_fake import fake_aiter

pytestmark = pytest.mark.vllm

GFX942 = Target("rocm", "gfx942")
SIZE, EPS = 256, 1e-5
ROWS = (1, 7, 80)
FORM = InputForm(torch.float8_e4m3fnuz, group=128)


def inputs(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rank + 10 * rows)).bfloat16()


def expected(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, of a sum over ranks that is rounded before the residual is added, as aiter does."""
    total = inputs(0, rows) + inputs(1, rows)
    return all_reduce_norm([total], inputs(50, rows), inputs(100, 1)[0], EPS)


def _serve(rank: int, port: int) -> dict:
    # What vLLM's executor tells its workers: CPU groups name their shared memory after it.
    os.environ["VLLM_DIST_IDENT"] = f"all_reduce_{port}"
    with fake_aiter("gfx942"):
        from vllm import _aiter_ops
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
        from vllm.distributed.device_communicators.aiter_custom_all_reduce import AiterCustomAllreduce
        from vllm.utils.torch_utils import direct_register_custom_op

        from atom_plugin.vllm.all_reduce import aiter_all_reduce_norm
        from atom_plugin.vllm.runtime import VllmCommunicator

        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            initialize_model_parallel(2)
        # As vLLM does on AMD's GPUs (cuda_communicator.py, _aiter_ops.py: register_ops_once).
        group = get_tp_group()
        group.device_communicator.aiter_ar_comm = AiterCustomAllreduce(group.cpu_group, "cpu")
        direct_register_custom_op(
            "rocm_aiter_fused_allreduce_rmsnorm",
            _aiter_ops._rocm_aiter_fused_allreduce_rmsnorm_impl,
            fake_impl=_aiter_ops._rocm_aiter_fused_allreduce_rmsnorm_fake,
            dispatch_key="CPU",
        )
        kernels = kernel_set(GFX942, contributed={"all_reduce_norm": aiter_all_reduce_norm()})
        spec = AllReduceNormSpec(SIZE, torch.bfloat16, VllmCommunicator(group))
        refused = kernels.select(ALL_REDUCE_NORM, spec)
        (choice,) = kernels.choices()
        found = {"refused": (refused, choice.passed_over[0])}
        kernels = kernel_set(GFX942, contributed={"all_reduce_norm": aiter_all_reduce_norm()})
        with mock.patch.object(_aiter_ops.rocm_aiter_ops, "is_custom_all_reduce_enabled", return_value=True):
            kernel = kernels.select(ALL_REDUCE_NORM, spec)
        weight = inputs(100, 1)[0]
        for rows in ROWS:
            x, residual = inputs(rank, rows), inputs(50, rows)
            given = x.clone(), residual.clone()
            assert kernel.takes(x)
            normed, summed = kernel(x, residual, weight, EPS)
            assert torch.equal(x, given[0])
            assert torch.equal(residual, given[1])
            found[rows] = normed.float().tolist(), summed.float().tolist()
            assert kernel.quantizes(x, FORM)
            (values, scales), also_summed = kernel.quantized(x, residual, weight, EPS, FORM)
            assert torch.equal(x, given[0])
            assert torch.equal(residual, given[1])
            assert torch.equal(also_summed, summed)
            assert (values.dtype, scales.shape, scales.is_contiguous()) == (FORM.dtype, (2, rows), True)
            found["quantized", rows] = values.float().tolist(), scales.tolist()
        found["taken"] = [kernel.takes(inputs(rank, rows)) for rows in (0, 80, 81)]
        found["gaps"] = kernel.takes(inputs(rank, 8)[:, :32])
        found["other forms"] = [
            kernel.quantizes(inputs(rank, 1)[:, :size], form)
            for size, form in (
                (256, InputForm(torch.float8_e4m3fn, 128)),
                (256, InputForm(torch.float8_e4m3fnuz, None)),
                (192, FORM),
            )
        ]
        found["calls"] = group.device_communicator.aiter_ar_comm.aiter_ca.calls
        return found


@pytest.fixture(scope="module")
def ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_serve, rank, port) for rank in range(2)]
        return [each.result(timeout=120) for each in running]


@pytest.mark.parametrize("rows", ROWS)
def test_both_ranks_have_the_reference(ranks, rows):
    assert ranks[0][rows] == ranks[1][rows]
    (found, summed), (wanted, wanted_sum) = map(torch.tensor, ranks[0][rows]), expected(rows)
    assert torch.equal(summed, wanted_sum.float())
    torch.testing.assert_close(found, wanted.float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("rows", ROWS)
def test_both_ranks_have_the_reference_in_fp8(ranks, rows):
    assert ranks[0]["quantized", rows] == ranks[1]["quantized", rows]
    values, scales = (torch.tensor(each) for each in ranks[0]["quantized", rows])
    # A group's largest number is the largest of FP8, and each is off by no more than half of one in the last place.
    assert torch.equal(values.view(rows, 2, 128).abs().amax(-1), torch.full((rows, 2), 240.0))
    found = values * scales.t().repeat_interleave(128, 1)
    torch.testing.assert_close(found, expected(rows)[0].float(), rtol=2**-4 + 2**-7, atol=float(scales.max()) * 2**-10)


def test_a_form_that_aiter_does_not_quantise_in_is_left_to_others(ranks):
    assert ranks[0]["other forms"] == [False, False, False]


def test_it_is_called_where_it_is_one_kernel(ranks):
    both = [("custom_fused_ar_rms", True), ("custom_fused_ar_rms_per_group_quant", True)]
    assert ranks[0]["calls"] == both * len(ROWS)
    assert ranks[0]["taken"] == [False, True, False]
    assert not ranks[0]["gaps"]


def test_a_group_without_aiters_all_reduce_is_told_what_turns_it_on(ranks):
    kernel, (name, reason) = ranks[0]["refused"]
    assert (kernel, name) == (None, "aiter")
    assert "VLLM_ROCM_USE_AITER=1" in reason


def test_one_kernel_is_what_vllm_calls_so():
    from vllm.distributed.device_communicators.aiter_custom_all_reduce import AiterCustomAllreduce

    for world_size in (2, 4, 8):
        communicator = AiterCustomAllreduce.__new__(AiterCustomAllreduce)
        communicator._impl = SimpleNamespace(world_size=world_size, fully_connected=True)
        for dtype in (torch.bfloat16, torch.float32):
            for size in (64, 100, 2048, 4096, 7168, 8192, 8200):
                for tokens in (1, 7, 8, 9, 15, 16, 17, 32, 63, 64, 80, 81):
                    x = torch.empty(tokens, size, dtype=dtype, device="meta")
                    theirs = communicator.use_1stage_fused_ar_rms(x)
                    ours = dtype == torch.bfloat16 and is_one_kernel(x.shape, dtype, world_size)
                    assert ours == theirs, (world_size, x.shape, dtype)


def test_shapes_that_aiter_has_no_kernel_for_are_refused_in_words():
    from atom_plugin.vllm.all_reduce import why_not_here

    with fake_aiter("gfx942"):
        for size, world_size, reason in ((8200, 2, "up to 8192 elements"), (64, 6, "2, 4 or 8 ranks, not 6")):
            spec = AllReduceNormSpec(size, torch.bfloat16, SimpleNamespace(world_size=world_size))
            assert reason in why_not_here(spec, GFX942)
