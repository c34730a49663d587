"""What is refused of models that keep states, and of drafts by a checkpoint's own layers; no SGLang is imported.

``given`` has the fields of SGLang's server arguments, None where a command does not say. The adapter asks with the
arguments as SGLang has resolved them, ``atom-plugin doctor`` with a command's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atom_plugin.common.load_formats import SHARDED_STATE
from atom_plugin.common.states import MOST_DRAFTS, STATE_DTYPES
from atom_plugin.sglang import BACKEND
from atom_plugin.sglang.flags import LOAD_FORMATS, captures_whole_prompts

if TYPE_CHECKING:
    from atom_core.config import ModelConfig

#: SGLang's only way to say which layers have full attention: every n-th. Files saved by Transformers 5 lack it.
INTERVAL, _DEFAULT = "full_attention_interval", 4
FULL = "full_attention"
#: Algorithms that draft by layers of the checkpoint.
OWN_LAYERS = ("EAGLE", "NEXTN")
#: The draft as the checkpoint has it, which SGLang writes as None once it has resolved its arguments.
UNQUANTIZED = "unquant"
_OTHERWISE = "Leave it out, or unset SGLANG_EXTERNAL_MODEL_PACKAGE."


def interval_of(architecture: str, values: Mapping[str, Any]) -> int:
    """Which layers have full attention: each whose number, counted from 1, is a multiple of this.

    Args:
        architecture: for the error.
        values: of the text's configuration.

    Raises:
        ValueError: they are other layers.
    """
    kinds = values.get("layer_types")
    if kinds is None:
        return int(values.get(INTERVAL) or _DEFAULT)
    full = [number for number, kind in enumerate(kinds, 1) if kind == FULL]
    interval = full[0] if full else len(kinds) + 1
    if full != list(range(interval, len(kinds) + 1, interval)):
        raise ValueError(
            f"{architecture} has full attention in layers {[number - 1 for number in full]} (layer_types of "
            f"config.json). SGLang can keep the tokens of such a model only if it is every n-th layer ({INTERVAL})."
        )
    return interval


def refused_in_configuration(given: Any, architecture: str, device: str, has_images: bool) -> Iterator[str]:
    """Each reason not to read such a model's configuration for a command, and behind it what to do.

    Args:
        given: see the module.
        architecture: of the model.
        device: the kind that it would run on.
        has_images: whether the checkpoint has more than text.
    """
    if keeps_prefixes_by_tokens(given, device) and (given.page_size or 1) > 1 and not given.disable_radix_cache:
        yield (
            f"--page-size {given.page_size} with prefix caching is not supported on a CPU for {architecture}: SGLang "
            "keeps the states of prefixes by single tokens there. Leave it out, or add --disable-radix-cache."
        )
    if has_images and given.enable_multimodal:
        yield (f"--enable-multimodal is not supported: atom-plugin has only the text of {architecture}. {_OTHERWISE}")
    if has_images and (given.tokenizer_worker_num or 1) > 1:
        yield (
            f"--tokenizer-worker-num {given.tokenizer_worker_num} is not supported by atom-plugin for {architecture}: "
            "SGLang loads no plug-in in such workers, and images in a request would be left out instead of refused. "
            "Leave it out."
        )


def keeps_prefixes_by_tokens(given: Any, device: str) -> bool:
    """Whether SGLang must keep the states of prefixes by single tokens: its other ways are for accelerators only."""
    return device == "cpu" and given.mamba_radix_cache_strategy in (None, "auto")


def attention_ranks(ranks: int, dp_size: int) -> int:
    """The number of ranks that share a request's attention: ``--tp-size`` divided by ``--attn-dp-size``.

    Raises:
        ValueError: it is not divisible.
    """
    if dp_size < 1 or ranks % dp_size:
        raise ValueError(
            f"--attn-dp-size {dp_size} (--enable-dp-attention) does not divide --tp-size {ranks}, the number of ranks."
        )
    return ranks // dp_size


def check_data_parallel(config: ModelConfig, ranks: int, dp_size: int) -> None:
    """Refuse to share requests out over the ranks of a model without mixtures of experts.

    Args:
        config: of the model.
        ranks: see :func:`attention_ranks`.
        dp_size: see there.

    Raises:
        ValueError: this is asked for, or not divisible.
    """
    shared = attention_ranks(ranks, dp_size)
    if dp_size > 1 and not config.has_mixtures:
        raise ValueError(
            f"--attn-dp-size {dp_size} (--enable-dp-attention) is for mixtures of experts, which it splits over all "
            f"ranks, and {config.architecture} is not one: --dp-size {dp_size} without it, and --tp-size {shared}, "
            "serves it by ranks that need not wait for one another."
        )


def refused_with_states(given: Any, attention: str, ours: Collection[str], dtype: str | None) -> Iterator[str]:
    """Each reason not to serve a model with linear attention, and behind it what to do.

    Args:
        given: see the module.
        attention: the backend of its full attention.
        ours: the names of backends that are ours.
        dtype: of its states, by ``config.json`` or a variable.
    """
    if not given.mamba_ssm_dtype and dtype not in (None, *STATE_DTYPES):
        yield (
            f"mamba_ssm_dtype={dtype} (config.json) is not supported by atom-plugin for the states of linear "
            f"attention; supported: {', '.join(STATE_DTYPES)}. Add --mamba-ssm-dtype float32."
        )
    whole = given.cuda_graph_backend_prefill == "full" or captures_whole_prompts(given.cuda_graph_config)
    if whole and attention not in ours:
        yield (
            "--cuda-graph-backend-prefill full is not supported by atom-plugin for models with linear attention; "
            f"supported: breakable, disabled. {_OTHERWISE}"
        )
    if given.speculative_algorithm is None:
        return
    tokens = max((given.speculative_num_steps or 0) + 1, given.speculative_num_draft_tokens or 0)
    if tokens > MOST_DRAFTS + 1:
        yield (
            f"--speculative-num-draft-tokens {tokens} (one more than --speculative-num-steps) is not supported by "
            f"atom-plugin for models with linear attention; supported: up to {MOST_DRAFTS + 1}. Set it to "
            f"{MOST_DRAFTS + 1}, with --speculative-num-steps {MOST_DRAFTS}, or to less."
        )
    if attention not in ours:
        yield (
            f"--speculative-algorithm {given.speculative_algorithm} with --attention-backend {attention} is not "
            f"supported by atom-plugin for models with linear attention: their drafts run on {BACKEND!r}. Leave "
            "--attention-backend out."
        )


def refused_with_own_drafts(given: Any, architecture: str, ours: Collection[str]) -> Iterator[str]:
    """Each reason not to draft for a model that has layers of its own for it, and behind it what to do.

    Args:
        given: see the module.
        architecture: of the model.
        ours: the names of backends that are ours.
    """
    algorithm = given.speculative_algorithm
    if algorithm is None:
        return
    form = given.speculative_draft_load_format
    path, attention = given.speculative_draft_model_path, given.speculative_draft_attention_backend
    quantization = given.speculative_draft_model_quantization
    dtype = given.speculative_draft_kv_cache_dtype
    for refused, what in (
        (algorithm not in OWN_LAYERS, f"--speculative-algorithm {algorithm}"),
        (path not in (None, given.model_path), f"--speculative-draft-model-path {path}"),
        (attention not in (None, *ours), f"--speculative-draft-attention-backend {attention}"),
        (dtype is not None, f"--speculative-draft-kv-cache-dtype {dtype}"),
        (
            quantization not in (None, UNQUANTIZED, given.quantization),
            f"--speculative-draft-model-quantization {quantization}",
        ),
        (form not in (None, *LOAD_FORMATS), f"--speculative-draft-load-format {form}"),
        (given.speculative_token_map is not None, f"--speculative-token-map {given.speculative_token_map}"),
        (bool(given.enable_multi_layer_eagle), "--enable-multi-layer-eagle"),
        (SHARDED_STATE in (given.load_format, form), f"--load-format {SHARDED_STATE}"),
        ((given.pp_size or 1) > 1, f"speculation with --pp-size {given.pp_size}"),
    ):
        if refused:
            yield (
                f"atom-plugin does not support {what} for {architecture}: it drafts by layers of its own checkpoint "
                "(--speculative-algorithm NEXTN), which share the target's embedding, head and attention. "
                f"{_OTHERWISE}"
            )
