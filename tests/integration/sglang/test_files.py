"""Folders as they are found, and by names on a hub: real SGLang reads what Transformers reads, or is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.files import LAYOUTS, REFUSED, SERVED, hub_environ, laid_out, on_hub
from tests.integration.preloaded import run_script
from tests.integration.questions import right_tokens
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

NUM_ASKED = 32
OURS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models"}


@pytest.mark.parametrize("layout", SERVED)
def test_what_transformers_reads_of_a_name_is_served(tmp_path, layout, rows):
    name = on_hub(laid_out(layout, tmp_path), tmp_path / "home")
    asked = rows[:NUM_ASKED]
    engine = Engine(name, True, [Ask([row.prompt for row in asked])])
    (ran,) = run([engine], environ=hub_environ(tmp_path / "home"))
    assert f"atom-plugin serves {name}" in ran.log
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("qwen3", asked)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What SGLang says to each folder and to each name, and of which model."""
    parent, home = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("home")
    models = {}
    for layout in LAYOUTS:
        folder = laid_out(layout, parent)
        models[layout, "folder"], models[layout, "name"] = str(folder), on_hub(folder, home)
    flags = ["--device", "cpu", "--skip-tokenizer-init"]
    described = [{"flags": ["--model-path", model, *flags], "environ": OURS} for model in models.values()]
    given, wanted = parent / "given.json", parent / "wanted.json"
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("resolve.py")
    finished = run_script(script, [str(given), str(wanted)], {**OURS, **hub_environ(home)}, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip(models, json.loads(wanted.read_text()), strict=True))


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
