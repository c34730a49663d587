"""The table of SGLang's settings, with its rows of refused and honoured settings; see :mod:`atom_plugin.common.flags`.

A setting is a field of the server's arguments or an environment variable. Those that act outside models are in
``flags_outside.py`` and ``flags_variables.py``. A setting that is refused by more than its own value (numbers of ranks
that do not fit together, drafts of MLA models) has a row :class:`Ours` here, and code in ``routing.py`` and
``speculation.py``.

Variables that only choose among native kernels with equal results are accepted, since SGLang's images set some of them.
Variables that ask for other results, or for another model than ours, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_core.quant import CHECKPOINT_METHODS
from atom_plugin.common.flags import Ours, Refused, Row, settings_of
from atom_plugin.common.load_formats import SHARDED_STATE
from atom_plugin.common.states import MOST_DRAFTS, STATE_DTYPES
from atom_plugin.sglang import BACKEND, PACKAGE_VARIABLE, ROCM_BACKEND, flags_outside, flags_variables

OTHERWISE = f"Unset {PACKAGE_VARIABLE} to use it."

#: Values of ``--load-format`` that read safetensors, or nothing.
LOAD_FORMATS = ("auto", "safetensors", "dummy", "fastsafetensors", "runai_streamer", SHARDED_STATE)
#: Dtypes of the KV pool. SGLang itself has no fp8_e5m2 on a CPU, and on ROCm maps both FP8 names to the GPU's format.
CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
#: Values of ``--quantization``. "modelopt_fp8" and "unquant" are SGLang's own names.
QUANTIZATIONS = ("unquant", *dict.fromkeys(("fp8", *CHECKPOINT_METHODS)), "modelopt_fp8")
#: SGLang's algorithms with a head on the target's last hidden states (two names), and with a separate draft model.
DRAFTS = ("EAGLE", "NEXTN", "STANDALONE")

_REFUSALS = "tests/integration/sglang/test_refusals.py::test_it_is_refused_with_a_message_that_says_what_and_what_else"


def _field(name: str, what: str, *others: str, flag: str = "", **more: Any) -> Refused:
    """A row for a field of the server's arguments; ``others`` are other names of its flag."""
    return Refused(f"ServerArgs.{name}", what, (flag or f"--{name.replace('_', '-')}", *others), **more)


def _kernel(name: str, of: str, op: str, allowed: tuple[str, ...] = ("auto",), flag: str = "", **more: Any) -> Refused:
    """A row for a choice among native kernels, which SGLang also makes if the user does not."""
    instead = (
        f"Our models have their own kernels: leave it out and use ATOM_KERNELS={op}=IMPLEMENTATION, or unset "
        f"{PACKAGE_VARIABLE}."
    )
    return _field(name, f"SGLang's kernels for {of}", flag=flag, allowed=allowed, as_given=True, instead=instead)


def _is_on(value: object) -> bool:
    """Whether SGLang reads a variable as true."""
    return str(value).lower() in ("1", "true", "yes", "y")


def _switch(name: str, what: str) -> Refused:
    """A row for a variable that is on or off."""
    return Refused(name, what, allowed=("0",), refuses=_is_on, instead=f"Unset it, or unset {PACKAGE_VARIABLE}.")


def _dtype(name: str, what: str) -> Refused:
    """A row for a variable that names the dtype of states."""
    return Refused(name, what, allowed=STATE_DTYPES, instead=f"Unset it, or unset {PACKAGE_VARIABLE}.")


def _on_our_attention(given: Any) -> bool:
    """Whether our models run on our attention, the default."""
    named = (given.attention_backend, given.decode_attention_backend, given.prefill_attention_backend)
    return not any(named) or not {BACKEND, ROCM_BACKEND}.isdisjoint(named)


def _drafts_on_ours(given: Any) -> bool:
    """Whether the draft or the target runs on our attention."""
    return _on_our_attention(given) or given.speculative_draft_attention_backend in (BACKEND, ROCM_BACKEND)


def captures_whole_prompts(config: Any) -> bool:
    """Whether ``--cuda-graph-config`` asks for graphs of whole prompts: as SGLang has it, or parsed from JSON."""
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    return bool(backend == "full")


def _drafts_by_a_model(given: Any) -> bool:
    return bool(given.speculative_algorithm == "STANDALONE")


_TEXT = "embedding"
_TEXT_ONLY = f"Our models serve the text alone, by one server: leave it out, or unset {PACKAGE_VARIABLE}."
_WHOLE_PROMPTS = "CUDA graphs of whole prompts"
_OFFLOADING = "weight offloading"
_CONTEXT = "context parallelism"
_EXPERT_BALANCE = "balancing experts over ranks"
_EXCHANGE = "all-to-all exchange of tokens between expert-parallel ranks: every rank gets all tokens"
_MODELOPT = "quantisation by ModelOpt while loading"
_SHARDS = "layers sharded unlike attention"
_CHAIN = (
    f"--attention-backend {BACKEND} verifies chains of draft tokens: set it to 1 (for example with "
    "--speculative-num-steps 3 and --speculative-num-draft-tokens 4), or name another attention backend."
)
_LINEAR = "linear attention"
_REPLAY = "states that are written every few tokens"
_WITHOUT = f"Leave it out: states are written after each token; or unset {PACKAGE_VARIABLE}."
_PLAIN_PAGES = f"Unset it, or name another --attention-backend than {BACKEND}."

FIELDS: tuple[Row, ...] = (
    # Another model than ours.
    _field(
        "model_impl",
        "another implementation than ours",
        allowed=("auto", "sglang"),
        instead=f"Leave it out, or unset {PACKAGE_VARIABLE}, which asks for ours.",
    ),
    _field("enable_lora", "LoRA adapters"),
    _field("lora_paths", "LoRA adapters"),
    _field("is_embedding", _TEXT),
    _field("dllm_algorithm", "diffusion decoding"),
    _field("encoder_only", "a server of images' encodings", instead=_TEXT_ONLY),
    _field("language_only", "encodings of images from another server", instead=_TEXT_ONLY),
    _field("enable_nvidia_megakernel", "SGLang's forward pass in one kernel"),
    _field("enable_amd_monokernel", "SGLang's forward pass in one kernel", "--monokernel-backend"),
    # Graphs: those of prompts are broken at attention, whose plan is another one in each step.
    _field(
        "cuda_graph_backend_prefill",
        _WHOLE_PROMPTS,
        allowed=("breakable", "disabled"),
        only_if=_on_our_attention,
    ),
    _field(
        "cuda_graph_config",
        _WHOLE_PROMPTS,
        refuses=captures_whole_prompts,
        as_given=True,
        only_if=_on_our_attention,
    ),
    # What a step computes and returns.
    _field("rl_on_policy_target", "results identical to a trainer's model"),
    _field("enable_deterministic_inference", "results that do not depend on the batch"),
    _field("expert_balancedness_report_mode", "reporting the balance of experts", allowed=("off",), as_given=True),
    _field("enable_return_aux_hidden_states", "returning hidden states of inner layers"),
    _field("enable_torch_compile", "torch.compile, because its kernels are already fused"),
    _field("enable_two_batch_overlap", "two-batch overlap"),
    _field("enable_single_batch_overlap", "overlap of experts and communication within a batch"),
    _field("enable_pdmux", "multiplexed prefill and decode"),
    # Weights.
    _field("quantization", "this quantisation", allowed=QUANTIZATIONS, as_given=True),
    _field("load_format", "checkpoints that are not safetensors", allowed=LOAD_FORMATS),
    _field(
        "speculative_draft_load_format",
        "drafts that are not safetensors",
        allowed=LOAD_FORMATS,
        only_if=_drafts_by_a_model,
    ),
    _field("startup_weight_load_mode", "loading weights after graphs are captured", allowed=("serial",)),
    _field("weight_cache_mode", "weights in another process's memory", allowed=("off",)),
    _field(
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "sending weights to other servers",
        as_given=True,
    ),
    _field("modelopt_quant", _MODELOPT),
    _field("modelopt_checkpoint_restore_path", _MODELOPT),
    _field("modelopt_checkpoint_save_path", _MODELOPT),
    _field("modelopt_export_path", _MODELOPT),
    _field("cpu_offload_gb", _OFFLOADING, allowed=("0",)),
    _field("offload_group_size", _OFFLOADING, allowed=("-1", "0")),
    _field("enable_paged_experts", _OFFLOADING),
    _field("kt_weight_path", _OFFLOADING),
    # Keys and values.
    _field("kv_cache_dtype", "a KV cache of this dtype", allowed=CACHE_DTYPES),
    _field("enable_unified_memory", "a KV pool whose slots move"),
    _field("enable_page_major_kv_layout", "a KV pool in which the layers of a page lie together"),
    # States of linear attention.
    _field("mamba_ssm_dtype", "states of this dtype", allowed=STATE_DTYPES),
    _field("enable_mamba_cache_stochastic_rounding", "states that are rounded at random"),
    _field("enable_linear_replayssm", _REPLAY, instead=_WITHOUT),
    _field("enable_linear_replayssm_spec", _REPLAY, instead=_WITHOUT),
    _kernel("linear_attn_backend", _LINEAR, "gated_delta_net", allowed=("triton",)),
    _kernel("linear_attn_decode_backend", _LINEAR, "gated_delta_net", allowed=("triton",)),
    _kernel("linear_attn_prefill_backend", _LINEAR, "gated_delta_net", allowed=("triton",)),
    _kernel("linear_attn_verify_backend", _LINEAR, "gated_delta_net", allowed=("triton",)),
    Ours(
        "states are copied for prefixes where SGLang asks for it",
        "tests/integration/sglang/test_hybrids.py::test_tokens_are_transformers",
        settings_of("ServerArgs", "mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval"),
    ),
    # Ranks.
    _field("attn_cp_size", _CONTEXT, "--attention-context-parallel-size", allowed=("1",)),
    _field("dcp_size", _CONTEXT, "--decode-context-parallel-size", allowed=("1",)),
    _field("enable_prefill_cp", _CONTEXT),
    _field("moe_dp_size", "data-parallel experts", "--moe-data-parallel-size", allowed=("1",)),
    _field("moe_a2a_backend", _EXCHANGE, allowed=("none",)),
    _field("speculative_moe_a2a_backend", _EXCHANGE, allowed=("none",), as_given=True),
    _field("enable_eplb", _EXPERT_BALANCE),
    _field("ep_num_redundant_experts", _EXPERT_BALANCE, allowed=("0",)),
    _field("init_expert_location", _EXPERT_BALANCE, allowed=("trivial",)),
    _field("ep_dispatch_algorithm", _EXPERT_BALANCE, as_given=True),
    _field("enable_waterfill", _EXPERT_BALANCE),
    _field("elastic_ep_backend", "elastic expert parallelism"),
    _field("enable_elastic_expert_backup", "elastic expert parallelism"),
    _field("dwdp_size", "fetching experts of other ranks", allowed=("1",)),
    _field(
        "enable_tp_lm_head_all_to_all",
        "a head sharded unlike attention",
        as_given=True,
        instead=f"Leave it out: the head is sharded as with --enable-dp-lm-head; or unset {PACKAGE_VARIABLE}.",
    ),
    _field("enable_attn_tp_input_scattered", _SHARDS),
    _field("enable_layernorm_sp", _SHARDS),
    _field("boundary_reduction", "a choice of the all-reduce method", allowed=("auto",), as_given=True),
    _field("enable_symm_mem", "NCCL's symmetric memory", as_given=True),
    # Native kernels.
    _kernel("moe_runner_backend", "experts", "experts"),
    _kernel("speculative_moe_runner_backend", "experts", "experts"),
    _kernel("flashinfer_mxfp4_moe_precision", "experts", "mxfp4_experts", allowed=("default",)),
    _kernel("enable_fused_moe_sum_all_reduce", "experts", "experts", allowed=()),
    _kernel("enforce_shared_experts_fusion", "shared experts", "experts", allowed=()),
    _kernel("fp8_gemm_runner_backend", "FP8 linear layers", "fp8_block_linear", flag="--fp8-gemm-backend"),
    _kernel("fp4_gemm_runner_backend", "FP4 linear layers", "mxfp4_linear", flag="--fp4-gemm-backend"),
    _kernel("bf16_gemm_backend", "linear layers", "linear"),
    _kernel("enable_fused_qk_norm_rope", "norms and rope of queries and keys", "qk_norm_rope_cache", allowed=()),
    _kernel("enable_flashinfer_allreduce_fusion", "all-reduce and norm", "all_reduce_norm", allowed=()),
    _kernel("flashinfer_allreduce_fusion_backend", "all-reduce and norm", "all_reduce_norm", allowed=()),
    _kernel("disable_aiter_allreduce_fusion_in_prefill", "all-reduce and norm", "all_reduce_norm", allowed=()),
    _kernel("disable_aiter_allreduce_fusion_in_decode", "all-reduce and norm", "all_reduce_norm", allowed=()),
    # Drafts.
    _field("speculative_algorithm", "this speculative algorithm", allowed=DRAFTS),
    _field(
        "speculative_eagle_topk",
        "trees of draft tokens",
        allowed=("1",),
        as_given=True,
        only_if=_drafts_on_ours,
        instead=_CHAIN,
    ),
    _field(
        "speculative_adaptive",
        f"an adaptive draft length on --attention-backend {BACKEND}",
        only_if=_drafts_on_ours,
    ),
    _field(
        "speculative_draft_window_size",
        f"drafts that see a window on --attention-backend {BACKEND}",
        only_if=_drafts_on_ours,
    ),
    _field(
        "speculative_draft_sink_size",
        f"drafts that see a window on --attention-backend {BACKEND}",
        only_if=_drafts_on_ours,
    ),
    Ours(
        "several workers are refused for checkpoints with images: they would not refuse a request's images",
        _REFUSALS,
        settings_of("ServerArgs", "tokenizer_worker_num"),
    ),
    Ours(
        f"models with linear attention verify up to {MOST_DRAFTS + 1} tokens, one more than is drafted; refused: more",
        _REFUSALS,
        settings_of("ServerArgs", "speculative_num_steps speculative_num_draft_tokens"),
    ),
    Ours(
        "drafts by our models take only the target's value, or none; other drafts take all of SGLang's",
        _REFUSALS,
        settings_of(
            "ServerArgs",
            """
            speculative_token_map speculative_draft_attention_backend speculative_draft_kv_cache_dtype
            speculative_draft_model_quantization enable_multi_layer_eagle
            """,
        ),
    ),
    Ours(
        "the head and the logits are computed in float32",
        "tests/integration/sglang/test_float32_head.py::test_logits_are_not_rounded_and_close_to_sglangs_own",
        settings_of("ServerArgs", "enable_fp32_lm_head"),
    ),
    Ours(
        "returns the experts that our routers chose, for mixtures in one pipeline stage",
        "tests/integration/sglang/test_routed_experts.py::test_a_request_is_given_those_of_its_tokens",
        settings_of("ServerArgs", "enable_return_routed_experts"),
    ),
    Ours(
        "stat, per_pass and per_token count the experts that our routers chose; stat_approx is refused",
        "tests/integration/sglang/test_routed_experts.py::test_the_recorder_counts_them_between_start_and_stop",
        settings_of("ServerArgs", "expert_distribution_recorder_mode"),
    ),
    Ours(
        "our attention by default, as `atom`, and on ROCm as `aiter`; SGLang's attention by its names",
        "tests/integration/sglang/test_tokens.py::test_sglangs_attention_and_reference_kernels_give_the_same_tokens",
        settings_of("ServerArgs", "attention_backend decode_attention_backend prefill_attention_backend"),
    ),
    Ours(
        "reads the scales of an FP8 cache; a file without scales for the model is refused",
        "tests/integration/sglang/test_fp8_cache.py::test_a_scale_in_a_file_that_is_none_ends_the_start",
        settings_of("ServerArgs", "quantization_param_path"),
    ),
    Ours(
        "weights and activations in bfloat16, float16 or float32; others are refused",
        "tests/integration/sglang/test_refusals.py::test_it_is_not_refused",
        settings_of("ServerArgs", "dtype"),
    ),
    Ours(
        "modules are not fused and have the names of SGLang's own",
        "tests/integration/sglang/test_names.py::test_dumps_have_what_sglangs_have_under_the_same_names",
        settings_of("ServerArgs", "debug_tensor_dump_output_folder debug_tensor_dump_layers"),
    ),
    Ours(
        "modules are not fused, so their hooks run",
        "tests/integration/sglang/test_names.py::test_hooks_see_what_they_see_of_sglangs_own_model",
        settings_of("ServerArgs", "forward_hooks"),
    ),
    Ours(
        "our configuration is read from SGLang's, which contains these overrides",
        "tests/integration/sglang/test_flags.py::test_overrides_of_the_configuration_are_what_our_models_read",
        settings_of("ServerArgs", "json_model_override_args context_length"),
    ),
    Ours(
        "the head always has as many shards as attention",
        "tests/integration/sglang/test_refusals.py::test_it_is_not_refused",
        settings_of("ServerArgs", "enable_dp_lm_head"),
    ),
    Ours(
        "layers have as many shards and stages",
        "tests/integration/sglang/test_tokens.py::test_two_processes_give_the_tokens_of_one",
        settings_of("ServerArgs", "tp_size pp_size"),
    ),
    Ours(
        "supported for mixtures of experts; refused for models without experts",
        "tests/integration/sglang/test_dp_attention.py::test_tokens_are_those_of_one_rank",
        settings_of("ServerArgs", "attn_dp_size enable_dp_attention"),
    ),
    Ours(
        "experts are split over all tensor-parallel ranks or none, and dense layers have as many shards as attention; "
        "other values are refused",
        _REFUSALS,
        settings_of("ServerArgs", "ep_size moe_dense_tp_size"),
    ),
    Ours(
        "also disables our fused all-reduce and norm, which reads other GPUs' memory",
        "tests/unit/plugin/common/test_communicator.py::test_peer_memory_is_left_alone_where_the_framework_is_told_to",
        settings_of("ServerArgs", "disable_custom_all_reduce"),
    ),
    Ours(
        "on AMD used whenever aiter's all-reduce takes a tensor, with or without the flag",
        "tests/integration/sglang/test_all_reduce.py::test_it_is_one_kernel_for_few_tokens",
        settings_of("ServerArgs", "enable_aiter_allreduce_fusion"),
    ),
)

VARIABLES: tuple[Row, ...] = (
    _switch("SGLANG_SIMULATE_UNIFORM_EXPERTS", "experts that the router did not choose"),
    _switch("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "experts that the router did not choose"),
    _switch("SGLANG_SHARED_EXPERT_TP1", "whole shared experts on each rank"),
    Refused(
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        f"planning steps beside drafts on --attention-backend {BACKEND}",
        allowed=("0",),
        refuses=_is_on,
        only_if=lambda given: given.speculative_algorithm is not None and _drafts_on_ours(given),
        instead=f"Unset it, or unset {PACKAGE_VARIABLE}.",
    ),
    _switch("SGLANG_ENABLE_EMBED_REPLICATION", "a whole embedding on each rank"),
    _switch("SGLANG_ENABLE_DP_GATHER_FP8", "hidden states in FP8 between ranks"),
    _switch("SGLANG_FORCE_FP8_MARLIN", "FP8 weights with unquantised inputs"),
    _switch("SGLANG_USE_AITER_FP8_PER_TOKEN", "FP8 weights with other scales of inputs"),
    _switch("SGLANG_USE_DEEPGEMM_BMM", "MLA's projection of latents in FP8"),
    _switch("SGLANG_INT4_WEIGHT", "4-bit weights"),
    _switch("SGLANG_ROCM_DISABLE_LINEARQUANT", "quantised experts with unquantised linear layers"),
    _switch("SGLANG_CPU_QUANTIZATION", "quantising weights on the CPU"),
    Refused(
        "SGLANG_FORCE_FUSED_OP_BACKEND",
        "a choice among SGLang's kernels",
        instead=f"Unset it and choose our kernels by ATOM_KERNELS, or unset {PACKAGE_VARIABLE}.",
    ),
    Refused("SGLANG_EMBEDDINGS_SPARSE_HEAD", _TEXT),
    _dtype("SGLANG_MAMBA_SSM_DTYPE", "states of linear attention of this dtype"),
    _dtype("SGLANG_MAMBA_CONV_DTYPE", "inputs of this dtype, which convolutions of linear attention keep"),
    Refused(
        "SGLANG_USE_HND_KVCACHE",
        "this KV cache layout",
        allowed=("0",),
        refuses=_is_on,
        only_if=_on_our_attention,
        instead=_PLAIN_PAGES,
    ),
    Refused(
        "SGLANG_AITER_KV_CACHE_LAYOUT",
        "this KV cache layout",
        allowed=("nhd",),
        only_if=_on_our_attention,
        instead=_PLAIN_PAGES,
    ),
    Ours(
        "asks for our models; another package of atom-plugin is refused",
        "tests/integration/sglang/test_registration.py::test_the_variable_makes_the_models_ours_and_announces_each_once",
        ("SGLANG_EXTERNAL_MODEL_PACKAGE",),
    ),
    Ours(
        "a list without our entry point is refused if our models are asked for",
        "tests/integration/sglang/test_flags.py::test_a_list_of_plugins_without_ours_is_refused",
        ("SGLANG_PLUGINS",),
    ),
    Ours("a list with one of our modules is refused", _REFUSALS, ("SGLANG_DISABLED_MODEL_ARCHS",)),
    Ours("refused with a quantisation; without effect otherwise", _REFUSALS, ("SGLANG_FP8_IGNORED_LAYERS",)),
    Ours(
        "on AMD our models always use aiter's kernels where it has them (ATOM_AITER=0 switches them off)",
        "tests/integration/sglang/test_aiter.py::test_the_kernels_are_aiters",
        ("SGLANG_USE_AITER",),
    ),
    Ours(
        "without it our layers use SGLang's all-reduce and a separate norm",
        "tests/integration/sglang/test_all_reduce.py::test_a_group_without_it_is_told_in_words",
        ("SGLANG_USE_AITER_AR",),
    ),
    Ours(
        "cosines and sines are always float32",
        "tests/integration/sglang/test_flags.py::test_cosines_and_sines_are_float32",
        ("SGLANG_ROPE_CACHE_FP32",),
    ),
    Ours(
        "stages build the layers that SGLang assigns to them",
        "tests/integration/sglang/test_flags.py::test_stages_have_the_layers_that_the_variable_says",
        ("SGLANG_PP_LAYER_PARTITION",),
    ),
)

TABLE: tuple[Row, ...] = (*FIELDS, *flags_outside.OUTSIDE, *VARIABLES, *flags_variables.OUTSIDE)
