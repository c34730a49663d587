"""Which experts tokens go to: the reference against Hugging Face's routers, the Triton kernel against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from atom_core.kernels import kernel_set
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.kernels.moe_routing.reference import route
from atom_core.kernels.select import Target
from atom_core.types import RoutingConfig

CPU = Target("cpu", "x86_64")
HIDDEN, EXPERTS = 16, 24

SPECS = {
    "one": RoutingConfig(5, 1, "softmax", renormalize=False),
    "Qwen3": RoutingConfig(128, 8, "softmax", renormalize=True),
    "not renormalised": RoutingConfig(60, 4, "softmax", renormalize=False),
    "Mixtral": RoutingConfig(8, 2, "softmax", renormalize=True),
    "GLM 4.5": RoutingConfig(128, 8, "sigmoid", renormalize=True, correction=True, scale=2.5),
    "DeepSeek V3": RoutingConfig(256, 8, "sigmoid", True, True, 2.5, num_groups=8, top_groups=4),
    "DeepSeek V2": RoutingConfig(60, 6, "softmax", False, False, 16.0, 6, 3, "largest"),
    "Kimi K2": RoutingConfig(384, 8, "sigmoid", True, True, 2.827),
    "groups of one": RoutingConfig(6, 2, "sigmoid", True, True, 1.0, 6, 3),
    "all": RoutingConfig(7, 7, "softmax", renormalize=True),
    "DeepSeek V3, one shared": RoutingConfig(256, 8, "sigmoid", True, True, 2.5, num_groups=8, top_groups=4, shared=1),
    "DeepSeek V2 Lite, two shared": RoutingConfig(64, 6, "softmax", renormalize=False, shared=2),
    "three shared": RoutingConfig(5, 1, "softmax", renormalize=False, scale=2.0, shared=3),
    "Qwen3-Next, one shared with a gate": RoutingConfig(512, 10, "softmax", True, shared=1, shared_gate=True),
    "three shared with a gate": RoutingConfig(24, 4, "sigmoid", True, True, 2.0, 4, 2, shared=3, shared_gate=True),
    "a gate of a separate network": RoutingConfig(60, 4, "softmax", renormalize=True, shared_gate=True),
}


def logits_of(spec, tokens=9, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    correction = torch.rand(spec.num_experts, generator=generator) if spec.correction else None
    return (3 * torch.randn(tokens, spec.num_logits, generator=generator)).to(dtype), correction


def by_expert(weights, experts, num_experts):
    """``[T, E]``: an order of one's own does not matter."""
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    found = torch.zeros(len(weights), num_experts)
    return found.scatter_add_(1, experts.long(), weights)


def by_definition(logits, correction, spec):
    """float64, a token at a time."""
    found = torch.zeros(len(logits), spec.total_experts, dtype=torch.float64)
    for token, logit in enumerate(logits.double()):
        row = logit[: spec.num_experts]
        scores = 1 / (1 + (-row).exp()) if spec.scoring == "sigmoid" else row.exp() / row.exp().sum()
        ranked = scores if correction is None else scores + correction.double()
        groups = ranked.view(spec.num_groups, -1)
        best = 2 if spec.group_score == "two largest" else 1
        scored = sorted(range(spec.num_groups), key=lambda g: -groups[g].sort(descending=True)[0][:best].sum())
        size = groups.shape[1]
        open_to = [expert for expert in range(spec.num_experts) if expert // size in scored[: spec.top_groups]]
        chosen = sorted(open_to, key=lambda expert: -ranked[expert])[: spec.top_k]
        weights = scores[chosen]
        if spec.renormalize:
            weights = weights / weights.sum()
        found[token, chosen] = weights * spec.scale
        gate = logit[spec.num_experts] if spec.shared_gate else torch.tensor(float("inf"))
        found[token, spec.num_experts :] = 1 / (1 + (-gate).exp())
    return found


every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_definition(spec, dtype):
    logits, correction = logits_of(spec, dtype=dtype)
    found = by_expert(*route(logits, correction, spec), spec.total_experts)
    torch.testing.assert_close(found.double(), by_definition(logits, correction, spec), rtol=1e-6, atol=1e-7)


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_triton_kernel_routes_as_the_reference_does(spec, dtype, tokens):
    from atom_core.kernels.moe_routing.triton_kernel import route as launch

    logits, correction = logits_of(spec, tokens, dtype)
    wide = torch.full((tokens, spec.num_logits + 3), float("nan"), dtype=dtype)  # a gap behind each row
    wide[:, : spec.num_logits] = logits
    weights, experts = launch(wide[:, : spec.num_logits], correction, spec, overlap=False)
    assert weights.shape == experts.shape == (tokens, spec.experts_per_token)
    found = by_expert(weights, experts, spec.total_experts)
    wanted = by_expert(*route(logits, correction, spec), spec.total_experts)
    shared = range(spec.num_experts, spec.total_experts)
    assert experts[:, spec.top_k :].tolist() == tokens * [list(shared)]
    assert (weights[:, spec.top_k :] == 1.0).all() or spec.shared_gate
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_gate_takes_no_part_in_the_choice():
    spec = SPECS["Qwen3-Next, one shared with a gate"]
    logits, correction = logits_of(spec)
    weights, experts = route(logits, correction, spec)
    logits[:, spec.num_experts] = 1e4  # the largest by far
    logits[:, spec.num_experts + 1 :] = float("nan")
    for chosen in (route(logits, correction, spec), launched(logits, correction, spec)):
        assert torch.equal(chosen[1].sort(-1).values, experts.sort(-1).values)
        torch.testing.assert_close(chosen[0][:, :-1].sort(-1).values, weights[:, :-1].sort(-1).values)
        assert (chosen[0][:, -1] == 1.0).all()


def launched(logits, correction, spec):
    from atom_core.kernels.moe_routing.triton_kernel import route as launch

    return launch(logits, correction, spec, overlap=False)


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek V3"])
def test_equal_and_impossible_scores_still_choose_as_many_experts(name):
    from atom_core.kernels.moe_routing.triton_kernel import route as launch

    spec = SPECS[name]
    logits = torch.zeros(3, spec.num_experts)
    logits[1] = float("nan")
    logits[2] = -1e9  # a sigmoid of nothing
    correction = torch.zeros(spec.num_experts) if spec.correction else None
    weights, experts = launch(logits, correction, spec, overlap=False)
    for row in experts.tolist():
        assert len(set(row)) == spec.top_k
        assert all(0 <= expert < spec.num_experts for expert in row)
    assert weights[[0, 2]].isfinite().all()


def config(kind, **settings):
    return AutoConfig.for_model(kind, hidden_size=HIDDEN, num_experts_per_tok=4, **settings)


def glm_like(kind, router, groups):
    built = config(
        kind, n_routed_experts=EXPERTS, n_group=groups, topk_group=2 if groups > 1 else 1, routed_scaling_factor=1.5
    )
    spec = RoutingConfig(EXPERTS, 4, "sigmoid", True, True, 1.5, groups, 2 if groups > 1 else 1)
    return router(built), spec


ROUTERS = {
    "Qwen3-MoE": lambda: (
        Qwen3MoeTopKRouter(config("qwen3_moe", num_experts=EXPERTS, norm_topk_prob=True)),
        RoutingConfig(EXPERTS, 4, "softmax", renormalize=True),
    ),
    "Qwen3-MoE, not renormalised": lambda: (
        Qwen3MoeTopKRouter(config("qwen3_moe", num_experts=EXPERTS, norm_topk_prob=False)),
        RoutingConfig(EXPERTS, 4, "softmax", renormalize=False),
    ),
    "Mixtral": lambda: (
        MixtralTopKRouter(config("mixtral", num_local_experts=EXPERTS)),
        RoutingConfig(EXPERTS, 4, "softmax", renormalize=True),
    ),
    "GPT-OSS": lambda: (
        GptOssTopKRouter(config("gpt_oss", num_local_experts=EXPERTS)),
        RoutingConfig(EXPERTS, 4, "softmax", renormalize=True),
    ),
    "GLM 4.5": lambda: glm_like("glm4_moe", Glm4MoeTopkRouter, 1),
    "GLM 4.5, groups": lambda: glm_like("glm4_moe", Glm4MoeTopkRouter, 4),
    "DeepSeek V2": lambda: (
        DeepseekV2TopkRouter(
            config(
                "deepseek_v2",
                num_attention_heads=4,
                n_routed_experts=EXPERTS,
                n_group=4,
                topk_group=2,
                topk_method="group_limited_greedy",
                routed_scaling_factor=1.5,
            )
        ),
        RoutingConfig(EXPERTS, 4, "softmax", False, False, 1.5, 4, 2, "largest"),
    ),
    "DeepSeek V3": lambda: glm_like("deepseek_v3", DeepseekV3TopkRouter, 4),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_reference_routes_as_hugging_face_does(name):
    router, spec = ROUTERS[name]()
    generator = torch.Generator().manual_seed(1)
    for parameter in (*router.parameters(), *router.buffers()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(11, HIDDEN, generator=generator)
    with torch.no_grad():
        answer = router(x)
    logits, weights, experts = answer if len(answer) == 3 else (None, *answer)
    correction = getattr(router, "e_score_correction_bias", None)
    if logits is None or logits.shape != (11, EXPERTS):
        logits = x @ router.weight.T + getattr(router, "bias", 0)
    wanted = by_expert(weights.float(), experts.int(), EXPERTS)
    found = by_expert(*route(logits, correction, spec), EXPERTS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_who_runs_it():
    kernels = kernel_set(CPU)
    kernels.select(MOE_ROUTING, SPECS["Qwen3"])
    (choice,) = kernels.choices()
    assert choice.implementation == "reference"
    triton = kernel_set(Target("cuda", "sm90"))
    assert triton.chosen(MOE_ROUTING, SPECS["Qwen3"]) == "triton"
    assert triton.chosen(MOE_ROUTING, RoutingConfig(2048, 8, "softmax", True)) == "reference"


def test_aiter_routes_to_what_it_chooses_alone():
    from atom_core.kernels.moe_routing.aiter_kernel import why_not

    spec = SPECS["DeepSeek V3"]
    assert why_not(spec) is None
    assert "none that all tokens share" in why_not(replace(spec, shared=1))
    assert "without a gate of shared ones" in why_not(replace(spec, shared_gate=True))
