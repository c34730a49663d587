"""The table of vLLM's settings, with its rows of refused and honoured settings.

Settings are fields of the classes in ``vllm/config``, which vLLM's flags set, and environment variables. Refused values
are checked as the user gave them, before vLLM fills in its own defaults (:func:`atom_plugin.vllm.routing.refuse`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from atom_core.models.registry import MODELS
from atom_core.quant import CHECKPOINT_METHODS, ONLINE_METHODS
from atom_plugin.common.flags import Ours, Refused, Row, refusals, settings_of
from atom_plugin.vllm.flags_outside import OUTSIDE
from atom_plugin.vllm.flags_variables import VARIABLES

OTHERWISE = "Leave --model-impl out to use it."

#: Values of ``--load-format`` that read safetensors. The others read pickles or other formats.
DRAFT_FORMATS = ("auto", "hf", "safetensors", "dummy", "fastsafetensors", "runai_streamer", "instanttensor")
SAFETENSORS_FORMATS = (*DRAFT_FORMATS, "sharded_state")
#: Values of ``--kv-cache-dtype``: the model's dtype, another 16- or 32-bit dtype, or FP8 with scales. "fp8" is the e4m3
#: format of the device.
CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
#: Values of ``--quantization``: online quantisation of an unquantised checkpoint, or the checkpoint's own method.
QUANTIZATIONS = ("none", *dict.fromkeys((*ONLINE_METHODS, *CHECKPOINT_METHODS)))
#: Speculative methods. With "mtp" the checkpoint's own layers draft.
SPECULATION = ("draft_model", "mtp", "ngram", "ngram_gpu", "suffix")
#: How data-parallel ranks exchange tokens: by all-gather, vLLM's default. "naive" is its older name.
EXCHANGES = ("allgather_reducescatter", "naive")

#: With this variable our models use vLLM's attention layer and backend instead of ours.
_VLLMS_ATTENTION = "ATOM_DISABLE_VLLM_ATTENTION"
_INSTEAD_OF_BACKENDS = (
    "Our models run on our own attention, whose kernels ATOM_KERNELS=attention=... and mla_attention=... choose; "
    f"{_VLLMS_ATTENTION}=1 runs vLLM's attention instead, except for DeepSeek models and models with linear attention."
)
_INSTEAD_OF_KERNELS = "ATOM_KERNELS chooses the kernels of our models, op by op; the table in the log names the ops."
_INSTEAD_OF_PASSES = "Our models have their own fused kernels for norms, rope and quantisation. Leave it out."

#: The flags of fields that have no flag of their own.
_NESTED: Mapping[str, str] = {
    "AttentionConfig": "--attention-config.",
    "CompilationConfig": "-cc.",
    "IrOpPriorityConfig": "--ir-op-priority.",
    "KernelConfig": "--kernel-config.",
    "PassConfig": "-cc.pass_config.",
    "SpeculativeConfig": "--speculative-config.",
}


def _flag(setting: str) -> str:
    owner, _, name = setting.rpartition(".")
    return _NESTED[owner] + name if owner in _NESTED else "--" + name.replace("_", "-")


def _refused(setting: str, what: str, *aliases: str, **options: Any) -> Refused:
    """A row with ``aliases`` and the flag of the field's own name."""
    return Refused(setting, what, flags=tuple(dict.fromkeys((*aliases, _flag(setting)))), **options)


def _more_than_one(value: int) -> bool:
    return value > 1


def _overrides_ours(overrides: Mapping[str, str]) -> bool:
    """Whether a class is given for one of our architectures."""
    return any(name.removeprefix("Atom") in MODELS for name in overrides or ())


def _is_no_page(size: int | None) -> bool:
    """Whether ``size`` tokens are not a multiple of 16, which all our kernels need."""
    return size is not None and size % 16 != 0


def _names_an_op(custom_ops: list[str]) -> bool:
    """Whether ops are switched on or off. vLLM itself adds "+quant_fp8" for weights in FP8 blocks."""
    return any(name != "+quant_fp8" for name in custom_ops)


_FEATURES: tuple[Refused, ...] = (
    Refused("VllmConfig.lora_config", "LoRA adapters", flags=("--enable-lora",)),
    _refused("ModelConfig.convert", "a model that embeds, classifies or scores", allowed=("auto", "none")),
    _refused("ModelConfig.runner", "a model that embeds, classifies or scores", allowed=("auto", "generate")),
    Refused(
        "ModelConfig.multimodal_config",
        "multimodal input",
        instead=f"Add --language-model-only to serve the text model of a multimodal checkpoint. {OTHERWISE}",
    ),
    _refused(
        "ModelConfig.model_class_overrides",
        "another class for one of its own architectures",
        refuses=_overrides_ours,
        instead="Leave out --model-class-overrides or --model-impl atom: each of them sets the model's class.",
    ),
    _refused("ModelConfig.quantization", "this quantisation", "--quantization", "-q", allowed=QUANTIZATIONS),
    _refused(
        "ModelConfig.quantization_config",
        "quantisation that differs between layers",
        instead="Use --quantization fp8, with one scale for each row of a weight and each token, or leave --model-impl "
        "out.",
    ),
    Refused("CacheConfig.cache_dtype", "this dtype of the KV cache", flags=("--kv-cache-dtype",), allowed=CACHE_DTYPES),
    _refused("CacheConfig.kv_cache_dtype_skip_layers", "a KV cache of another dtype in some layers"),
    _refused(
        "CacheConfig.block_size",
        "pages of this size",
        refuses=_is_no_page,
        unless=_VLLMS_ATTENTION,
        instead="It supports multiples of 16 tokens.",
    ),
    _refused("LoadConfig.load_format", "weights of this format", allowed=SAFETENSORS_FORMATS),
    Refused("LoadConfig.device", "loading weights on another device than the model's"),
    _refused(
        "ParallelConfig.decode_context_parallel_size",
        "decode context parallelism",
        "--decode-context-parallel-size",
        "-dcp",
        allowed=("1",),
        refuses=_more_than_one,
    ),
    _refused(
        "ParallelConfig.prefill_context_parallel_size",
        "prefill context parallelism",
        "--prefill-context-parallel-size",
        "-pcp",
        allowed=("1",),
        refuses=_more_than_one,
    ),
    _refused("ParallelConfig.enable_dbo", "dual-batch overlap"),
    _refused("ParallelConfig.ubatch_size", "micro-batches", allowed=("0", "1"), refuses=_more_than_one),
    _refused("ParallelConfig.enable_eplb", "balancing experts over ranks"),
    _refused("ParallelConfig.expert_placement_strategy", "this placement of experts on ranks", allowed=("linear",)),
    _refused("ParallelConfig.enable_batch_sharded_sampling", "sampling a shard of the batch on each rank"),
    _refused(
        "ParallelConfig.all2all_backend", "this exchange of tokens between data-parallel ranks", allowed=EXCHANGES
    ),
    Refused("UVAOffloadConfig.cpu_offload_gb", "weight offloading", flags=("--cpu-offload-gb",), allowed=("0", "0.0")),
    Refused(
        "PrefetchOffloadConfig.offload_group_size", "weight offloading", flags=("--offload-group-size",), allowed=("0",)
    ),
    _refused(
        "SpeculativeConfig.method",
        "this way of speculative decoding",
        "--spec-method",
        allowed=SPECULATION,
        # vLLM reads the names that it had for each family, such as "qwen3_next_mtp", as "mtp".
        refuses=lambda method: bool(method) and method not in SPECULATION and not str(method).endswith("_mtp"),
    ),
)

_KERNELS: tuple[Refused, ...] = (
    _refused(
        "AttentionConfig.backend",
        "the choice of an attention backend",
        "--attention-backend",
        allowed=("auto",),
        unless=_VLLMS_ATTENTION,
        instead=_INSTEAD_OF_BACKENDS,
    ),
    *(
        _refused(
            f"AttentionConfig.{name}",
            "settings of vLLM's attention",
            allowed=allowed,
            unless=_VLLMS_ATTENTION,
            instead=_INSTEAD_OF_BACKENDS,
        )
        for name, allowed in (
            ("backend_per_kind", ()),
            ("flash_attn_version", ()),
            ("flash_attn_max_num_splits_for_cuda_graph", ("32",)),
            ("use_trtllm_attention", ()),
            ("disable_flashinfer_q_quantization", ()),
            ("use_non_causal", ()),
            ("mla_prefill_backend", ()),
            ("use_prefill_query_quantization", ()),
            ("trtllm_ragged_backend", ("trtllm-gen",)),
        )
    ),
    Refused(
        "ModelConfig.disable_cascade_attn",
        "cascade attention",
        flags=("--no-disable-cascade-attn",),
        refuses=lambda value: value is False,
        unless=_VLLMS_ATTENTION,
        instead="Leave the flag out.",
    ),
    _refused(
        "KernelConfig.enable_rocm_segmented_attn_autotune",
        "tuning vLLM's segmented attention",
        unless=_VLLMS_ATTENTION,
        instead=_INSTEAD_OF_BACKENDS,
    ),
    *(
        _refused(f"KernelConfig.{name}", what, *aliases, allowed=allowed, instead=_INSTEAD_OF_KERNELS)
        for name, what, aliases, allowed in (
            ("moe_backend", "the choice of a backend for experts", ("--moe-backend",), ("auto",)),
            ("linear_backend", "the choice of a backend for linear layers", ("--linear-backend",), ("auto",)),
            ("linear_backend_per_quant", "the choice of a backend for linear layers", (), ()),
            ("monokernel", "one kernel for a whole layer", ("--monokernel",), ()),
        )
    ),
    *(
        _refused(f"IrOpPriorityConfig.{name}", "the choice of a kernel for vLLM's ops", instead=_INSTEAD_OF_KERNELS)
        for name in ("rms_norm", "fused_add_rms_norm", "gelu_and_mul_sparse")
    ),
    _refused(
        "EngineArgs.gdn_prefill_backend", "the choice of a kernel for linear attention", instead=_INSTEAD_OF_KERNELS
    ),
    _refused(
        "CompilationConfig.custom_ops",
        "switching vLLM's custom ops on or off",
        refuses=_names_an_op,
        instead=_INSTEAD_OF_KERNELS,
    ),
    _refused("CompilationConfig.ir_enable_torch_wrap", "vLLM's IR ops in traced code", instead=_INSTEAD_OF_PASSES),
    *(
        _refused(f"PassConfig.{name}", "a compiler pass that fuses vLLM's own layers", instead=_INSTEAD_OF_PASSES)
        for name in (
            *("enable_qk_norm_rope_fusion", "enable_sp", "fuse_act_padding", "fuse_act_quant", "fuse_allreduce_rms"),
            *("fuse_attn_quant", "fuse_gemm_comms", "fuse_mla_dual_rms_norm", "fuse_norm_quant"),
            *("fuse_qk_norm_rope_kvcache", "fuse_rope_kvcache", "fuse_rope_kvcache_cat_mla"),
            *("fi_allreduce_fusion_max_size_mb", "sp_min_token_num"),
        )
    ),
    _refused(
        "PassConfig.rope_kvcache_fusion_max_token_num",
        "a compiler pass that fuses vLLM's own layers",
        allowed=("256",),
        instead=_INSTEAD_OF_PASSES,
    ),
)

#: Refused if the draft is one of our models; supported for vLLM's own drafts.
DRAFT: tuple[Refused, ...] = (
    _refused(
        "SpeculativeConfig.attention_backend",
        "the choice of an attention backend for its draft",
        unless=_VLLMS_ATTENTION,
        instead=_INSTEAD_OF_BACKENDS,
    ),
    _refused(
        "SpeculativeConfig.moe_backend",
        "the choice of a backend for its draft's experts",
        allowed=("auto",),
        instead=_INSTEAD_OF_KERNELS,
    ),
    _refused("SpeculativeConfig.use_local_argmax_reduction", "a local argmax on each rank for its draft"),
    _refused("SpeculativeConfig.draft_load_config", "a draft's weights of this format", allowed=DRAFT_FORMATS),
)

_GRAPHS = "tests/contract/vllm/test_graph_defaults.py::"
_VLLM = "tests/integration/vllm/"
_HONOURED: tuple[Ours, ...] = (
    Ours(
        "returns the experts that our routers chose, for mixtures that are not compiled",
        _VLLM + "test_routed_experts.py::test_they_are_those_of_vllms_own_model",
        (
            *settings_of("ModelConfig", "enable_return_routed_experts"),  # 0.30
            *settings_of("AuxOutputConfig", "enable_return_routed_experts"),
        ),
    ),
    Ours(
        "default: not compiled, with graphs; a user's value is kept, except that nothing is compiled on a CPU",
        _GRAPHS + "test_what_is_stated_stands_and_the_rest_is_filled_in",
        (
            *settings_of("CompilationConfig", "mode cudagraph_mode"),
            *settings_of("VllmConfig", "optimization_level"),
            *settings_of("ModelConfig", "enforce_eager"),
        ),
    ),
    Ours(
        "longer prefills are captured too, unless one of these is set",
        _GRAPHS + "test_sizes_that_are_stated_stand_and_full_graphs_have_vllms",
        (
            *settings_of("CompilationConfig", "cudagraph_capture_sizes max_cudagraph_capture_size"),
            *settings_of("VllmConfig", "performance_mode"),
        ),
    ),
    Ours(
        "our kernels are compiled in vLLM's own warm-up",
        "tests/contract/vllm/test_warmup.py::test_a_model_on_a_gpu_is_announced_and_one_on_a_cpu_is_not",
        settings_of("KernelConfig", "enable_jit_warmup"),
    ),
    Ours(
        "layers are split over vLLM's tensor-parallel group",
        _VLLM + "test_tokens.py::test_two_ranks_give_the_tokens_of_one",
        settings_of("ParallelConfig", "tensor_parallel_size"),
    ),
    Ours(
        "each stage builds the layers that vLLM assigns to it",
        "tests/multi_gpu/test_vllm.py::test_tokens_are_those_of_one_gpu",
        settings_of("ParallelConfig", "pipeline_parallel_size"),
    ),
    Ours(
        "data-parallel ranks split the experts of a mixture, or the weights of each expert",
        _VLLM + "test_mixtures.py::test_data_parallel_ranks_that_share_each_expert_give_hugging_faces_tokens",
        settings_of("ParallelConfig", "data_parallel_size enable_expert_parallel"),
    ),
    Ours(
        "weights of other ranks' experts are not read; the split of experts is vLLM's",
        _VLLM + "test_mixtures.py::test_tokens_of_shared_experts_among_the_routed_ones_are_hugging_faces",
        settings_of("ParallelConfig", "enable_ep_weight_filter"),
    ),
    Ours(
        "pages are shared, also in the step that fills them",
        _VLLM + "test_page_of_the_step.py::test_a_request_reads_what_another_writes_in_the_same_step",
        settings_of("CacheConfig", "enable_prefix_caching"),
    ),
    Ours(
        "states of linear attention are kept in bfloat16 or float32, and refused in others",
        "tests/contract/vllm/test_states.py::test_states_have_the_dtype_of_the_flags",
        settings_of("CacheConfig", "mamba_cache_dtype mamba_ssm_cache_dtype"),
    ),
    Ours(
        "with prefix caching states are kept at the ends of blocks",
        _VLLM + "test_hybrids.py::test_tokens_are_those_of_the_model_by_itself",
        settings_of("CacheConfig", "mamba_cache_mode"),
    ),
    Ours(
        "weights and activations in bfloat16, float16 or float32; others are refused",
        _VLLM + "test_fp8_weights.py::test_answers_are_right_but_for_a_few",
        settings_of("ModelConfig", "dtype"),
    ),
    Ours(
        "overridden keys of config.json are read or refused like those in the file",
        "tests/contract/vllm/test_checkpoint_config.py::test_the_base_is_the_checkpoints_own",
        settings_of("ModelConfig", "hf_overrides"),
    ),
    Ours(
        "embeddings may be given instead of tokens, and are used unchanged",
        "tests/unit/core/models/test_parallel.py::test_embeddings_may_be_given_instead_of_tokens_and_are_left_alone",
        settings_of("ModelConfig", "enable_prompt_embeds"),
    ),
    Ours(
        "also disables our fused all-reduce and norm, which reads other GPUs' memory",
        "tests/contract/vllm/test_flags.py::test_ranks_leave_each_others_memory_alone_where_vllm_is_told_to",
        settings_of("ParallelConfig", "disable_custom_all_reduce"),
    ),
    Ours(
        "no sliding window, and no request longer than the window",
        "tests/contract/vllm/test_flags.py::test_a_window_that_is_switched_off_is_none_of_ours",
        settings_of("ModelConfig", "disable_sliding_window"),
    ),
    Ours(
        "asks for our models",
        _VLLM + "test_isolation.py::test_auto_atom_and_auto_again_in_one_process",
        settings_of("ModelConfig", "model_impl"),
    ),
    Ours(
        "requests use vLLM's own sampler, which returns the mask",
        "tests/contract/vllm/test_sampling.py::test_probabilities_are_vllms_to_tell",
        settings_of("ModelConfig", "return_sampling_mask"),
    ),
    Ours(
        "weights are freed and loaded again, at the same addresses",
        _VLLM + "test_updates.py::test_answers_are_those_of_a_fresh_start_bit_for_bit",
        (*settings_of("ModelConfig", "enable_sleep_mode"), *settings_of("VllmConfig", "weight_transfer_config")),
    ),
    Ours(
        "our attention passes pages to connectors, and reads the pages that they load",
        "tests/contract/vllm/test_attention_layers.py"
        "::test_pages_are_shared_in_the_step_that_fills_them_where_prefixes_are_cached",
        settings_of("VllmConfig", "kv_transfer_config"),
    ),
    Ours(
        "the checkpoint's own layers draft, or one of our models",
        _VLLM + "test_mtp.py::test_tokens_and_right_drafts_are_hugging_faces",
        settings_of("SpeculativeConfig", "num_speculative_tokens model quantization"),
    ),
    Ours(
        "for multi-token prediction, other values than the target's are refused",
        _VLLM + "test_refusals.py::test_it_is_refused_with_a_message_that_says_what_and_what_else",
        settings_of("SpeculativeConfig", "draft_tensor_parallel_size kv_cache_dtype draft_lm_head_quantization"),
    ),
)

TABLE: tuple[Row, ...] = (*_FEATURES, *_KERNELS, *DRAFT, *_HONOURED, *OUTSIDE, *VARIABLES)

_REFUSED: Mapping[str, Refused] = {row.setting: row for row in refusals(TABLE)}


def refused(setting: str, **changes: Any) -> Refused:
    """The row of a refused setting, with ``changes``, for code that checks more than its value."""
    return replace(_REFUSED[setting], **changes)


def refused_by_value() -> Iterator[Refused]:
    """Rows that refuse by the value only."""
    return (row for row in refusals(TABLE) if row not in DRAFT and row.setting not in REFUSED_BY_MODEL)


def on_the_command_line() -> tuple[Refused, ...]:
    """Rows that refuse by the command line, for any model."""
    return (*refused_by_value(), *(refused(f"ModelConfig.{name}") for name in ("quantization", "quantization_config")))


#: Refused depending on the model: quantised checkpoints, MLA, mixtures with data parallelism.
REFUSED_BY_MODEL = (
    "ModelConfig.quantization",
    "ModelConfig.quantization_config",
    "ParallelConfig.all2all_backend",
    "VLLM_MLA_DISABLE",
)

#: Fields of ``EngineArgs`` that set a configuration field of another name, or whose name several classes have. All
#: others set the field of their own name.
ARGUMENTS: Mapping[str, str] = {
    "EngineArgs.attention_backend": "AttentionConfig.backend",
    "EngineArgs.enable_lora": "VllmConfig.lora_config",
    "EngineArgs.enable_mamba_cache_stochastic_rounding": "MambaConfig.enable_stochastic_rounding",
    "EngineArgs.kv_cache_dtype": "CacheConfig.cache_dtype",
    "EngineArgs.lora_target_modules": "LoRAConfig.target_modules",
    "EngineArgs.mamba_backend": "MambaConfig.backend",
    "EngineArgs.mamba_cache_philox_rounds": "MambaConfig.stochastic_rounding_philox_rounds",
    "EngineArgs.mamba_ssu_algorithm": "MambaConfig.ssu_algorithm",
    "EngineArgs.moe_backend": "KernelConfig.moe_backend",
    "EngineArgs.scheduling_policy": "SchedulerConfig.policy",
    "EngineArgs.spec_method": "SpeculativeConfig.method",
    "EngineArgs.spec_model": "SpeculativeConfig.model",
    "EngineArgs.spec_tokens": "SpeculativeConfig.num_speculative_tokens",
}

#: Settings that vLLM has removed, by the last version that has them; remove them with that version.
LAST_IN: Mapping[str, tuple[str, ...]] = {
    "0.30": (
        *settings_of("CacheConfig", "enable_mamba_fine_grained_prefix_cache"),
        *settings_of("ModelConfig", "enable_return_routed_experts"),
        *settings_of("MultiModalDummyOptionsBuiltins", "audio image video"),
        *settings_of(
            "",
            """
            VLLM_KIMI_K3_GEMM_RS VLLM_PLE_CPU_OFFLOAD VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_XPU_ENABLE_XPU_GRAPH
            """,
        ),
    ),
    "0.31": (
        *settings_of("ECTransferConfig", "ec_parallel_size ec_rank"),
        *settings_of("KVTransferConfig", "kv_buffer_size kv_ip kv_parallel_size kv_rank"),
        *settings_of("ParallelConfig", "sd_worker_cls"),
        *settings_of("PassConfig", "enable_sp fuse_gemm_comms sp_min_token_num"),
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    ),
    "0.32": settings_of(
        "",
        """
        VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_MONO_DECODE
        VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
        """,
    ),
}

#: The attribute of ``VllmConfig`` that has the object of a class.
OWNERS: Mapping[str, str] = {
    "AttentionConfig": "attention_config",
    "AuxOutputConfig": "aux_output_config",
    "CacheConfig": "cache_config",
    "CompilationConfig": "compilation_config",
    "EngineArgs": "additional_config",  # of flags without a field
    "IrOpPriorityConfig": "kernel_config.ir_op_priority",
    "KernelConfig": "kernel_config",
    "LoadConfig": "load_config",
    "ModelConfig": "model_config",
    "ParallelConfig": "parallel_config",
    "PassConfig": "compilation_config.pass_config",
    "PrefetchOffloadConfig": "offload_config.prefetch",
    "SpeculativeConfig": "speculative_config",
    "UVAOffloadConfig": "offload_config.uva",
    "VllmConfig": "",
}
