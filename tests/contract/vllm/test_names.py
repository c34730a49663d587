"""What the vLLM adapter uses of vLLM is there, takes what we pass and has the fields that we read.

Much of it is no public interface. A release that moves it should fail here, in seconds and by name, and not in a
server.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import reduce
from importlib import import_module

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]


def resolve(path: str):
    """The object at ``module:attribute.attribute``."""
    module, _, attributes = path.partition(":")
    return reduce(getattr, attributes.split("."), import_module(module))


NAMES = (
    "vllm:ModelRegistry.get_supported_archs",
    "vllm.config:VllmConfig",
    "vllm.config:CompilationMode.NONE",
    "vllm.config:CUDAGraphMode.FULL_DECODE_ONLY",
    "vllm.distributed:get_pp_group",
    "vllm.distributed:get_tp_group",
    "vllm.envs:VLLM_CPU_ATTN_SPLIT_KV",
    "vllm.envs:environment_variables",
    "vllm.envs:is_set",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    "vllm.model_executor.warmup.jit_warmup:VllmJitKernel",
    "vllm.platforms:current_platform.fp8_dtype",
    "vllm.platforms:current_platform.is_cpu",
    "vllm.platforms:current_platform.is_cuda_alike",
    "vllm.utils.torch_utils:LayerNameType",
    "vllm.v1.attention.backend:AttentionCGSupport.ALWAYS",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes",
    "vllm.v1.kv_cache_interface:KVCacheSpec",
    "vllm.v1.kv_cache_layout:KVCacheLayout.LBHNC",
    "vllm.v1.kv_cache_layout:KVCacheLayout.LBNHC",
)


@pytest.mark.parametrize("path", NAMES)
def test_it_exists(path):
    resolve(path)


CALLS = {
    "vllm:ModelRegistry.register_model": (("name", "module:class"), {}),
    "vllm._custom_ops:cpu_attention_with_kv_cache": (
        (),
        dict.fromkeys(
            [
                *("query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal"),
                *("alibi_slopes", "sliding_window", "block_table", "softcap", "scheduler_metadata", "s_aux"),
            ]
        ),
    ),
    "vllm._custom_ops:cpu_attn_get_scheduler_metadata": (
        (),
        dict.fromkeys(
            [
                *(
                    "num_reqs",
                    "num_heads",
                    "num_kv_heads",
                    "head_dim",
                    "seq_lens",
                    "dtype",
                    "query_start_loc",
                    "causal",
                ),
                *("sliding_window_size", "isa", "enable_kv_split"),
            ]
        ),
    ),
    "vllm._custom_ops:weight_packed_linear_cpu": (("x", "packed", 8, None), {}),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (("key", "value", "keys", "values", "slots", "isa"), {}),
    "vllm.compilation.breakable_cudagraph:eager_break_during_capture": (("function",), {}),
    "vllm.compilation.decorators:support_torch_compile": ((), dict.fromkeys(("dynamic_arg_dims", "enable_if"))),
    "vllm.distributed.parallel_state:GroupCoordinator.all_gather": (("self", "x", "dim"), {}),
    "vllm.distributed.parallel_state:GroupCoordinator.all_reduce": (("self", "x"), {}),
    "vllm.distributed.parallel_state:GroupCoordinator.reduce_scatter": (("self", "x", "dim"), {}),
    "vllm.distributed.utils:get_pp_indices": (("layers", "rank", "size"), {}),
    "vllm.model_executor.layers.attention:Attention.__init__": (
        ("self", "heads", "head size", "scale"),
        dict.fromkeys(
            ("num_kv_heads", "cache_config", "quant_config", "logits_soft_cap", "per_layer_sliding_window", "prefix")
        ),
    ),
    "vllm.model_executor.layers.attention.kv_transfer_utils:maybe_transfer_kv_layer": (("function",), {}),
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": (("layer",), {"remove_weight": True}),
    "vllm.config.quantization:resolve_quantization_config": (("quantization", "quantization_config"), {}),
    "vllm.forward_context:create_forward_context": (("metadata", "vllm_config"), {}),
    "vllm.forward_context:override_forward_context": (("context",), {}),
    "vllm.platforms.interface:Platform.apply_config_platform_defaults": (("vllm_config",), {}),
    "vllm.platforms.interface:Platform.check_and_update_config": (("vllm_config",), {}),
    "vllm.sequence:IntermediateTensors": (("tensors",), {}),
    "vllm.utils.torch_utils:_encode_layer_name": (("name",), {}),
    "vllm.utils.torch_utils:_resolve_layer_name": (("name",), {}),
    "vllm.utils.torch_utils:direct_register_custom_op": (
        ("name", "function"),
        dict.fromkeys(("mutates_args", "fake_impl", "target_lib")),
    ),
    "vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype": (("auto", "model_config"), {}),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": (
        ("self", "spec", "layer names", "config", "device"),
        {},
    ),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": (("dtype", "block size", "head size"), {}),
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills": (("metadata",), {}),
    "vllm.v1.kv_cache_interface:get_kv_quant_mode": (("fp8",), {}),
}


@pytest.mark.parametrize("path", CALLS)
def test_it_takes_what_we_pass(path):
    positional, named = CALLS[path]
    inspect.signature(resolve(path)).bind(*positional, **named)


FIELDS = {
    "vllm.config:CacheConfig": ("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_dtype_skip_layers"),
    "vllm.config:CompilationConfig": ("cudagraph_mode", "mode", "splitting_ops", "static_forward_context"),
    "vllm.config:DeviceConfig": ("device",),
    "vllm.config:LoadConfig": ("load_format",),
    "vllm.config:ModelConfig": (
        *("dtype", "hf_config", "hf_text_config", "max_model_len", "model", "model_impl", "multimodal_config"),
        "quantization",
        "quantization_config",
    ),
    "vllm.config:ParallelConfig": (
        *("decode_context_parallel_size", "enable_dbo", "prefill_context_parallel_size", "tensor_parallel_size"),
    ),
    "vllm.config:SchedulerConfig": ("max_num_batched_tokens", "max_num_seqs"),
    "vllm.config:SpeculativeConfig": ("draft_model_config", "method"),
    "vllm.config:VllmConfig": (
        *("additional_config", "cache_config", "compilation_config", "device_config", "kv_transfer_config"),
        *("load_config", "lora_config"),
        *("model_config", "offload_config", "optimization_level", "parallel_config", "quant_config"),
        *("scheduler_config", "speculative_config"),
    ),
    "vllm.forward_context:ForwardContext": ("attn_metadata", "no_compile_layers"),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        *("block_table_tensor", "max_query_len", "max_seq_len", "num_actual_tokens", "num_reqs", "query_start_loc"),
        *("seq_lens", "slot_mapping"),
    ),
}


@pytest.mark.parametrize("path", FIELDS)
def test_it_has_the_fields_that_we_read(path):
    assert set(FIELDS[path]) <= {field.name for field in dataclasses.fields(resolve(path))}


def test_a_model_config_works_out_what_we_read_and_keeps_its_class_where_routing_rewrites_it():
    from vllm.config import ModelConfig

    source = inspect.getsource(ModelConfig)
    for attribute in ("_architecture", "_model_info", "model_arch_config", "runner_type"):
        assert f"self.{attribute} = " in source or f"self.{attribute}: " in source, attribute


def test_built_in_platforms_are_probed_by_functions_without_arguments():
    from vllm.platforms import builtin_platform_plugins

    assert builtin_platform_plugins
    for probe in builtin_platform_plugins.values():
        inspect.signature(probe).bind()


SCHEMAS = {
    "convert_weight_packed": ["weight!"],
    "fused_add_rms_norm": ["input!", "residual!", "weight", "epsilon"],
    "rms_norm": ["out!", "input", "weight", "epsilon"],
    "rotary_embedding": ["positions", "query!", "key!", "head_size", "cos_sin_cache", "is_neox"],
}
"""The arguments that we pass, in order; those with an exclamation mark are declared as written to."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_compiled_op_takes_what_we_pass_in_that_order(name):
    import vllm._custom_ops  # noqa: F401 - loads the compiled ops

    if name == "convert_weight_packed" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM has it for processors with bfloat16 dot products, and we ask for it there alone")
    arguments = getattr(torch.ops._C, name).default._schema.arguments
    passed, others = arguments[: len(SCHEMAS[name])], arguments[len(SCHEMAS[name]) :]
    written = [it.alias_info is not None and it.alias_info.is_write for it in passed]
    assert [it.name + "!" * write for it, write in zip(passed, written, strict=True)] == SCHEMAS[name]
    assert all(it.has_default_value() for it in others)


@pytest.mark.parametrize("window", [None, 64])
def test_a_cache_spec_is_made_of_what_we_give(window):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

    shape = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.uint8,
        "kv_quant_mode": KVQuantMode(1),
    }
    spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (32, 2, 64)


def test_decodes_and_prefills_are_four_counts():
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    starts = torch.tensor([0, 1, 2, 7], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([5, 9, 5], dtype=torch.int32),
        num_reqs=3,
        num_actual_tokens=7,
        max_query_len=5,
        max_seq_len=9,
        block_table_tensor=torch.zeros(3, 1, dtype=torch.int32),
        slot_mapping=torch.arange(7),
    )
    assert tuple(split_decodes_and_prefills(common)) == (2, 1, 2, 5)


def test_a_layer_name_survives_its_encoding():
    from vllm.utils.torch_utils import _encode_layer_name, _resolve_layer_name

    assert _resolve_layer_name(_encode_layer_name("model.layers.0.self_attn.attn")) == "model.layers.0.self_attn.attn"


@pytest.mark.parametrize(
    "path",
    [
        "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
        "vllm.model_executor.layers.attention.kv_transfer_utils:maybe_transfer_kv_layer",
    ],
)
def test_a_decorator_around_our_op_calls_straight_through_where_it_has_nothing_to_do(path):
    def op(qkv, layer_name):
        return qkv, layer_name

    assert resolve(path)(op)("qkv", "name") == ("qkv", "name")
