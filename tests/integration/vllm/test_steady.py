"""`benchmarks.steady` with `vllm serve` and `vllm bench serve`, from the first server to the figures."""

from __future__ import annotations

import pytest

from tests.integration.steady_load import DEADLINE, run_steady

#: Thorough: two servers and four clients, each of which imports vLLM; what they print is tested without them.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(DEADLINE + 60)]


def test_steady_load_on_vllm(tmp_path):
    flags = "--kv-cache-memory-bytes 268435456 --enforce-eager"
    found = run_steady("vllm", tmp_path / "steady.json", flags, {}, "--rates", "half")
    assert {"enable_prefix_caching=True", "enable_chunked_prefill=True"} <= set(found["native_ran_with"]["settings"])
    native, atom = ([it for it in found["cells"] if it["implementation"] == name] for name in ("native", "atom"))
    assert [it["cell"]["load"] for it in native] == [it["cell"]["load"] for it in atom]
    four, half = native
    assert half["cell"]["rate"] == four["result"]["request_throughput"] / 2
    assert four["result"]["total_output_tokens"] == 16 * 16
