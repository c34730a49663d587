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


def test_markdown_has_a_line_a_family():
    lines = support.as_markdown(support.support_rows()).splitlines()
    assert lines[0] == "| Family | Architectures | Frameworks | Weights | Devices |"
    qwen3 = "| Qwen3 | `Qwen3ForCausalLM` | vLLM, SGLang | 16 or 32 bits, FP8, MXFP4 | cpu, cuda, rocm |"
    assert qwen3 in lines
    assert len(lines) == 2 + len({entry.family for entry in MODELS.values()})


def test_markdown_names_what_of_a_line_is_not_supported():
    page = support.as_markdown(support.support_rows())
    assert "| 16 or 32 bits, MXFP4 (not by SGLang on cpu) | cpu, cuda, rocm |" in page


def test_markdown_folds_the_architectures_of_a_family():
    rows = [support.SupportRow(name, "Twins", "vllm", "none", "cuda") for name in ("OneForCausalLM", "TwoForCausalLM")]
    lines = support.as_markdown(rows).splitlines()
    assert lines[2:] == ["| Twins | `OneForCausalLM`, `TwoForCausalLM` | vLLM | 16 or 32 bits | cuda |"]


def test_sglang_runs_the_same_models_on_the_same_devices_but_for_what_it_refuses():
    ours, theirs = (
        {(row.architecture, row.quantization, row.device) for row in support.support_rows() if row.framework == name}
        for name in ("sglang", "vllm")
    )
    assert theirs - ours == {("GptOssForCausalLM", "mxfp4", "cpu")}
    assert ours <= theirs
