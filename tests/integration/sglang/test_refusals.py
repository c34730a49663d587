"""Each thing that our models cannot do is one clear error before any weight is loaded.

All refusals but one are made while SGLang resolves its arguments, in the process that the user started, so they are
tested on that alone, all in one process; a few go through the real command, to see that the line reaches the user and
that the server ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.hybrid_checkpoints import make_hybrid
from tests.integration.checkpoint_damage import DAMAGES, NORM, damaged
from tests.integration.preloaded import run_script
from tests.integration.questions import checkpoint
from tests.integration.server import ServerFailed, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OURS = {PACKAGE: "atom_plugin.sglang.models"}


@dataclass(frozen=True)
class Case:
    """A command line that is refused, and what the message must say."""

    says: tuple[str, ...]
    flags: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    model: str = "sound"
    ours: bool = True


def chain(steps: int, tokens: int | None) -> tuple[str, ...]:
    """Flags of a chain of drafts."""
    verified = () if tokens is None else ("--speculative-num-draft-tokens", str(tokens))
    return ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1", *verified)


def drafting_by_layers(steps: int, tokens: int | None = None) -> tuple[str, ...]:
    """Flags that ask for drafts by layers of the checkpoint."""
    return ("--speculative-algorithm", "NEXTN", *chain(steps, tokens))


CHAIN = chain(3, 4)
DUMMY = ("--load-format", "dummy")
NEXTN = drafting_by_layers(3, 4)


def draft(algorithm: str) -> tuple[str, ...]:
    """Flags that ask for drafts."""
    return ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", checkpoint("llama"))


CASES = {
    "LoRA": Case(("does not support LoRA adapters (--enable-lora",), ("--enable-lora", "--max-lora-rank", "8")),
    "embedding": Case(("does not support embedding (--is-embedding)",), ("--is-embedding",)),
    "two batches at once": Case(
        ("does not support two-batch overlap (--enable-two-batch-overlap)",), ("--enable-two-batch-overlap",)
    ),
    "experts of a model without any": Case(
        ("--enable-return-routed-experts is for mixtures of experts, and this Qwen3ForCausalLM is not one",),
        ("--enable-return-routed-experts",),
    ),
    "a record of experts of a model without any": Case(
        ("--expert-distribution-recorder-mode per_token is for mixtures of experts",),
        ("--expert-distribution-recorder-mode", "per_token"),
    ),
    "experts of two stages": Case(
        ("--enable-return-routed-experts is not supported with --pp-size 2",),
        ("--enable-return-routed-experts", "--pp-size", "2", *DUMMY),
        model="a mixture",
    ),
    "an approximate record of experts": Case(
        ("--expert-distribution-recorder-mode stat_approx counts what --moe-a2a-backend deepep sends", "use stat"),
        ("--expert-distribution-recorder-mode", "stat_approx", *DUMMY),
        model="a mixture",
    ),
    "a record of experts where SGLang cannot count": Case(
        ("--expert-distribution-recorder-mode stat is not supported on --device cpu", "Use per_token"),
        ("--expert-distribution-recorder-mode", "stat", *DUMMY),
        model="a mixture",
    ),
    "data-parallel attention of no mixture": Case(
        ("--attn-dp-size 2 (--enable-dp-attention) is for mixtures of experts", "--dp-size 2 without it"),
        ("--tp", "2", "--attn-dp-size", "2"),
    ),
    "the same by its old name": Case(
        ("--attn-dp-size 2 (--enable-dp-attention) is for mixtures of experts", "--dp-size 2 without it"),
        ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
    ),
    "attention groups that the ranks do not fill": Case(
        ("--attn-dp-size 3", "does not divide --tp-size 4"),
        ("--tp", "4", "--attn-dp-size", "3", "--load-format", "dummy"),
        model="a mixture",
    ),
    "experts that attention groups cannot share out": Case(
        ("tensor times data parallel size 4 does not divide num_experts=6",),
        ("--tp", "4", "--attn-dp-size", "2", "--ep-size", "4", "--load-format", "dummy"),
        model="a mixture",
    ),
    "dense layers sharded unlike attention": Case(
        ("does not support --moe-dense-tp-size 1", "as many shards as attention (2)"),
        ("--tp", "4", "--attn-dp-size", "2", "--moe-dense-tp-size", "1", "--load-format", "dummy"),
        model="latents",
    ),
    "a head sharded unlike attention": Case(
        (
            "does not support a head sharded unlike attention (--enable-tp-lm-head-all-to-all)",
            "--enable-dp-lm-head",
        ),
        ("--tp", "2", "--attn-dp-size", "2", "--enable-tp-lm-head-all-to-all", "--load-format", "dummy"),
        model="latents",
    ),
    "data-parallel attention on a backend that takes no padding": Case(
        ("--attention-backend torch_native with --attn-dp-size 2", "takes no padded batches"),
        ("--tp", "2", "--attn-dp-size", "2", "--attention-backend", "torch_native", *DUMMY),
        model="a mixture",
    ),
    "a head on hidden states beside data-parallel attention": Case(
        ("--speculative-algorithm EAGLE by a head that is no layer of the checkpoint", "--attn-dp-size 2"),
        (*draft("EAGLE"), *CHAIN, "--tp", "2", "--attn-dp-size", "2", "--load-format", "dummy"),
        model="a mixture",
    ),
    "experts on some ranks": Case(
        ("--ep-size 2 with --tp-size 4", "or 1 (each expert is sharded)"), ("--tp", "4", "--ep-size", "2")
    ),
    "experts that ranks cannot share out": Case(
        ("tensor parallel size 4 does not divide num_experts=6",),
        ("--tp", "4", "--ep-size", "4", "--load-format", "dummy"),
        model="a mixture",
    ),
    "latents on SGLang's attention": Case(
        ("--attention-backend triton is not supported for our DeepSeek models", "runs on 'atom' only"),
        ("--attention-backend", "triton", "--load-format", "dummy"),
        model="latents",
    ),
    "drafts beside latents": Case(
        ("does not support --speculative-algorithm STANDALONE for DeepseekV3ForCausalLM", "NEXTN"),
        (*draft("STANDALONE"), "--load-format", "dummy"),
        model="latents",
    ),
    "a head on hidden states beside latents": Case(
        ("does not support --speculative-draft-model-path", "layers of its own checkpoint"),
        (*draft("EAGLE"), *CHAIN, "--load-format", "dummy"),
        model="latents",
    ),
    "drafts by layers of the checkpoint on another backend": Case(
        ("does not support --speculative-draft-attention-backend triton for DeepseekV3ForCausalLM",),
        (*NEXTN, "--speculative-draft-attention-backend", "triton", "--load-format", "dummy"),
        model="latents",
    ),
    "drafts by layers of the checkpoint beside files of a rank": Case(
        ("does not support --load-format sharded_state for DeepseekV3ForCausalLM",),
        (*NEXTN, "--load-format", "sharded_state"),
        model="latents",
    ),
    "drafts by layers of the checkpoint on two stages": Case(
        ("does not support speculation with --pp-size 2 for DeepseekV3ForCausalLM",),
        (*NEXTN, "--pp-size", "2", "--load-format", "dummy"),
        model="latents",
    ),
    "drafts by layers that the configuration lacks": Case(
        ("The checkpoint has no layers to draft with", "num_nextn_predict_layers=0"),
        (*NEXTN, "--load-format", "dummy"),
        model="latents with no layer that drafts",
    ),
    "drafts by layers that the checkpoint lacks": Case(
        ("has no weights to draft with (multi-token prediction)", "no tensor is called model.layers.5.*"),
        NEXTN,
        model="latents without layers that draft",
    ),
    "trees of drafts by layers of the checkpoint": Case(
        ("does not support trees of draft tokens (--speculative-eagle-topk 4); supported: 1.", "set it to 1"),
        (*NEXTN[:4], "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8", "--load-format", "dummy"),
        model="latents",
    ),
    "experts that move": Case(
        ("balancing experts over ranks (--init-expert-location x.json); supported: trivial.",),
        ("--init-expert-location", "x.json"),
    ),
    "multiplexed prefill and decode": Case(("--enable-pdmux",), ("--enable-pdmux", "--chunked-prefill-size", "-1")),
    "compilation": Case(("--enable-torch-compile",), ("--enable-torch-compile",)),
    "the same tokens in every batch": Case(
        ("--enable-deterministic-inference",), ("--enable-deterministic-inference",)
    ),
    "weights in host memory": Case(
        ("weight offloading (--cpu-offload-gb 1); supported: 0.",), ("--cpu-offload-gb", "1")
    ),
    "drafts from n-grams": Case(
        ("this speculative algorithm (--speculative-algorithm NGRAM); supported: EAGLE, NEXTN, STANDALONE.",),
        ("--speculative-algorithm", "NGRAM"),
    ),
    "trees of drafts": Case(
        ("does not support trees of draft tokens (--speculative-eagle-topk 4); supported: 1.", "set it to 1"),
        (*draft("EAGLE"), "--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
    ),
    "trees of drafts beside sinks": Case(
        ("does not support trees of draft tokens (--speculative-eagle-topk 4); supported: 1.",),
        (*draft("EAGLE"), "--speculative-num-steps", "3", "--speculative-eagle-topk", "4", *DUMMY),
        model="sinks",
    ),
    "drafts of a length that changes": Case(
        ("an adaptive draft length on --attention-backend atom (--speculative-adaptive)",),
        (*draft("EAGLE"), *CHAIN, "--speculative-adaptive"),
    ),
    "a draft of ours on another backend": Case(
        ("--speculative-draft-attention-backend triton", "the target's attention backend, atom"),
        (*draft("STANDALONE"), "--speculative-draft-attention-backend", "triton"),
    ),
    "a pool whose slots move": Case(("--enable-unified-memory",), ("--enable-unified-memory",)),
    "a KV cache of another type": Case(
        ("--kv-cache-dtype mxfp8); supported: auto, bf16",), ("--kv-cache-dtype", "mxfp8")
    ),
    "quantisation by flag": Case(
        ("does not support this quantisation (--quantization w8a8_fp8); supported: unquant, fp8,",),
        ("--quantization", "w8a8_fp8"),
    ),
    "a checkpoint in small FP8 blocks": Case(
        ("Quantisation 'fp8' with weight_block_size=[64, 64] (only [128, 128]) is not supported",),
        model="quantised in small blocks",
    ),
    "a checkpoint that is not the FP8 that it says": Case(
        ("missing (", "weight_scale", "is stored as BF16, but config.json says FP8"), model="quantised to fp8"
    ),
    "modules left out by a variable": Case(
        ("SGLANG_FP8_IGNORED_LAYERS=o_proj",), ("--quantization", "fp8"), {"SGLANG_FP8_IGNORED_LAYERS": "o_proj"}
    ),
    "weights as pickles, by flag": Case(
        ("checkpoints that are not safetensors (--load-format pt); supported: auto, safetensors,",),
        ("--load-format", "pt"),
    ),
    "weights as pickles, by what is there": Case(
        ("has no *.safetensors file", "pytorch_model.bin", "never read"), model="pickled"
    ),
    "weights layer by layer": Case(
        ("checkpoints that are not safetensors (--load-format layered); supported: auto,",),
        ("--load-format", "layered"),
    ),
    "a quantisation of checkpoints for one that has none": Case(
        ("--quantization modelopt_fp8 is for checkpoints that are stored so", "--quantization fp8"),
        ("--quantization", "modelopt_fp8"),
    ),
    "Transformers' model": Case(
        ("another implementation than ours (--model-impl transformers); supported: auto, sglang.", f"unset {PACKAGE}"),
        ("--model-impl", "transformers"),
    ),
    "a kernel for experts": Case(
        ("SGLang's kernels for experts (--moe-runner-backend triton); supported: auto.", "ATOM_KERNELS=experts="),
        ("--moe-runner-backend", "triton", *DUMMY),
        model="a mixture",
    ),
    "a kernel for FP8": Case(
        ("SGLang's kernels for FP8 linear layers (--fp8-gemm-backend triton)", "ATOM_KERNELS=fp8_block_linear="),
        ("--fp8-gemm-backend", "triton"),
    ),
    "a kernel for FP4": Case(("(--fp4-gemm-backend marlin)", "ATOM_KERNELS="), ("--fp4-gemm-backend", "marlin")),
    "a kernel for linear layers": Case(
        ("(--bf16-gemm-backend torch)", "ATOM_KERNELS=linear="), ("--bf16-gemm-backend", "torch")
    ),
    "a kernel for queries and keys": Case(
        ("(--enable-fused-qk-norm-rope)", "ATOM_KERNELS=qk_norm_rope_cache="), ("--enable-fused-qk-norm-rope",)
    ),
    "a kernel that adds up experts": Case(
        ("(--enable-fused-moe-sum-all-reduce)", "ATOM_KERNELS="), ("--enable-fused-moe-sum-all-reduce",)
    ),
    "a kernel for all-reduce and norm": Case(
        ("(--flashinfer-allreduce-fusion-backend auto)", "ATOM_KERNELS=all_reduce_norm="),
        ("--flashinfer-allreduce-fusion-backend", "auto"),
    ),
    "the same in prefill": Case(
        ("(--disable-aiter-allreduce-fusion-in-prefill)",), ("--disable-aiter-allreduce-fusion-in-prefill",)
    ),
    "the same in decode": Case(
        ("(--disable-aiter-allreduce-fusion-in-decode)",), ("--disable-aiter-allreduce-fusion-in-decode",)
    ),
    "inputs of another precision": Case(
        ("(--flashinfer-mxfp4-moe-precision bf16); supported: default.",), ("--flashinfer-mxfp4-moe-precision", "bf16")
    ),
    "shared experts among those that are routed to": Case(
        ("(--enforce-shared-experts-fusion)",), ("--enforce-shared-experts-fusion",)
    ),
    "the numbers of a trainer": Case(
        ("results identical to a trainer's model (--rl-on-policy-target fsdp)",), ("--rl-on-policy-target", "fsdp")
    ),
    "overlap within a batch": Case(("(--enable-single-batch-overlap)",), ("--enable-single-batch-overlap",)),
    "rows of a norm on each rank": Case(
        ("layers sharded unlike attention (--enable-layernorm-sp)",), ("--tp", "2", "--enable-layernorm-sp")
    ),
    "scattered inputs of attention": Case(
        ("(--enable-attn-tp-input-scattered)",), ("--tp", "2", "--enable-attn-tp-input-scattered")
    ),
    "how ranks add up": Case(("(--boundary-reduction ar); supported: auto.",), ("--boundary-reduction", "ar")),
    "memory that NCCL shares": Case(("(--enable-symm-mem)",), ("--tp", "2", "--enable-symm-mem")),
    "prefill over ranks": Case(("context parallelism (--enable-prefill-cp)",), ("--enable-prefill-cp",)),
    "experts fetched when they are needed": Case(
        ("weight offloading (--enable-paged-experts)",), ("--enable-paged-experts", "--paged-experts-num-resident", "4")
    ),
    "experts on the CPU": Case(("weight offloading (--kt-weight-path x)",), ("--kt-weight-path", "x")),
    "weights after graphs": Case(
        ("(--startup-weight-load-mode overlap); supported: serial.",), ("--startup-weight-load-mode", "overlap")
    ),
    "weights of another process": Case(
        ("(--weight-cache-mode client); supported: off.",), ("--weight-cache-mode", "client")
    ),
    "a context over ranks": Case(
        ("context parallelism (--attn-cp-size 2); supported: 1.",), ("--tp", "2", "--attn-cp-size", "2", *DUMMY)
    ),
    "a context over ranks that decode": Case(
        ("context parallelism (--dcp-size 2); supported: 1.",), ("--tp", "2", "--dcp-size", "2", *DUMMY)
    ),
    "data-parallel experts": Case(
        ("data-parallel experts (--moe-dp-size 2); supported: 1.",),
        ("--tp", "2", "--moe-dp-size", "2", *DUMMY),
        model="a mixture",
    ),
    "tokens sent to experts": Case(
        ("every rank gets all tokens (--moe-a2a-backend deepep); supported: none.",),
        ("--tp", "2", "--moe-a2a-backend", "deepep", *DUMMY),
        model="a mixture",
    ),
    "experts that are balanced": Case(("(--enable-eplb)",), ("--tp", "2", "--ep-size", "2", "--enable-eplb", *DUMMY)),
    "experts twice": Case(
        ("balancing experts over ranks (--ep-num-redundant-experts 2); supported: 0.",),
        ("--tp", "2", "--ep-size", "2", "--ep-num-redundant-experts", "2", *DUMMY),
        model="a mixture",
    ),
    "diffusion": Case(("diffusion decoding (--dllm-algorithm LowConfidence)",), ("--dllm-algorithm", "LowConfidence")),
    "adapters": Case(("LoRA adapters (--",), ("--lora-paths", "a=b")),
    "groups of layers in host memory": Case(
        ("weight offloading (--offload-group-size 2); supported: -1, 0.",), ("--offload-group-size", "2")
    ),
    "a kernel for all-reduce and norm by its old flag": Case(
        ("ATOM_KERNELS=all_reduce_norm=",), ("--enable-flashinfer-allreduce-fusion",)
    ),
    "weights for other servers": Case(
        ("(--remote-instance-weight-loader-start-seed-via-transfer-engine)",),
        ("--remote-instance-weight-loader-start-seed-via-transfer-engine",),
    ),
    "how experts are dispatched": Case(
        ("balancing experts over ranks (--ep-dispatch-algorithm fake)",), ("--ep-dispatch-algorithm", "fake")
    ),
    "hidden states within the model": Case(
        ("returning hidden states of inner layers (--enable-return-aux-hidden-states)",),
        ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
    ),
    "a report of how experts are balanced": Case(
        ("(--expert-balancedness-report-mode server_log); supported: off.",),
        ("--expert-balancedness-report-mode", "server_log"),
    ),
    "ranks that come and go": Case(
        ("elastic expert parallelism (--elastic-ep-backend mooncake)",), ("--elastic-ep-backend", "mooncake")
    ),
    "experts kept for ranks that come and go": Case(
        ("(--enable-elastic-expert-backup)",), ("--enable-elastic-expert-backup",)
    ),
    "experts of other ranks": Case(
        ("fetching experts of other ranks (--dwdp-size 2); supported: 1.",), ("--tp", "2", "--dwdp-size", "2")
    ),
    "waterfilled experts": Case(("(--enable-waterfill)",), ("--enable-waterfill",)),
    "a kernel of several layers": Case(
        ("SGLang's forward pass in one kernel (--enable-nvidia-megakernel)",), ("--enable-nvidia-megakernel",)
    ),
    "a kernel of several layers on AMD": Case(
        ("SGLang's forward pass in one kernel (--enable-amd-monokernel)",), ("--enable-amd-monokernel",)
    ),
    "drafts with a sink": Case(
        ("(--speculative-draft-sink-size 4)",),
        (*draft("EAGLE"), *CHAIN, "--attention-backend", "atom", "--speculative-draft-sink-size", "4"),
    ),
    "an exchange for the experts of drafts": Case(
        ("(--speculative-moe-a2a-backend deepep)",), (*draft("STANDALONE"), "--speculative-moe-a2a-backend", "deepep")
    ),
    **{
        f"ModelOpt by {flag}": Case((f"quantisation by ModelOpt while loading ({flag} x)",), (flag, "x"))
        for flag in (
            "--modelopt-checkpoint-restore-path",
            "--modelopt-checkpoint-save-path",
            "--modelopt-export-path",
        )
    },
    "ModelOpt while loading": Case(
        ("quantisation by ModelOpt while loading (--modelopt-quant fp8)",), ("--modelopt-quant", "fp8")
    ),
    "drafts that are pickles": Case(
        ("drafts that are not safetensors (--speculative-draft-load-format pt)",),
        (*draft("STANDALONE"), "--speculative-draft-load-format", "pt"),
    ),
    "drafts that see a window": Case(
        ("drafts that see a window on --attention-backend atom (--speculative-draft-window-size 64)",),
        (*draft("EAGLE"), *CHAIN, "--speculative-draft-window-size", "64"),
    ),
    "a kernel for the experts of drafts": Case(
        ("(--speculative-moe-runner-backend triton)",),
        (*draft("STANDALONE"), "--speculative-moe-runner-backend", "triton"),
    ),
    "two backends": Case(
        ("backend 'atom' with decode on 'torch_native' is not supported", "--attention-backend atom"),
        ("--prefill-attention-backend", "atom", "--decode-attention-backend", "torch_native"),
    ),
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
    "an unknown op": Case(
        ("ATOM_KERNELS", "unknown op 'atention'", "attention", "rms_norm"),
        environ={"ATOM_KERNELS": "atention=reference"},
    ),
    "an unknown implementation": Case(
        ("ATOM_KERNELS asks for rms_norm=cuda", "reference"), environ={"ATOM_KERNELS": "rms_norm=cuda"}
    ),
    "a malformed setting": Case(
        ("ATOM_KERNELS='attention'", "op=implementation"), environ={"ATOM_KERNELS": "attention"}
    ),
    "an unknown variable": Case(
        ("unknown environment variable ATOM_KERNEL", "'attention=reference'", "did you mean ATOM_KERNELS?"),
        environ={"ATOM_KERNEL": "attention=reference"},
    ),
    "pages in aiter's order": Case(("ATOM_SHUFFLED_CACHE=1 is for vLLM",), environ={"ATOM_SHUFFLED_CACHE": "1"}),
    "pages in aiter's order, by the kernel's name": Case(
        ("ATOM_KERNELS=attention=aiter_shuffled is for vLLM",), environ={"ATOM_KERNELS": "attention=aiter_shuffled"}
    ),
    **{
        name: Case((f"({name}=", "supported: 0."), environ={name: "1"})
        for name in (
            "SGLANG_SIMULATE_UNIFORM_EXPERTS",
            "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
            "SGLANG_SHARED_EXPERT_TP1",
            "SGLANG_ENABLE_EMBED_REPLICATION",
            "SGLANG_ENABLE_DP_GATHER_FP8",
            "SGLANG_FORCE_FP8_MARLIN",
            "SGLANG_USE_AITER_FP8_PER_TOKEN",
            "SGLANG_USE_DEEPGEMM_BMM",
            "SGLANG_INT4_WEIGHT",
            "SGLANG_ROCM_DISABLE_LINEARQUANT",
            "SGLANG_CPU_QUANTIZATION",
            "SGLANG_USE_HND_KVCACHE",
        )
    },
    "kernels of SGLang's by a variable": Case(
        ("(SGLANG_FORCE_FUSED_OP_BACKEND=torch)", "ATOM_KERNELS"), environ={"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    ),
    "a head for embedding": Case(
        ("embedding (SGLANG_EMBEDDINGS_SPARSE_HEAD=x)",), environ={"SGLANG_EMBEDDINGS_SPARSE_HEAD": "x"}
    ),
    "pages in aiter's order, as SGLang has it": Case(
        ("(SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d); supported: nhd.",),
        environ={"SGLANG_AITER_KV_CACHE_LAYOUT": "vectorized_5d"},
    ),
    "a page of all layers": Case(
        ("does not support a KV pool in which the layers of a page lie together (--enable-page-major-kv-layout)",),
        ("--enable-page-major-kv-layout",),
    ),
    **{
        flag: Case(
            (f"SGLang's kernels for linear attention ({flag} flashinfer)", "ATOM_KERNELS=gated_delta_net="),
            (flag, "flashinfer"),
        )
        for flag in (
            "--linear-attn-backend",
            "--linear-attn-decode-backend",
            "--linear-attn-prefill-backend",
            "--linear-attn-verify-backend",
        )
    },
    **{
        flag: Case((f"states that are written every few tokens ({flag})", "after each token"), (flag,))
        for flag in ("--enable-linear-replayssm", "--enable-linear-replayssm-spec")
    },
    "states in float16": Case(
        ("does not support states of this dtype (--mamba-ssm-dtype float16); supported: float32, bfloat16.",),
        ("--mamba-ssm-dtype", "float16"),
    ),
    "states that are rounded at random": Case(
        ("rounded at random (--enable-mamba-cache-stochastic-rounding)",), ("--enable-mamba-cache-stochastic-rounding",)
    ),
    **{
        name: Case((f"({name}=float16); supported: float32, bfloat16.", "Unset it"), environ={name: "float16"})
        for name in ("SGLANG_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_CONV_DTYPE")
    },
    "layers of full attention that SGLang cannot express": Case(
        ("Qwen3_5ForCausalLM has full attention in layers [0, 3]", "every n-th layer (full_attention_interval)"),
        model="hybrid of odd layers",
    ),
    "images": Case(
        ("--enable-multimodal is not supported", "only the text of Qwen3_5ForConditionalGeneration"),
        ("--enable-multimodal",),
        model="hybrid with images",
    ),
    "a hybrid's heads over too many ranks": Case(
        ("does not divide linear_num_key_heads=2",), ("--tp", "4"), model="hybrid"
    ),
    "more drafts than a hybrid verifies": Case(
        ("--speculative-num-draft-tokens 9", "supported: up to 8. Set it to 8, with --speculative-num-steps 7"),
        drafting_by_layers(8, 9),
        model="hybrid",
    ),
    "more steps of drafts than a hybrid verifies": Case(
        ("--speculative-num-draft-tokens 9", "supported: up to 8"),
        drafting_by_layers(8),
        model="hybrid",
    ),
    "drafts of a hybrid on SGLang's attention": Case(
        ("--speculative-algorithm NEXTN with --attention-backend triton is not supported", "Leave --attention-backend"),
        (*NEXTN, "--attention-backend", "triton"),
        model="hybrid",
    ),
    "trees of drafts of a hybrid": Case(
        ("--speculative-algorithm NEXTN with --attention-backend triton is not supported",),
        (*NEXTN, "--attention-backend", "triton", "--speculative-eagle-topk", "4"),
        model="hybrid",
    ),
    "states in float16 by the configuration": Case(
        ("mamba_ssm_dtype=float16 (config.json)", "Add --mamba-ssm-dtype float32"),
        ("--json-model-override-args", json.dumps({"mamba_ssm_dtype": "float16"})),
        model="hybrid",
    ),
    "pages of a hybrid's prefixes on a CPU": Case(
        ("--page-size 16 with prefix caching is not supported on a CPU", "--disable-radix-cache"),
        ("--page-size", "16"),
        model="hybrid",
    ),
    "graphs of a hybrid's whole prompts beside SGLang's attention": Case(
        ("--cuda-graph-backend-prefill full is not supported by atom-plugin for models with linear attention",),
        ("--cuda-graph-backend-prefill", "full", "--attention-backend", "triton"),
        model="hybrid",
    ),
    "graphs of whole prompts": Case(
        ("does not support CUDA graphs of whole prompts (--cuda-graph-backend-prefill full)", "breakable"),
        ("--cuda-graph-backend-prefill", "full"),
    ),
    "graphs of whole prompts, in JSON": Case(
        ("does not support CUDA graphs of whole prompts (--cuda-graph-config",),
        ("--cuda-graph-config", json.dumps({"prefill": {"backend": "full"}})),
    ),
    "plans beside drafts": Case(
        ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1",),
        NEXTN,
        environ={"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
        model="hybrid",
    ),
    "a server of images' encodings": Case(
        ("does not support a server of images' encodings (--encoder-only)", "text alone"),
        ("--encoder-only",),
        model="hybrid with images",
    ),
    "workers that do not refuse images": Case(
        ("--tokenizer-worker-num 2 is not supported by atom-plugin for Qwen3_5ForConditionalGeneration",),
        ("--tokenizer-worker-num", "2"),
        model="hybrid with images",
    ),
    "encodings of images from another server": Case(
        ("(--language-only)",),
        ("--language-only", "--encoder-urls", "http://127.0.0.1:1"),
        model="hybrid with images",
    ),
    "drafts of a hybrid by a model": Case(
        ("does not support --speculative-algorithm STANDALONE for Qwen3_5ForCausalLM: it drafts by layers of its own",),
        draft("STANDALONE"),
        model="hybrid",
    ),
    "drafts of a hybrid without layers for it": Case(
        ("no layers to draft with", "mtp_num_hidden_layers=0"), NEXTN, model="hybrid that drafts nothing"
    ),
    "a package of ours without models": Case(
        ("SGLANG_EXTERNAL_MODEL_PACKAGE=atom_plugin.sglang names no package", "atom_plugin.sglang.models"),
        environ={PACKAGE: "atom_plugin.sglang"},
    ),
    "our module switched off": Case(
        ("asks for our Qwen3ForCausalLM", "SGLANG_DISABLED_MODEL_ARCHS=dense"),
        environ={"SGLANG_DISABLED_MODEL_ARCHS": "dense"},
    ),
}
# What must still be taken: the refusals must not reach further than they say.
TAKEN = {
    "the checkpoint itself": Case(()),
    "two ranks": Case((), ("--tp", "2")),
    "two stages": Case((), ("--pp-size", "2")),
    "float16": Case((), ("--dtype", "float16")),
    "quantisation while loading": Case((), ("--quantization", "fp8")),
    "a KV cache in FP8": Case((), ("--kv-cache-dtype", "fp8_e4m3")),
    "random weights": Case((), ("--load-format", "dummy"), model="missing tensor"),
    "a chain of drafts by a head": Case((), (*draft("EAGLE"), *CHAIN)),
    "a chain of drafts by a model": Case((), draft("STANDALONE")),
    "files of what layers compute": Case((), ("--debug-tensor-dump-output-folder", "dumps", *DUMMY)),
    "hooks on layers": Case((), ("--forward-hooks", '[{"name": "a", "target_modules": ["b"]}]', *DUMMY)),
    "files of a rank": Case((), ("--load-format", "sharded_state")),
    "kernels of SGLang's that replace ours, by name": Case(
        (), environ={"ATOM_KERNELS": "attention=triton_and_flash_attention_3,all_reduce_norm=aiter"}
    ),
    "a chain of drafts by layers of the checkpoint": Case((), (*NEXTN, "--load-format", "dummy"), model="latents"),
    "SGLang's attention": Case((), ("--attention-backend", "torch_native")),
    "data-parallel attention": Case(
        (), ("--tp", "4", "--attn-dp-size", "2", "--enable-dp-lm-head", "--load-format", "dummy"), model="latents"
    ),
    "data-parallel attention, with drafts and whole dense layers": Case(
        (),
        (
            "--tp",
            "2",
            "--dp",
            "2",
            "--enable-dp-attention",
            "--moe-dense-tp-size",
            "1",
            *NEXTN,
            "--load-format",
            "dummy",
        ),
        model="latents",
    ),
    "variables that SGLang's images for ROCm set": Case(
        (),
        environ={
            "SGLANG_INT4_WEIGHT": "0",
            "SGLANG_MOE_PADDING": "1",
            "SGLANG_ROCM_DISABLE_LINEARQUANT": "0",
            "SGLANG_ROCM_FUSED_DECODE_MLA": "1",
            "SGLANG_USE_AITER": "1",
            "SGLANG_USE_ROCM700A": "1",
        },
    ),
    "pages in another order for SGLang's attention": Case(
        (), ("--attention-backend", "torch_native"), {"SGLANG_USE_HND_KVCACHE": "1"}
    ),
    "values that are SGLang's own": Case(
        (),
        ("--moe-runner-backend", "auto", "--fp8-gemm-backend", "auto", "--model-impl", "sglang", *DUMMY),
        model="a mixture",
    ),
    "a hybrid, with drafts": Case((), NEXTN, model="hybrid"),
    "a hybrid of which Transformers has saved all keys": Case((), model="hybrid of few keys"),
    "a draft that a configuration does not count": Case((), NEXTN, model="hybrid of few keys"),
    "as many drafts as a hybrid verifies": Case(
        (),
        drafting_by_layers(7, 8),
        model="hybrid",
    ),
    "states in another dtype than the configuration's": Case(
        (),
        (
            "--json-model-override-args",
            json.dumps({"mamba_ssm_dtype": "float16"}),
            "--mamba-ssm-dtype",
            "bfloat16",
        ),
        model="hybrid",
    ),
    "plans beside nothing that drafts": Case((), environ={"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}),
    "broken graphs of prompts": Case((), ("--cuda-graph-backend-prefill", "breakable")),
    "a hybrid with images": Case((), model="hybrid with images"),
    "states in bfloat16, and copies of them": Case(
        (),
        ("--mamba-ssm-dtype", "bfloat16", "--max-mamba-cache-size", "40", "--mamba-track-interval", "128"),
        {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
        model="hybrid",
    ),
    "a kernel that SGLang chooses": Case((), DUMMY, model="sinks"),
    "whole shared experts": Case((), ("--disable-shared-experts-fusion", *DUMMY), model="latents"),
    "Transformers' model without ours": Case((), ("--model-impl", "transformers"), ours=False),
    "LoRA for SGLang's own model": Case((), ("--enable-lora", "--max-lora-rank", "8"), ours=False),
    "a wrong setting for SGLang's own model": Case((), environ={"ATOM_KERNEL": "x"}, ours=False),
    "an architecture that only SGLang has": Case((), model="opt"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A copy of the checkpoint for each way in which one can be wrong."""
    places = {name: damaged(name, tmp_path_factory.mktemp("checkpoints")) for name in DAMAGES}
    hybrids = tmp_path_factory.mktemp("hybrids")
    odd = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    return {
        **places,
        "hybrid": str(make_hybrid(hybrids / "plain", "qwen3_5")),
        "hybrid of few keys": str(make_hybrid(hybrids / "few", "qwen3_5", extra={})),
        "hybrid that drafts nothing": str(make_hybrid(hybrids / "none", "qwen3_5", extra={"mtp_num_hidden_layers": 0})),
        "hybrid of odd layers": str(make_hybrid(hybrids / "odd", "qwen3_5", layer_types=odd)),
        "hybrid with images": str(make_hybrid(hybrids / "images", "qwen3_5_vl")),
    }


@pytest.fixture(scope="module")
def problems(folders, tmp_path_factory):
    """What SGLang says to each case."""
    cases = {**CASES, **TAKEN}
    given, wanted = (tmp_path_factory.mktemp("resolve") / name for name in ("cases.json", "problems.json"))
    described = [
        {
            "flags": ["--model-path", folders[case.model], "--device", "cpu", *case.flags],
            "environ": {**(OURS if case.ours else {}), **case.environ},
        }
        for case in cases.values()
    ]
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("resolve.py")
    finished = run_script(script, [str(given), str(wanted)], OURS, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip(cases, json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_a_message_that_says_what_and_what_else(name, problems):
    message = problems[name]
    assert message is not None, "SGLang would have started"
    for part in CASES[name].says:
        assert part in message


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_not_refused(name, problems):
    assert problems[name] is None


# Which implementations can run is known where the model is built: after the others, still before weights are loaded.
CANNOT_RUN = Case(
    ("ATOM_KERNELS asks for attention=triton", "cannot run on cpu"), environ={"ATOM_KERNELS": "attention=triton"}
)


@pytest.mark.parametrize("case", [CASES["LoRA"], CASES["missing tensors"], CANNOT_RUN], ids=lambda case: case.says[0])
def test_the_server_says_so_and_ends_before_it_loads_weights(case, folders):
    server = SglangServer(folders[case.model], *case.flags, environ=case.environ, deadline=180)
    with pytest.raises(ServerFailed) as failure, server:
        pass
    assert failure.value.returncode not in (None, 0)
    for part in case.says:
        assert part in failure.value.log
    assert "Loading safetensors" not in failure.value.log
    assert "atom-plugin serves" not in failure.value.log
