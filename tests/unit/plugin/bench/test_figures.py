"""Medians, ratios, table and plot of the end-to-end benchmarks, from figures that nobody measured."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from benchmarks import _gpu, _runs, gpu_accuracy, serve_gpu
from benchmarks._figures import Spread, as_json, markdown, plot, require_matplotlib, summarise
from benchmarks._runs import Generated, Run
from benchmarks._served import Served
from benchmarks._together import compare_answers, take_turns
from benchmarks._tokenizer import write_tokenizer
from tests.integration.vllm.offline import Answer

ROUNDS = {
    "1x128 tpot, ms": {"native": [2.0, 2.2, 1.8], "atom": [1.0, 1.0, 1.2]},
    "cache tokens": {"native": [1000, 1000, 1000], "atom": [1100, 1100, 1100]},
    "start, cold, s": {"native": [60.0], "atom": [30.0]},
}
FLOORS = {"1x128 tpot, ms": 0.5}


def test_ratios_are_those_of_the_rounds_and_above_one_where_atom_is_better():
    token, cache, start = summarise(ROUNDS, FLOORS)
    assert token.native == Spread(2.0, 1.8, 2.2)
    assert token.ratio == 2.0
    assert (token.least_ratio, token.most_ratio) == (pytest.approx(1.5), 2.2)
    assert token.share == 0.5
    assert cache.ratio == pytest.approx(1.1)
    assert (start.ratio, start.share) == (2.0, None)


def test_the_table_is_one_of_markdown():
    lines = markdown(summarise(ROUNDS, FLOORS)).splitlines()
    assert lines[2] == "| 1x128 tpot, ms | 2 (1.8 to 2.2) | 1 (1 to 1.2) | 2.000 (1.50 to 2.20) | 0.5 | 50% |"
    assert lines[4] == "| start, cold, s | 60 | 30 | 2.000 |  |  |"


def test_rows_for_a_file_hold_the_share():
    assert as_json(summarise(ROUNDS, FLOORS))[0]["share_of_floor"] == 0.5


def test_a_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    plot(summarise(ROUNDS, FLOORS), tmp_path / "plot.png", "a title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--no-plot"):
        require_matplotlib()


def test_shapes_are_requests_and_tokens():
    assert _gpu.Shape.read("8x128") == _gpu.Shape(8, 128)
    assert _gpu.Shape.read("256x640") == _gpu.Shape(256, 640)
    assert str(_gpu.Shape(64, 512)) == "64x512"
    assert str(_gpu.Shape(8, 0)) == "8x0"
    with pytest.raises(argparse.ArgumentTypeError, match="'8' is not of the form 8x128"):
        _gpu.Shape.read("8")


@pytest.mark.parametrize("text", ["", "256", "0x640", "x640", "256x", "-1x2", "2x-3", "2x3x4"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not of the form 8x128"):
        _gpu.Shape.read(text)


def options(*given):
    parser = argparse.ArgumentParser()
    _gpu.engine_options(parser)
    found = parser.parse_args(given)
    found.shapes, found.output_len = [_gpu.Shape(1, 128), _gpu.Shape(8, 128)], 256
    return found


def test_the_floor_of_a_shape_has_half_of_the_answer_in_the_cache():
    one, eight = _gpu.floors(options("--model", "qwen3-8b"), 4.8e12).values()
    assert one == pytest.approx(3.17, abs=0.02)
    assert eight > one
    (quantized, *_) = _gpu.floors(options("--model", "qwen3-8b", "--quantization", "fp8"), 4.8e12).values()
    assert one / 2 < quantized < 0.6 * one


def test_an_architecture_that_is_not_ours_has_no_floor(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["GPT5ForCausalLM"]}))
    assert set(_gpu.floors(options("--model", str(path)), 4.8e12).values()) == {None}


@pytest.mark.parametrize("decoding", [(), (0.5,)], ids=["a difference", "the engine's own"])
def test_a_shape_is_run_for_one_token_and_for_all(monkeypatch, decoding):
    clock, runs = [0.0], []

    def generate(prompts, tokens):
        runs.append((len(prompts), tokens))
        clock[0] += 1.0 + 0.1 * (tokens - 1)
        return Generated([[0] * tokens] * len(prompts), *decoding)

    monkeypatch.setattr(_runs.time, "perf_counter", lambda: clock[0])
    engine = _gpu.Started(generate, generate, cache_tokens=1, stop=lambda: None)
    prompts = {_gpu.Shape(2, 1): [[1], [2]], _gpu.Shape(1, 1): [[1]]}
    times = _gpu.run_shapes(engine, prompts, output_len=11, repetitions=2)
    one = {"ttft": pytest.approx([1.0] * 2), "tpot": pytest.approx([0.05 if decoding else 0.1] * 2)}
    assert times == dict.fromkeys(prompts, one)
    # Each shape is warmed; then all are run, and once more backwards.
    assert runs == [(2, 8), (1, 8), *((count, tokens) for count in (2, 1, 1, 2) for tokens in (1, 11))]


def test_prompts_of_a_shape_are_the_same_for_both(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    prompts = _gpu.prompts_of(_gpu.Shape(2, 5), str(tmp_path))
    assert prompts == _gpu.prompts_of(_gpu.Shape(2, 5), str(tmp_path))
    assert [len(it) for it in prompts] == [5, 5]
    assert all(0 <= token < 50 for it in prompts for token in it)


def test_engines_that_live_side_by_side_take_turns():
    runs = []

    def run(name, shape, tokens):
        runs.append((name, str(shape), tokens))
        seconds = (2.0 if name == "native" else 1.0) * (1 + 0.001 * (tokens - 1))
        return Run(seconds, Generated([[0] * tokens] * shape.batch))

    rounds = take_turns(run, [_gpu.Shape(8, 128)], output_len=11, repetitions=2)
    native, atom = "native", "atom"
    order = [(native, 8), (atom, 8), (native, 1), (atom, 1), (native, 11), (atom, 11)]
    assert [(name, tokens) for name, _, tokens in runs] == [*order, (atom, 1), (native, 1), (atom, 11), (native, 11)]
    tpot, ttft = summarise(rounds)
    assert (tpot.figure, ttft.figure) == ("8x128 tpot, ms", "8x128 ttft, ms")
    assert (tpot.native.median, tpot.ratio, ttft.atom.median) == pytest.approx((2.0, 2.0, 1000.0))


def test_answers_of_both_are_compared(capsys):
    def answers(name, shape, tokens):
        other = [0, *range(50, 49 + tokens)] if name == "native" else [1] * tokens
        answers = [list(range(tokens))] * 6 + [[0, *range(20, 19 + tokens)], other]
        if name == "native":
            answers[0] = [0, 1, 2, *range(30, 27 + tokens)]
        return answers

    found = compare_answers(answers, [_gpu.Shape(8, 128)], output_len=11)
    # Of seven answers six are alike to the end, one for three tokens.
    said = "7 of 8 first tokens alike, and of those 8.9 of the 10 behind; "
    said += "of 88 tokens native has 39 different ones, atom 21"
    assert found == {"8x128": said}
    assert said in capsys.readouterr().out


SERVED = """
import argparse
from benchmarks._served import answer

parser = argparse.ArgumentParser()
parser.add_argument("--replies", type=int)
print("what the engine prints is no answer")
say = answer(parser.parse_args().replies, {"ready": 1}, lambda asked: {"twice": 2 * asked["number"]})
say({"left": "memory"})
"""


def test_an_engine_answers_over_a_pipe_of_its_own():
    served = Served("atom", [sys.executable, "-c", SERVED])
    assert served.next() == {"ready": 1}
    assert [served.ask({"number": number}) for number in (1, 2)] == [{"twice": 2}, {"twice": 4}]
    served.end()
    assert served.next() == {"left": "memory"}
    assert served.process.wait() == 0


def test_an_engine_that_ends_is_named_with_what_it_said(capsys):
    with pytest.raises(SystemExit, match="the atom engine failed with exit code 3"):
        Served("atom", [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"]).next()
    assert "no GPU" in capsys.readouterr().err


def test_both_servers_get_the_same_flags_but_for_one():
    given = options("--quantization", "fp8", "--extra-engine-json", '{"enforce_eager": true, "block_size": 32}')
    native, atom = (serve_gpu.server_flags(name, given) for name in ("native", "atom"))
    assert [(one, other) for one, other in zip(native, atom, strict=True) if one != other] == [("auto", "atom")]
    assert native[-3:] == ["--enforce-eager", "--block-size", "32"]
    assert native[-5:-3] == ["--quantization", "fp8"]


def test_every_token_of_a_random_model_is_a_word(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    write_tokenizer(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokens = [7, 49, 0, 7]
    assert len(tokenizer) == 50
    assert tokenizer(tokenizer.decode(tokens, skip_special_tokens=True), add_special_tokens=False).input_ids == tokens


def test_a_load_says_how_many_prompts_it_needs():
    assert serve_gpu.Load(concurrency=64).num_prompts(8, 20.0) == 512
    assert serve_gpu.Load(concurrency=1).num_prompts(8, 20.0) == 16
    assert serve_gpu.Load(rate=4.0).num_prompts(8, 20.0) == 80
    assert serve_gpu.Load(rate=4.0).flags() == ["--request-rate", "4.0"]
    assert str(serve_gpu.Load(rate=4.0)) == "4 a second"


def answer(text, tokens, logprob=-0.5):
    return Answer(text, tokens, [{"1": logprob}], [])


def test_answers_are_scored_by_their_first_line():
    questions = [{"answer": "42"}, {"answer": "Kate"}, {"answer": "7"}]
    answers = [answer(" 42\nQuestion", [1]), answer(" Kate", [2]), answer(" 8\n7", [3])]
    assert gpu_accuracy.accuracy(answers, questions) == pytest.approx(2 / 3)


def test_answers_are_compared_by_token_and_by_bit():
    some = [answer("a", [1, 2]), answer("b", [3])]
    others = [answer("a", [1, 2], logprob=-0.5000001), answer("b", [4])]
    assert gpu_accuracy.equal_share(some, others) == 0.5
    assert gpu_accuracy.differing(some, others) == 2
    assert gpu_accuracy.differing(some, some) == 0
