"""SGLang's server arguments that act outside models, or in code that our models do not have; see ``flags.py``."""

from __future__ import annotations

from atom_plugin.common.flags import Row, Theirs, settings_of


def _outside(why: str, names: str) -> Theirs:
    return Theirs(why, settings_of("ServerArgs", names))


OUTSIDE: tuple[Row, ...] = (
    _outside(
        "devices, processes, seeds and watchdogs of workers",
        """
        device base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
        custom_sigquit_handler numa_node gc_threshold nccl_port dist_timeout dist_init_addr gated_launch_port nnodes
        node_rank enable_p2p_check pre_warm_nccl
        """,
    ),
    _outside(
        "HTTP and gRPC servers, tokenizers, chat templates and parsers, in processes without a model",
        """
        enable_response_store tokenizer_path tokenizer_mode tokenizer_backend
        detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport
        smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args
        skip_server_warmup warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name weight_version chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser
        default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
        sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params
        allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
        incremental_streaming_output enable_streaming_session enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode
        """,
    ),
    _outside(
        "structured output and sampling, on a model's logits",
        """
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        grammar_backend disable_outlines_disk_cache sampling_backend enable_custom_logit_processor enable_watermark
        watermark_config watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all sampling_mask_max_tokens
        """,
    ),
    _outside(
        "SGLang's logits processor, which our models use as its own do",
        """
        enable_return_hidden_states return_hidden_states_mode enable_mis
        """,
    ),
    _outside(
        "the scheduler",
        """
        max_running_requests max_queued_requests max_total_tokens chunked_prefill_size prefill_decode_interval
        prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy schedule_conservativeness disable_overlap_schedule num_continuous_decode_steps
        scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay dp_size load_balance_method pp_max_micro_batch_size pp_async_batch_depth
        enable_dp_attention_local_control_broadcast
        """,
    ),
    _outside(
        "KV pools, the radix tree and its storage tiers; our attention asks the pool for each layer's pages at each "
        "step, so it waits for pages that are still being loaded",
        """
        mem_fraction_static page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
        disable_hybrid_swa_memory radix_eviction_policy _radix_eviction_policy_explicitly_set
        radix_eviction_policy_config disable_radix_cache enable_session_radix_cache radix_cache_backend
        enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction
        hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv
        flexkv_config_file
        """,
    ),
    _outside(
        "prefill and decode on two servers, which transfer pages between their pools",
        """
        disaggregation_mode disaggregation_decode_allocation_policy disaggregation_transfer_backend
        disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval enable_pd_role_switch optimistic_prefill_attempts
        disaggregation_decode_host_receive_threshold
        """,
    ),
    _outside(
        "CUDA graphs of whole steps",
        """
        cuda_graph_backend_decode cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        """,
    ),
    _outside(
        "communication in SGLang's process groups, which our layers use",
        """
        enable_nccl_nvls enable_mscclpp enable_torch_symm_mem
        """,
    ),
    _outside(
        "logs, metrics, traces and checks of steps and pools",
        """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
        enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
        kv_canary_sweep_interval
        """,
    ),
    _outside(
        "hooks around every module of a model, also of ours",
        "enable_layerwise_nvtx_marker",
    ),
    _outside(
        "finding a checkpoint and its config, and reading files into tensors, before a model gets them",
        """
        model_path trust_remote_code revision model_config_parser decrypted_config_file decrypted_draft_config_file
        download_dir model_checksum delete_ckpt_after_loading model_loader_extra_config weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        checkpoint_engine_wait_weights_before_ready custom_weight_loader engine_info_bootstrap_port
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
        """,
    ),
    _outside(
        "a setting of torch, which also applies to our float32 matrix products in torch",
        "enable_tf32_matmul",
    ),
    _outside(
        "drafting, verifying and accepting, in SGLang's workers",
        """
        speculative_draft_model_path speculative_draft_model_revision speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
        speculative_attention_mode speculative_adaptive_config spec_trace_dir
        _speculative_draft_quantization_explicitly_set
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        """,
    ),
    _outside(
        "for speculative algorithms that are refused (--speculative-algorithm)",
        """
        uno_lora_path speculative_dflash_block_size speculative_domino_candidate_pool_size
        speculative_dspark_block_size speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens aux_hidden_state_capture return_aux_hidden_state_layer_ids
        """,
    ),
    _outside(
        "SGLang's attention backends, if --attention-backend names one, for our models as for its own",
        """
        enable_lean_attention triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size
        """,
    ),
    _outside(
        "choices among native kernels with equal results, or of their launch; our models do not run them",
        """
        flashinfer_mla_disable_ragged disable_chunked_prefix_cache disable_flashinfer_autotune
        flashinfer_autotune_skip_ops enforce_disable_flashinfer_allreduce_fusion disable_attn_tp_gather
        tbo_token_distribution_threshold speculative_boundary_reduction
        """,
    ),
    _outside(
        "disables computing a shared expert as a routed one, which our models never do",
        "disable_shared_experts_fusion",
    ),
    _outside(
        "without effect unless a refused flag is given: LoRA adapters (--enable-lora)",
        """
        enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
        lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts
        lora_strict_loading lora_drain_wait_threshold
        """,
    ),
    _outside(
        "without effect unless a refused flag is given: all-to-all exchange of tokens (--moe-a2a-backend), elastic "
        "expert parallelism (--elastic-ep-backend), expert balancing (--enable-eplb)",
        """
        enable_w4a4_mxfp4_megamoe deepep_v2_mode deepep_mode fuseep_mode deepep_dispatcher_output_dtype
        flashinfer_a2a_dispatch_type deepep_config mooncake_ib_device ep_join_mode elastic_ep_scale_timeout
        ep_join_rank_offset elastic_ep_initial_size max_ep_size eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        speculative_enable_w4a4_mxfp4_megamoe disable_flashinfer_cutlass_moe_fp4_allgather
        enable_megamoe_for_layernorm_sp
        """,
    ),
    _outside(
        "without effect unless a refused flag is given: weights in host memory (--cpu-offload-gb, "
        "--offload-group-size, --enable-paged-experts, --kt-weight-path), context parallelism (--attn-cp-size, "
        "--dcp-size), --enable-pdmux, --enable-torch-compile, --dllm-algorithm, --enable-unified-memory, a 4-bit "
        "cache (--kv-cache-dtype), float16 states (--mamba-ssm-dtype), --enable-linear-replayssm, other load formats "
        "(--load-format), the weight cache (--weight-cache-mode), embedding (--is-embedding) and records of what a "
        "step has computed",
        """
        offload_num_in_group offload_prefetch_step offload_mode paged_experts_num_resident kt_method kt_cpuinfer
        kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token dcp_comm_backend
        dcp_replicate_q_proj cp_strategy enable_cp_tp_group_sharing enable_cp_decode_attn_tp enable_kv_cache_sharding
        pdmux_config_path sm_group_num enable_torch_compile_debug_mode torch_compile_max_bs dllm_algorithm_config
        dllm_fdfo prefill_kv_cache_dequant_dtype rl_quant_profile mamba_cache_philox_rounds linear_replayssm_cache_len
        remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        modelexpress_config weight_cache_socket
        weight_cache_timeout prefill_only_disable_kv_cache expert_distribution_recorder_buffer_size
        debug_tensor_dump_input_file
        """,
    ),
    _outside("SGLang itself refuses it for every model", "quantize_and_serve"),
    _outside(
        "devices that our models do not support; SGLang refuses it on others",
        """
        mlx_enable_sampling enable_quant_communications c128_page_size msprobe_dump_config
        """,
    ),
    _outside(
        "models that atom-plugin does not have (with state spaces or other linear attention than Qwen3-Next's and "
        "Qwen3.5's, DeepSeek V3.2 and V4, Qwen4, Inkling, Kimi K3), which SGLang runs itself",
        """
        dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsv4_attn_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend speculative_dsa_topk_backend enable_deepseek_v4_fp4_indexer
        enable_dsa_fused_indexer enable_dsa_cache_layer_split enable_return_indexer_topk
        enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay enable_hisparse hisparse_config
        mamba_backend ple_offload_embedding ple_offload_backend
        ple_offload_dir qsa_indexer_dtype enable_scattered_sconv enable_shared_experts_attn_tp
        shared_experts_tp_size enable_dense_mlp_attn_tp
        """,
    ),
    _outside(
        "SGLang's pool of the states of linear attention, and its cache of prefixes, which copies and packs states",
        """
        mamba_max_states_per_path enable_int8_mamba_checkpoint int8_mamba_ckpt_size max_mamba_cache_size
        mamba_full_memory_ratio
        """,
    ),
    _outside(
        "images, video and sound; our models take only text",
        """
        language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port
        encoder_register_urls enable_adaptive_dispatch_to_encoder enable_precise_embedding_interpolation
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend disable_fast_image_processor
        mm_feature_transport
        """,
    ),
    Theirs(
        "ports and sockets between SGLang's processes, which SGLang chooses",
        settings_of(
            "PortArgs",
            """
            tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name nccl_port rpc_ipc_name metrics_ipc_name
            tokenizer_worker_ipc_name decoupled_spec_ipc_config load_collector_ipc_name instance_id
            """,
        ),
    ),
    Theirs(
        "copies of server arguments, which have their own rows",
        settings_of(
            "ModelConfig",
            """
            model_path trust_remote_code revision context_length model_override_args is_embedding enable_multimodal
            dtype quantization override_config_file is_draft_model model_impl sampling_defaults quantize_and_serve
            is_multi_layer_eagle encoder_only language_only language_model_only disable_hybrid_swa_memory
            model_config_parser speculative_algorithm is_draft_quantization_explicit
            """,
        ),
    ),
)
