"""Which speculative decoding our models can take part in, decided while SGLang resolves its arguments."""

from __future__ import annotations

from typing import Any

from atom_plugin.common.support import SGLANG_DRAFTS
from atom_plugin.sglang import BACKEND, our_backends

#: What SGLang chooses for a head on a target of this architecture where nothing is said; for all else it is a chain.
TREES = {"LlamaForCausalLM": 4}


def check_drafts(view: Any, attention: str, architecture: str) -> None:
    """Refuse speculation that one of our models, as its target, cannot take part in.

    Args:
        view: SGLang's resolving view of the server's arguments.
        attention: the attention backend of the target.
        architecture: of the target.

    Raises:
        ValueError: a way to speculate that our models or our attention backend cannot take part in.
    """
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return
    if algorithm not in SGLANG_DRAFTS:
        raise ValueError(
            f"atom-plugin does not support --speculative-algorithm {algorithm} (it has: {', '.join(SGLANG_DRAFTS)}). "
            "Unset SGLANG_EXTERNAL_MODEL_PACKAGE to use it."
        )
    of_drafts = view.speculative_draft_attention_backend
    if algorithm == "STANDALONE" and of_drafts not in (None, attention):
        raise ValueError(
            f"--speculative-draft-attention-backend {of_drafts} with --speculative-algorithm STANDALONE cannot be: a "
            f"draft that is one of our models runs on the target's attention backend, which is {attention}."
        )
    if algorithm == "STANDALONE" and view.speculative_draft_kv_cache_dtype is not None:
        raise ValueError(
            f"--speculative-draft-kv-cache-dtype {view.speculative_draft_kv_cache_dtype} is not supported: a draft "
            "that is one of our models has a cache of the target's dtype. Leave it out."
        )
    if {attention, of_drafts}.isdisjoint(our_backends()):
        return
    if view.speculative_adaptive:
        raise ValueError(f"--speculative-adaptive is not supported by --attention-backend {BACKEND}.")
    unsaid = 1 if algorithm == "STANDALONE" else TREES.get(architecture, 1)
    check_chain(view.speculative_eagle_topk or unsaid)


def check_chain(candidates: int) -> None:
    """Refuse trees of draft tokens: our kernels have the causal mask only.

    Raises:
        ValueError: more than one candidate a step.
    """
    if candidates > 1:
        raise ValueError(
            f"--speculative-eagle-topk {candidates} is not supported by --attention-backend {BACKEND}, which verifies "
            "chains of draft tokens and not trees: set it to 1 (with --speculative-num-steps 3 and "
            "--speculative-num-draft-tokens 4, say), or name another attention backend."
        )
