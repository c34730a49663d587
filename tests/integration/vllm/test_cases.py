"""Public reports in the real vLLM: what should not be served is refused while the configuration is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cases import CASES, is_right, make
from tests.integration.preloaded import run_script

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What vLLM says to each."""
    folder = tmp_path_factory.mktemp("cases")
    common = {"model_impl": "atom", "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    described = [
        {"args": {"model": str(make(folder, case)), **common}, "environ": {}, "build": False} for case in CASES
    ]
    (given, wanted) = folder / "given.json", folder / "wanted.json"
    given.write_text(json.dumps(described))
    script = Path(__file__).with_name("configure.py")
    finished = run_script(script, [str(given), str(wanted)], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, 300)
    assert finished.returncode == 0, finished.tail()
    return dict(zip((case.name for case in CASES), json.loads(wanted.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_report(case, problems):
    assert is_right(case, problems[case.name]), problems[case.name]
