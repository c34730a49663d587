"""What a ``quantization_config`` says, and which of them are refused."""

from __future__ import annotations

import pytest

from atom_core.quant import Mxfp4LinearConfig, Unquantized, read_quantization
from atom_core.quant.fp8 import Fp8Config
from atom_core.quant.scheme import matches_name
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, compressed, quark, scheme
from tests.unit.core.mxfp4_checkpoints import quark_mxfp4

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
LAYER = "model.layers.3"


def read(config, asked=None, **hf):
    return read_quantization({"quantization_config": config, **hf}, asked)


def test_no_quantisation_is_one_too():
    assert read_quantization({}) == Unquantized()
    assert Unquantized().linear([f"{LAYER}.mlp.down_proj"]) is None
    assert Unquantized().below("draft") == Unquantized()


@pytest.mark.parametrize("form", [*FORMATS, *BLOCK_FORMATS], ids=str)
def test_each_format_is_read(form):
    found = read(form.config)
    assert isinstance(found, Fp8Config)
    assert found.name == "fp8"
    assert found.serialized
    assert found.input_scale == ("static" if form.static else "dynamic")
    assert (found.block, found.scale) == (form.block, form.scale)
    assert found.linear([f"{LAYER}.mlp.down_proj"]) == found


@pytest.mark.parametrize("rounded", [False, True])
def test_quarks_mxfp4_is_read(rounded):
    found = read(quark_mxfp4(rounded))
    assert found == Mxfp4LinearConfig(rounded_inputs=rounded, ignored=("lm_head",))
    assert found.name == "mxfp4"
    assert found.linear([f"{LAYER}.mlp.down_proj"]) == found
    assert found.linear(["lm_head"]) is None


def test_quarks_mxfp4_may_describe_a_cache_too():
    config = quark_mxfp4()
    cached = {**config["global_quant_config"], "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    assert read({**config, "layer_quant_config": {"*k_proj": cached}}).rounded_inputs


@pytest.mark.parametrize("part", ["weight", "input_tensors"])
def test_quark_writes_null_where_fp8_has_no_zero_points(part):
    assert read(of_quark(part, symmetric=None)) == read(of_quark(part, symmetric=True))


def test_the_old_spelling_of_blocks_is_read():
    group = {"group_0": blocks(block_structure="128x128")}
    assert read(compressed("block", True, config_groups=group)).block


def test_the_old_key_of_compressed_tensors_is_read():
    assert read_quantization({"compression_config": compressed("channel", dynamic=True)}).name == "fp8"


def test_modelopts_own_nesting_is_read():
    config = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    assert read(config).input_scale == "static"


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_tensor", "fp8_per_channel"])
def test_a_flag_quantises_an_unquantised_checkpoint(asked):
    assert read_quantization({}, asked) == Fp8Config(serialized=False)


def test_a_flag_may_name_what_the_checkpoint_is():
    assert read(FP8, "fp8") == read(FP8)


def test_a_flag_that_contradicts_the_checkpoint_is_refused():
    with pytest.raises(ValueError, match=r"--quantization fp8 contradicts .* quant_method 'compressed-tensors'"):
        read(compressed("channel", dynamic=True), "fp8")


def with_group(**changes):
    return compressed("channel", dynamic=True, config_groups={"group_0": {**scheme("channel", True), **changes}})


def weights(**changes):
    return with_group(weights={**scheme("channel", True)["weights"], **changes})


def inputs(**changes):
    return with_group(input_activations={**scheme("channel", True)["input_activations"], **changes})


def blocks(inputs=None, **changes):
    """A group of weights in blocks, with other ``inputs`` or weights."""
    group = scheme("block", True)
    return {
        **group,
        "weights": {**group["weights"], **changes},
        "input_activations": {**group["input_activations"], **(inputs or {})},
    }


def in_blocks(**changes):
    return compressed("block", True, config_groups={"group_0": blocks(**changes)})


def of_quark(part, **changes):
    """A scheme a tensor, static, of Quark's with one side of it changed."""
    config = quark("per_tensor", "per_tensor", dynamic=False)
    common = config["global_quant_config"]
    common = {**common, part: {**common[part], **changes}}
    return {**config, "global_quant_config": common, "layer_quant_config": {}}


def of_mxfp4(part, **changes):
    """MXFP4 of Quark's with one side of it changed."""
    config = quark_mxfp4()
    common = config["global_quant_config"]
    return {**config, "global_quant_config": {**common, part: {**common[part], **changes}}}


QUARK = of_quark("weight")
QUARK_BLOCKS = {**quark("per_block", "per_group", dynamic=True), "layer_quant_config": {}}

REFUSED = {
    "an unknown method": ({"quant_method": "gptq"}, "'gptq' is not supported"),
    "a method without a name": ({"bits": 4}, "'unknown' is not supported"),
    "other blocks": ({**FP8, "weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\] \(only \[128, 128\]\)"),
    "blocks and static activations": (
        {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
        r"weight_block_size=\[128, 128\] and activation_scheme='static' \(only 'dynamic'\)",
    ),
    "an unknown activation scheme": ({**FP8, "activation_scheme": "mixed"}, "activation_scheme='mixed'"),
    "integers": (weights(type="int"), "weights of type='int', num_bits=8, strategy='channel'"),
    "four bits": (weights(num_bits=4), "weights of type='float', num_bits=4"),
    "groups": (weights(strategy="group"), "strategy='group'"),
    "other blocks in compressed-tensors": (in_blocks(block_structure=[128, 64]), r"block_structure=\[128, 64\] \(only"),
    "blocks of no size": (in_blocks(block_structure=None), "block_structure=None"),
    "blocks of a word": (in_blocks(block_structure="large"), "block_structure='large'"),
    "blocks with a scale a token": (in_blocks(inputs={"strategy": "token"}), "strategy='token', .*weights in blocks"),
    "blocks with other groups": (in_blocks(inputs={"group_size": 64}), "group_size=64 with weights in blocks"),
    "blocks with static groups": (in_blocks(inputs={"dynamic": False}), "strategy='group', dynamic=False"),
    "zero points": (weights(symmetric=False), "weights that are not symmetric and static"),
    "zero points of inputs": (inputs(symmetric=False), "input_activations that are not symmetric"),
    "weights alone": (with_group(input_activations=None), "weights alone quantised"),
    "static scales a token": (inputs(dynamic=False), "input_activations of .* strategy='token', dynamic=False"),
    "local dynamic inputs": (inputs(dynamic="local", strategy="group"), "strategy='group', dynamic=local"),
    "no targets": (with_group(targets=[]), "config_groups without targets"),
    "no scheme": (compressed("channel", True, config_groups={}), "0 different schemes"),
    "two schemes": (
        compressed("channel", True, config_groups={"a": scheme("channel", True), "b": scheme("tensor", False)}),
        "2 different schemes in config_groups",
    ),
    "a sparse checkpoint": (compressed("channel", True, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
    "rotations": (compressed("channel", True, transform_config={"config_groups": {}, "x": 1}), "transforms"),
    "a quantised head": (compressed("channel", True, ignore=[]), "'compressed-tensors' with a quantised lm_head"),
    "a quantised head by modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised lm_head"),
    "quark's integers": (of_quark("weight", dtype="int8"), "'quark' with weights of dtype='int8'.* .only fp8_e4m3"),
    "quark's other activations": (of_quark("input_tensors", dtype="mx"), "input_tensors of dtype='mx'"),
    "quark's weights alone": (
        {**QUARK, "global_quant_config": {**QUARK["global_quant_config"], "input_tensors": None}},
        "weights alone quantised",
    ),
    "quark's two dtypes at once": (
        {**QUARK, "global_quant_config": {**QUARK["global_quant_config"], "weight": [{"dtype": "fp8_e4m3"}, {}]}},
        "weights of several dtypes at once",
    ),
    "quark's zero points": (of_quark("weight", symmetric=False), "weights that are not symmetric"),
    "quark's groups": (of_quark("weight", qscheme="per_group"), "weights of .*qscheme='per_group'"),
    "quark's static scales a token": (
        of_quark("input_tensors", qscheme="per_channel"),
        "input_tensors of .*per_channel",
    ),
    "quark's blocks of another size": (
        {
            **QUARK_BLOCKS,
            "global_quant_config": {
                **QUARK_BLOCKS["global_quant_config"],
                "weight": {**QUARK_BLOCKS["global_quant_config"]["weight"], "block_size": [32, 32]},
            },
        },
        r"blocks of .*block_size=\[32, 32\]",
    ),
    "quark's other schemes for some layers": (
        {**QUARK, "layer_quant_config": {"*mlp*": {"weight": {"dtype": "fp4"}}}},
        r"a scheme of its own for '\*mlp\*'",
    ),
    "quark's other schemes for some kinds": (
        {**QUARK, "layer_type_quant_config": {"x": {}}},
        "layer_type_quant_config",
    ),
    "a quantised head by quark": ({**QUARK, "exclude": []}, "'quark' with a quantised lm_head"),
    "quark's fp4 of other groups": (
        of_mxfp4("weight", group_size=16, scale_format="e4m3"),
        r"weights of .*group_size=16.* \(of fp4 only per_group of 32 with scale_format='e8m0', static\)",
    ),
    "quark's fp4 without a format of scales": (of_mxfp4("weight", scale_format=None), "of fp4 only per_group of 32"),
    "quark's dynamic fp4 weights": (of_mxfp4("weight", is_dynamic=True), "weights of .*is_dynamic=True"),
    "quark's fp4 with FP8 activations": (
        of_mxfp4("input_tensors", dtype="fp8_e4m3", qscheme="per_tensor"),
        r"input_tensors of dtype='fp8_e4m3'.* with weights of fp4 \(only fp4 per_group of 32 .*, dynamic, or none\)",
    ),
    "quark's static fp4 activations": (of_mxfp4("input_tensors", is_dynamic=False), "input_tensors of .*with weights"),
    "quark's fp4 activations that are scaled otherwise": (
        of_mxfp4("input_tensors", scale_calculation_mode="floor"),
        r"scale_calculation_mode='floor' \(only 'even'\)",
    ),
    "quark's fp4 that does not speak of activations": (
        {**quark_mxfp4(), "global_quant_config": {"weight": quark_mxfp4()["global_quant_config"]["weight"]}},
        "a global_quant_config without input_tensors",
    ),
    "a quantised head in quark's fp4": (quark_mxfp4(exclude=[]), "'quark' with a quantised lm_head"),
    "modelopt's other algorithms": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_runs_is_refused_with_what_it_is_and_what_is_supported(name):
    config, says = REFUSED[name]
    with pytest.raises(ValueError, match=says) as caught:
        read(config)
    assert "supported: unquantised checkpoints (bfloat16, float16, float32)" in str(caught.value)
    assert "one scale per weight, per row or per block of 128 by 128" in str(caught.value)


def test_a_flag_for_anything_else_is_refused():
    with pytest.raises(ValueError, match="Quantisation 'awq' is not supported; supported: unquantised"):
        read_quantization({}, "awq")


def test_a_tied_head_is_nobodys_to_quantise():
    assert read(compressed("channel", True, ignore=[]), tie_word_embeddings=True).name == "fp8"


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.3.mlp.down_proj", f"{LAYER}.mlp.down_proj", True),
        ("model.layers.3.mlp.down_proj", "model.layers.13.mlp.down_proj", False),
        ("mlp.down_proj", f"{LAYER}.mlp.down_proj", True),
        ("model.layers.3", f"{LAYER}.mlp.down_proj", True),
        ("model.layers.3", "model.layers.31.mlp.down_proj", False),
        ("down", f"{LAYER}.mlp.down_proj", False),
        (r"re:.*\.mlp\..*", f"{LAYER}.mlp.down_proj", True),
        (r"re:mlp", f"{LAYER}.mlp.down_proj", False),
        ("model.layers.3*", f"{LAYER}.mlp.down_proj", True),
        ("*.self_attn.*", f"{LAYER}.mlp.down_proj", False),
    ],
)
def test_what_a_pattern_names(pattern, module, matches):
    assert matches_name(pattern, module) == matches


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_ignored_modules_have_no_scheme(key):
    found = read({**FP8, key: [f"{LAYER}.mlp.down_proj"]})
    assert found.linear([f"{LAYER}.mlp.down_proj"]) is None
    assert found.linear([f"{LAYER}.self_attn.o_proj"]) is not None


MATRICES = ("gate_proj", "up_proj", "down_proj")
EXPERTS = f"{LAYER}.mlp.experts"


@pytest.mark.parametrize(
    "pattern", [f"{EXPERTS}.2", f"{EXPERTS}.0", f"{EXPERTS}.2.down_proj", r"re:.*experts\.2\.", "*.experts.2.*", "2"]
)
def test_experts_are_quantised_all_or_none(pattern):
    found = read({**FP8, "modules_to_not_convert": [pattern]})
    with pytest.raises(ValueError, match=r"only some .*experts.* leaves out"):
        found.experts(EXPERTS, MATRICES, 4)


@pytest.mark.parametrize("pattern", [EXPERTS, "experts", LAYER, r"re:.*experts\.", "*experts*", "mlp"])
def test_experts_may_all_be_left_out(pattern):
    found = read({**FP8, "modules_to_not_convert": [pattern, f"{EXPERTS}.1"]})
    assert found.experts(EXPERTS, MATRICES, 4) is None
    assert found.experts("model.layers.2.mlp.experts", MATRICES, 4) == (found if LAYER in pattern else None)


def test_patterns_that_name_no_single_expert_are_tried_once_a_layer(monkeypatch):
    gates = [f"model.layers.{layer}.mlp.{name}" for layer in range(48) for name in ("gate", "shared_expert_gate")]
    found = read({**FP8, "modules_to_not_convert": ["lm_head", *gates]})
    tried = []
    monkeypatch.setattr("atom_core.quant.scheme.matches_name", lambda *given: tried.append(given))
    assert found.experts(EXPERTS, MATRICES, 512) == found
    assert {module.partition(".experts.")[2] for _, module in tried} == {f"0.{matrix}" for matrix in MATRICES}


@pytest.mark.parametrize("end", ["", ".down_proj", ".*", "*"])
def test_experts_of_other_layers_are_not_tried(monkeypatch, end):
    """A draft's may be listed one by one."""
    others = [f"{place}.0.mlp.experts.{it}{end}" for place in ("mtp.layers", "model.layers.1") for it in range(512)]
    found, tried = read({**FP8, "ignored_layers": others}), []
    monkeypatch.setattr(
        "atom_core.quant.scheme.matches_name", lambda *given: tried.append(given) or matches_name(*given)
    )
    assert found.experts(EXPERTS, MATRICES, 512) == found
    assert {module.partition(".experts.")[2] for _, module in tried} == {f"0.{matrix}" for matrix in MATRICES}


def test_experts_of_compressed_tensors_are_targets_all_or_none():
    group = compressed("channel", True)["config_groups"]["group_0"]
    some = {**group, "targets": [r"re:.*\.experts\.[01]\."]}
    found = read(compressed("channel", True, config_groups={"group_0": some}))
    assert found.experts(EXPERTS, MATRICES, 2) == found
    with pytest.raises(ValueError, match=r"leaves out .*experts\.2"):
        found.experts(EXPERTS, MATRICES, 3)


def test_a_drafts_prefix_is_none_of_the_checkpoints():
    found = read({**FP8, "ignored_layers": [r"re:model\.layers\.3\."]}).below("draft_model")
    assert found.linear([f"draft_model.{LAYER}.mlp.down_proj"]) is None
    assert found.linear(["draft_model.model.layers.2.mlp.down_proj"]) is not None


def test_a_merged_layer_is_quantised_as_a_whole_or_not_at_all():
    modules = [f"{LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    assert read({**FP8, "ignored_layers": modules}).linear(modules) is None
    with pytest.raises(ValueError, match=r"quantises only some of .*q_proj, .*k_proj, .*v_proj.*leaves out .*k_proj"):
        read({**FP8, "ignored_layers": modules[1:2]}).linear(modules)


@pytest.mark.parametrize(
    ("targets", "ignore", "quantised"),
    [
        (["Linear"], ["lm_head"], {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}),
        (["Linear"], ["lm_head", "model.layers.0.mlp"], {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}),
        (["Linear"], ["lm_head", "model.layers.0.mlp.up_proj"], {"model.layers.1.mlp.up_proj"}),
        (["Linear"], ["lm_head", "re:.*layers\\.0\\..*"], {"model.layers.1.mlp.up_proj"}),
        (["re:.*layers\\.1\\..*"], [], {"model.layers.1.mlp.up_proj"}),
        (["model.layers.0.mlp.up_proj"], [], {"model.layers.0.mlp.up_proj"}),
        (["Linear"], ["Linear"], set()),
    ],
)
def test_patterns_of_compressed_tensors_name_whole_modules_and_classes(targets, ignore, quantised):
    found = read({**with_group(targets=targets), "ignore": ignore})
    modules = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert {module for module in modules if found.linear([module])} == quantised


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**FP8, "fmt": "e5m2"}, "'fp8' with fmt='e5m2'"),
        ({**FP8, "group_size": 64}, "'fp8' with group_size='64'"),
        ({**FP8, "config_groups": {"a": {}}}, "'fp8' with config_groups="),
        (compressed("channel", True, bits=4), "'compressed-tensors' with bits='4'"),
        ({**FP8, "ignored_layers": 3}, r"quantization_config\.ignored_layers=3; a list is needed"),
        ({**FP8, "weight_block_size": [128, "128"]}, r"weight_block_size\[1\]='128'; a whole number is needed"),
        (compressed("channel", True, config_groups=[1]), r"config_groups=\[1\]; an object is needed"),
        (compressed("channel", True, ignore="lm_head"), "ignore='lm_head'; a list is needed"),
        (compressed("channel", True, sparsity_config="dense"), "sparsity_config='dense'; an object is needed"),
        (weights(symmetric=None), r"config_groups\.group_0\.weights\.symmetric=None; true or false is needed"),
        (weights(num_bits=8.0), r"group_0\.weights\.num_bits=8\.0; a whole number is needed"),
        (inputs(dynamic=None), r"input_activations\.dynamic=None; true or false or a text is needed"),
        (inputs(dynamic="local"), "input_activations of .* dynamic=local"),
        ({"quant_method": "quark", "global_quant_config": {"weight": 3}}, "weight=3; an object or a list is needed"),
        ({"quant_method": "modelopt", "quantization": [1]}, r"quantization=\[1\]; an object is needed"),
        ({"quant_method": ["fp8"]}, "is not supported"),
    ],
    ids=str,
)
def test_a_key_of_another_method_and_a_value_of_another_type_are_refused(config, says):
    with pytest.raises(ValueError, match=says) as error:
        read(config)
    assert "\n" not in str(error.value)


def test_what_is_no_object_is_refused():
    with pytest.raises(ValueError, match="quantization_config='fp8'; an object is needed"):
        read_quantization({"quantization_config": "fp8"})


def test_keys_of_tools_are_taken_and_unknown_ones_named_once(caplog):
    taken = {**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0", "version": "0.8", "producer": {"name": "a"}}
    assert read(taken) == read(FP8)
    assert caplog.records == []
    read({**FP8, "a_note": 1})
    (record,) = caplog.records
    assert record.getMessage() == "Keys of quantization_config that no model reads are ignored: a_note"


def test_a_pattern_that_is_no_expression_is_one_line():
    for config in ({**FP8, "ignored_layers": ["re:*q_proj"]}, compressed("channel", True, ignore=["re:(", "lm_head"])):
        with pytest.raises(ValueError, match=r"quantization_config with 're:.*', which is not a regular expression"):
            read(config).linear([f"{LAYER}.self_attn.q_proj"])
