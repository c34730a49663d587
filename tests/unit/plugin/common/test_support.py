"""The support tables are the registry's, in each of their forms."""

from __future__ import annotations

import json

from atom_core.models.registry import MODELS
from atom_plugin.common import support


def test_every_registered_architecture_has_a_row_a_device():
    rows = support.support_rows()
    assert {row.architecture for row in rows} == set(MODELS)
    found = [
        (row.quantization, row.device)
        for row in rows
        if row.architecture == "Qwen3ForCausalLM" and row.framework == "vllm"
    ]
    assert found == [(name, device) for name in ("none", "fp8", "mxfp4") for device in ("cpu", "cuda", "rocm")]
    assert len(set(rows)) == len(rows)


def test_json_has_every_combination():
    rows = support.support_rows()
    objects = json.loads(support.as_json(rows))
    assert len(objects) == len(rows)
    assert objects[0].keys() == {"architecture", "family", "framework", "quantization", "device"}


def test_markdown_has_a_line_an_architecture_and_framework():
    lines = support.as_markdown(support.support_rows()).splitlines()
    assert lines[0] == "| Architecture | Family | Framework | Quantisation | Devices |"
    assert "| `Qwen3ForCausalLM` | Qwen3 | vllm | none, fp8, mxfp4 | cpu, cuda, rocm |" in lines
    assert "| `GptOssForCausalLM` | GPT-OSS | sglang | none, mxfp4 | cpu, cuda, rocm |" in lines
    assert len(lines) == 2 + len(MODELS) * len(support.FRAMEWORKS)


def test_sglang_runs_the_same_models_on_the_same_devices_but_for_what_it_refuses():
    ours, theirs = (
        {(row.architecture, row.quantization, row.device) for row in support.support_rows() if row.framework == name}
        for name in ("sglang", "vllm")
    )
    assert theirs - ours == {("GptOssForCausalLM", "mxfp4", "cpu")}
    assert ours <= theirs
