"""What a server says and shows of itself."""

from __future__ import annotations

import re

import pytest
import torch

from tests.integration.questions import complete

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]


def test_the_log_says_once_which_model_attention_and_kernels_run(server):
    report = server.startup_report()
    start = report.index("  kernels")
    facts = dict(line.split(maxsplit=1) for line in report[1:start])
    assert report[0] == f"atom-plugin serves {server.model}"
    assert facts["model"] == "Qwen3ForCausalLM"
    assert facts["attention"] == "VllmPagedAttention"
    assert re.fullmatch(r"cpu \(\w+\), bfloat16", facts["device"])
    assert [tuple(line.split(maxsplit=2)[:2]) for line in report[start + 1 :]] == [
        ("embedding", "reference"),
        ("rms_norm", "framework"),
        ("linear", "framework" if torch.cpu._is_avx512_supported() else "widened"),
        ("normed_linear", "separate"),
        ("qk_norm_rope_cache", "framework"),
        ("attention", "framework"),
        ("decode_attention", "separate"),
        ("gated_activation", "reference"),
    ]


def test_the_log_says_which_class_serves_the_architecture(server):
    assert "--model-impl atom: Qwen3ForCausalLM is served by AtomQwen3ForCausalLM" in server.log


def test_it_is_healthy_and_names_its_model(server, client):
    assert server.get("/health") == ""
    (model,) = client.models.list().data
    assert model.id == server.model


def test_metrics_count_requests_and_tokens(server, client, rows):
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [server.metric(name) for name in names]
    complete(client, server, rows[0].prompt)
    # A request that finished just before may be counted late, so more than this one may come in.
    server.wait_for(lambda: server.metric(names[0]) > before[0], "one more request in /metrics")
    server.wait_for(lambda: server.metric(names[1]) > before[1] + 50, "its prompt's tokens in /metrics")
    server.wait_for(lambda: server.metric(names[2]) > before[2] + 1, "its answer's tokens in /metrics")
