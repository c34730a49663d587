"""Heads and middles filled up with zeros, so that they divide over ranks, change no answer."""

from __future__ import annotations

import pytest

from atom_core.checkpoint import Checkpoint
from atom_core.config import Padding
from atom_core.layers.parameters import ParameterLayer
from atom_core.standalone import Runner
from atom_core.weights import expected_tensors
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, make_config, make_model, random_tokens
from tests.unit.core.models import test_block_fp8, test_deepseek, test_fp8, test_gpt_oss, test_mixtral
from tests.unit.core.mxfp4_checkpoints import make_quark, quark_mxfp4
from tests.unit.core.ranks import build, on_ranks, tensor_parallel_logits

TOKENS = random_tokens(24)
RANKS = 4
#: 3 key/value heads on 4 ranks: the last has none of the checkpoint's.
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 89}
OF_LATENTS = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 89}


#: Heads of linear attention are not padded.
WITH_HEADS_ALONE = [family for family in ALL_FAMILIES if "linear_num_key_heads" not in family.settings]


def odd(family):
    return OF_LATENTS if family in (test_deepseek.V2, test_deepseek.V3) else ODD


def padded(runner, unit_of_scales=1):
    """The runner's configuration as SGLang on a CPU has it on 4 ranks."""
    config, unit = runner.config, RANKS * unit_of_scales
    heads, before = config.heads
    kv_heads = -(-before // RANKS) * RANKS
    middle = -(-config.intermediate_size // unit) * unit
    return config.padded(kv_heads * heads // before, kv_heads, middle)


@pytest.mark.parametrize("family", WITH_HEADS_ALONE, ids=str)
def test_ranks_of_padded_sizes_have_the_logits_of_one_rank(tmp_path, family):
    sizes = odd(family)
    if family in (test_gpt_oss.FAMILY, test_mixtral.FAMILY):
        sizes = {**sizes, "intermediate_size": 40}  # of experts, which are not padded
    make_model(tmp_path, make_config(family, **sizes))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    runner.config = padded(runner)
    assert runner.config.layers[0].mixer.padding.kv_heads == (2 if sizes is OF_LATENTS else 1)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, RANKS):
        assert distance(found, expected) <= LOGITS_TOLERANCE


QUANTIZED = {
    "a scale a tensor": FORMATS[0],
    "a scale a row": FORMATS[5],
    "static": FORMATS[4],
    "blocks": BLOCK_FORMATS[0],
    "mxfp4": None,
    "made at load": None,
}
#: Numbers of a middle that share a scale.
UNITS = {"blocks": 128, "mxfp4": 32}


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("form", QUANTIZED)
def test_so_have_those_of_quantised_weights(tmp_path, monkeypatch, form, latents):
    monkeypatch.setattr("atom_core.kernels.fp8_linear.ReferenceFp8Linear", test_fp8.ExactInputs)
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", test_block_fp8.ExactInputs)
    family, unit = ALL_FAMILIES[3], UNITS.get(form, 1)
    sizes = {**ODD, "hidden_size": 128, "head_dim": 128, "intermediate_size": 3 * unit if unit > 1 else 89}
    if latents:
        family = test_deepseek.V3
        ranks = {"kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128}
        sizes |= {**ranks, "qk_rope_head_dim": 128, "num_key_value_heads": 6, **test_deepseek.DENSE}
    make_model(tmp_path / "plain", make_config(family, **sizes))
    folder = tmp_path / ("plain" if form == "made at load" else "quantised")
    if form == "mxfp4":
        make_quark(tmp_path / "plain", folder, quark_mxfp4(rounded_inputs=False))
    elif form != "made at load":
        make_fp8(tmp_path / "plain", folder, QUANTIZED[form])
    runner = Runner(folder, quantization="fp8" if form == "made at load" else None)
    expected = runner.logits(TOKENS)
    runner.config = padded(runner, unit)
    for found in tensor_parallel_logits(runner, folder, TOKENS, RANKS):
        assert distance(found, expected) <= LOGITS_TOLERANCE


def test_padding_is_zeros_whatever_was_there(tmp_path):
    make_model(tmp_path, make_config(ALL_FAMILIES[0], **ODD, tie_word_embeddings=False))
    runner = Runner(tmp_path)
    runner.config = padded(runner)
    assert runner.config.layers[0].mixer.padding == Padding(heads=2, kv_heads=1)
    assert runner.config.intermediate_padding == 3

    def work(group):
        model = build(runner, tmp_path, tensor_parallel=group)
        for module in model.modules():
            if isinstance(module, ParameterLayer):
                module.open_weights(whole=True)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        slots = expected_tensors(model)
        for name, tensor in Checkpoint.open(tmp_path).load():
            slots[name].placement.load(tensor)
        attention = model.model.layers[0].self_attn
        return attention.qkv_proj.weight, attention.qkv_proj.bias, attention.o_proj.weight

    for weight in on_ranks(RANKS, work)[-1]:
        assert not weight.isnan().any()
    assert not any(weight.count_nonzero() for weight in on_ranks(RANKS, work)[-1][:2])


def test_a_model_is_padded_once_and_with_whole_groups_of_queries(tmp_path):
    make_model(tmp_path, make_config(ALL_FAMILIES[3], **ODD))
    config = Runner(tmp_path).config
    with pytest.raises(AssertionError):
        config.padded(7, 4, config.intermediate_size)
    with pytest.raises(AssertionError):
        config.padded(8, 4, config.intermediate_size).padded(16, 8, config.intermediate_size)
