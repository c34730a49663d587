"""A checkpoint's files: what is damaged, missing or dangerous is said before any tensor is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from atom_core.checkpoint import Checkpoint, config_of, read_config_json

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_headers_say_dtype_shape_and_file(file):
    tensors = Checkpoint.open(file.parent).tensors
    assert {name: (info.dtype, info.shape, info.file) for name, info in tensors.items()} == {
        "a": ("F32", (2, 3), file),
        "b": ("BF16", (4,), file),
    }


def test_tensors_of_all_files_are_loaded(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "2.safetensors")
    loaded = dict(Checkpoint.open(tmp_path).load())
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    save_file({"a": TENSORS["b"]}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "1.safetensors"})
    assert dict(Checkpoint.open(tmp_path).load())["a"].shape == (2, 3)


def test_a_shard_that_the_index_names_but_is_not_there_is_an_error(file):
    write_index(file.parent, {"a": file.name, "b": "model-2.safetensors", "c": "model-3.safetensors"})
    with pytest.raises(ValueError, match=r"index\.json names files that are not there: model-2.*, model-3"):
        Checkpoint.open(file.parent)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none_is_an_error_that_names_it(file, text):
    (file.parent / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json .*weight_map"):
        Checkpoint.open(file.parent)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file: it holds pickles \(pytorch_model\.bin\)"):
        Checkpoint.open(tmp_path)


def test_pickles_beside_safetensors_are_not_looked_at(file):
    (file.parent / "pytorch_model.bin").write_bytes(b"anything")
    assert Checkpoint.open(file.parent).tensors.keys() == TENSORS.keys()


def test_an_empty_directory_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no \*\.safetensors file: it holds none"):
        Checkpoint.open(tmp_path)


def test_a_file_cut_off_in_its_tensors_names_those_beyond_its_end(file):
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    last = max((name for name in TENSORS), key=lambda name: header[name]["data_offsets"][1])
    with pytest.raises(ValueError, match=f"model.safetensors is damaged: .*; beyond its end: {last}"):
        Checkpoint.open(file.parent)


@pytest.mark.parametrize("length", [0, 5, 8, 30])
def test_a_file_cut_off_in_its_header_is_an_error(file, length):
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        Checkpoint.open(file.parent)


def test_bytes_after_the_last_tensor_are_an_error(file):
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: \d+ bytes where its header describes \d+\."):
        Checkpoint.open(file.parent)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[1, 2]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b'\xff\xfe{"a"'],
    ids=["text", "a list", "no entry", "half an entry", "no UTF-8"],
)
def test_a_header_that_is_none_is_an_error(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["a text", ["a", "list"], 5, True, [], ""])
def test_the_language_models_config_is_an_object(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["It"], "text_config": text}))
    with pytest.raises(ValueError, match=r"config\.json: .*has text_config=.*; an object is needed"):
        read_config_json(tmp_path)


def test_a_config_is_a_json_object(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config_json(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config_json(tmp_path)
    config.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds a list, not a JSON object"):
        read_config_json(tmp_path)
    config.write_text('{"a": 1}')
    assert read_config_json(tmp_path) == {"a": 1}


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("model", [("model.safetensors",), ("model-00001-of-00002.safetensors", "model-2.safetensors")])
def test_files_beside_the_model_are_left_alone_also_without_an_index(tmp_path, beside, model):
    for number, name in enumerate(model):
        save_file({f"of the model {number}": TENSORS["a"]}, tmp_path / name)
    save_file({"beside": TENSORS["b"]}, tmp_path / beside)
    assert list(Checkpoint.open(tmp_path).tensors) == [f"of the model {number}" for number in range(len(model))]


def test_a_single_file_beside_an_index_of_others_is_refused_with_both_names(file):
    save_file({"a": TENSORS["a"] + 1}, file.parent / "model-1.safetensors")
    write_index(file.parent, {"a": "model-1.safetensors"})
    with pytest.raises(ValueError, match=r"holds two models: model\.safetensors, .* the files that .*: model-1\.safet"):
        Checkpoint.open(file.parent)


def test_what_the_library_will_not_read_names_the_file(tmp_path):
    entries = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    entries["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: "):
        Checkpoint.open(tmp_path)


def test_another_head_in_the_files_unties_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    embedding = torch.arange(6.0).view(3, 2)
    for head, tied in ((None, True), (embedding, True), (embedding + 1, False)):
        heads = {} if head is None else {"lm_head.weight": head.clone()}
        save_file({"model.embed_tokens.weight": embedding, **heads}, tmp_path / "model.safetensors")
        assert config_of(tmp_path)["tie_word_embeddings"] is tied


def test_a_link_to_what_was_not_downloaded_is_no_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file: it holds none"):
        Checkpoint.open(tmp_path)
