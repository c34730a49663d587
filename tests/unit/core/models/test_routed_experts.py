"""Who asks which experts tokens are sent to is told those that Hugging Face's routers choose, on every path."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from atom_core.fusion.linear import Stream
from atom_core.runtime import SingleDataParallelRank
from atom_core.standalone import Runner
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.hugging_face import make_config, make_model, random_tokens, routed_experts
from tests.unit.core.layers.test_moe import HIDDEN, PLAIN, RUNTIME, SIZE, mixture, triton_runtime
from tests.unit.core.ranks import build, on_ranks, run

TOKENS = random_tokens(24)
DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text")
MIXTURES = [family for family in ALL_FAMILIES if family.model_type not in DENSE]


class Told:
    """What a model tells."""

    def __init__(self):
        self.experts = {}

    def __call__(self, index, experts):
        assert experts.dtype == torch.int32
        assert index not in self.experts
        self.experts[index] = experts.sort(-1).values.tolist()


def told_by(runner, folder, group=None, /, **runtime):
    """What a rank tells of one prompt."""
    told = Told()
    fields = {} if group is None else {"tensor_parallel": group}
    model = build(runner, folder, routed_experts=told, **fields, **runtime)
    with torch.inference_mode():
        run(runner, model, TOKENS)
    return told.experts


@pytest.mark.parametrize("family", MIXTURES, ids=str)
def test_they_are_those_that_hugging_face_chooses(tmp_path, family):
    config = make_config(family, num_key_value_heads=4)
    expected = routed_experts(make_model(tmp_path, config), TOKENS)
    assert len({str(chosen) for layer in expected.values() for chosen in layer}) > 3
    runner = Runner(tmp_path)
    assert told_by(runner, tmp_path) == expected
    for expert_parallel in (False, True):
        fields = {"expert_parallel": expert_parallel}
        assert on_ranks(2, partial(told_by, runner, tmp_path, **fields)) == [expected, expected]


@pytest.mark.parametrize("family", [it for it in MIXTURES if "shared" in str(make_config(it).to_dict())], ids=str)
def test_shared_experts_among_the_routed_ones_are_left_out(tmp_path, family):
    expected = routed_experts(make_model(tmp_path, make_config(family)), TOKENS)
    runner = Runner(tmp_path, kernels={"shared_experts": "routed"})
    assert any(layer.mlp.experts.total > layer.mlp.experts.routed for layer in runner.model.model.layers[1:])
    assert told_by(runner, tmp_path, kernels=runner.runtime.kernels) == expected


def test_data_parallel_ranks_report_the_rows_of_all():
    """As both frameworks count them; here the other data-parallel rank has the same rows in another order."""

    class Two(SingleDataParallelRank):
        def gather(self, *rows):
            return tuple(torch.cat([each.flip(0), each]) for each in rows)

        def reduce(self, x):
            return x[len(x) // 2 :]

    told = Told()
    layer = mixture(PLAIN, replace(RUNTIME, data_parallel=Two(1, 2), routed_experts=told))
    alone = Told()
    one = mixture(PLAIN, replace(RUNTIME, routed_experts=alone))
    residual = torch.randn(5, HIDDEN)
    layer(Stream(None, residual.clone()))
    one(Stream(None, residual.clone()))
    assert told.experts[0] == alone.experts[0][::-1] + alone.experts[0]


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_fused_kernels_tell_the_same(tokens, shared):
    config = replace(PLAIN, shared_size=shared * SIZE)
    told, expected = Told(), Told()
    forced = {"shared_experts": "routed"} if shared else {}
    fused = mixture(config, replace(triton_runtime(**forced), routed_experts=told))
    plain = mixture(config, replace(RUNTIME, routed_experts=expected))
    plain.router.weight.data.copy_(fused.router.weight)
    plain.norm.weight.data.copy_(fused.norm.weight)
    residual = torch.randn(tokens, HIDDEN)
    for layer in (fused, plain):
        layer(Stream(None, residual.clone()))
    assert told.experts == expected.experts
    assert len(told.experts[0][0]) == PLAIN.routing.top_k
