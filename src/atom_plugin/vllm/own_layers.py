"""What is refused of drafts by a checkpoint's own layers (multi-token prediction); no vLLM is imported.

The adapter asks with what vLLM has made of a command, ``atom-plugin doctor`` with the command. The layers may lie in
another folder than the target: vLLM drafts by those of any model that has some, whatever method was asked for, and
gives them the target's hidden states, embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atom_core.models.registry import DRAFTS, MODELS
from atom_plugin.common.load_formats import SHARDED_STATE

if TYPE_CHECKING:
    from atom_core.config import ModelConfig

#: The speculative method of such drafts.
METHOD = "mtp"


@dataclass(frozen=True)
class Asked:
    """What a command asks for, where it matters; None: it does not say."""

    stages: int
    """``--pipeline-parallel-size``."""
    ranks: int
    """``--tensor-parallel-size``."""
    draft_ranks: int | None
    cache_dtype: str
    draft_cache_dtype: str | None
    load_format: str
    head_quantization: str | None


def refusals(asked: Asked) -> Iterator[str]:
    """Each reason not to draft by such layers as ``asked``, and behind it what to do."""
    for differs, what in (
        (asked.stages > 1, f"--pipeline-parallel-size {asked.stages}: the draft's stage has no embedding"),
        (
            asked.draft_ranks not in (None, asked.ranks),
            f"draft_tensor_parallel_size={asked.draft_ranks} and --tensor-parallel-size {asked.ranks}: the embedding "
            "and the head are the target's",
        ),
        (
            asked.draft_cache_dtype not in (None, asked.cache_dtype),
            f"kv_cache_dtype={asked.draft_cache_dtype} for the draft; its cache has the target's dtype",
        ),
        (
            asked.load_format == SHARDED_STATE,
            f"--load-format {SHARDED_STATE}, whose files do not have the draft layers",
        ),
        (
            asked.head_quantization is not None,
            f"draft_lm_head_quantization={asked.head_quantization}; drafts use the target's head",
        ),
    ):
        if differs:
            yield (
                f"--model-impl atom does not support multi-token prediction (method {METHOD!r}) with {what}. "
                "Leave one of them out."
            )


def check_architecture(folder: str, file: Mapping[str, Any], architecture: str) -> None:
    """Check that a checkpoint has layers that draft for a target.

    Args:
        folder: of the layers that draft.
        file: its ``config.json``.
        architecture: the target's.

    Raises:
        ValueError: they are those of another model.
    """
    for name in file.get("architectures") or ():
        if name in MODELS and DRAFTS.get(name) != DRAFTS[architecture]:
            raise ValueError(_misfit(folder, f"its architecture is {name}, the target's {architecture}"))


def check_sizes(folder: str, draft: ModelConfig, target: ModelConfig) -> None:
    """Check that layers that draft, in ``folder``, fit a target's embedding, hidden states and head.

    Raises:
        ValueError: they have other sizes.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(draft, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(_misfit(folder, f"its {name} is {ours}, the target's {theirs}"))


def _misfit(folder: str, differs: str) -> str:
    return (
        f"--speculative-config drafts by the layers of {folder}, which do not fit the target: {differs}. vLLM drafts "
        f"by a model's layers for multi-token prediction (method {METHOD!r}) where it has some. They take the target's "
        "hidden states, embedding and head, and --hf-overrides changes the target alone. Draft by the target's own "
        "layers, as its config.json has them, or use ngram or suffix."
    )
