"""The measured model: a checkpoint's folder, a `config.json`, or the name of a public model.

Named models have the dimensions of their published `config.json`. Weights are random, so nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom_core.checkpoint import read_config_json

HfValues = dict[str, Any]


def _qwen3(**values: Any) -> HfValues:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        **values,
    }


def _qwen2(**values: Any) -> HfValues:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        **values,
    }


def _llama3(**values: Any) -> HfValues:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        **values,
    }


#: FP8 weights in blocks, as Qwen's own FP8 checkpoints have them.
_FP8_BLOCKS: HfValues = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_MX: HfValues = {"dtype": "fp4", "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"}
#: Weights and activations in MXFP4, as AMD's own checkpoints have them.
_QUARK_MXFP4: HfValues = {
    "exclude": ["lm_head"],
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "global_quant_config": {
        "input_tensors": {**_MX, "is_dynamic": True},
        "weight": {**_MX, "is_dynamic": False},
    },
    "layer_quant_config": {},
    "quant_method": "quark",
}
_QWEN3_8B = _qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
_QWEN3_30B_A3B = _qwen3(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
)
#: As in the published checkpoints; without it an engine would take the routers as quantised.
_QWEN3_30B_A3B_PLAIN = ["lm_head", *(f"model.layers.{index}.mlp.gate" for index in range(48))]


def _hybrid_fp8(values: HfValues) -> HfValues:
    """In blocks, with what published checkpoints of the family leave in 16 bits."""
    names = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba", "linear_attn.conv1d")
    plain = (*names, "mlp.gate", "mlp.shared_expert_gate")
    layers = range(values["num_hidden_layers"])
    left_out = ["lm_head", *(f"model.layers.{index}.{name}" for index in layers for name in plain)]
    return {**values, "quantization_config": {**_FP8_BLOCKS, "modules_to_not_convert": left_out}}


def _hybrid(layers: int, **values: Any) -> HfValues:
    return {
        "attention_bias": False,
        "eos_token_id": 248044,
        # SGLang's own classes read this, and not layer_types; published checkpoints have both.
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 248320,
        **values,
    }


_QWEN3_5_35B_A3B = _hybrid(
    40,
    architectures=["Qwen3_5MoeForCausalLM"],
    model_type="qwen3_5_moe_text",
    hidden_size=2048,
    moe_intermediate_size=512,
    num_attention_heads=16,
    num_experts=256,
    num_experts_per_tok=8,
    num_key_value_heads=2,
    shared_expert_intermediate_size=512,
)
_QWEN3_NEXT = _hybrid(
    48,
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    decoder_sparse_step=1,
    eos_token_id=151645,
    hidden_size=2048,
    intermediate_size=5120,
    mlp_only_layers=[],
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_key_value_heads=2,
    shared_expert_intermediate_size=512,
    vocab_size=151936,
)

#: Each model's `config.json` by name. Architectures that the core does not have are for engines only.
CONFIGS: Mapping[str, HfValues] = {
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": _qwen3(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _qwen3(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-8b-fp8": {**_QWEN3_8B, "quantization_config": _FP8_BLOCKS},
    "qwen3-8b-mxfp4": {**_QWEN3_8B, "quantization_config": _QUARK_MXFP4},
    "qwen3-14b": _qwen3(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40),
    "qwen3-32b": _qwen3(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
    "qwen2.5-0.5b": _qwen2(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        vocab_size=151936,
    ),
    "qwen2.5-7b": _qwen2(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "llama-3.1-8b": _llama3(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    },
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": {
        **_QWEN3_30B_A3B,
        "quantization_config": {**_FP8_BLOCKS, "modules_to_not_convert": _QWEN3_30B_A3B_PLAIN},
    },
    "qwen3-30b-a3b-mxfp4": {
        **_QWEN3_30B_A3B,
        "quantization_config": {**_QUARK_MXFP4, "exclude": _QWEN3_30B_A3B_PLAIN},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "eos_token_id": 151329,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {**_FP8_BLOCKS, "fmt": "e4m3"},
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "qwen3.5-27b": _hybrid(
        64,
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        hidden_size=5120,
        intermediate_size=17408,
        linear_num_value_heads=48,
        num_attention_heads=24,
        num_key_value_heads=4,
    ),
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    "qwen3.5-35b-a3b-fp8": _hybrid_fp8(_QWEN3_5_35B_A3B),
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "qwen3-next-80b-a3b-fp8": _hybrid_fp8(_QWEN3_NEXT),
}


def read_config(model: str, num_layers: int | None = None) -> HfValues:
    """The parsed `config.json` of `model`.

    Args:
        model: a name of :data:`CONFIGS`, a checkpoint's folder, or a JSON file.
        num_layers: keep only the first layers; None: all.

    Raises:
        ValueError: it is none of the three, cannot be read, or has fewer layers.
    """
    values = _read(model)
    return values if num_layers is None else cut(values, num_layers)


def cut(values: Mapping[str, Any], num_layers: int) -> HfValues:
    """The configuration with only its first layers; a ValueError if it has fewer."""
    if isinstance(text := values.get("text_config"), Mapping):
        return {**values, "text_config": cut(text, num_layers)}
    has = values.get("num_hidden_layers")
    if not isinstance(has, int) or not 0 < num_layers <= has:
        raise ValueError(f"--layers {num_layers}: the model has num_hidden_layers={has!r}.")
    result = {**values, "num_hidden_layers": num_layers}
    if isinstance(types := values.get("layer_types"), list):
        result["layer_types"] = types[:num_layers]
    return result


def _read(model: str) -> HfValues:
    path = Path(model)
    if path.is_dir():
        return read_config_json(path)
    if path.is_file():
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object.")
        return values
    if model in CONFIGS:
        return dict(CONFIGS[model])
    raise ValueError(f"{model!r} is neither a folder, nor a file, nor one of the known models: {', '.join(CONFIGS)}.")
