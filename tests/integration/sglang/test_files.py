"""Folders as they are found, and by names on a hub: real SGLang reads what Transformers reads, or is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.files import LAYOUTS, REFUSED, SERVED, all_on_hub, hub_environ
from tests.integration.preloaded import run_script
from tests.integration.questions import right_tokens
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

NUM_ASKED = 32
OURS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders and the names of all layouts, and Hugging Face's cache."""
    home = tmp_path_factory.mktemp("home")
    return all_on_hub(tmp_path_factory.mktemp("files"), home), home


@pytest.mark.parametrize("layout", SERVED)
def test_what_transformers_reads_of_a_name_is_served(models, layout, rows):
    names, home = models
    name, asked = names[layout, "name"], rows[:NUM_ASKED]
    engine = Engine(name, True, [Ask([row.prompt for row in asked])])
    (ran,) = run([engine], environ=hub_environ(home))
    assert f"atom-plugin serves {name}" in ran.log
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("qwen3", asked)


@pytest.fixture(scope="module")
def problems(models, tmp_path_factory):
    """What SGLang says to each folder and to each name, and of which model."""
    names, home = models
    flags = ["--device", "cpu", "--skip-tokenizer-init"]
    described = [{"flags": ["--model-path", model, *flags], "environ": OURS} for model in names.values()]
    folder = tmp_path_factory.mktemp("problems")
    given, wanted = folder / "given.json", folder / "wanted.json"
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("resolve.py")
    finished = run_script(script, [str(given), str(wanted)], {**OURS, **hub_environ(home)}, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip(names, json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("given", ["folder", "name"])
@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_refused_is_refused_before_weights_are_read(problems, layout, given):
    message = problems[layout, given]
    assert message is not None
    assert LAYOUTS[layout].says in message
    assert "\n" not in message


@pytest.mark.parametrize("layout", SERVED)
def test_what_is_served_is_not_refused_as_a_folder_either(problems, layout):
    assert problems[layout, "folder"] is problems[layout, "name"] is None
