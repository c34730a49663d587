"""What makes the test checkpoints, `tools/checkpoints`: the files that it wrote are what it still writes and reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(monkeypatch):
    """Gives a module of the tools, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "checkpoints"))
    return importlib.import_module


@pytest.mark.parametrize(("file", "rows", "count"), [("heldout", "heldout_rows", 500), ("recall", "recall_rows", 100)])
def test_prompts_are_those_that_the_generator_writes(tool, file, rows, count):
    lines = (ROOT / "tests" / "evaluation" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == getattr(tool("task"), rows)(count, 2024)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5"])
def test_a_drafting_layer_is_stored_under_the_names_it_is_read_by(tool, tmp_path, family):
    mtp, source = tool("mtp"), ROOT / "tests" / "checkpoints" / family
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    assert mtp.drafting_layers(model.config) == 1
    stored = load_file(source / "model.safetensors")
    model.save_pretrained(tmp_path)
    mtp.add_to_checkpoint(mtp.load_from_checkpoint(model, source), tmp_path, model.config)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], value) for name, value in stored.items())


def test_the_rule_of_training_and_its_gradients_are_those_of_transformers(tool):
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    draws = torch.Generator().manual_seed(0)
    sizes = ((2, 192, 4, 32), (2, 192, 4, 32), (2, 192, 4, 64), (2, 192, 4), (2, 192, 4))
    q, k, v, decay, beta = (torch.randn(size, generator=draws) for size in sizes)
    given = [q, k, v, -0.1 * decay.abs(), beta.sigmoid()]
    weight = torch.randn(v.shape, generator=draws)

    def outputs_and_gradients(rule: Any) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in given]
        outputs, _ = rule(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)
        (outputs * weight).sum().backward()
        return [outputs.detach(), *(leaf.grad for leaf in leaves)]

    wanted = outputs_and_gradients(modeling.torch_chunk_gated_delta_rule)
    torch.testing.assert_close(outputs_and_gradients(tool("hybrid").delta_rule), wanted, rtol=1e-4, atol=1e-5)
