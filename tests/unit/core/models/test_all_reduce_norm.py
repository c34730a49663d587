"""Sums over ranks are left to the norm behind them, and taken in one call with it where a kernel has both."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Implementation, Target, always
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    NUM_LAYERS,
    distance,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.ranks import build, on_ranks, run, stages

CPU = Target("cpu", "")


class Fused:
    """The op in one call, by exchanges of the group's own."""

    def __init__(self, group, most, calls):
        self.group, self.most, self.calls = group, most, calls

    def takes(self, x):
        return len(x) <= self.most

    def __call__(self, x, residual, weight, eps):
        self.calls.append(len(x))
        summed = residual + self.group.all_reduce(x)
        return rms_norm(summed, weight, eps, None)[0], summed


def runner_of(directory):
    make_model(directory, make_config(FAMILIES[0]))
    return Runner(directory)


@pytest.mark.parametrize(("tokens", "fused"), [(20, True), (21, False)])
def test_a_model_calls_it_behind_every_product_that_ranks_share(tmp_path, tokens, fused):
    runner, tokens = runner_of(tmp_path), random_tokens(tokens)

    @torch.inference_mode()
    def work(group):
        calls: list[int] = []
        kernel = Implementation("framework", always, lambda spec, target: Fused(spec.group, 20, calls))
        kernels = kernel_set(CPU, contributed={"all_reduce_norm": kernel})
        model = build(runner, tmp_path, tensor_parallel=group, kernels=kernels)
        return model.logits(run(runner, model, tokens)), calls, kernels.choices()

    for found, calls, choices in on_ranks(2, work):
        assert distance(found, runner.logits(tokens)) <= LOGITS_TOLERANCE
        assert calls == [len(tokens)] * (2 * NUM_LAYERS if fused else 0)
        assert [it.implementation for it in choices if it.op == "all_reduce_norm"] == ["framework"]


def test_a_stage_carries_on_what_is_summed_up(tmp_path):
    runner, tokens = runner_of(tmp_path), random_tokens(20)

    @torch.inference_mode()
    def work(group):
        model = build(runner, tmp_path, tensor_parallel=group, pipeline=stages(NUM_LAYERS, 1)[0])
        return run(runner, model, tokens)

    first, second = on_ranks(2, work)
    whole = run(runner, build(runner, tmp_path, pipeline=stages(NUM_LAYERS, 1)[0]), tokens)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.residual, second.residual)
    assert distance(first.hidden + first.residual, whole.hidden + whole.residual) <= LOGITS_TOLERANCE


def test_one_rank_chooses_none(tmp_path):
    assert "all_reduce_norm" not in {it.op for it in runner_of(tmp_path).runtime.kernels.choices()}
