"""Which experts tokens go to: into what the caller gave, the best first."""

import torch
from aiter._recorded import real


@real("aiter.topk_softmax")
def topk_softmax(
    topk_weights,
    topk_indices,
    token_expert_indices,
    gating_output,
    need_renorm,
    num_shared_experts=0,
    shared_expert_scoring_func="",
):
    assert (num_shared_experts, shared_expert_scoring_func) == (0, "")
    _check(topk_weights, topk_indices, gating_output)
    assert token_expert_indices.dtype == torch.int32
    assert token_expert_indices.shape == topk_indices.shape
    scores = gating_output.float().softmax(-1)
    _choose(scores, scores, topk_weights, topk_indices, need_renorm, 1.0)


@real("aiter.topk_gating")
def topk_gating(
    topk_weights,
    topk_indices,
    gating_output,
    correction_bias=None,
    need_renorm=True,
    routed_scaling_factor=1.0,
    score_func="sqrtsoftplus",
):
    _check(topk_weights, topk_indices, gating_output)
    assert topk_indices.shape[1] <= 64, "a lane each"
    scores = gating_output.float()
    scores = {
        "sigmoid": torch.sigmoid,
        "softmax": lambda it: it.softmax(-1),
        "sqrtsoftplus": lambda it: torch.nn.functional.softplus(it).sqrt(),
    }[score_func](scores)
    ranked = scores
    if correction_bias is not None:
        assert correction_bias.dtype == torch.float32 or (
            correction_bias.dtype == torch.bfloat16 and gating_output.dtype != torch.float16
        )
        assert correction_bias.shape == gating_output.shape[1:]
        ranked = scores + correction_bias.float()
    _choose(scores, ranked, topk_weights, topk_indices, need_renorm, routed_scaling_factor)


@real("aiter.grouped_topk")
def grouped_topk(
    gating_output,
    topk_weights,
    topk_ids,
    num_expert_group,
    topk_group,
    need_renorm,
    is_softmax=True,
    routed_scaling_factor=1.0,
):
    _check(topk_weights, topk_ids, gating_output)
    scores = gating_output.float()
    scores = scores.softmax(-1) if is_softmax else scores.sigmoid()
    best = _in_groups(scores, num_expert_group, topk_group).amax(-1)
    ranked = _let_in(scores, best, topk_group)
    _choose(scores, ranked, topk_weights, topk_ids, need_renorm, routed_scaling_factor)


@real("aiter.biased_grouped_topk_hip")
def biased_grouped_topk_hip(
    gating_output,
    correction_bias,
    topk_weights,
    topk_ids,
    num_expert_group,
    topk_grp,
    need_renorm,
    routed_scaling_factor=1.0,
):
    _check(topk_weights, topk_ids, gating_output)
    assert correction_bias.dtype == gating_output.dtype, "its bits are read as numbers of the logits' dtype"
    assert correction_bias.shape == gating_output.shape[1:]
    scores = gating_output.float().sigmoid()
    ranked = scores + correction_bias.float()
    grouped = _in_groups(ranked, num_expert_group, topk_grp)
    lanes = 64 // num_expert_group
    if lanes not in (8, 4, 2):
        # The first lane alone counts: vectors of four numbers go round the lanes of a group.
        of_first = torch.arange(grouped.shape[-1]) // 4 % lanes == 0
        grouped = grouped[..., of_first]
    ranked = _let_in(ranked, grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1), topk_grp)
    special = (topk_ids.shape[1], num_expert_group, gating_output.shape[1], topk_grp) == (8, 8, 256, 4)
    scale = 1.0 if special and not need_renorm else routed_scaling_factor
    _choose(scores, ranked, topk_weights, topk_ids, need_renorm, scale)


def _check(weights, experts, logits):
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert logits.is_contiguous(), "some kernels look at no strides"
    assert weights.is_contiguous()
    assert experts.is_contiguous()
    assert weights.shape == experts.shape
    assert len(weights) == len(logits) > 0, "a launch of no programs"


def _in_groups(scores, groups, top_groups):
    assert groups in (1, 2, 4, 8)
    assert 1 <= top_groups <= groups
    assert scores.shape[1] % groups == 0
    size = scores.shape[1] // groups
    assert groups == 1 or size % 4 == 0, "groups are read four numbers at a time"
    return scores.view(len(scores), groups, size)


def _let_in(ranked, of_groups, top_groups):
    let_in = torch.zeros_like(of_groups, dtype=torch.bool)
    let_in.scatter_(-1, of_groups.topk(top_groups, -1)[1], True)
    size = ranked.shape[1] // of_groups.shape[1]
    return ranked.masked_fill(~let_in.repeat_interleave(size, -1), float("-inf"))


def _choose(scores, ranked, weights, experts, renormalize, scale):
    chosen = ranked.topk(experts.shape[1], -1)[1]
    found = scores.gather(-1, chosen)
    if renormalize:
        found = found / found.sum(-1, keepdim=True)
    weights.copy_(found * scale)
    experts.copy_(chosen)
