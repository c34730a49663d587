"""The table of cases, its arithmetic and its errors; contenders that need no GPU agree with each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_core.models.read_config import read_model_config
from atom_plugin.bench import cases, delta_cases, expert_cases, fp8_cases, fused_cases, kernels, mla_cases
from atom_plugin.bench.agreement import distance
from atom_plugin.bench.cases import Bench, Case
from atom_plugin.bench.device import Ceiling, Limits, Timing, num_copies
from atom_plugin.bench.kernels import CASES, KernelOptions, Row
from atom_plugin.bench.models import read_config
from atom_plugin.bench.vllm_kernels import Unavailable
from atom_plugin.cli import app
from tests.unit.plugin.bench.test_step import TINY
from tests.unit.plugin.installed import assert_both_refuse

CONFIG = read_model_config({**TINY, "head_dim": 64})
LATENTS = read_model_config(
    {
        **read_config("deepseek-v2-lite", 1),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
)
MIXTURE = read_model_config(
    {
        **read_config("qwen3-30b-a3b", 1),
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
)
WITH_BIASES = read_model_config(
    {
        **read_config("gpt-oss-20b", 1),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
)
HYBRID = read_model_config(
    {
        **read_config("qwen3.5-27b", 4),
        "hidden_size": 64,
        "intermediate_size": 96,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
)
LIMITS = Limits(Ceiling("a GPU", copy=4e12, read=3e12), products=8e14)


def case_of(op, name):
    (found,) = (case for case in CASES[op](CONFIG, 2) if case.name.startswith(name))
    return found


def test_a_product_moves_its_weight_input_and_output():
    case = case_of("linear", "gate_up 192 x 64, 4 rows")
    assert case.num_bytes == 2 * (192 * 64 + 4 * (192 + 64))
    assert case.num_operations == 2 * 4 * 192 * 64


def test_a_norm_reads_and_writes_two_streams():
    assert case_of("rms_norm", "8 x 64").num_bytes == 2 * (4 * 8 * 64 + 64)


def test_attention_counts_the_keys_that_are_seen():
    H, K, D = 4, 2, 64
    assert case_of("attention", "decode 8 x 2048").num_bytes == 8 * 2 * (2 * 2048 * K * D + 2 * H * D)
    assert case_of("attention", "prefill 8 x 512").num_operations == 4 * 8 * (512 * 513 // 2) * H * D


def test_fused_ops_move_what_enters_and_leaves_them():
    H, K, D = 4, 2, 64
    assert case_of("normed_linear", "gate_up 192 x 64, 8 rows").num_bytes == 2 * (192 * 64 + 64 + 8 * (64 + 96))
    assert case_of("fp8_linear", "o 64 x 256, 8 rows").num_bytes == 64 * 256 + 4 * 64 + 2 * 8 * (64 + 256)
    assert case_of("fp8_block_linear", "o 64 x 256, 8 rows").num_bytes == 64 * 256 + 4 * 2 + 2 * 8 * (64 + 256)
    moved = 64 * 2 * (2 * 513 * K * D + (2 * H + 2 * K) * D)
    assert case_of("decode_attention", "64 x 513").num_bytes == moved


def test_the_output_gate_reads_two_streams_and_writes_one():
    one, *_ = CASES["output_gate"](HYBRID, 2)
    assert (one.name, one.num_bytes) == ("1 x 128", 3 * 2 * 128)
    assert [list(CASES["output_gate"](config, 2)) for config in (CONFIG, LATENTS)] == [[], []]


def test_a_state_is_read_and_written_once():
    one, *_, last = CASES["gated_delta_net"](HYBRID, 2)
    channels, values, heads, state = 128, 64, 4, 4 * 16 * 16
    row = channels + 2 * values + 2 * heads
    assert one.num_bytes == 2 * row + 2 * (4 * state + 3 * channels * 2)
    assert last.num_bytes == 8 * 2048 * 2 * row + 8 * (4 * state + 3 * channels * 2)
    assert list(CASES["gated_delta_net"](CONFIG, 2)) == []


@pytest.fixture
def few(monkeypatch):
    """Sizes that a CPU is done with at once."""
    monkeypatch.setattr(cases, "PRODUCT_ROWS", (1, 3))
    monkeypatch.setattr(cases, "NORM_ROWS", (1, 5))
    monkeypatch.setattr(cases, "QKV_TOKENS", (1, 20))
    monkeypatch.setattr(cases, "DECODES", ((2, 48),))
    monkeypatch.setattr(cases, "PREFILLS", ((2, 32),))
    monkeypatch.setattr(mla_cases, "DECODES", ((2, 128),))
    monkeypatch.setattr(mla_cases, "PREFILLS", ((2, 64),))
    monkeypatch.setattr(mla_cases, "PRODUCT_TOKENS", (1, 5))
    monkeypatch.setattr(delta_cases, "DECODES", (1, 3))
    monkeypatch.setattr(delta_cases, "PREFILLS", ((2, 70),))
    monkeypatch.setattr(fused_cases, "NORMED_ROWS", (1, 3))
    monkeypatch.setattr(fp8_cases, "FP8_ROWS", (1, 5))
    monkeypatch.setattr(fp8_cases, "BLOCK_ROWS", (1, 5))
    monkeypatch.setattr(fused_cases, "DECODES", ((2, 33), (1, 16)))
    monkeypatch.setattr(expert_cases, "EXPERT_TOKENS", (1, 5))


def test_latents_are_read_once_for_all_heads():
    (case,) = (it for it in CASES["mla_attention"](LATENTS, 2) if it.name.startswith("decode 64 x 4096"))
    assert case.num_bytes == 2 * 64 * (4096 * 48 + 4 * (48 + 32))
    assert list(CASES["attention"](LATENTS, 2)) == list(CASES["mla_attention"](CONFIG, 2)) == []


def test_experts_are_read_once_where_some_token_was_sent_to_them():
    one, *_, last = CASES["experts"](MIXTURE, 2)
    assert one.num_bytes == 2 * 2 * 3 * 128 * 256 + 2 * 1 * 256 * 2
    assert last.num_bytes == 2 * 8 * 3 * 128 * 256 + 2 * 256 * 256 * 2
    assert last.num_operations == 2 * 256 * 2 * 3 * 128 * 256
    (fp8, *_), (mxfp4, *_) = (list(CASES[op](MIXTURE, 2)) for op in ("fp8_experts", "mxfp4_experts"))
    moved = 2 * 3 * 128 * 256
    assert fp8.num_bytes == moved + 4 * moved // 128**2 + 2 * 256 * 2
    assert mxfp4.num_bytes == moved // 2 + moved // 32 + 2 * 256 * 2
    assert {"vllm", "vllm, untuned"} < set(fp8.contenders)
    assert [list(CASES[op](CONFIG, 2)) for op in ("experts", "fp8_experts", "mxfp4_experts")] == [[], [], []]
    assert list(CASES["fp8_experts"](WITH_BIASES, 2)) == []
    assert set(next(CASES["experts"](WITH_BIASES, 2)).contenders) == {"atom", "torch"}


@pytest.mark.parametrize("op", list(CASES))
@pytest.mark.parametrize(
    "config",
    [CONFIG, LATENTS, MIXTURE, WITH_BIASES, HYBRID],
    ids=["keys and values", "latents", "mixture", "with biases", "hybrid"],
)
def test_contenders_answer_the_same(few, config, op):
    target = Target.of(torch.device("cpu"))
    bench = Bench(torch.device("cpu"), torch.float32, kernel_set(target))
    for case in CASES[op](config, 4):
        found = {}
        with torch.inference_mode():
            for name, contender in case.contenders.items():
                try:
                    run = contender(bench, 2)
                except Unavailable as reason:
                    assert name in kernels._OF_VLLM, reason  # noqa: PT017 - which one it was
                    continue
                found[name] = run(0).clone()
                assert run(1).shape == found[name].shape
        assert set(found) >= {"atom", "torch"} or (op == "gated_activation" and config is WITH_BIASES)
        for numbers in found.values():
            torch.testing.assert_close(found["atom"], numbers, rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            exact = [contender(bench, 1)(0) for contender in case.exact]
            wide = case.unrounded and case.unrounded(bench, 1)(0)
        assert not exact or min(distance(found["atom"], numbers) for numbers in exact) < 1e-4
        assert wide is None or 0 < distance(wide, exact[0]) < 0.06


def test_a_call_is_limited_by_memory_or_by_products():
    assert LIMITS.least_seconds(SimpleNamespace(num_bytes=4000, num_operations=0)) == (1e-9, True)
    assert LIMITS.least_seconds(SimpleNamespace(num_bytes=4000, num_operations=8_000_000)) == (1e-8, False)
    assert LIMITS.least_seconds(SimpleNamespace(num_bytes=4000, num_operations=8_000_000), 8) == (5e-9, False)


@pytest.mark.parametrize(
    ("num_bytes", "cache", "free", "copies"),
    [(10, 50, 10_000, 10), (1000, 50, 10_000, 1), (1, 50_000, 10**9, 256), (10, 50, 200, 5), (10**9, 50, 10, 1)],
)
def test_buffers_are_larger_than_the_cache_where_they_can_be(num_bytes, cache, free, copies):
    assert num_copies(num_bytes, cache, free) == copies


def row(**changes):
    values = {
        "model": "qwen3-8b",
        "op": "linear",
        "case": "qkv",
        "contender": "atom",
        "num_bytes": 4_000_000,
        "num_operations": 0,
        "floor_seconds": 1e-6,
        "memory_bound": True,
        "timing": Timing(2e-6, 1.9e-6, 2.1e-6),
        **changes,
    }
    return Row(**values)


def test_a_row_has_rate_and_share():
    assert row().share == 0.5
    assert row().rate() == "2000 GB/s"
    assert row(memory_bound=False, num_operations=2_000_000_000).rate() == "1000.0 TFLOP/s"
    assert "50%" in row().line()
    assert row().as_json()["microseconds"] == pytest.approx(2.0)


def test_a_contender_that_could_not_run_says_why():
    found = row(timing=None, note="vLLM's kernels cannot be imported")
    assert found.share is None
    assert found.line().endswith("-  vLLM's kernels cannot be imported")
    assert found.as_json()["microseconds"] is None
    assert kernels.as_json(LIMITS, [found])["rows"][0]["note"] == found.note


def test_numbers_that_disagree_are_far_apart():
    ours, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert distance(ours, ours) == 0.0
    assert distance(2 * ours, ours) == 1.0
    assert distance(nan, ours) == float("inf")


def notes(monkeypatch, exact, unrounded=None, **numbers):
    """Of the rows of contenders that answer ``numbers``, by contender: whether there is a time, and the note."""
    timing = Timing(2e-6, 1.9e-6, 2.1e-6)
    monkeypatch.setattr(kernels, "cache_and_memory", lambda device: (1 << 20, 1 << 40))
    monkeypatch.setattr(kernels, "_measure_one", lambda contender, *_: (timing, contender(None, 1)(0)))

    def answering(number):
        return lambda bench, copies: lambda index: torch.tensor([1.0, number])

    contenders = {name: answering(number) for name, number in numbers.items()}
    wide = None if unrounded is None else answering(unrounded)
    case = Case("linear", "qkv", 1 << 20, 0, contenders, tuple(answering(number) for number in exact), wide)
    bench = Bench(torch.device("cpu"), torch.bfloat16, None)
    rows = kernels._rows("qwen3-8b", case, bench, LIMITS, KernelOptions(against_vllm=True))
    return {row.contender: (row.timing is not None, row.note) for row in rows}


def test_without_exact_numbers_others_are_held_against_torchs(monkeypatch):
    found = notes(monkeypatch, (), atom=0.9, near=0.99, torch=1.0)
    assert found["torch"] == found["near"] == (True, "")
    assert found["atom"] == (False, "its values are 1.0e-01 from torch's: no time is given")


def test_exact_numbers_are_held_against_all_and_torch_keeps_its_time(monkeypatch):
    found = notes(monkeypatch, (1.0, 0.5), atom=0.99, other=0.51, far=0.9, torch=0.9)
    assert found["atom"] == found["other"] == (True, "")
    assert found["far"] == (False, "its values are 1.0e-01 from float32's: no time is given")
    assert found["torch"] == (True, "its values are 1.0e-01 from float32's")


def test_vllms_kernels_keep_their_time_up_to_twice_as_far_from_the_exact(monkeypatch):
    found = notes(monkeypatch, (1.0,), atom=0.98, vllm=0.98)
    assert found["atom"] == (False, "its values are 2.0e-02 from float32's: no time is given")
    assert found["vllm"] == (True, "its values are 2.0e-02 from float32's")
    assert notes(monkeypatch, (1.0,), vllm=0.96)["vllm"] == (
        False,
        "its values are 4.0e-02 from float32's: no time is given",
    )


def test_quantised_numbers_may_be_as_far_from_the_exact_as_those_from_unquantised_ones(monkeypatch):
    found = notes(monkeypatch, (1.0,), 0.96, atom=0.965, far=0.95)
    assert found["atom"] == (True, "")
    assert found["far"] == (False, "its values are 5.0e-02 from float32's: no time is given")
    assert notes(monkeypatch, (1.0,), 1.0, atom=0.99)["atom"] == (True, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ("matmul",)}, "--op 'matmul': supported: linear, rms_norm"),
        ({"models": ("qwen9",)}, "neither a folder"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"repetitions": 0}, "--repetitions 0"),
        ({"rows": (1, 3)}, "--rows 3: supported: 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KernelOptions(**options).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "No GPU that torch"),
        (("--op", "matmul"), "--op 'matmul'"),
        (("--output", "tiles"), "--output is where --tune writes"),
        (("--tune", "--op", "attention"), "--tune has tiles to choose for linear only"),
        (("--tune", "--json", "tiles.json"), "no --json"),
        (("--rows", "1"), "--rows is for --tune"),
        (("--tune", "--rows", "3"), "--rows 3: supported"),
        (("--tune", "--rows", "1", "--rows", "8"), "No GPU that torch"),
    ],
)
def test_both_command_lines_say_what_is_wrong(arguments, message, capsys):
    assert_both_refuse("kernels", kernels.main, arguments, message, capsys)


def test_only_vllm_can_be_compared_with():
    result = CliRunner().invoke(app, ["bench", "kernels", "--against", "trt"])
    assert result.exit_code == 2
    assert "'trt' is not vllm" in result.stderr
