"""A KV cache in FP8 (``--kv-cache-dtype fp8_e4m3``), with scales from a file, from the checkpoint, or none.

Numbers of one byte cost an answer now and then, so answers are counted. Scales that were lost on the way, or used once
where they belong twice, leave few right: those here are far from 1.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, Ran, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# Holds the one function of vLLM's that SGLang's own rope imports on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")
NUM_ROWS = 64
RIGHT = 0.95
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
#: Keys and values are a few units large, so that what is stored is some tens, of the 448 that there are.
SCALE = 0.06


def scales_file(folder: Path, scale: float = SCALE) -> str:
    """The file that ``--quantization-param-path`` names."""
    layers = json.loads(Path(checkpoint("qwen3"), "config.json").read_text())["num_hidden_layers"]
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {str(layer): scale for layer in range(layers)}}}
    path = folder / "scales.json"
    path.write_text(json.dumps({"model_type": "qwen3", "kv_cache": cache}))
    return str(path)


def scaled_checkpoint(folder: Path) -> str:
    """A copy of the checkpoint with scales in it."""
    copy = folder / "scaled"
    shutil.copytree(checkpoint("qwen3"), copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for side, scale in (("k", SCALE), ("v", 2 * SCALE)):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = torch.tensor(scale)
    save_file(tensors, path, {"format": "pt"})
    return str(copy)


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory) -> dict[str, Ran]:
    """Every engine that the tests look at."""
    folder = tmp_path_factory.mktemp("fp8")
    scaled = scaled_checkpoint(folder)
    asks = [Ask([row.prompt for row in rows[:NUM_ROWS]])]
    from_file = {**FP8, "quantization_param_path": scales_file(folder)}
    engines = {
        "no scales": Engine(checkpoint("qwen3"), True, asks, FP8),
        "scales from a file": Engine(checkpoint("qwen3"), True, asks, from_file),
        "scales from the checkpoint": Engine(scaled, True, asks, {**FP8, "page_size": 16}),
        "SGLang's attention": Engine(scaled, True, asks, {**FP8, "attention_backend": "torch_native"}),
        "SGLang's model": Engine(checkpoint("qwen3"), False, asks, {**from_file, "attention_backend": "atom"}),
    }
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    return dict(zip(engines, run(list(engines.values()), environ={"PYTHONPATH": path}), strict=True))


ATTENTION = {
    "no scales": "SglangRadixAttention",
    "scales from a file": "SglangRadixAttention",
    "scales from the checkpoint": "SglangRadixAttention",
    "SGLang's attention": "FrameworkAttention",
    "SGLang's model": None,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_answers_are_right_but_for_a_few(name, ran, rows):
    log, (answers,) = ran[name].log, ran[name].answers
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(answers, rows, strict=False))
    assert right >= RIGHT * NUM_ROWS
    if (attention := ATTENTION[name]) is not None:
        assert f"attention  {attention}" in log
    else:
        assert "atom-plugin serves" not in log
    assert "torch.float8_e4m3fn" in log


def test_a_scale_in_a_file_that_is_none_ends_the_start(tmp_path):
    options = {**FP8, "quantization_param_path": scales_file(tmp_path, -1.0)}
    with pytest.raises(AssertionError, match=r"layer 0, scales a KV cache by -1\.0; a scale is a finite number"):
        run([Engine(checkpoint("qwen3"), True, [Ask(["1 + 1 ="])], options)])
