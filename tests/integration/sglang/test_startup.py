"""What a server says and shows of itself."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.questions import complete

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]


def test_the_log_says_once_which_model_attention_and_kernels_run(server):
    report = server.startup_report()
    start = report.index("  kernels")
    facts = dict(line.split(maxsplit=1) for line in report[1:start])
    assert report[0] == f"atom-plugin serves {server.model}"
    assert server.log.count("atom-plugin serves") == 1
    assert facts["model"] == "Qwen3ForCausalLM"
    assert facts["attention"] == "SglangRadixAttention"
    assert re.fullmatch(r"cpu \(\w+\), bfloat16", facts["device"])
    ops = [line.split(maxsplit=2)[0] for line in report[start + 1 :]]
    fused = ["normed_linear", "decode_attention"]
    assert [op for op in ops if op not in fused] == [
        "embedding",
        "rms_norm",
        "linear",
        "qk_norm_rope_cache",
        "attention",
        "gated_activation",
    ]
    assert set(fused) <= set(ops)


def test_it_is_healthy_and_names_its_model(server, client):
    assert server.get("/health") == ""
    (model,) = client.models.list().data
    assert model.id == server.model
    assert json.loads(server.get("/model_info"))["model_path"] == server.model


def test_metrics_count_requests_and_tokens(server, client, rows):
    names = ("sglang:num_requests_total", "sglang:prompt_tokens_total", "sglang:generation_tokens_total")
    before = [server.metric(name) for name in names]
    complete(client, server, rows[0].prompt)
    # A request that finished just before may be counted late, so more than this one may come in.
    server.wait_for(lambda: server.metric(names[0]) > before[0], "one more request in /metrics")
    server.wait_for(lambda: server.metric(names[1]) > before[1] + 50, "its prompt's tokens in /metrics")
    server.wait_for(lambda: server.metric(names[2]) > before[2] + 1, "its answer's tokens in /metrics")
