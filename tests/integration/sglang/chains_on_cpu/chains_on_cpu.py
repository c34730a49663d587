"""A plug-in for SGLang that gives it speculative decoding on a CPU, for tests: two kernels that it lacks there.

They are for chains, which are trees of one draft after the other (`--speculative-eagle-topk 1`). SGLang has both as
Triton kernels for any tree, but Triton's interpreter takes longer for them than the model takes. A folder with this
module and its metadata on PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

from typing import Any

import torch

SPEC_TREE = "sglang.kernels.ops.speculative.spec_tree"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SPEC_TREE}.build_tree_kernel_efficient_func", build_chains, HookType.REPLACE)
    HookRegistry.register(f"{SPEC_TREE}.verify_tree_greedy_func", verify_greedily, HookType.REPLACE)


def build_chains(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """See SGLang: each token of a chain sees the request's tokens and those before it in the chain, and itself."""
    assert topk == 1
    count = num_verify_tokens
    place = torch.arange(count)
    requests = torch.arange(len(seq_lens))[:, None]
    positions.copy_((seq_lens.cpu()[:, None] + place).flatten())
    retrieve_index.copy_(requests * count + place)
    retrieve_next_token.copy_(torch.where(place == count - 1, -1, place + 1).expand(len(seq_lens), -1))
    retrieve_next_sibling.fill_(-1)
    chain, begin = place[:, None] >= place, 0
    for length in seq_lens.tolist() if tree_mask_mode == 0 else [0] * len(seq_lens):
        width = length + count
        mask = tree_mask[begin : begin + count * width].view(count, width)
        mask[:, :length] = True
        mask[:, length:] = chain
        begin += count * width


def verify_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[Any, Any, Any]:
    """See SGLang: of each chain the drafts are accepted up to the first that the model would not have said."""
    rows, count = candidates.shape
    said = target_predict.view(rows, count)
    right = (candidates[:, 1:] == said[:, :-1]).int().cumprod(1).sum(1)
    place = torch.arange(count)
    accepted = place <= right[:, None]
    of_rows = predicts.view(-1)[: rows * count].view(rows, count)
    of_rows.copy_(torch.where(accepted, said.to(predicts.dtype), of_rows))
    kept = min(count, accept_index.shape[1])
    index = retrieve_index[:, :kept].to(accept_index.dtype)
    accept_index[:, :kept] = torch.where(accepted[:, :kept], index, accept_index[:, :kept])
    accept_token_num.copy_(right)
    return predicts, accept_index, accept_token_num
