"""Names that wrappers and newer libraries write are those of the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import Checkpoint
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import FAMILIES, make_config, make_model, random_tokens
from tests.unit.core.models import test_deepseek, test_glm4_moe, test_mixtral, test_qwen3_moe

TOKENS = random_tokens(40)
MIXTURES = (test_qwen3_moe.FAMILY, test_mixtral.FAMILY, test_glm4_moe.FAMILY, test_deepseek.V2, test_deepseek.V3)


def respell(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def fused(tensors):
    """All experts of a layer in one tensor a matrix, as Transformers 5 has them."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, matrix, _ = rest.split(".")
            layer = layer.replace("block_sparse_moe", "mlp")
            experts.setdefault(layer, {}).setdefault(matrix, {})[int(number)] = tensor
        else:
            found[name] = tensor
    for layer, matrices in experts.items():
        rows = {name: torch.stack([of[number] for number in sorted(of)]) for name, of in matrices.items()}
        gate, up, down = (
            rows[name] for name in (("w1", "w3", "w2") if "w1" in rows else ("gate_proj", "up_proj", "down_proj"))
        )
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1).contiguous()
        found[f"{layer}.experts.down_proj"] = down.contiguous()
    assert experts
    return found


def prefixed(prefix):
    return lambda tensors: {
        f"{prefix}{name.removeprefix('model.') if prefix.startswith('model.') and name.startswith('model.') else name}"
        if name.startswith("model.") or prefix == "language_model."
        else name: tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("family", MIXTURES, ids=str)
def test_experts_in_one_tensor_a_matrix(tmp_path, family):
    make_model(tmp_path, make_config(family))
    expected = Runner(tmp_path).logits(TOKENS)
    respell(tmp_path, fused)
    assert torch.equal(Runner(tmp_path).logits(TOKENS), expected)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
@pytest.mark.parametrize("family", [FAMILIES[3], test_qwen3_moe.FAMILY], ids=str)
def test_prefixes_of_wrappers(tmp_path, family, prefix):
    make_model(tmp_path, make_config(family))
    expected = Runner(tmp_path).logits(TOKENS)
    respell(tmp_path, prefixed(prefix))
    assert all(name.startswith((prefix, "lm_head")) for name in Checkpoint.open(tmp_path).tensors)
    assert torch.equal(Runner(tmp_path).logits(TOKENS), expected)


def test_an_update_may_come_in_another_spelling(tmp_path):
    make_model(tmp_path / "old", make_config(test_qwen3_moe.FAMILY))
    make_model(tmp_path / "new", make_config(test_qwen3_moe.FAMILY), seed=1)
    expected = Runner(tmp_path / "new").logits(TOKENS)
    runner = Runner(tmp_path / "old")
    respell(tmp_path / "new", fused)
    runner.weights.update(list(Checkpoint.open(tmp_path / "new").load()), "a list", whole=True)
    assert torch.equal(runner.logits(TOKENS), expected)
