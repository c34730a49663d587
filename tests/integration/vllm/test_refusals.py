"""Each thing that our models cannot do is one clear error before any weight is loaded.

Most refusals are made while the configuration is, so they are tested on that alone, all in one process; a few go
through the real `vllm serve`, to see that the line reaches the user and that the server ends.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.checkpoint_damage import DAMAGES, NORM, damaged
from tests.integration.preloaded import run_script
from tests.integration.questions import checkpoint
from tests.integration.server import ServerFailed, VllmServer

pytestmark = pytest.mark.vllm

SUPPORTED = (
    "DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, GptOssForCausalLM, LlamaForCausalLM, "
    "MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
    "Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM, "
    "Qwen3_5MoeForConditionalGeneration"
)
ENVIRON = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


MTP = {"method": "mtp", "num_speculative_tokens": 2}


@dataclass(frozen=True)
class Case:
    """Arguments that are refused, and what the message must say."""

    says: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    model: str = "sound"
    impl: str = "atom"
    build: bool = False
    """Whether it takes the model being laid out to know: kernels are chosen then, still before weights are loaded."""


CASES = {
    "an unsupported architecture": Case(
        ("--model-impl atom has no model for the architecture OPTForCausalLM", f"supported: {SUPPORTED}"), model="opt"
    ),
    "data-parallel ranks that exchange tokens in another way": Case(
        ("(--all2all-backend deepep_low_latency)", "supported: allgather_reducescatter", "--data-parallel-size 2"),
        {"data_parallel_size": 2, "all2all_backend": "deepep_low_latency", "load_format": "dummy"},
        model="a mixture",
    ),
    "experts that data-parallel ranks cannot split": Case(
        ("tensor times data parallel size 4 does not divide num_experts=6",),
        {"data_parallel_size": 4, "enable_expert_parallel": True, "load_format": "dummy"},
        model="a mixture",
    ),
    "experts that ranks cannot share out": Case(
        ("tensor parallel size 4 does not divide num_experts=6",),
        {"tensor_parallel_size": 4, "enable_expert_parallel": True, "load_format": "dummy"},
        model="a mixture",
    ),
    "latents on vLLM's attention": Case(
        ("ATOM_DISABLE_VLLM_ATTENTION=1 is not supported for DeepSeek models", "layer only"),
        {"load_format": "dummy"},
        environ={"ATOM_DISABLE_VLLM_ATTENTION": "1"},
        model="latents",
    ),
    "a draft model beside latents": Case(
        ("does not support draft models for DeepSeek models", "Use mtp", "ngram or suffix"),
        {
            "load_format": "dummy",
            "speculative_config": {"method": "draft_model", "model": checkpoint("llama"), "num_speculative_tokens": 2},
        },
        model="latents",
    ),
    "drafts by layers of the checkpoint beside files of a rank": Case(
        ("multi-token prediction (method 'mtp') with --load-format sharded_state",),
        {"load_format": "sharded_state", "speculative_config": MTP},
        model="latents",
    ),
    "drafts by layers of the checkpoint on two stages": Case(
        ("multi-token prediction (method 'mtp') with --pipeline-parallel-size 2", "stage has no embedding"),
        {"load_format": "dummy", "pipeline_parallel_size": 2, "speculative_config": MTP},
        model="latents",
    ),
    "drafts by layers of the checkpoint on fewer ranks": Case(
        ("draft_tensor_parallel_size=1 and --tensor-parallel-size 2",),
        {
            "load_format": "dummy",
            "tensor_parallel_size": 2,
            "speculative_config": {**MTP, "draft_tensor_parallel_size": 1},
        },
        model="latents",
    ),
    "drafts by layers that the checkpoint lacks": Case(
        ("has no weights to draft with (multi-token prediction)", "no tensor is called model.layers.5.*"),
        {"speculative_config": MTP},
        model="latents without layers that draft",
    ),
    "drafts by a number of tokens that layers cannot take turns for": Case(
        ("num_speculative_tokens:3 must be divisible by n_predict=2",),
        {"load_format": "dummy", "speculative_config": {**MTP, "num_speculative_tokens": 3}},
        model="latents with two layers that draft",
    ),
    "drafts of a hybrid behind cached prefixes, on the older model runner": Case(
        ("speculative decoding with prefix caching", "model runner V1", "Add --no-enable-prefix-caching"),
        {"speculative_config": MTP},
        model="a hybrid",
    ),
    "more drafts than a hybrid's kernels verify": Case(
        ("num_speculative_tokens=8 (--speculative-config)", "supported: up to 7"),
        {"enable_prefix_caching": False, "speculative_config": {**MTP, "num_speculative_tokens": 8}},
        model="a hybrid",
    ),
    "a draft model beside a hybrid": Case(
        ("does not support draft models for models with linear attention", "Use mtp", "ngram or suffix"),
        {
            "enable_prefix_caching": False,
            "speculative_config": {"method": "draft_model", "model": checkpoint("llama"), "num_speculative_tokens": 2},
        },
        model="a hybrid",
    ),
    "a hybrid on vLLM's attention": Case(
        ("ATOM_DISABLE_VLLM_ATTENTION=1 is not supported for models with linear attention", "output gate"),
        environ={"ATOM_DISABLE_VLLM_ATTENTION": "1"},
        model="a hybrid",
    ),
    "a stage without full attention": Case(
        ("--pipeline-parallel-size 2 gives stage 0 layers 0 to 1", "none of which has full attention"),
        {"pipeline_parallel_size": 2},
        model="a hybrid",
    ),
    "states in 16 bits that kernels do not have": Case(
        ("states of linear attention in float16", "supported: float32, bfloat16", "Add --mamba-ssm-cache-dtype"),
        {"mamba_ssm_cache_dtype": "float16"},
        model="a hybrid",
    ),
    "a kernel of vLLM's for linear attention": Case(
        ("the choice of a kernel for linear attention (--gdn-prefill-backend triton)", "ATOM_KERNELS"),
        {"gdn_prefill_backend": "triton"},
        model="a hybrid",
    ),
    "a variable for vLLM's linear attention": Case(
        ("kernels of vLLM's linear attention (VLLM_GDN_DECODE_KERNEL=triton)", "ATOM_KERNELS"),
        environ={"VLLM_GDN_DECODE_KERNEL": "triton"},
        model="a hybrid",
    ),
    "LoRA": Case(
        ("atom-plugin does not support LoRA adapters (--enable-lora)", "Leave --model-impl out"), {"enable_lora": True}
    ),
    "pooling": Case(("embeds, classifies or scores (--runner pooling); supported: auto, gen",), {"runner": "pooling"}),
    "conversion to an embedder": Case(("embeds, classifies or scores (--convert embed)",), {"convert": "embed"}),
    "quantisation by flag": Case(
        (
            "this quantisation (--quantization fp8_per_block); supported: fp8, fp8_per_tensor, fp8_per_channel.",
            "The checkpoint is not quantised itself",
        ),
        {"quantization": "fp8_per_block"},
    ),
    "quantisation by a flag of many parts": Case(
        ("(--quantization-config)", "--quantization fp8"),
        {"quantization": "fp8_per_channel", "quantization_config": {"ignore": ["re:.*o_proj"]}},
    ),
    "a checkpoint in small FP8 blocks": Case(
        ("Quantisation 'fp8' with weight_block_size=[64, 64] (only [128, 128]) is not supported",),
        model="quantised in small blocks",
    ),
    "a checkpoint that is not the FP8 that it says": Case(
        ("missing (", "weight_scale", "is stored as BF16, but config.json says FP8"), model="quantised to fp8"
    ),
    "a quantised checkpoint": Case(("gptq' is not supported", "bfloat16, float16, float32"), model="quantised"),
    "a KV cache of another type": Case(
        ("(--kv-cache-dtype fp8_per_token_head); supported: auto", "fp8_e5m2"), {"kv_cache_dtype": "fp8_per_token_head"}
    ),
    "a KV cache of two types": Case(
        ("--kv-cache-dtype-skip-layers",), {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}
    ),
    "weights as pickles, by flag": Case(("--load-format pt", "safetensors"), {"load_format": "pt"}),
    "weights as pickles, by what is there": Case(
        ("has no *.safetensors file", "pytorch_model.bin", "never read"), model="pickled"
    ),
    "weights in host memory": Case(("weight offloading (--cpu-offload-gb 1",), {"cpu_offload_gb": 1}),
    "weights fetched in groups": Case(("weight offloading", "--offload-group-size"), {"offload_group_size": 2}),
    "batch-invariant kernels": Case(("VLLM_BATCH_INVARIANT=1",), environ={"VLLM_BATCH_INVARIANT": "1"}),
    "speculation by a head on our hidden states": Case(
        ("(--spec-method eagle); supported: draft_model, mtp",),
        {
            "model": checkpoint("llama"),
            "speculative_config": {"method": "eagle", "model": checkpoint("llama"), "num_speculative_tokens": 2},
        },
    ),
    "an attention backend": Case(
        ("(--attention-backend CPU_ATTN)", "ATOM_KERNELS=attention=...", "ATOM_DISABLE_VLLM_ATTENTION=1"),
        {"attention_backend": "CPU_ATTN"},
    ),
    "a part of vLLM's attention": Case(
        ("(--attention-config.flash_attn_max_num_splits_for_cuda_graph 16); supported: 32",),
        {"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 16}},
    ),
    "a backend for experts": Case(
        ("(--moe-backend triton); supported: auto. ATOM_KERNELS",), {"moe_backend": "triton"}
    ),
    "a backend for linear layers": Case(("(--linear-backend torch); supported: auto",), {"linear_backend": "torch"}),
    "a backend for a format": Case(
        ("(--kernel-config.linear_backend_per_quant {'mxfp4_w4a16': 'marlin'})",),
        {"kernel_config": {"linear_backend_per_quant": {"mxfp4_w4a16": "marlin"}}},
    ),
    "a kernel of vLLM's ops": Case(
        ("(--ir-op-priority.rms_norm ['native'])",), {"ir_op_priority": {"rms_norm": ["native"]}}
    ),
    "custom ops": Case(("(-cc.custom_ops ['+rms_norm'])",), {"compilation_config": {"custom_ops": ["+rms_norm"]}}),
    "a pass of vLLM's": Case(
        ("(-cc.pass_config.fuse_norm_quant)", "own fused kernels"),
        {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
    ),
    "experts in turns over ranks": Case(
        ("(--expert-placement-strategy round_robin); supported: linear",),
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
        model="a mixture",
    ),
    "batches in parts": Case(
        ("(--ubatch-size 2); supported: 0, 1",), {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}
    ),
    "pages of a size that no kernel reads": Case(
        ("pages of this size (--block-size 24)", "multiples of 16"), {"block_size": 24}
    ),
    "another class": Case(
        ("(--model-class-overrides {'Qwen3ForCausalLM'", "Leave out --model-class-overrides or --model-impl atom"),
        {"model_class_overrides": {"Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM"}},
    ),
    "experts that are drawn": Case(
        ("(VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random)", "Unset it"),
        environ={"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
    ),
    "float32 in fewer bits": Case(
        ("(VLLM_FLOAT32_MATMUL_PRECISION=high); supported: highest",), environ={"VLLM_FLOAT32_MATMUL_PRECISION": "high"}
    ),
    "tiles of vLLM's": Case(("(VLLM_TUNED_CONFIG_FOLDER=/tiles)",), environ={"VLLM_TUNED_CONFIG_FOLDER": "/tiles"}),
    "a kernel by a variable": Case(
        ("(VLLM_MARLIN_INPUT_DTYPE=int8)", "ATOM_KERNELS"), environ={"VLLM_MARLIN_INPUT_DTYPE": "int8"}
    ),
    "an attention backend for a draft of ours": Case(
        ("for its draft (--speculative-config.attention_backend CPU_ATTN)",),
        {
            "speculative_config": {
                "method": "draft_model",
                "model": checkpoint("qwen2"),
                "num_speculative_tokens": 2,
                "attention_backend": "CPU_ATTN",
            }
        },
    ),
    "a backend for the experts of layers that draft": Case(
        ("(--speculative-config.moe_backend triton)",),
        {"load_format": "dummy", "speculative_config": {**MTP, "moe_backend": "triton"}},
        model="latents",
    ),
    "latents cached as keys and values": Case(
        ("(VLLM_MLA_DISABLE=1)", "Unset it"),
        {"load_format": "dummy"},
        environ={"VLLM_MLA_DISABLE": "1"},
        model="latents",
    ),
    "heads that do not divide": Case(("3", "heads"), {"tensor_parallel_size": 3}),
    "an unknown rope type": Case(("'spiral'", "yarn"), model="unknown rope"),
    "missing tensors": Case(("does not fit Qwen3ForCausalLM", "missing (1)", NORM), model="missing tensor"),
    "unexpected tensors": Case(
        ("does not fit Qwen3ForCausalLM", "unexpected (1)", "model.extra.weight in model.safetensors"),
        model="unexpected tensor",
    ),
    "misshapen tensors": Case(
        ("does not fit Qwen3ForCausalLM", "misshapen (1)", f"{NORM} in model.safetensors is [63], should be [64]"),
        model="misshapen tensor",
    ),
    "a file cut off in its tensors": Case(("model.safetensors is damaged", "beyond its end"), model="truncated"),
    "a file cut off in its header": Case(("model.safetensors is truncated",), model="truncated header"),
    "experts of a model without any": Case(
        ("--enable-return-routed-experts is for mixtures of experts, and this Qwen3ForCausalLM is not one",),
        {"enable_return_routed_experts": True},
    ),
    "a head of fewer bits than the model": Case(
        ("head_dtype bfloat16 (--hf-overrides) with --dtype float16 is not supported", "supported: float32, float16"),
        {"dtype": "float16", "hf_overrides": {"head_dtype": "bfloat16"}},
    ),
    "an unknown op": Case(
        ("ATOM_KERNELS", "unknown op 'atention'", "attention", "rms_norm"),
        environ={"ATOM_KERNELS": "atention=reference"},
        build=True,
    ),
    "an unknown implementation": Case(
        ("ATOM_KERNELS asks for rms_norm=cuda", "framework, torch, reference"),
        environ={"ATOM_KERNELS": "rms_norm=cuda"},
        build=True,
    ),
    "an implementation that cannot run here": Case(
        ("ATOM_KERNELS asks for attention=triton", "cannot run on cpu"),
        environ={"ATOM_KERNELS": "attention=triton"},
        build=True,
    ),
    "a malformed setting": Case(
        ("ATOM_KERNELS='attention'", "op=implementation"), environ={"ATOM_KERNELS": "attention"}
    ),
    "an unknown variable": Case(
        ("unknown environment variable ATOM_KERNEL", "'attention=reference'", "did you mean ATOM_KERNELS?"),
        environ={"ATOM_KERNEL": "attention=reference"},
    ),
    "a value that is no truth value": Case(
        ("ATOM_DISABLE_VLLM_ATTENTION='maybe'", "0, 1, false, true"), environ={"ATOM_DISABLE_VLLM_ATTENTION": "maybe"}
    ),
}
# What must still be taken: the refusals must not reach further than they say.
TAKEN = {
    "the checkpoint itself": Case(()),
    "a draft of another family": Case(
        (),
        {"speculative_config": {"method": "draft_model", "model": checkpoint("llama"), "num_speculative_tokens": 2}},
    ),
    "drafts by layers of the checkpoint": Case(
        (), {"load_format": "dummy", "speculative_config": {**MTP, "num_speculative_tokens": 3}}, model="latents"
    ),
    "two ranks": Case((), {"tensor_parallel_size": 2}),
    "a hybrid": Case((), model="a hybrid"),
    "drafts of a hybrid": Case((), {"enable_prefix_caching": False, "speculative_config": MTP}, model="a hybrid"),
    "float16": Case((), {"dtype": "float16"}),
    "a head in float32": Case((), {"dtype": "float16", "hf_overrides": {"head_dtype": "float32"}}),
    "a head in the model's dtype": Case((), {"hf_overrides": {"head_dtype": "model"}}),
    "quantisation while loading": Case((), {"quantization": "fp8"}),
    "an FP8 KV cache": Case((), {"kv_cache_dtype": "fp8"}),
    "random weights": Case((), {"load_format": "dummy"}, model="missing tensor"),
    "files of a rank": Case((), {"load_format": "sharded_state"}),
    "an attention backend where it runs": Case(
        (), {"attention_backend": "CPU_ATTN"}, environ={"ATOM_DISABLE_VLLM_ATTENTION": "1"}
    ),
    "kernels that are switched off": Case(
        (), environ={"VLLM_USE_DEEP_GEMM": "0", "VLLM_MARLIN_USE_ATOMIC_ADD": "0", "VLLM_DISABLED_KERNELS": "X"}
    ),
    "AMD's variables elsewhere": Case((), environ={"VLLM_ROCM_USE_AITER_MHA": "0"}),
    "a class for another architecture": Case((), {"model_class_overrides": {"NobodysForCausalLM": "module:Class"}}),
    "values at their defaults": Case(
        (),
        {"moe_backend": "auto", "linear_backend": "auto", "ubatch_size": 0},
        environ={"VLLM_FLOAT32_MATMUL_PRECISION": "highest", "VLLM_BATCH_INVARIANT": "0"},
    ),
    "experts of other ranks left unread": Case(
        (),
        {
            "load_format": "dummy",
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "enable_ep_weight_filter": True,
        },
        model="a mixture",
    ),
    "a backend for the experts of vLLM's own model": Case((), {"moe_backend": "triton"}, impl="auto"),
    "LoRA for vLLM's own model": Case((), {"enable_lora": True}, impl="auto"),
    "a wrong setting for vLLM's own model": Case((), environ={"ATOM_KERNEL": "x"}, impl="auto"),
    "an architecture that only vLLM has": Case((), model="opt", impl="auto"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A copy of the checkpoint for each way in which one can be wrong."""
    copies = {name: damaged(name, tmp_path_factory.mktemp("checkpoints")) for name in DAMAGES}
    return {**copies, "a hybrid": checkpoint("qwen3_next")}


@pytest.fixture(scope="module")
def problems(folders, tmp_path_factory):
    """What vLLM says to each case."""
    cases = {**CASES, **TAKEN}
    given, wanted = (tmp_path_factory.mktemp("configure") / name for name in ("cases.json", "problems.json"))
    described = [
        {
            "args": {"model": folders[case.model], "model_impl": case.impl, **case.args},
            "environ": case.environ,
            "build": case.build,
        }
        for case in cases.values()
    ]
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("configure.py")
    finished = run_script(script, [str(given), str(wanted)], ENVIRON, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip(cases, json.loads(wanted.read_text()), strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_a_message_that_says_what_and_what_else(name, problems):
    message = problems[name]
    assert message is not None, "vLLM would have started"
    for part in CASES[name].says:
        assert part in message


@pytest.mark.smoke
@pytest.mark.parametrize("name", TAKEN)
def test_it_is_not_refused(name, problems):
    assert problems[name] is None


@pytest.mark.parametrize("name", ["an unsupported architecture", "an implementation that cannot run here"])
def test_the_server_says_so_and_ends_before_it_loads_weights(name, folders):
    case = CASES[name]
    with (
        pytest.raises(ServerFailed) as failure,
        VllmServer(folders[case.model], "--model-impl", "atom", environ=case.environ, deadline=120),
    ):
        pass
    assert failure.value.returncode not in (None, 0)
    for part in case.says:
        assert part in failure.value.log
    assert not re.search("Loading (safetensors|weights)", failure.value.log)
