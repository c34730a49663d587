"""Keys of ``config.json`` that no family reads: harmless ones, neutral values, and keys that are refused.

``hf_keys.json`` has the names to which some class of Transformers, vLLM or SGLang gives a meaning.
``tools/config_keys.py`` writes it, and a test compares it with the installed versions, so a new release fails a test
instead of breaking a model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

#: Keys that change no logit of a served decoder, by reason.
HARMLESS_BY_REASON: Mapping[str, str] = MappingProxyType(
    {
        "about training": (
            "attention_dropout attn_pdrop aux_loss_alpha classifier_dropout embd_pdrop ep_size finetuning_task "
            "gradient_checkpointing hidden_dropout hidden_dropout_prob initializer_factor initializer_range "
            "output_router_logits pretraining_tp resid_pdrop router_aux_loss_coef router_jitter_noise "
            "router_z_loss_coef seq_aux summary_type train_batch_size use_bfloat16 z_loss_coefficient"
        ),
        "about token ids": (
            "bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id "
            "prefix sep_token_id suppress_tokens begin_suppress_tokens unk_token_id image_token_id video_token_id "
            "vision_start_token_id vision_end_token_id tokenizer_class"
        ),
        "a default for sampling, which the frameworks read from generation_config.json": (
            "bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
            "exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size "
            "num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty "
            "return_dict_in_generate temperature top_k top_p typical_p"
        ),
        "about the file, or about the tool that wrote it": (
            "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
            "_experts_implementation_internal "
            "_name_or_path attn_implementation auto_map base_model_prefix finetuned internal_version is_llama_config "
            "name_or_path neftune_noise_alpha original_architecture task_specific_params transformers.js_config "
            "transformers_version transformers_weights unsloth_fixed unsloth_version"
        ),
        "about how a library runs it": (
            "chunk_size_feed_forward dtype is_decoder num_logits_to_keep output_attentions output_hidden_states "
            "pruned_heads return_dict tf_legacy_loss torch_dtype torchscript use_cache use_flash_attention "
            "use_return_dict"
        ),
        "about heads that classify": "id2label label2id num_labels problem_type",
        "another name of a size that is read": (
            "experts_per_token initial_context_length max_sequence_length model_max_length qk_head_dim seq_length"
        ),
        # Only SGLang's YaRN reads it.
        "ignored by Transformers and vLLM": "attn_factor",
    }
)
HARMLESS: Mapping[str, str] = MappingProxyType(
    {key: reason for reason, keys in HARMLESS_BY_REASON.items() for key in keys.split()}
)
#: Values of other keys that change nothing, besides null, false and empty values.
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_multiplier": (1, 1.0),
        "embedding_multiplier": (1, 1.0),
        "expert_layer_offset": (0,),
        "hidden_size_per_layer_input": (0,),
        "logit_scale": (1, 1.0),
        "logits_scaling": (1, 1.0),
        "moe_layer_freq": (1,),
        "num_mtp_layers": (0,),
        "num_nextn_predict_layers": (0,),
        "residual_multiplier": (1, 1.0),
        "rotary_pct": (1, 1.0),
        "scoring_func": ("softmax",),
        "shared_expert_intermediate_size": (0,),
        "topk_method": ("greedy",),
    }
)


@cache
def meaningful() -> frozenset[str]:
    """Keys with a meaning in some class of Transformers, vLLM or SGLang."""
    return frozenset(json.loads(Path(__file__).with_name("hf_keys.json").read_text()))


def check_other_keys(architecture: str, others: Mapping[str, Any], prefix: str = "") -> None:
    """Check the keys ``others`` that the family of ``architecture`` does not read; unknown keys are one warning.

    Messages show ``prefix``, the path of the object with the keys.

    Raises:
        ValueError: another model gives the key a meaning, and its value is not neutral.
    """
    unknown = []
    for key, value in others.items():
        if key in HARMLESS or is_neutral(key, value):
            continue
        if key in meaningful():
            raise ValueError(
                f"The model's config has {prefix}{key}={_short(value)}, to which {architecture} gives no meaning here "
                "and other models do: it cannot be ignored. Serve the framework's own model, or remove the key "
                "if it is not needed."
            )
        unknown.append(f"{prefix}{key}={_short(value)}")
    if unknown:
        logger.warning("Keys of config.json that no model reads are ignored: %s", ", ".join(sorted(unknown)))


def is_neutral(key: str, value: Any) -> bool:
    """Whether a key that is not read has a value that changes nothing."""
    if value is None or value is False or (isinstance(value, (str, list, tuple, dict)) and not value):
        return True
    if key == "layer_types" and isinstance(value, (list, tuple)):
        return all(kind == "full_attention" for kind in value)
    return not isinstance(value, bool) and any(value == neutral for neutral in NEUTRAL.get(key, ()))


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
