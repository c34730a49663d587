"""Which speculative decoding our models support, checked while SGLang resolves its arguments."""

from __future__ import annotations

from typing import Any

from atom_core.loading import check_files
from atom_core.models.registry import DRAFTS, load_draft_class
from atom_core.quant import QuantConfig
from atom_plugin.common.hub import folder_to_check
from atom_plugin.sglang import BACKEND, our_backends
from atom_plugin.sglang.checkpoint_config import values_of
from atom_plugin.sglang.hybrids import attention_ranks, refused_with_own_drafts
from atom_plugin.sglang.padding import to_be_padded

#: SGLang's default of --speculative-eagle-topk for a head on a target of this architecture; 1 (a chain) for others.
TREES = {"LlamaForCausalLM": 4}


def attention_ranks_of(view: Any) -> int:
    """See :func:`.hybrids.attention_ranks`."""
    return attention_ranks(int(view.tp_size), int(view.attn_dp_size))


def check_drafts(view: Any, attention: str, architecture: str) -> None:
    """Refuse speculation that our model does not support as its target.

    Args:
        view: SGLang's resolving view of the server's arguments.
        attention: the attention backend of the target.
        architecture: of the target.

    Raises:
        ValueError: our models or our attention backend do not support the speculation.
    """
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return
    if view.attn_dp_size > 1 and algorithm != "STANDALONE" and architecture not in DRAFTS:
        raise ValueError(
            f"--speculative-algorithm {algorithm} by a head that is no layer of the checkpoint is not supported with "
            f"--attn-dp-size {view.attn_dp_size} (--enable-dp-attention): the head would read the target's weights "
            "with another sharding. Leave one of them out."
        )
    draft_attention = view.speculative_draft_attention_backend
    if algorithm == "STANDALONE" and draft_attention not in (None, attention):
        raise ValueError(
            f"--speculative-draft-attention-backend {draft_attention} with --speculative-algorithm STANDALONE is not "
            f"supported: a draft that is one of our models runs on the target's attention backend, {attention}."
        )
    if algorithm == "STANDALONE" and view.speculative_draft_kv_cache_dtype is not None:
        raise ValueError(
            f"--speculative-draft-kv-cache-dtype {view.speculative_draft_kv_cache_dtype} is not supported: a draft "
            "that is one of our models has a cache of the target's dtype. Leave it out."
        )
    if {attention, draft_attention}.isdisjoint(our_backends()):
        return
    default = 1 if algorithm == "STANDALONE" else TREES.get(architecture, 1)
    check_chain(view.speculative_eagle_topk or default)


def check_chain(candidates: int) -> None:
    """Refuse trees of draft tokens: our kernels have only the causal mask.

    Raises:
        ValueError: more than one candidate a step.
    """
    if candidates > 1:
        raise ValueError(
            f"--speculative-eagle-topk {candidates} is not supported by --attention-backend {BACKEND}, which verifies "
            "chains of draft tokens and not trees: set it to 1 (for example with --speculative-num-steps 3 and "
            "--speculative-num-draft-tokens 4), or name another attention backend."
        )


def check_own_layers(view: Any, hf_config: Any, quant: QuantConfig) -> None:
    """Refuse speculation except multi-token prediction by the checkpoint's own layers: of MLA and of hybrid models.

    Args:
        view: SGLang's resolving view of the server's arguments.
        hf_config: of the target.
        quant: of the checkpoint.

    Raises:
        ValueError: another algorithm, a checkpoint without these layers, or settings that they do not support.
    """
    if view.speculative_algorithm is None:
        return
    for reason in refused_with_own_drafts(view, hf_config.architectures[0], our_backends()):
        raise ValueError(reason)
    config = load_draft_class(hf_config.architectures[0]).from_hf(values_of(hf_config))
    check_files(
        to_be_padded(config, view, attention_ranks_of(view), quant),
        folder_to_check(view.model_path, view.revision, view.download_dir, view.load_format),
        tensor_parallel_size=attention_ranks_of(view),
        quant=quant,
        expert_parallel=view.ep_size > 1,
        data_parallel_size=view.attn_dp_size,
    )
