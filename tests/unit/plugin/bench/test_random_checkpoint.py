"""Random checkpoints have every tensor that a model wants, in its format, with numbers that a model can run on."""

from __future__ import annotations

import pytest

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from atom_plugin.bench.models import CONFIGS
from benchmarks.random_checkpoint import write_random

#: What makes each small.
SMALL = {"num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 256, "max_position_embeddings": 512}
MIXTURE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 128}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 16}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GATED = {**MIXTURE, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 128}
CASES = {
    "qwen3-0.6b": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256},
    "qwen3-8b-fp8": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256},
    "qwen3-30b-a3b": {**MIXTURE, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b-fp8": {**MIXTURE, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-20b": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3.5-27b": {**HYBRID, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256},
    "qwen3.5-35b-a3b": {**HYBRID, **GATED},
    "qwen3.5-35b-a3b-fp8": {**HYBRID, **GATED},
    "qwen3-next-80b-a3b-fp8": {**HYBRID, **GATED},
    "deepseek-v2-lite": {**LATENT, "kv_lora_rank": 128, "intermediate_size": 256},
    "deepseek-v3": {**LATENT, "kv_lora_rank": 128, "q_lora_rank": 128, "intermediate_size": 256, "n_group": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_a_random_checkpoint_is_read_and_runs(tmp_path, name):
    hf = {**CONFIGS[name], **SMALL, **CASES[name]}
    write_random(hf, tmp_path)
    check_files(read_model_config(hf), tmp_path, quant=read_quantization(hf, None))
    runner = Runner(tmp_path)
    logits = runner.logits([1, 2, 3, 250])
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 1, "all tokens have one answer"
    assert 0.05 < logits.float().std() < 5


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("deepseek-v3", {}),
        ("qwen3-next-80b-a3b-fp8", {"num_nextn_predict_layers": 1}),
        ("qwen3.5-35b-a3b", {"mtp_num_hidden_layers": 1}),
    ],
)
def test_layers_that_draft_are_written_as_well(tmp_path, name, count):
    hf = {**CONFIGS[name], **SMALL, **CASES[name], **count}
    write_random(hf, tmp_path)
    drafts = load_draft_class(hf["architectures"][0]).from_hf(hf)
    check_files(drafts, tmp_path, quant=read_quantization(hf, None))


@pytest.mark.parametrize(
    ("name", "key"), [("qwen3-30b-a3b-fp8", "modules_to_not_convert"), ("qwen3-30b-a3b-mxfp4", "exclude")]
)
def test_quantised_mixtures_say_that_no_router_is(name, key):
    """As published ones do: vLLM asks the format's reader about its router, and has random scales for it otherwise."""
    hf = CONFIGS[name]
    plain = hf["quantization_config"][key]
    assert {f"model.layers.{index}.mlp.gate" for index in range(hf["num_hidden_layers"])} < set(plain)
