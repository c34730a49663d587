"""Public reports in the real SGLang: what should not be served is refused while the arguments are resolved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cases import CASES, is_right, make
from tests.integration.preloaded import run_script

pytestmark = pytest.mark.sglang

OURS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What SGLang says to each."""
    folder = tmp_path_factory.mktemp("cases")
    flags = ["--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32"]
    described = [{"flags": ["--model-path", str(make(folder, case)), *flags], "environ": OURS} for case in CASES]
    given, wanted = folder / "given.json", folder / "wanted.json"
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("resolve.py")
    finished = run_script(script, [str(given), str(wanted)], OURS, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip((case.name for case in CASES), json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_report(case, problems):
    assert is_right(case, problems[case.name]), problems[case.name]
