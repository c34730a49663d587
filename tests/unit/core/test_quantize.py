"""The tool that writes quantised copies of a checkpoint: `tools/checkpoints/quantize.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from atom_core.standalone import Runner

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "tests" / "checkpoints" / "qwen3"
GPT_OSS = ROOT / "tests" / "checkpoints" / "gpt_oss"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/checkpoints/quantize.py", *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "NO_COLOR": "1"}
    return subprocess.run(command, check=False, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_copies_are_read_and_static_scales_are_the_models_own(tmp_path):
    formats = ("quark-mxfp4", "compressed-tensor-static")
    ran = run(SOURCE, tmp_path / "out", *formats)
    assert ran.returncode == 0, ran.stderr
    for name in formats:
        folder = tmp_path / "out" / name
        assert f"wrote {folder}" in ran.stdout
        assert (folder / "tokenizer.json").exists()
        assert Runner(folder).logits([5, 6, 7]).isfinite().all()
    stored = load_file(tmp_path / "out" / formats[1] / "model.safetensors")
    scales = {name: tensor.item() for name, tensor in stored.items() if name.endswith("input_scale")}
    assert len(scales) == 5 * 7
    assert len(set(scales.values())) == 5 * 4  # queries, keys and values have one input, and so have gate and up
    assert all(1e-4 < scale < 1 for scale in scales.values())


def test_a_copy_of_gpt_oss_has_its_experts_alone_packed(tmp_path):
    ran = run(GPT_OSS, tmp_path / "out", "mxfp4")
    assert ran.returncode == 0, ran.stderr
    stored = load_file(tmp_path / "out" / "mxfp4" / "model.safetensors")
    packed = {name for name, tensor in stored.items() if tensor.dtype == torch.uint8}
    ends = [f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in ("blocks", "scales")]
    assert packed == {f"model.layers.{index}.mlp.experts.{end}" for index in range(4) for end in ends}
    assert Runner(tmp_path / "out" / "mxfp4").logits([5, 6, 7]).isfinite().all()


def test_what_a_model_cannot_have_is_refused_and_removed(tmp_path):
    ran = run(SOURCE, tmp_path, "mxfp4")
    assert ran.returncode != 0
    assert "'mxfp4' with model_type 'qwen3' (only gpt_oss) is not supported" in ran.stderr
    assert not (tmp_path / "mxfp4").exists()
    assert json.loads((SOURCE / "config.json").read_text()).get("quantization_config") is None


def test_unknown_formats_are_named_before_anything_is_written(tmp_path):
    ran = run(SOURCE, tmp_path / "out", "int3")
    assert ran.returncode == 2
    assert "int3" in ran.stderr
    assert "quark-mxfp4" in ran.stderr
    assert not (tmp_path / "out").exists()
