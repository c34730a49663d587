"""The reference of `atom-plugin check`: what Transformers loads is what we load, or one line says why it is not."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.check import compare
from atom_core.checkpoint import INDEX, SINGLE_FILE
from atom_core.hugging_face import load_reference, one_line
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.hugging_face import FAMILIES, Family, make_config, make_model
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, quark_mxfp4

LLAMA = FAMILIES[0]
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128, "num_key_value_heads": 4},
)
QUANTISATIONS = [
    *(pytest.param(it.config, id=it.name) for it in (*FORMATS, *BLOCK_FORMATS)),
    pytest.param(quark_mxfp4(), id="quark, mxfp4"),
]


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path / "model", make_config(LLAMA))
    return tmp_path / "model"


def set_keys(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("quantization", QUANTISATIONS)
def test_a_quantisation_without_a_reference_is_refused_before_anything_is_loaded(directory, quantization, key):
    (directory / SINGLE_FILE).unlink()
    set_keys(directory, **{key: quantization})
    with pytest.raises(ValueError, match="Check the checkpoint that it was quantised from") as error:
        compare(directory)
    assert str(directory / "config.json") in str(error.value)
    assert f"quant_method='{quantization['quant_method']}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_quantised_checkpoint_is_no_reference_by_itself_either(directory, tmp_path):
    modelopt = next(form for form in FORMATS if form.name == "modelopt")
    make_fp8(directory, tmp_path / "fp8", modelopt)
    with pytest.raises(ValueError, match="quant_method='modelopt'"):
        load_reference(tmp_path / "fp8", torch.float32, torch.device("cpu"))


def test_a_quantisation_that_we_do_not_have_is_refused_as_elsewhere(directory):
    set_keys(directory, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ValueError, match="'awq' is not supported"):
        compare(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_experts_of_gpt_oss_in_mxfp4_are_unpacked_in_the_dtype_that_is_checked(tmp_path, dtype):
    make_model(tmp_path / "plain", make_config(GPT_OSS))
    make_gpt_oss(tmp_path / "plain", tmp_path / "packed")
    reference = load_reference(tmp_path / "packed", dtype, torch.device("cpu"))
    assert {it.dtype for name, it in reference.named_parameters() if ".experts." in name} == {dtype}


def test_gpt_oss_in_mxfp4_agrees_within_the_tolerance_of_float32(tmp_path):
    make_model(tmp_path / "plain", make_config(GPT_OSS))
    make_gpt_oss(tmp_path / "plain", tmp_path / "packed")
    report = compare(tmp_path / "packed")
    assert report.passed, str(report)
    assert report.tolerance == 1e-4


@pytest.mark.parametrize("name", ["model-0000{}-of-00002.safetensors", "model.safetensors-0000{}-of-00002.safetensors"])
@pytest.mark.parametrize("indexed", [False, True], ids=["no index", "an index"])
def test_shards_are_read_with_an_index_and_without(directory, name, indexed):
    tensors = sorted(load_file(directory / SINGLE_FILE).items())
    (directory / SINGLE_FILE).unlink()
    shards = {name.format(part + 1): dict(tensors[part::2]) for part in range(2)}
    for file, shard in shards.items():
        save_file(shard, directory / file, {"format": "pt"})
    if indexed:
        weight_map = {it: file for file, shard in shards.items() for it in shard}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    before = sorted(path.name for path in directory.iterdir())
    report = compare(directory)
    assert report.passed, str(report)
    assert sorted(path.name for path in directory.iterdir()) == before, "the folder is left as it was"


def test_an_index_that_was_not_downloaded_is_not_written(directory, tmp_path):
    """A cache has a link to it, which names no file yet."""
    (directory / SINGLE_FILE).rename(directory / "model-00001-of-00001.safetensors")
    missing = tmp_path / "blob"
    (directory / INDEX).symlink_to(missing)
    (directory / "other.json").symlink_to(tmp_path / "another")
    assert compare(directory).passed
    assert not missing.exists()


def test_shards_without_an_index_and_other_files_need_no_more_than_config_json(directory):
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / SINGLE_FILE).rename(directory / "model-00001-of-00001.safetensors")
    assert compare(directory).passed


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (LLAMA, {"initializer_range": None}, "'initializer_range'"),
        (LLAMA, {"bos_token_id": [1, 2]}, "'bos_token_id'"),
        (GPT_OSS, {"router_aux_loss_coef": None}, "'router_aux_loss_coef'"),
    ],
)
def test_what_transformers_does_not_read_is_one_line_with_the_file_and_the_key(tmp_path, family, changes, said):
    make_model(tmp_path, make_config(family))
    set_keys(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"^Transformers \S+ cannot load ") as error:
        compare(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_a_tokenizer_that_transformers_does_not_read_is_one_line(directory):
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^Transformers \S+ cannot load ") as error:
        compare(directory, prompt="one two")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AttributeError("no attribute 'x'\n\nmore"), "AttributeError: no attribute 'x'"),
        (TypeError("the field 'x':\n    it is a list\n    more"), "TypeError: the field 'x': it is a list"),
        (KeyError("x"), "KeyError: 'x'"),
        (ImportError("y:"), "ImportError: y:"),
        (OSError(), "OSError"),
    ],
)
def test_the_line_has_the_start_of_what_was_said(tmp_path, error, line):
    with pytest.raises(ValueError, match="cannot load") as found, one_line(tmp_path):
        raise error
    assert str(found.value).endswith(line)
    assert found.value.__cause__ is error
