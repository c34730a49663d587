"""Our models' parameters and modules stand under the names that vLLM's own have, in each of its versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.names import MODELS, comparable, make

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

SCRIPT = Path(__file__).parents[2] / "integration" / "vllm" / "named.py"
#: vLLM makes the groups that mixtures need where the first model is one.
ORDER = sorted(MODELS, key=lambda model: "moe" not in model)
#: Attention over latents, which ours call as all attention. Theirs has another module in it.
MLA = re.compile(r"\.mla_attn(\.mla_attn)?(\..*)?$")
#: Modules of vLLM's own models that ours have no module for: functions.
VLLM_ALONE = re.compile(r"act_fn|logits_processor|rotary_emb|^lm_head$")
#: Modules of ours that theirs have none for: a buffer, what is told of scales of the cache and of the end of loading.
OURS_ALONE = re.compile(r"rotary|cache_scales|end_of_loading|^lm_head$")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Of each model, what ours and vLLM's own are made of."""
    folder = tmp_path_factory.mktemp("built")
    given, wanted = folder / "folders.json", folder / "names.json"
    given.write_text(json.dumps([str(make(folder, model)) for model in ORDER]))
    subprocess.run([sys.executable, str(SCRIPT), str(given), str(wanted)], check=True, timeout=300)
    return dict(zip(ORDER, json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_every_familys_names_are_vllms(built, model):
    (mine, parameters, modules), (whose, expected, theirs) = built[model]
    assert mine == f"Atom{whose}"
    assert comparable(parameters) == comparable(expected)
    assert all(parameters[name] == expected[name] for name in set(parameters) & set(expected))
    assert {name for name in comparable(modules) if not OURS_ALONE.search(name)} == {
        MLA.sub(".attn", name) for name in comparable(theirs) if not VLLM_ALONE.search(name)
    }
