"""Folders as they are found, and by names on a hub: real vLLM reads what Transformers reads, or is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.files import LAYOUTS, REFUSED, SERVED, all_on_hub, hub_environ
from tests.integration.preloaded import run_script
from tests.integration.questions import right_tokens
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

NUM_ASKED = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders and the names of all layouts, and Hugging Face's cache."""
    home = tmp_path_factory.mktemp("home")
    return all_on_hub(tmp_path_factory.mktemp("files"), home), home


@pytest.fixture(scope="module")
def served(models, rows):
    """What each name answers that is served."""
    names, home = models
    asks = [Ask([row.prompt for row in rows[:NUM_ASKED]], {"max_tokens": 32})]
    engines = [Engine(names[layout, "name"], "atom", asks, {"dtype": "float32"}) for layout in SERVED]
    return dict(zip(SERVED, run(engines, environ=hub_environ(home)), strict=True))


@pytest.mark.parametrize("layout", SERVED)
def test_what_transformers_reads_of_a_name_is_served(served, layout, rows):
    assert served[layout].model_class == "AtomQwen3ForCausalLM"
    assert [answer.tokens for answer in served[layout].answers[0]] == right_tokens("qwen3", rows[:NUM_ASKED])


@pytest.fixture(scope="module")
def problems(models, tmp_path_factory):
    """What vLLM says to each folder and to each name."""
    names, home = models
    args = [{"model": model, "model_impl": "atom", "skip_tokenizer_init": True} for model in names.values()]
    folder = tmp_path_factory.mktemp("problems")
    given, wanted = folder / "given.json", folder / "wanted.json"
    given.write_text(json.dumps([{"args": each, "environ": {}, "build": False} for each in args]))
    script = Path(__file__).with_name("configure.py")
    finished = run_script(script, [str(given), str(wanted)], hub_environ(home), 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip(names, json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("given", ["folder", "name"])
@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_refused_is_refused_before_weights_are_read(problems, layout, given):
    message = problems[layout, given]
    assert message is not None
    assert LAYOUTS[layout].says in message


@pytest.mark.parametrize("layout", SERVED)
def test_what_is_served_is_not_refused_as_a_folder_either(problems, layout):
    assert problems[layout, "folder"] is problems[layout, "name"] is None
