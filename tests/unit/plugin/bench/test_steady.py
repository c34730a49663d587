"""`benchmarks.steady` without a model: cells, command lines, what logs name, tables, and how it fails."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import _ran_with, steady
from benchmarks._ran_with import SGLANG_LINES, VLLM_LINES, LogLines
from benchmarks._steady_cells import WARM_SEED, Cell, Lengths, Plan, read_rate
from benchmarks._steady_frameworks import FIGURES, FRAMEWORKS, ClientFailed
from tests.integration.processes import living_of_group
from tests.unit.plugin.bench import steady_fakes

CELL = Cell(Lengths(1024, 128), num_prompts=64, seed=5, concurrency=16)


@pytest.fixture
def fake_main(monkeypatch):
    for name in ("FRAMEWORKS", "device"):
        monkeypatch.setattr(steady, name, getattr(steady, name))
    handler = signal.getsignal(signal.SIGTERM)
    yield steady_fakes.main
    signal.signal(signal.SIGTERM, handler)


def plan(concurrency=(1, 64), rates=(None, 2.0), lengths=((1024, 1024), (8192, 1024)), **options):
    given = {"prompts_each": 4, "least_prompts": 16, "seconds": 60.0, **options}
    return Plan([Lengths(*it) for it in lengths], concurrency, rates, **given)


def test_lengths_are_tokens_in_and_out():
    assert Lengths.read("8k/1k") == Lengths(8192, 1024)
    assert str(Lengths.read("8k/1k")) == "8k/1k"
    assert str(Lengths.read("512/100")) == "512/100"


@pytest.mark.parametrize("text", ["", "1k", "1k/", "0/8", "8/1", "k/k", "1k/1k/1k", "a/b"])
def test_what_are_no_lengths_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not of the form 1k/1k"):
        Lengths.read(text)


def test_a_rate_is_half_or_a_number():
    assert read_rate("half") is None
    assert read_rate("2.5") == 2.5


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "fast"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is neither half nor a number"):
        read_rate(text)


def test_there_are_prompts_for_each_request_at_once():
    cells = plan().at_once()
    assert [str(cell) for cell in cells] == [
        f"{lengths}, {load}" for lengths in ("1k/1k", "8k/1k") for load in ("1 at once", "64 at once")
    ]
    assert [cell.num_prompts for cell in cells] == [16, 256] * 2


def test_a_server_that_is_asked_again_gets_prompts_that_its_cache_does_not_have():
    it = plan()
    native = dict.fromkeys(it.at_once(), 1.0)
    cells = [cell for asked in range(3) for cell in (*it.at_once(asked), *it.at_rates(native, asked))]
    assert len({cell.seed for cell in cells}) == len(cells) == 24


def test_half_is_of_natives_best_rate_of_the_same_lengths_and_goes_on_for_as_long():
    it = plan()
    native = dict(zip(it.at_once(), [0.5, 8.0, 3.0, 1.0], strict=True))
    half, number, other_half, _ = it.at_rates(native)
    assert (half.rate, half.num_prompts, half.load) == (4.0, 128, "4 a second")
    assert (number.rate, number.num_prompts) == (2.0, 120)
    assert (str(other_half), other_half.num_prompts) == ("8k/1k, 1.5 a second", 16)
    # 256 prompts at 8 a second, and 128 at 4.
    assert half.num_prompts / half.rate == 256 / 8.0


def test_no_two_cells_have_the_same_prompts():
    it = plan(concurrency=(1, 4, 16), rates=(None, 1.0, 2.0))
    cells = it.at_once() + it.at_rates(dict.fromkeys(it.at_once(), 1.0)) + it.warm_up()
    assert len({cell.seed for cell in cells}) == len(cells) == 18


def test_a_warm_up_has_the_most_at_once_with_short_answers_and_one_to_its_end():
    found = [(str(cell), cell.num_prompts) for cell in plan(lengths=((1024, 8192),)).warm_up()]
    assert found == [("1k/32, 64 at once", 64), ("1k/32, 3 at once", 9), ("1k/8k, 1 at once", 1)]
    assert [str(cell) for cell in plan(lengths=((8, 8),)).warm_up()] == ["8/8, 64 at once", "8/8, 3 at once"]
    assert [str(cell) for cell in plan(concurrency=[1], lengths=((8, 64),)).warm_up()] == ["8/64, 1 at once"]
    assert [cell.concurrency for cell in plan(concurrency=[]).warm_up()] == [64, 3, 1, 64, 3, 1]


@pytest.mark.parametrize(("implementation", "ours"), [("native", []), ("atom", ["--model-impl", "atom"])])
def test_vllm_is_started_as_users_start_it(implementation, ours):
    server = FRAMEWORKS["vllm"].server(implementation, "model", ["--seed", "1"], 1.0)
    program, *rest = server.command
    assert program.endswith("vllm")
    assert rest == ["serve", "model", "--host", "127.0.0.1", "--port", str(server.port), *ours, "--seed", "1"]


@pytest.mark.parametrize(("implementation", "package"), [("native", None), ("atom", "atom_plugin.sglang.models")])
def test_sglang_is_started_as_users_start_it(implementation, package, monkeypatch):
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "left.by.the.shell")
    server = FRAMEWORKS["sglang"].server(implementation, "model", ["--tp-size", "2"], 1.0)
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", "model"]
    assert server.command == [*launch, "--host", "127.0.0.1", "--port", str(server.port), "--tp-size", "2"]
    assert server.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") == package
    assert set(server.environ) - {"SGLANG_EXTERNAL_MODEL_PACKAGE"} <= set(os.environ)


def options(command):
    """By name; a flag without a value maps to True."""
    found = {}
    for index, part in enumerate(command):
        if part.startswith("--"):
            value = command[index + 1] if index + 1 < len(command) else "--"
            found[part] = True if value.startswith("--") else value
    return found


def test_the_client_of_vllm_has_the_cell(tmp_path):
    server = FRAMEWORKS["vllm"].server("atom", "model", [], 1.0)
    command = FRAMEWORKS["vllm"].client(server, CELL, tmp_path / "result.json")
    assert command[1:3] == ["bench", "serve"]
    assert options(command) == {
        "--backend": "vllm",
        "--base-url": server.url,
        "--model": "model",
        "--dataset-name": "random",
        "--random-input-len": "1024",
        "--random-output-len": "128",
        "--num-prompts": "64",
        "--seed": "5",
        "--request-rate": "inf",
        "--max-concurrency": "16",
        "--ignore-eos": True,
        "--percentile-metrics": "ttft,tpot,e2el",
        "--metric-percentiles": "50,99",
        "--disable-tqdm": True,
        "--save-result": True,
        "--result-dir": str(tmp_path),
        "--result-filename": "result.json",
    }


def test_the_client_of_sglang_has_the_cell(tmp_path):
    cell = Cell(Lengths(1024, 128), num_prompts=64, seed=5, rate=2.25)
    server = FRAMEWORKS["sglang"].server("atom", "model", [], 1.0)
    command = FRAMEWORKS["sglang"].client(server, cell, tmp_path / "result.json")
    assert command[1:3] == ["-m", "sglang.bench_serving"]
    assert options(command) == {
        "--backend": "sglang",
        "--base-url": server.url,
        "--model": "model",
        "--dataset-name": "random-ids",
        "--tokenize-prompt": True,
        "--random-range-ratio": "1.0",
        "--random-input-len": "1024",
        "--random-output-len": "128",
        "--num-prompts": "64",
        "--seed": "5",
        "--request-rate": "2.25",
        "--warmup-requests": "0",
        "--disable-tqdm": True,
        "--output-file": str(tmp_path / "result.json"),
    }


KEYS = {
    "vllm": ["output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p50_e2el_ms"],
    "sglang": ["output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"],
}
LAST = {"vllm": ["p99_e2el_ms"], "sglang": ["median_e2e_latency_ms", "p99_e2e_latency_ms"]}


def result_file(folder, framework, **changes):
    keys = KEYS[framework] + LAST[framework]
    found = {key: float(index) for index, key in enumerate(keys)}
    found |= {"completed": 64, "total_output_tokens": 64 * 128, "request_throughput": 9.5, **changes}
    path = folder / "result.json"
    path.write_text('{"of": "a run before"}\n' * (framework == "sglang") + json.dumps(found) + "\n")
    return path


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_a_result_is_read(tmp_path, framework):
    path = result_file(tmp_path, framework, request_rate=float("inf"), server_info={"a": 1}, latencies=[1.0])
    found = FRAMEWORKS[framework].read(path, CELL)
    assert found.figures == {label: float(index) for index, label in enumerate(FIGURES)}
    assert found.requests_per_second == 9.5
    assert found.result["request_rate"] == "Infinity"
    assert not {"server_info", "latencies"} & set(found.result)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"completed": 60}, "4 of 64 requests failed"),
        ({"total_output_tokens": 8000}, "the answers have 8000 tokens where 8192 were asked for"),
    ],
)
def test_a_result_of_other_answers_is_none(tmp_path, changes, said):
    with pytest.raises(ClientFailed, match=said):
        FRAMEWORKS["vllm"].read(result_file(tmp_path, "vllm", **changes), CELL)


# Lines as vLLM 0.33.0 prints them on an H200, shortened; those of quantised models after its source.
VLLM_LOG = """\
(APIServer pid=7) INFO 11-28 06:34:33 [utils.py:240] non-default args: {'model': 'm', 'linear_backend': 'auto'}
(EngineCore pid=9) INFO 11-28 06:34:35 [core.py:139] Initializing a V1 LLM engine with config: \
quantization=fp8, enable_prefix_caching=True, enable_chunked_prefill=True, compilation_config={'cudagraph_mode': \
<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}, kernel_config=KernelConfig(moe_backend='auto', linear_backend='auto')
(EngineCore pid=9) INFO 11-28 06:34:37 [gpu_worker.py:513] Using V2 Model Runner
(EngineCore pid=9) INFO 11-28 06:34:39 [cuda.py:508] Using FLASH_ATTN attention backend out of potential backends: \
['FLASH_ATTN', 'TRITON_ATTN', 'FLEX_ATTENTION'].
(EngineCore pid=9) INFO 11-28 06:34:39 [flash_attn.py:1122] Using FlashAttention version 3
(EngineCore pid=9) INFO 11-28 06:34:39 [flash_attn.py:1122] Using FlashAttention version 3
(EngineCore pid=9) INFO 11-28 06:34:40 [selector.py:131] Using FLASH_ATTN MLA prefill backend.
(EngineCore pid=9) INFO 11-28 06:34:40 [fp8.py:880] Using TRITON Fp8 MoE backend out of potential backends: \
['TRITON'].
(EngineCore pid=9) WARNING 11-28 06:34:40 [fused_moe.py:1165] Using default MoE config. \
Performance might be sub-optimal!
(EngineCore pid=9) INFO 11-28 06:34:40 [__init__.py:778] Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod
(EngineCore pid=9) INFO 11-28 06:34:41 [deep_gemm.py:139] DeepGEMM E8M0 enabled on current platform.
DeepGEMM warmup:   4%|4         | 52/1167 [00:05<01:36, 11.60it/s]
(EngineCore pid=9) INFO 11-28 06:34:42 [utils.py:381] Using LBNHC KV cache layout.
(EngineCore pid=9) INFO 11-28 06:34:42 [topk_topp_sampler.py:149] Using FlashInfer for top-p & top-k sampling.
(EngineCore pid=9) INFO 11-28 06:34:46 [backends.py:1125] Using cache directory: /cache for vLLM's torch.compile
"""
SGLANG_LOG = """\
[2026-11-28 06:34:33] Attention backend not specified. Use fa3 backend by default.
[2026-11-28 06:34:33] Detected GPT-OSS model, enabling triton_kernels MOE kernel.
[2026-11-28 06:34:34] server_args={'model_path': 'm', 'chunked_prefill_size': 8192, 'disable_radix_cache': False, \
'attention_backend': 'fa3', 'decode_attention_backend': None, 'sampling_backend': 'flashinfer', \
'fp8_gemm_runner_backend': 'auto', 'moe_runner_backend': 'triton_kernel', 'kv_cache_dtype': 'auto'}
[2026-11-28 06:34:35 TP0] Using MoE kernel config from /configs/E=128.json.
[2026-11-28 06:34:36 TP0] Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=6144, K=4096, num_groups=1 with all Ms.
[2026-11-28 06:34:36 TP0] Using hybrid linear attention backend for hybrid GDN models.
[2026-11-28 06:34:39] INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK
"""


def test_vllms_log_names_what_it_ran_with():
    assert VLLM_LINES.read(VLLM_LOG) == {
        "attention": [
            "Using FLASH_ATTN attention backend out of potential backends: "
            "['FLASH_ATTN', 'TRITON_ATTN', 'FLEX_ATTENTION'].",
            "Using FlashAttention version 3",
            "Using FLASH_ATTN MLA prefill backend.",
        ],
        "GEMM": [
            "Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod",
            "DeepGEMM E8M0 enabled on current platform.",
        ],
        "MoE": [
            "Using TRITON Fp8 MoE backend out of potential backends: ['TRITON'].",
            "Using default MoE config. Performance might be sub-optimal!",
        ],
        "sampling": ["Using FlashInfer for top-p & top-k sampling."],
        "settings": [
            "quantization=fp8",
            "enable_prefix_caching=True",
            "enable_chunked_prefill=True",
            "cudagraph_mode=<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>",
        ],
    }


def test_sglangs_log_names_what_it_ran_with():
    assert SGLANG_LINES.read(SGLANG_LOG) == {
        "attention": [
            "Attention backend not specified. Use fa3 backend by default.",
            "attention_backend=fa3",
            "Using hybrid linear attention backend for hybrid GDN models.",
        ],
        "GEMM": ["Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=6144, K=4096, num_groups=1 with all Ms."],
        "MoE": [
            "Detected GPT-OSS model, enabling triton_kernels MOE kernel.",
            "moe_runner_backend=triton_kernel",
            "Using MoE kernel config from /configs/E=128.json.",
        ],
        "sampling": ["sampling_backend=flashinfer"],
        "settings": ["chunked_prefill_size=8192", "disable_radix_cache=False", "kv_cache_dtype=auto"],
    }


def test_what_is_installed_has_a_version():
    found = _ran_with.versions()
    assert set(found) <= set(_ran_with.DISTRIBUTIONS)
    assert "torch" in found


def test_both_are_measured_in_turns_and_native_sets_the_rate(tmp_path, capsys, fake_main):
    file = tmp_path / "steady.json"
    given = ("--model", "qwen3-0.6b", "--lengths", "64/16", "--concurrency", 1, 4, "--turns", 2, "--json", file)
    fake = fake_main(*given)
    assert fake.serving == [(name, '{"version": ') for name in ("native", "atom", "atom", "native")]
    # Native's best is 16 requests a second, in both of its turns, and half of it is asked of both.
    loads = ["4 at once", "3 at once", "1 at once", "4 at once", "8 a second"]
    assert [(name, cell.load) for name, cell in fake.asked] == [
        (name, load) for name in ("native", "atom", "atom", "native") for load in loads
    ]
    # All have the same prompts but for the warm-up.
    assert {cell.seed for _, cell in fake.asked if cell.load == "8 a second"} == {2}
    found = json.loads(file.read_text())
    assert found["device"] == {"gpus": ["a GPU"]}
    assert "torch" in found["versions"]
    assert found["native_ran_with"] == {"attention": ["Using GREAT attention"], "GEMM": [], "settings": []}
    assert [server["startup_report"] for server in found["servers"]] == [["our table"]] * 4
    assert all("--load-format dummy" in server["command"] for server in found["servers"])
    assert len(found["cells"]) == 12
    assert found["cells"][0]["cell"]["load"] == "1 at once"
    assert len(found["rows"]) == 3 * len(FIGURES)
    assert {row["ratio"] for row in found["rows"]} == {2.0}
    printed = capsys.readouterr().out
    assert "| 8 a second | 50 / 100 = 2.00 | 20 / 10 = 2.00 |" in printed
    assert "- attention: Using GREAT attention\n- GEMM: its log names none" in printed


def test_one_server_of_each_is_asked_in_turns_together(tmp_path, fake_main):
    file = tmp_path / "steady.json"
    given = ("--model", "qwen3-0.6b", "--lengths", "64/16", "--concurrency", 4, "--turns", 2, "--together")
    fake = fake_main(*given, "--json", file)
    assert sorted(name for name, _ in fake.serving) == ["atom", "native"]
    asked = [(name, cell) for name, cell in fake.asked if cell.seed < WARM_SEED]
    assert [(name, cell.load) for name, cell in asked] == [
        (name, load) for name in ("native", "atom", "atom", "native") for load in ("4 at once", "8 a second")
    ]
    # Both have the same prompts, and other ones in the next turn.
    assert [cell.seed for _, cell in asked] == [0, 1, 0, 1, 2, 3, 2, 3]
    found = json.loads(file.read_text())
    assert [server["startup_report"] for server in found["servers"]] == [["our table"]] * 2
    assert all(server["ready_s"] >= 0 for server in found["servers"])


def test_a_table_has_the_spread_over_turns():
    it = steady.Steady.__new__(steady.Steady)
    it.figures = {
        "1k/1k, 4 at once: output tokens a second": {"native": [100.0, 110.0], "atom": [110.0, 132.0]},
        "1k/1k, 4 at once: ttft p50, ms": {"native": [10.0, 10.0], "atom": [10.0]},
        "1k/1k, 16 at once: output tokens a second": {"native": [100.0]},
    }
    first, _, header, rule, row = steady.tables(it.rows()).splitlines()[:5]
    assert first.startswith("1k/1k tokens in and out")
    assert header == f"| load | {' | '.join(FIGURES)} |"
    assert rule.count("---") == 8
    assert row == "| 4 at once | 105 / 121 = 1.15 (1.10 to 1.20) | 10 / 10 = 1.00 |  |  |  |  |  |"


SMALL = ("--model", "qwen3-0.6b", "--lengths", "64/16", "--concurrency", "1")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--atom-flags=--broken"], ["atom, turn 0, start: The server ended with exit code 1", "no such flag"]),
        (["--client-flags=--fail"], ["native, turn 0, warm-up of 64/16, 1 at once: ", "code 7", "who asks?", "GREAT"]),
        (["--client-flags=--lose"], ["native, turn 0, warm-up of", "answers have 15 tokens where 16 were asked for"]),
        (["--client-flags=--end"], ["native, turn 0, 64/16, 2 a second: the server ended", "code 3", "out of memory"]),
    ],
    ids=["start", "client", "answers", "server"],
)
def test_a_failure_names_the_server_the_phase_and_the_end_of_the_log(tmp_path, fake_main, flags, said):
    file = tmp_path / "steady.json"
    with pytest.raises(SystemExit) as error:
        fake_main(*SMALL, "--json", file, *flags)
    for words in said:
        assert words in str(error.value)
    # What was measured before is there.
    if "--end" in flags[0]:
        (cell,) = json.loads(file.read_text())["cells"]
        assert cell["cell"]["load"] == "1 at once"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_whoever_ends_it_ends_its_server_and_client(number, code):
    command = [sys.executable, "-m", "tests.unit.plugin.bench.steady_fakes", *SMALL, "--client-flags=--sleep"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, children = time.monotonic() + 60, []
    while len(children) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = [int(child) for child in listed if living_of_group(int(child))]
    time.sleep(1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert not any(living_of_group(child) for child in children)
    if number == signal.SIGINT:
        assert "native, turn 0, warm-up of 64/16, 1 at once: interrupted" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--concurrency"], "--rates half needs native's rates"),
        (["--load-format", "auto"], "--load-format auto needs a checkpoint's folder; qwen3-8b is none"),
        (["--concurrency", "0"], "'0' is not a number from 1 on"),
        (["--turns", "x"], "'x' is not a number from 1 on"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(flags, said, capsys):
    with pytest.raises(SystemExit):
        steady.read_arguments(["vllm", *flags])
    assert said in capsys.readouterr().err


def test_layers_of_a_checkpoint_stay(tmp_path, capsys):
    with pytest.raises(SystemExit):
        steady.read_arguments(["vllm", "--model", str(tmp_path), "--layers", "2"])
    assert "--layers needs random weights" in capsys.readouterr().err


def test_weights_are_a_folders_or_random(tmp_path):
    assert steady.read_arguments(["vllm", "--model", str(tmp_path)]).load_format == "auto"
    assert steady.read_arguments(["vllm"]).load_format == "dummy"
    assert steady.read_arguments(["vllm", "--server-flags=--tp-size 2"]).server_flags == ["--tp-size", "2"]


def test_a_kind_is_looked_for_in_order():
    lines = LogLines(VLLM_LINES.prefix, VLLM_LINES.kinds, {})
    assert lines.read("Using X MoE backend")["MoE"] == ["Using X MoE backend"]
    assert lines.read("Using X MoE backend")["attention"] == []
