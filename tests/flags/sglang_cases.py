"""Cases of SGLang: a line each."""

from __future__ import annotations

from tests.flags.case import Case

_JSON = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_LONG = ["x y z " * 40 + str(number) for number in range(12)]
_SHARED = ["one two three four five six seven eight nine ten " * 12 + tail for tail in ("a", "b", "c")]
_EBNF = 'root ::= "a" | "b" root'

_OWN_MIXTURES = (
    "on a CPU, SGLang's own mixtures answer otherwise than Hugging Face's, whose answers ours have "
    "(tests/integration/sglang/test_mixtures.py, test_routed_experts.py)"
)

SERVED = (
    Case("no flag", sample=True),
    Case("no flag, mixture", family="qwen3_moe", sample=True, native_is_wrong=_OWN_MIXTURES),
    Case("no flag, MLA", family="deepseek_v3"),
    Case("--chunked-prefill-size 64", {"chunked_prefill_size": 64}, ({"prompts": _LONG},), sample=True),
    Case("--chunked-prefill-size -1", {"chunked_prefill_size": -1}, ({"prompts": _LONG},)),
    Case("--max-running-requests 2", {"max_running_requests": 2}, ({"prompts": _LONG},)),
    Case("--max-prefill-tokens 128", {"max_prefill_tokens": 128}, ({"prompts": _LONG},)),
    Case("--page-size 16", {"page_size": 16}, ({"prompts": _SHARED, "repeat": 2},)),
    Case("--page-size 64", {"page_size": 64}, ({"prompts": _SHARED, "repeat": 2},)),
    Case("--disable-radix-cache", {"disable_radix_cache": True}, ({"prompts": _SHARED, "repeat": 2},)),
    Case("prefix cache hits", asks=({"prompts": _SHARED}, {"prompts": _SHARED}), sample=True),
    Case(
        "prefix cache hits, mixture",
        asks=({"prompts": _SHARED, "repeat": 2},),
        family="qwen3_moe",
        native_is_wrong=_OWN_MIXTURES,
    ),
    Case("prefix cache hits, MLA", asks=({"prompts": _SHARED, "repeat": 2},), family="deepseek_v3"),
    Case(
        "retraction",
        {"max_total_tokens": 640, "max_running_requests": 8},
        ({"prompts": _LONG[:6], "max_new_tokens": 60, "ignore_eos": True},),
    ),
    *(
        Case(f"--schedule-policy {policy}", {"schedule_policy": policy, "max_running_requests": 2})
        for policy in ("lpm", "fcfs", "lof", "dfs-weight")
    ),
    Case("--schedule-conservativeness 0.3", {"schedule_conservativeness": 0.3}),
    Case(
        "--enable-priority-scheduling",
        {"enable_priority_scheduling": True, "max_running_requests": 2},
        ({"how": "one at a time", "request": {"priority": 3}},),
    ),
    Case("--disable-overlap-schedule", {"disable_overlap_schedule": True}),
    Case("--enable-mixed-chunk", {"enable_mixed_chunk": True, "chunked_prefill_size": 64}, ({"prompts": _LONG},)),
    Case("--stream-interval 4", {"stream_interval": 4}),
    Case("--random-seed 7, sampled", {"random_seed": 7}, ({"temperature": 0.8, "top_k": 1},)),
    Case("--sampling-backend pytorch", {"sampling_backend": "pytorch"}),
    Case("--context-length 256", {"context_length": 256}),
    Case("--preferred-sampling-params", {"preferred_sampling_params": '{"repetition_penalty": 1.4}'}),
    Case("--sampling-defaults openai", {"sampling_defaults": "openai"}),
    Case("--skip-tokenizer-init", {"skip_tokenizer_init": True}, ({"how": "tokens"},)),
    Case("--tokenizer-mode slow", {"tokenizer_mode": "slow"}),
    Case("--load-format safetensors", {"load_format": "safetensors"}),
    Case("--model-loader-extra-config, threads", {"model_loader_extra_config": '{"enable_multithread_load": true}'}),
    Case("--weight-loader-disable-mmap", {"weight_loader_disable_mmap": True}),
    Case(
        "--json-model-override-args, YaRN",
        {
            "json_model_override_args": '{"rope_parameters": {"rope_type": "yarn", '
            '"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}}'
        },
    ),
    Case("--json-model-override-args, fewer layers", {"json_model_override_args": '{"num_hidden_layers": 2}'}),
    Case(
        "--enable-fp32-lm-head",
        {"enable_fp32_lm_head": True, "dtype": "bfloat16"},
        ({"max_new_tokens": 1, "request": {"top_logprobs_num": 0, "logprob_start_len": -1}},),
        tolerance=0.1,  # by the states' rounding: native's is 0.07 from float32's, ours 0.04
    ),
    Case(
        "--enable-return-hidden-states",
        {"enable_return_hidden_states": True},
        ({"max_new_tokens": 3, "request": {"return_hidden_states": True}},),
    ),
    Case(
        "--enable-return-routed-experts",
        {"enable_return_routed_experts": True},
        ({"request": {"return_routed_experts": True}},),
        "qwen3_moe",
        native_is_wrong=_OWN_MIXTURES,
    ),
    Case("--enable-metrics", {"enable_metrics": True}),
    Case("--enable-cache-report", {"enable_cache_report": True}),
    Case("--tp-size 2", {"tp_size": 2}, environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
    Case(
        "--tp-size 2 --ep-size 2",
        {"tp_size": 2, "ep_size": 2},
        family="qwen3_moe",
        native_is_wrong=_OWN_MIXTURES,
        environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    *(
        Case(
            f"--grammar-backend {backend}",
            {"grammar_backend": backend},
            ({"json_schema": _JSON, "max_new_tokens": 24}, {"regex": "[ab]{3}"}),
        )
        for backend in ("xgrammar", "llguidance", "outlines")
    ),
    Case("regex", asks=({"regex": "[ab]{3}"},), sample=True),
    Case("ebnf", asks=({"ebnf": _EBNF},)),
    Case("n=3", asks=({"n": 3},)),
    Case("top_k 1 at a temperature", asks=({"top_k": 1, "temperature": 1.0},)),
    Case("min_p 1 at a temperature", asks=({"min_p": 1.0, "temperature": 1.0},)),
    Case("presence_penalty", asks=({"presence_penalty": 1.5},)),
    Case("frequency_penalty", asks=({"frequency_penalty": 1.5},)),
    Case("repetition_penalty", asks=({"repetition_penalty": 1.5},), sample=True),
    Case("logit_bias", asks=({"logit_bias": {"80": 50.0}},), sample=True),
    Case("min_new_tokens", asks=({"min_new_tokens": 8},)),
    Case("ignore_eos", asks=({"ignore_eos": True},)),
    Case("stop", asks=({"stop": ["\n", "a"]},)),
    Case("stop_regex", asks=({"stop_regex": "[0-9]+"},)),
    Case("stop, not trimmed", asks=({"stop": ["\n", "a"], "no_stop_trim": True},)),
    Case("stop_token_ids", asks=({"stop_token_ids": [1, 225, 203]},)),
    Case("skip_special_tokens false", asks=({"skip_special_tokens": False},)),
    Case("token_ids_logprob", asks=({"request": {"token_ids_logprob": [70, 80, 90]}},), sample=True),
    Case("logprobs of the answer alone", asks=({"request": {"logprob_start_len": -1}},)),
    Case("logprobs from the tenth token on", asks=({"prompts": _LONG[:3], "request": {"logprob_start_len": 10}},)),
    Case("logprobs with cache hits", asks=({"prompts": _SHARED, "repeat": 2, "request": {"logprob_start_len": 40}},)),
    Case("logprobs in chunks", {"chunked_prefill_size": 64}, ({"prompts": _LONG, "request": {"top_logprobs_num": 3}},)),
    Case("token ids as prompts", asks=({"how": "tokens"},)),
    Case("one at a time", asks=({"how": "one at a time"},)),
    *(
        Case(
            f"generation that pauses ({mode})",
            asks=({"how": f"pause, {mode}", "max_new_tokens": 100, "ignore_eos": True},),
        )
        for mode in ("in_place", "retract")
    ),
    Case("a session", asks=({"how": "session"},)),
)

CASES: tuple[Case, ...] = SERVED
