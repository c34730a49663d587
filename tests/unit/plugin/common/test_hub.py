"""Models by their names on a hub: what its cache has, and what is looked at before anything is fetched."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from atom_core.checkpoint import INDEX, SINGLE_FILE, WEIGHT_FILES
from atom_plugin.common import hub
from tests.integration.files import on_hub

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def online(monkeypatch):
    """A hub of one model, whose files are given, and their index."""

    def use(names, indexed=None, error=None):
        def listed(model, revision=None):
            if error is not None:
                raise error
            return [*names, *([INDEX] if indexed is not None else ())]

        def fetched(model, name, revision=None, cache_dir=None):
            if error is not None or indexed is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("no such file")
            path = cache_dir / name
            path.write_text(json.dumps({"weight_map": {file: file for file in indexed}}))
            return str(path)

        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)

    return use


@pytest.fixture
def cache(tmp_path):
    """A cache with one model in it, without weights."""
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    on_hub(folder, tmp_path / "home")
    return str(tmp_path / "home" / "hub")


def test_a_folder_is_itself(tmp_path):
    assert hub.cached_folder(str(tmp_path)) == hub.whole_folder(str(tmp_path)) == tmp_path


def test_a_name_is_what_the_cache_has_and_whole_where_nothing_is_fetched(cache, monkeypatch):
    found = hub.cached_folder("tests/model", cache=cache)
    assert found is not None
    assert [path.name for path in found.iterdir()] == ["config.json"]
    assert hub.cached_folder("tests/other", cache=cache) is None
    assert hub.cached_folder("no/name/of/a/model", cache=cache) is None
    for offline, expected in ((True, found), (False, None)):
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
        assert hub.whole_folder("tests/model", cache=cache) == expected


def test_two_models_on_a_hub_are_refused_before_they_are_fetched(online, tmp_path):
    online([SINGLE_FILE, SHARD, "consolidated.safetensors", "onnx/model.safetensors"], [SHARD])
    with pytest.raises(ValueError, match=rf"tests/model holds two models: {SINGLE_FILE}, .*: {SHARD}\. Remove one"):
        hub.folder_to_check("tests/model", None, tmp_path, "auto")
    assert hub.folder_to_check("tests/model", None, tmp_path, "dummy") is None


def test_a_shard_that_a_hub_does_not_have_is_an_error(online, tmp_path):
    online([], [SHARD])
    with pytest.raises(ValueError, match=f"tests/model: {INDEX} names files that are not there: {SHARD}"):
        hub.check_names("tests/model", None, tmp_path)


@pytest.mark.parametrize("names", [[SINGLE_FILE, "consolidated.safetensors"], [SHARD], []])
def test_other_files_are_left_to_the_framework(online, tmp_path, names):
    online(names)
    assert hub.folder_to_check("tests/model", None, tmp_path, "auto") is None
    assert hub.patterns("tests/model", None, tmp_path) == list(WEIGHT_FILES)


def test_what_an_index_names_is_read_without_patterns(online, tmp_path):
    online([SHARD, "mtp.safetensors"], [SHARD, "mtp.safetensors"])
    hub.check_names("tests/model", None, tmp_path)
    assert hub.patterns("tests/model", None, tmp_path) is None
    assert hub.patterns(str(tmp_path)) is None
    (tmp_path / INDEX).unlink()
    assert hub.patterns(str(tmp_path)) == list(WEIGHT_FILES)


@pytest.mark.parametrize(
    "error",
    [hub._HTTP_ERROR("no route"), HFValidationError("no name"), OSError("no socket")],
)
def test_a_hub_that_cannot_be_asked_is_left_to_the_framework(online, tmp_path, error):
    online([], error=error)
    assert hub.folder_to_check("tests/model", None, tmp_path, "auto") is None
