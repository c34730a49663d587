"""Cases of vLLM: a line each."""

from __future__ import annotations

from tests.flags.case import Case

_JSON = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_LONG = ["x y z " * 40 + str(number) for number in range(12)]
_SHARED = ["one two three four five six seven eight nine ten " * 12 + tail for tail in ("a", "b", "c")]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": "@llama"}
_SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
_MTP = {"method": "mtp", "num_speculative_tokens": 2}

SERVED = (
    Case("no flag", sample=True),
    Case("no flag, mixture", family="qwen3_moe", sample=True),
    Case("no flag, MLA", family="deepseek_v3"),
    Case("--enforce-eager", {"enforce_eager": True}),
    Case("--block-size 32", {"block_size": 32}),
    Case("--block-size 64", {"block_size": 64}),
    Case("--max-num-batched-tokens 64", {"max_num_batched_tokens": 64}, ({"prompts": _LONG},), sample=True),
    Case("--max-num-seqs 2", {"max_num_seqs": 2}, ({"prompts": _LONG},)),
    Case("--no-enable-chunked-prefill", {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}),
    Case("--long-prefill-token-threshold 32", {"long_prefill_token_threshold": 32}, ({"prompts": _LONG},)),
    Case("--no-enable-prefix-caching", {"enable_prefix_caching": False}, ({"prompts": _SHARED},)),
    Case("prefix cache hits", {"block_size": 32}, ({"prompts": _SHARED}, {"prompts": _SHARED}), sample=True),
    Case(
        "--prefix-caching-hash-algo sha256_cbor", {"prefix_caching_hash_algo": "sha256_cbor"}, ({"prompts": _SHARED},)
    ),
    Case("prefix cache hits, mixture", {"block_size": 32}, ({"prompts": _SHARED, "repeat": 2},), "qwen3_moe"),
    Case("prefix cache hits, MLA", {"block_size": 32}, ({"prompts": _SHARED, "repeat": 2},), "deepseek_v3"),
    Case(
        "preemption",
        {"num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 256},
        ({"prompts": _LONG[:6], "max_tokens": 48},),
    ),
    Case(
        "--scheduling-policy priority",
        {"scheduling_policy": "priority", "max_num_seqs": 2},
        ({"prompts": _LONG[:4], "priority": [3, 0, 2, 1]},),
    ),
    Case("--async-scheduling", {"async_scheduling": True}),
    Case("--no-async-scheduling", {"async_scheduling": False}),
    Case("--disable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": True}, family="mistral"),
    Case("--disable-cascade-attn", {"disable_cascade_attn": True}),
    Case("--seed 7, sampled", {"seed": 7}, ({"temperature": 0.8, "top_p": 0.9},)),
    Case("--generation-config vllm", {"generation_config": "vllm"}),
    Case("--override-generation-config", {"override_generation_config": {"top_k": 5}}),
    Case(
        "--logprobs-mode processed_logprobs",
        {"logprobs_mode": "processed_logprobs"},
        ({"temperature": 0.7, "seed": 1, "top_k": 4},),
    ),
    Case("--logprobs-mode raw_logits", {"logprobs_mode": "raw_logits"}),
    Case("--logprobs-mode processed_logits", {"logprobs_mode": "processed_logits"}),
    Case("--max-logprobs -1, every log probability", {"max_logprobs": -1}, ({"logprobs": -1, "max_tokens": 2},)),
    Case("--skip-tokenizer-init", {"skip_tokenizer_init": True}, ({"how": "tokens", "detokenize": False},)),
    Case("--enable-prompt-embeds", {"enable_prompt_embeds": True}, ({"how": "embeddings"},)),
    Case("--enable-sleep-mode", {"enable_sleep_mode": True}, ({}, {"how": "sleep"})),
    Case("--load-format safetensors", {"load_format": "safetensors"}),
    Case("--safetensors-load-strategy eager", {"safetensors_load_strategy": "eager"}),
    Case("--model-loader-extra-config, threads", {"model_loader_extra_config": {"enable_multithread_load": True}}),
    Case("--served-model-name", {"served_model_name": "another"}),
    Case("--max-model-len 128", {"max_model_len": 128}),
    Case(
        "--hf-overrides, YaRN",
        {
            "hf_overrides": {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 512,
                }
            }
        },
    ),
    Case("--hf-overrides, fewer layers", {"hf_overrides": {"num_hidden_layers": 2}}),
    Case("--hf-overrides, fewer layers, mixture", {"hf_overrides": {"num_hidden_layers": 2}}, family="qwen3_moe"),
    Case(
        "float32 head of a bfloat16 model",
        {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}},
        ({"max_tokens": 1, "logprobs": 1},),
        tolerance=0.02,
    ),
    Case(
        "--kv-cache-dtype bfloat16",
        {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"},
        ({"max_tokens": 1, "logprobs": 0},),
        tolerance=0.02,
    ),
    Case("--tensor-parallel-size 2", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    Case(
        "--tensor-parallel-size 2, mixture, experts apart",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": True},
        family="qwen3_moe",
    ),
    Case("--pipeline-parallel-size 2", {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
    Case("--distributed-executor-backend mp", {"distributed_executor_backend": "mp"}),
    Case("speculation by n-grams", {"speculative_config": _NGRAM}, ({"max_tokens": 24},)),
    Case("speculation by suffixes", {"speculative_config": _SUFFIX}, ({"max_tokens": 24},)),
    Case("speculation by a draft model", {"speculative_config": _DRAFT}, ({"max_tokens": 24},)),
    Case("speculation by MTP", {"speculative_config": _MTP}, ({"max_tokens": 16},), "drafting"),
    *(
        Case(
            f"structured outputs by {backend}",
            {"structured_outputs_config": {"backend": backend}},
            ({"structured": {"json": _JSON}, "max_tokens": 24}, {"structured": {"choice": ["yes", "no"]}}),
        )
        for backend in ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
    ),
    Case("structured outputs, regex", asks=({"structured": {"regex": "[ab]{3}"}},), sample=True),
    Case("structured outputs, grammar", asks=({"structured": {"grammar": 'root ::= "a" | "b" root'}},)),
    Case(
        "structured outputs beside n-grams",
        {"speculative_config": _NGRAM},
        ({"structured": {"regex": "[ab]{8}"}, "max_tokens": 16},),
    ),
    Case("n=3, sampled with a seed", asks=({"n": 3, "temperature": 1.0, "seed": 11},), sample=True),
    Case("top_k", asks=({"top_k": 3, "temperature": 1.0, "seed": 5},)),
    Case("top_p", asks=({"top_p": 0.5, "temperature": 1.0, "seed": 5},)),
    Case("min_p", asks=({"min_p": 0.2, "temperature": 1.0, "seed": 5},)),
    Case("temperature 2", asks=({"temperature": 2.0, "seed": 5},)),
    Case("presence_penalty", asks=({"presence_penalty": 1.5},)),
    Case("frequency_penalty", asks=({"frequency_penalty": 1.5},)),
    Case("repetition_penalty", asks=({"repetition_penalty": 1.5},), sample=True),
    Case("logit_bias", asks=({"logit_bias": {80: 50.0}},), sample=True),
    Case("allowed_token_ids", asks=({"allowed_token_ids": [70, 71, 72]},)),
    Case("bad_words", asks=({"bad_words": ["a", "the"]},)),
    Case("min_tokens", asks=({"min_tokens": 8},)),
    Case("ignore_eos", asks=({"ignore_eos": True},)),
    Case("stop", asks=({"stop": ["\n", "a"]},)),
    Case("stop, included", asks=({"stop": ["\n", "a"], "include_stop_str_in_output": True},)),
    Case("stop_token_ids", asks=({"stop_token_ids": [1, 225, 203]},)),
    Case("prompt_logprobs", asks=({"prompt_logprobs": 3},), sample=True),
    Case(
        "prompt_logprobs with cache hits",
        {"block_size": 32},
        ({"prompts": _SHARED, "prompt_logprobs": 2, "repeat": 2},),
    ),
    Case("prompt_logprobs in chunks", {"max_num_batched_tokens": 64}, ({"prompts": _LONG, "prompt_logprobs": 1},)),
    Case("logprobs 0", asks=({"logprobs": 0},)),
    Case("logprobs of one token", asks=({"max_tokens": 1, "logprobs": 20},)),
    Case("long prompts", asks=({"prompts": _LONG[:2], "max_tokens": 4},)),
    Case("skip_special_tokens false", asks=({"skip_special_tokens": False},)),
    Case("beam search", asks=({"how": "beam", "beam_width": 3, "max_tokens": 8},)),
    Case("token ids as prompts", asks=({"how": "tokens"},)),
    *(
        Case(
            f"generation that pauses ({mode})",
            asks=({"how": f"pause, {mode}", "max_tokens": 100, "ignore_eos": True},),
        )
        for mode in ("keep", "wait")
    ),
    Case("logprobs beside n-grams", {"speculative_config": _NGRAM}, ({"logprobs": 2, "max_tokens": 24},)),
    Case("penalties beside n-grams", {"speculative_config": _NGRAM}, ({"repetition_penalty": 1.3, "max_tokens": 24},)),
)

CASES: tuple[Case, ...] = SERVED
