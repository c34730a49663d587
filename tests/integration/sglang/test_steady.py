"""`benchmarks.steady` with `sglang.launch_server` and `sglang.bench_serving`, from the first server to the figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.server import SglangServer
from tests.integration.steady_load import DEADLINE, run_steady

#: Thorough: see vLLM's.
pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(DEADLINE + 60)]
STAND_INS = Path(__file__).with_name("stand_ins")


def test_steady_load_on_sglang(tmp_path):
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    flags = "--device cpu --max-total-tokens 16384 --sleep-on-idle"
    environ = {**SglangServer.on_a_cpu, "PYTHONPATH": path}
    found = run_steady("sglang", tmp_path / "steady.json", flags, environ, "--rates")
    assert {"disable_radix_cache=False", "chunked_prefill_size=4096"} <= set(found["native_ran_with"]["settings"])
    assert found["native_ran_with"]["attention"] == ["attention_backend=torch_native"]
    for it in found["cells"]:
        assert it["result"]["total_input_tokens"] == 16 * 64
        assert it["result"]["total_output_tokens"] == 16 * 16
