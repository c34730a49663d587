"""Names that wrappers and newer libraries write are those of the same checkpoint."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import Checkpoint
from atom_core.loading import check_files, update_from
from atom_core.models.registry import load_model_class
from atom_core.standalone import Runner
from atom_core.weights import load_weights
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    distance,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.models import test_deepseek, test_glm4_moe, test_mixtral, test_qwen3_5, test_qwen3_moe
from tests.unit.core.ranks import tensor_parallel_logits

TOKENS = random_tokens(40)
MIXTURES = (
    test_qwen3_moe.FAMILY,
    test_mixtral.FAMILY,
    test_glm4_moe.FAMILY,
    test_deepseek.V2,
    test_deepseek.V3,
    test_qwen3_5.MOE,
)


def respell(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def fused(tensors):
    """All experts of a layer in one tensor a matrix, as Transformers 5 has them, scales too."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, matrix, leaf = rest.split(".")
            layer = layer.replace("block_sparse_moe", "mlp")
            stack = experts.setdefault((layer, leaf.removeprefix("weight")), {})
            stack.setdefault(matrix, {})[int(number)] = tensor
        else:
            found[name] = tensor
    for (layer, suffix), matrices in experts.items():
        rows = {name: torch.stack([of[number] for number in sorted(of)]) for name, of in matrices.items()}
        gate, up, down = (
            rows[name] for name in (("w1", "w3", "w2") if "w1" in rows else ("gate_proj", "up_proj", "down_proj"))
        )
        found[f"{layer}.experts.gate_up_proj{suffix}"] = torch.cat([gate, up], 1).contiguous()
        found[f"{layer}.experts.down_proj{suffix}"] = down.contiguous()
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


BLOCKS = {"hidden_size": 200, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
FP8 = [form for form in (*FORMATS, *BLOCK_FORMATS) if form.block or (form.per_row and not form.scale_shape)]


@pytest.mark.parametrize("form", FP8, ids=str)
def test_fp8_experts_in_one_tensor_a_matrix_with_their_scales(tmp_path, form):
    make_model(tmp_path / "source", make_config(test_qwen3_moe.FAMILY, num_key_value_heads=4, **BLOCKS))
    make_fp8(tmp_path / "source", tmp_path / "fp8", form)

    def answers():
        runner = Runner(tmp_path / "fp8")
        return runner.logits(TOKENS), *tensor_parallel_logits(runner, tmp_path / "fp8", TOKENS, 2)

    expected = answers()
    respell(tmp_path / "fp8", fused)
    suffix = form.scale.removeprefix("weight")
    assert f"model.layers.1.mlp.experts.gate_up_proj{suffix}" in Checkpoint.open(tmp_path / "fp8").tensors
    for found, wanted in zip(answers(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_scale_of_a_stack_that_is_no_number_is_refused_by_its_name(tmp_path):
    make_model(tmp_path / "source", make_config(test_qwen3_moe.FAMILY, **BLOCKS))
    make_fp8(tmp_path / "source", tmp_path / "fp8", BLOCK_FORMATS[0])
    respell(tmp_path / "fp8", fused)
    runner = Runner(tmp_path / "fp8")
    expected = runner.logits(TOKENS)
    name = "model.layers.1.mlp.experts.gate_up_proj_scale_inv"

    def spoil(tensors):
        tensors[name][3, 2, 1] = float("nan")
        return tensors

    respell(tmp_path / "fp8", spoil)
    with pytest.raises(ValueError, match=rf"{name} in .*model.safetensors holds a scale that is no finite number"):
        update_from(runner.weights, runner.config, tmp_path / "fp8", runner.runtime.quant)
    assert torch.equal(runner.logits(TOKENS), expected)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
@pytest.mark.parametrize("family", [test_qwen3_moe.FAMILY, test_glm4_moe.FAMILY], ids=str)
def test_ranks_copy_their_share_of_a_stack(tmp_path, family, expert_parallel):
    make_model(tmp_path, make_config(family, num_key_value_heads=4))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    respell(tmp_path, fused)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, 2, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


STACK = "model.layers.1.mlp.experts.gate_up_proj"
DAMAGES = {
    "an expert less": lambda stack: stack[:-1],
    "an expert more": lambda stack: torch.cat([stack, stack[:1]]),
    "transposed": lambda stack: stack.transpose(1, 2),
    "an odd number of rows": lambda stack: stack[:, :-1],
    "other rows": lambda stack: stack[:, 2:],
    "other columns": lambda stack: stack[..., 1:],
    "one matrix": lambda stack: stack[0],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("family", [test_qwen3_moe.FAMILY, test_deepseek.V3], ids=str)
def test_a_stack_of_another_shape_is_refused_by_its_name(tmp_path, family, damage):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    respell(tmp_path, fused)
    expected, wanted = runner.logits(TOKENS), list(Checkpoint.open(tmp_path).tensors[STACK].shape)

    def change(tensors):
        return {**tensors, STACK: DAMAGES[damage](tensors[STACK]).contiguous()}

    respell(tmp_path, change)
    checkpoint = Checkpoint.open(tmp_path)
    found = list(checkpoint.tensors[STACK].shape)
    says = rf"misshapen \(1\): {STACK}( in model.safetensors)? is {re.escape(f'{found}, should be {wanted}')}\. "
    checks = (
        lambda: Runner(tmp_path),
        lambda: check_files(runner.config, tmp_path),
        lambda: runner.weights.update(list(checkpoint.load()), "a list", whole=True),
        lambda: runner.weights.update([(STACK, checkpoint.tensor(STACK))], "a list", whole=False),
    )
    for check in checks:
        with pytest.raises(ValueError, match=says) as caught:
            check()
        assert "missing" not in str(caught.value)
        assert "unexpected" not in str(caught.value)
    with pytest.raises(ValueError, match=says):
        load_weights(load_model_class(runner.config.architecture)(runner.config, runner.runtime), checkpoint.load())
    assert torch.equal(runner.logits(TOKENS), expected)


def test_an_update_of_a_wrapper_may_have_more_layers(tmp_path):
    make_model(tmp_path / "old", make_config(test_qwen3_moe.FAMILY))
    make_model(tmp_path / "new", make_config(test_qwen3_moe.FAMILY, num_hidden_layers=4), seed=1)
    runner = Runner(tmp_path / "old")
    plain = Runner(tmp_path / "old")
    update_from(plain.weights, plain.config, tmp_path / "new", plain.runtime.quant)
    respell(tmp_path / "new", prefixed("model.language_model."))
    update_from(runner.weights, runner.config, tmp_path / "new", runner.runtime.quant)
    assert torch.equal(runner.logits(TOKENS), plain.logits(TOKENS))
