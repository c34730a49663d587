"""What is refused of models with linear attention, which keep a state for each request; no vLLM is imported.

The adapter asks with what vLLM has made of a command, ``atom-plugin doctor`` with the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from atom_plugin.common.states import MOST_DRAFTS, STATE_DTYPES

#: What drafts on vLLM's model runner V1 alone.
ON_OLDER_RUNNER = ("suffix",)
#: What does before the version from which on the newer one does, too.
BY_NGRAMS, NEWER_RUNNER_DRAFTS_BY_NGRAMS = ("ngram", "ngram_gpu"), (0, 32)


@dataclass(frozen=True)
class Asked:
    """What a command asks for, where it matters."""

    on_vllms_attention: bool
    """``ATOM_DISABLE_VLLM_ATTENTION=1``."""
    caches_prefixes: bool
    older_runner: bool
    """vLLM's model runner V1."""
    state_dtype: str
    num_drafts: int = 0
    draft_method: str | None = None
    """None: nothing is drafted."""


def refusals(asked: Asked) -> Iterator[str]:
    """Each reason not to serve such a model as ``asked``, and behind it what to do."""
    if asked.on_vllms_attention:
        yield (
            "ATOM_DISABLE_VLLM_ATTENTION=1 is not supported for models with linear attention: their full attention has "
            "an output gate, which our layer applies. Unset it, or leave --model-impl atom out."
        )
    if asked.state_dtype not in STATE_DTYPES:
        yield (
            f"--model-impl atom does not support states of linear attention in {asked.state_dtype}; supported: "
            f"{', '.join(STATE_DTYPES)}. Add --mamba-ssm-cache-dtype float32; without it the checkpoint, "
            "--mamba-cache-dtype or --dtype decides."
        )
    if asked.draft_method is not None and asked.caches_prefixes and asked.older_runner:
        yield (
            "--model-impl atom does not support speculative decoding with prefix caching for models with linear "
            "attention on vLLM's model runner V1, which forgets how many drafts were accepted of a request that a step "
            "leaves out. Add --no-enable-prefix-caching, or leave out --speculative-config."
        )
    if asked.num_drafts > MOST_DRAFTS:
        yield (
            f"num_speculative_tokens={asked.num_drafts} (--speculative-config) is not supported by --model-impl atom "
            f"for models with linear attention; supported: up to {MOST_DRAFTS}."
        )
    if asked.draft_method == "draft_model":
        yield (
            "--model-impl atom does not support draft models for models with linear attention, whose cache has groups "
            "of layers. Use mtp (if the checkpoint has layers for it), ngram or suffix, or leave --model-impl out."
        )


def refused_stages(full: Sequence[bool], stages: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Each pipeline stage that such a model cannot have, and behind it what to do.

    Args:
        full: whether each layer has full attention.
        stages: the first layer of each, and the one after its last.
    """
    for stage, (first, end) in enumerate(stages):
        if not any(full[first:end]):
            yield (
                f"--pipeline-parallel-size {len(stages)} gives stage {stage} layers {first} to {end - 1}, none of "
                "which has full attention, and vLLM lays out its cache by those. Use fewer stages, or "
                "VLLM_PP_LAYER_PARTITION."
            )


def stages_of(num_layers: int, count: int, partition: str | None) -> list[tuple[int, int]]:
    """How vLLM shares layers out over pipeline stages (its ``get_pp_indices``, which the adapter calls).

    Args:
        num_layers: of the model.
        count: of stages.
        partition: ``VLLM_PP_LAYER_PARTITION``.

    Raises:
        ValueError: the partition does not fit.
    """
    sizes = [num_layers // count] * count
    for i in range(num_layers % count):
        sizes[-i - 2] += 1  # of the last ones, but for the very last, which has the head
    if partition is not None:
        try:
            sizes = [int(size) for size in partition.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != count or sum(sizes) != num_layers:
            raise ValueError(
                f"VLLM_PP_LAYER_PARTITION={partition} does not share {num_layers} layers out over {count} stages. Give "
                f"{count} numbers with that sum, and a comma between them, or unset it."
            )
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))
