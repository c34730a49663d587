"""What llm-compressor itself writes is read: recorded from copies of `tests/checkpoints/qwen3` that it made.

`llm_compressor.json` has, by its name of the scheme, the `quantization_config` and some tensors' dtypes and shapes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom_core.layers.linear import Linear
from atom_core.quant import read_quantization
from atom_core.standalone import build_runtime

RECORDED = json.loads(Path(__file__).with_name("llm_compressor.json").read_text(encoding="utf-8"))["schemes"]
#: (static activations, a scale a block).
KINDS = {"FP8_DYNAMIC": (False, False), "FP8": (True, False), "FP8_BLOCK": (False, True)}
#: Rows and columns of the recorded matrices.
MATRICES = {"model.layers.0.mlp.down_proj": (128, 384), "model.layers.0.self_attn.k_proj": (128, 128)}


def test_there_is_one_of_each_kind():
    assert RECORDED.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_its_config_is_read(name):
    found = read_quantization({"quantization_config": RECORDED[name]["quantization_config"]})
    assert (found.input_scale == "static", found.block) == KINDS[name]
    assert found.linear(["lm_head"]) is None


@pytest.mark.parametrize("module", MATRICES)
@pytest.mark.parametrize("name", KINDS)
def test_its_tensors_fit(name, module):
    quant = read_quantization({"quantization_config": RECORDED[name]["quantization_config"]})
    rows, columns = MATRICES[module]
    runtime = replace(build_runtime(torch.device("cpu"), torch.bfloat16, 8), quant=quant)
    placements = {name: it for _, name, it in Linear(columns, rows, False, runtime, module).placements()}
    tensors = {key.removeprefix(f"{module}."): it for key, it in RECORDED[name]["tensors"].items() if module in key}
    assert placements.keys() == tensors.keys()
    for tensor, (dtype, shape) in tensors.items():
        assert placements[tensor].problem(tuple(shape), dtype) is None
