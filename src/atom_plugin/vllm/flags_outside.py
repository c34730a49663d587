"""vLLM's settings that act outside models and layers, or in code that our models do not have.

They are grouped by the code that reads them in vLLM's sources. Fields that only vLLM itself sets are not settings.
"""

from __future__ import annotations

from atom_plugin.common.flags import Theirs, settings_of

_SCHEDULER = (
    *settings_of(
        "SchedulerConfig",
        """
        async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager enable_chunked_prefill
        is_encoder_decoder is_multimodal_model long_prefill_token_threshold long_prefill_token_threshold_adaptive
        max_model_len max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens
        max_num_scheduled_tokens max_num_seqs policy prefill_schedule_interval runner_type scheduler_cls
        scheduler_reserve_full_isl stream_interval watermark
        """,
    ),
    *settings_of("VllmConfig", "scheduler_config"),
)

_CACHE = (
    *settings_of(
        "CacheConfig",
        """
        enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint gpu_memory_utilization
        is_attention_free kv_cache_memory_bytes kv_offloading_backend kv_offloading_size mamba_block_size
        mamba_page_size_padded num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo
        prefix_match_unit skip_page_size_padded sliding_window
        """,
    ),
    *settings_of(
        "KVEventsConfig",
        "buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher replay_endpoint topic",
    ),
    *settings_of(
        "KVTransferConfig",
        """
        enable_permute_local_kv engine_id kv_buffer_device kv_buffer_size kv_connector kv_connector_extra_config
        kv_connector_module_path kv_ip kv_load_failure_policy kv_parallel_size kv_port kv_rank kv_role
        """,
    ),
    *settings_of("VllmConfig", "cache_config kv_events_config"),
)

_FRONT = (
    *settings_of(
        "ModelConfig",
        """
        allowed_local_media_path allowed_media_domains generation_config io_processor_plugin override_generation_config
        renderer_num_workers served_model_name skip_tokenizer_init tokenizer tokenizer_mode
        tokenizer_revision
        """,
    ),
    *settings_of(
        "StructuredOutputsConfig",
        """
        backend disable_additional_properties disable_any_whitespace enable_in_reasoning reasoning_parser
        reasoning_parser_plugin
        """,
    ),
    *settings_of("ReasoningConfig", "reasoning_end_str reasoning_parser reasoning_start_str"),
    *settings_of("VllmConfig", "reasoning_config structured_outputs_config"),
)

_SAMPLER = (
    *settings_of(
        "ModelConfig", "enable_trace_replay logits_processors logprobs_mode max_logprobs seed use_fp64_gumbel"
    ),
    *settings_of(
        "WatermarkConfig",
        """
        algorithm allow_target_only_watermarking alpha context_width deduplicate_contexts
        deduplicate_contexts_max_history key prf
        """,
    ),
    *settings_of("VllmConfig", "watermark_config"),
)

_CHECKPOINT = (
    *settings_of(
        "ModelConfig",
        """
        allow_deprecated_quantization code_revision config_format hf_config_path hf_token max_model_len model
        model_weights revision spec_target_max_model_len trust_remote_code
        """,
    ),
    *settings_of(
        "LoadConfig",
        """
        download_dir ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load
        """,
    ),
    *settings_of("WeightTransferConfig", "backend"),
    *settings_of("VllmConfig", "load_config model_config"),
)

_PROCESSES = (
    *settings_of(
        "ParallelConfig",
        """
        assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb data_parallel_master_ip data_parallel_master_port data_parallel_rank
        data_parallel_rank_local data_parallel_rpc_port data_parallel_size_local
        disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds dp_sync_interval
        enable_fault_tolerance enable_shm_tensor_arena fault_tolerance_config is_moe_model master_addr master_port
        max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group rank
        ray_runtime_env ray_workers_use_nsight sd_worker_cls worker_cls worker_extension_cls
        _allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank _coord_store_port
        _data_parallel_master_port_list
        """,
    ),
    *settings_of("FaultToleranceConfig", "engine_recovery_timeout_sec"),
    *settings_of("WatchdogConfig", "check_interval dump_dir timeout"),
    *settings_of("DeviceConfig", "device"),
    *settings_of(
        "ModelConfig",
        """
        enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_backend sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names
        """,
    ),
    *settings_of(
        "VllmConfig", "additional_config device_config instance_id parallel_config shutdown_timeout watchdog_config"
    ),
    *settings_of(
        "EngineArgs",
        """
        aggregate_engine_logging data_parallel_address data_parallel_multi_port_external_lb data_parallel_start_rank
        device_ids fail_on_environ_validation tokens_only
        """,
    ),
)

_OBSERVED = (
    *settings_of(
        "ObservabilityConfig",
        """
        collect_detailed_traces cudagraph_metrics custom_histogram_buckets enable_layerwise_nvtx_tracing
        enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats jit_monitor_mode
        jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample otlp_traces_endpoint
        per_request_spec_decode_metrics show_hidden_metrics_for_version
        """,
    ),
    *settings_of(
        "ProfilerConfig",
        """
        active_iterations capture_torch_profiler delay_iterations detailed_trace_annotation ignore_frontend
        max_iterations profiler proton_backend proton_context proton_data proton_graph_attribution proton_hook
        proton_mode proton_output_format proton_profiler_dir torch_profiler_activities torch_profiler_dir
        torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_use_gzip
        torch_profiler_with_flops torch_profiler_with_memory torch_profiler_with_stack wait_iterations
        warmup_iterations
        """,
    ),
    *settings_of("LoggingConfig", "configure_logging formatter log_level pylogging_config_file"),
    *settings_of("VllmConfig", "logging_config observability_config profiler_config"),
    *settings_of("EngineArgs", "disable_log_stats log_config_file"),
    *settings_of("AsyncEngineArgs", "enable_log_requests"),
)

_COMPILER = (
    *settings_of(
        "CompilationConfig",
        """
        backend cache_dir compile_cache_save_format compile_ranges_endpoints compile_sizes cudagraph_copy_inputs
        cudagraph_num_of_warmups debug_dump_path dynamic_shapes_config fast_moe_cold_start inductor_compile_config
        inductor_passes pass_config splitting_ops use_inductor_graph_partition
        """,
    ),
    *settings_of("PassConfig", "eliminate_noops"),
    *settings_of("DynamicShapesConfig", "assume_32_bit_indexing evaluate_guards type"),
    *settings_of("VllmConfig", "compilation_config"),
)

_DRAFTING = (
    *settings_of(
        "SpeculativeConfig",
        """
        code_revision disable_eagle_block_drop disable_lookahead_block_hashes disable_padded_drafter_batch
        draft_sample_method enforce_eager max_model_len num_speculative_tokens_per_batch_size parallel_drafting
        prompt_lookup_max prompt_lookup_min rejection_sample_method revision suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
        synthetic_acceptance_length synthetic_acceptance_rates tensor_parallel_size use_heterogeneous_vocab
        draft_model_config draft_parallel_config target_model_config target_parallel_config
        """,
    ),
    *settings_of("VllmConfig", "speculative_config"),
)

_OTHER_DRAFTS = settings_of(
    "SpeculativeConfig",
    """
    dspark_draft_topk enable_adaptive_verification fly_entropy_threshold fly_entropy_top_k fly_window_size
    index_share_for_mtp_iteration xpress_topc
    """,
)

_OTHER_MODELS = (
    *settings_of(
        "AttentionConfig",
        """
        hisparse_config indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp
        minimax_m3_msa_decode_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
        """,
    ),
    *settings_of("HiSparseConfig", "device_buffer_size eager_host_mirror"),
    *settings_of(
        "CacheConfig",
        """
        kv_sharing_fast_prefill replayssm_buffer_len swa_bounded_replay use_replayssm
        """,
    ),
    *settings_of(
        "CompilationConfig",
        "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold",
    ),
    *settings_of("DiffusionConfig", "canvas_length max_denoising_steps"),
    *settings_of("EngramConfig", "cpu_offload dp_shared_memory embedding_across_dp use_thp"),
    *settings_of("KernelConfig", "sparse_indexer_topk_backend"),
    *settings_of("MambaConfig", "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds"),
    *settings_of("ParallelConfig", "enable_hc_sp"),
    *settings_of("VllmConfig", "diffusion_config engram_config mamba_config"),
    *settings_of("EngineArgs", "kda_decode_backend kda_prefill_backend"),
)

_IN_CHOSEN_BACKENDS = settings_of(
    "AttentionConfig",
    """
    flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size tokenspeed_mla_min_split_kv
    tq_max_kv_splits_for_cuda_graph
    """,
)

_MULTIMODAL = (
    *settings_of("AudioDummyOptions", "length"),
    *settings_of("BaseDummyOptions", "count"),
    *settings_of("ImageDummyOptions", "height width"),
    *settings_of("VideoDummyOptions", "height num_frames width"),
    *settings_of("MultiModalDummyOptionsBuiltins", "audio image video"),
    *settings_of(
        "CompilationConfig",
        """
        compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_max_frames_per_batch
        encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets
        """,
    ),
    *settings_of(
        "ECTransferConfig",
        """
        ec_buffer_device ec_buffer_size ec_connector ec_connector_extra_config ec_connector_module_path ec_ip
        ec_parallel_size ec_port ec_rank ec_role engine_id
        """,
    ),
    *settings_of("EncoderCacheManagerConfig", "encoder_cache_manager_cls manager_config"),
    *settings_of(
        "ModelConfig",
        """
        enable_mm_embeds interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs
        mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method
        video_pruning_rate
        """,
    ),
    *settings_of(
        "MultiModalConfig",
        """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only limit_per_prompt
        media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method video_pruning_rate
        """,
    ),
    *settings_of(
        "SpeechToTextConfig", "max_audio_clip_s min_energy_split_window_size overlap_chunk_second sample_rate"
    ),
    *settings_of(
        "SpeechToTextParams", "audio hotwords language model_config request_prompt stt_config task_type to_language"
    ),
    *settings_of("VllmConfig", "ec_manager_config ec_transfer_config"),
)

_POOLING = (
    *settings_of(
        "PoolerConfig",
        """
        dimensions enable_chunked_processing enable_flash_late_interaction logit_mean logit_sigma max_embed_len
        pooling_type returned_token_ids seq_pooling_type step_tag_id task tok_pooling_type use_activation
        """,
    ),
    *settings_of("ModelConfig", "pooler_config"),
)

_NEED_REFUSED = (
    *settings_of(
        "LoRAConfig",
        """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        specialize_active_lora target_modules
        """,
    ),
    *settings_of("CompilationConfig", "cudagraph_specialize_lora"),
    *settings_of(
        "EPLBConfig",
        """
        communicator enable_migration_batching log_balancedness log_balancedness_interval num_redundant_experts policy
        step_interval use_async window_size
        """,
    ),
    *settings_of(
        "ParallelConfig",
        """
        cp_kv_cache_interleave_size dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate elastic_ep_max_dp_size enable_elastic_ep eplb_config
        """,
    ),
    *settings_of("OffloadConfig", "offload_backend prefetch uva"),
    *settings_of("PrefetchOffloadConfig", "offload_num_in_group offload_params offload_prefetch_step"),
    *settings_of("UVAOffloadConfig", "cpu_offload_params"),
    *settings_of("QuantSpec", "activation weight"),
    *settings_of("QuantizationConfigArgs", "ignore linear moe targets"),
    *settings_of("AuxOutputConfig", "max_bytes"),
    *settings_of("VllmConfig", "aux_output_config offload_config"),
)

_WARM_UP = (
    *settings_of("KernelConfig", "enable_cutedsl_warmup enable_flashinfer_autotune ir_op_priority"),
    *settings_of("VllmConfig", "attention_config kernel_config"),
)

_DERIVED = (
    *settings_of("KVCacheDTypeHandler", "name"),
    *settings_of("Range", "end start"),
    *settings_of(
        "ModelArchitectureConfig",
        """
        architectures derived_max_model_len_and_key head_size hidden_size is_deepseek_mla is_mm_prefix_lm model_type
        num_experts num_experts_per_token per_layer_overrides quantization_config rswa_window text_model_type
        total_num_attention_heads total_num_hidden_layers total_num_kv_heads vocab_size
        """,
    ),
    *settings_of("VllmConfig", "quant_config"),
)

OUTSIDE: tuple[Theirs, ...] = (
    Theirs("the scheduler", _SCHEDULER),
    Theirs("the cache manager and page transfers; our layers define the page format", _CACHE),
    Theirs("the front end and grammars, before and after a model runs", _FRONT),
    Theirs("the sampler, after our logits", _SAMPLER),
    Theirs("finding and reading config.json and weights, before a model gets them", _CHECKPOINT),
    Theirs("processes, process groups and memory", _PROCESSES),
    Theirs("logs, metrics and profilers", _OBSERVED),
    Theirs("torch.compile of a traced model, and CUDA graphs", _COMPILER),
    Theirs("the loop that drafts and verifies", _DRAFTING),
    Theirs(
        "speculative methods that are refused (--speculative-config.method), or are for other models", _OTHER_DRAFTS
    ),
    Theirs(
        "models and layers of other architectures, which are refused; vLLM's own models of ours lack them too",
        _OTHER_MODELS,
    ),
    Theirs("attention backends that a user must choose, which is refused", _IN_CHOSEN_BACKENDS),
    Theirs("multimodal input, which is refused, and its encoders", _MULTIMODAL),
    Theirs("pooling, which is refused", _POOLING),
    Theirs("without effect unless another setting is on, which is refused", _NEED_REFUSED),
    Theirs("the warm-up of kernels that our models do not run; its fields have their own rows", _WARM_UP),
    Theirs("derived from other settings by vLLM; no flag sets it", _DERIVED),
)
