"""Models that keep states beside pages (Gated DeltaNet) in real vLLM: tokens are the model's own, whatever is between.

That is: steps that cut prompts up, requests in the same step, prefixes from the cache, preemption, requests that are
given up, drafts, and slots that others have used, whose memory is NaN at first.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openai import BadRequestError
from transformers import AutoTokenizer

from atom_plugin.common.versions import installed
from tests.integration.hybrids import LENGTHS, WHOLE_BLOCKS, doubt, in_fp8_blocks, make_hybrid, wrapped
from tests.integration.preloaded import run_script
from tests.integration.questions import BY_VECTORS, TESTS, checkpoint, connect
from tests.integration.server import VllmServer
from tests.integration.vllm.data_parallel import COPIES, greedy_at_once, two_data_parallel_ranks
from tests.integration.vllm.offline import Answer, Ask, Engine, Ran, run

pytestmark = pytest.mark.vllm

NUM_TOKENS = 16
#: How many prompts share many tokens, the last ones of all.
NUM_SHARING = 4
NUM_PROMPTS = len(LENGTHS) + NUM_SHARING


def before_all_else(*folders: str) -> dict[str, str]:
    """Folders beside this file on the path of every process."""
    paths = [str(Path(__file__).with_name(folder)) for folder in folders]
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


#: vLLM inspects its own classes of Qwen3.5 first, which import torchvision.
ENVIRON = before_all_else("stand_ins")
#: The newer model runner, whose Triton kernels are interpreted; see `triton_on_cpu`.
NEWER_RUNNER = {
    **before_all_else("stand_ins", "triton_on_cpu"),
    "TRITON_INTERPRET": "1",
    "TRITON_BACKENDS_IN_TREE": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
#: Blocks of 64 tokens, of which so few make requests wait for each other or lose what they have.
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "skip_tokenizer_init": True,
}
EXACTLY = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
WITHOUT_PREFIXES = {"enable_prefix_caching": False}
WRAPPER = {"language_model_only": True}
#: A PNG of one.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


#: Of prompts that come together, so many tokens a step: four have their last ones in the same step.
IN_PARTS = {"long_prefill_token_threshold": 12}


def drafts(count: int) -> dict[str, object]:
    """vLLM refuses prefix caching beside them in model runner V1, the only one that a CPU has without Triton."""
    return {**WITHOUT_PREFIXES, "speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


#: Of each engine the architecture, how many blocks there are, and its options.
WAYS = {
    "Next": ("Qwen3NextForCausalLM", 40, {}),
    "Next, 2 drafts": ("Qwen3NextForCausalLM", 32, drafts(2)),
    "dense": ("Qwen3_5ForCausalLM", 40, {}),
    "dense, no prefix cache": ("Qwen3_5ForCausalLM", 20, WITHOUT_PREFIXES),
    "dense, 1 draft": ("Qwen3_5ForCausalLM", 32, drafts(1)),
    "dense, 3 drafts": ("Qwen3_5ForCausalLM", 40, {**drafts(3), **IN_PARTS}),
    "mixture, 1 draft": ("Qwen3_5MoeForCausalLM", 32, drafts(1)),
    "text of a dense one": ("Qwen3_5ForConditionalGeneration", 40, WRAPPER),
    "text of a mixture, 3 drafts": ("Qwen3_5MoeForConditionalGeneration", 40, {**WRAPPER, **drafts(3)}),
}


def checkpoints(tmp_path_factory, names):
    made = {}
    for name in names:
        architecture = WAYS[name][0]
        if architecture not in made:
            made[architecture] = make_hybrid(tmp_path_factory.mktemp(architecture), architecture, NUM_TOKENS)
    return made


def num_drafts(options) -> int:
    return options.get("speculative_config", {}).get("num_speculative_tokens", 0)


def ends_behind_48(options) -> int:
    """Which prompt has as many tokens behind 48 as a request that verifies drafts."""
    return LENGTHS.index(48 + 1 + (num_drafts(options) or 1))


def asked(options) -> list[list[int]]:
    """Which prompts come at once: one token, one prompt in two steps, four like it, all, all again, ...

    Of many short ones, which end before long, some must wait: the last one, of one token, comes while others run.
    """
    last, everything, sharing = ends_behind_48(options), list(range(NUM_PROMPTS)), NUM_PROMPTS - 1
    short = [0, 1, 2] * 5 + [1, 0]
    return [[0], [last], [last] * 4, everything, everything, everything, [sharing], [sharing], short]


#: Among what is asked.
COLD, BESIDE_ABORTED, WARM = 3, 5, 7


def engine(hybrid, blocks, options) -> Engine:
    """One that is asked all that."""
    asks = [Ask([hybrid.prompts[row] for row in rows], EXACTLY) for rows in asked(options)]
    asks[BESIDE_ABORTED] = replace(asks[BESIDE_ABORTED], aborted=hybrid.prompts[::-1])
    few = {"num_gpu_blocks_override": blocks}
    return Engine(hybrid.folder, "atom", asks, {**OPTIONS, **few, **options}, poisoned=True, stepped=True)


def assert_answers(name: str, asked: list[list[int]], ran: Ran, hybrid) -> None:
    for at, (rows, answers) in enumerate(zip(asked, ran.answers, strict=True)):
        pairs = zip(rows, answers, strict=True)
        assert [row for row, answer in pairs if answer.tokens != hybrid.answers[row]] == [], f"{name}, ask {at}"


def assert_cached(cold: list[Answer], warm: list[Answer]) -> None:
    """Prompts that share a prefix found it with a request that ran, and one of them after itself."""
    sharing = cold[-NUM_SHARING:]
    found = [answer for answer in sharing if answer.num_cached_tokens]
    assert any(other.began < answer.began < other.ended for answer in found for other in sharing)
    assert warm[0].num_cached_tokens > 0


def serve(tmp_path_factory, names):
    """What each of these engines did, and the checkpoints by architecture."""
    made = checkpoints(tmp_path_factory, names)
    engines = [engine(made[architecture], *rest) for architecture, *rest in (WAYS[name] for name in names)]
    return dict(zip(names, run(engines, environ=ENVIRON), strict=True)), made


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return serve(tmp_path_factory, list(WAYS))


@pytest.mark.smoke
def test_each_version_gives_the_tokens_of_the_model_by_itself(tmp_path_factory):
    names = ["dense", "dense, 3 drafts"]
    if installed("vllm").version.startswith("0.30."):
        names.remove("dense, 3 drafts")  # on a CPU its own code for drafts fails: "Cannot inspect kernel parameters"
    rans, made = serve(tmp_path_factory, names)
    for name, ran in rans.items():
        assert_answers(name, asked(WAYS[name][2]), ran, made[WAYS[name][0]])


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_those_of_the_model_by_itself(served, name):
    rans, made = served
    ran, (architecture, _, options) = rans[name], WAYS[name]
    assert ran.model_class == f"Atom{architecture}"
    assert {"VllmPagedAttention", "VllmLinearAttention"} <= set(ran.layer_classes)
    assert_answers(name, asked(options), ran, made[architecture])
    if "speculative_config" in options:
        assert ran.draft_class is not None
        assert (
            0 < ran.counters["vllm:spec_decode_num_accepted_tokens"] < ran.counters["vllm:spec_decode_num_draft_tokens"]
        )
    if "enable_prefix_caching" not in options:
        assert_cached(ran.answers[COLD], ran.answers[WARM])


@pytest.mark.parametrize("name", WAYS)
def test_steps_have_what_is_taken_for_drafts_or_decodes_elsewhere(served, name):
    """A prompt's last tokens, as many as verify drafts (vllm#55766), and a prompt of one token, alone and padded."""
    options = WAYS[name][2]
    assert_steps(served[0][name].steps, num_drafts(options), 48)
    if "long_prefill_token_threshold" in options:
        assert [[48, 1 + num_drafts(options), 1]] * 4 in served[0][name].steps


def assert_steps(steps: list[list[list[int]]], count: int, before: int) -> None:
    """Steps of an engine with ``count`` drafts: a prompt of one token, and last ones behind ``before``, alone."""
    assert [[0, 1, 1]] in steps
    assert [[before, 1 + (count or 1), 1]] in steps
    if count == 3:  # of so many tokens no prompt is
        assert any(row[:2] == [0, 1 + count] for step in steps for row in step)


@pytest.mark.parametrize("drafting", [False, True])
def test_requests_were_preempted(served, drafting):
    rans, _ = served
    counts = {name: ran.counters["vllm:num_preemptions"] for name, ran in rans.items()}
    assert sum(count > 0 for name, count in counts.items() if ("draft" in name) == drafting) >= 2, counts


def recall(count: int) -> list[dict[str, str]]:
    """Questions whose answers stand hundreds of tokens before."""
    lines = (TESTS / "evaluation" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


#: Of each engine the trained checkpoint and its options.
TRAINED = {
    "Next": ("qwen3_next", {}),
    "Next, 3 drafts": ("qwen3_next", {**drafts(3), "mamba_ssm_cache_dtype": "float32"}),
    "dense, an FP8 cache": ("qwen3_5", {"mamba_ssm_cache_dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "dense, ngram": (
        "qwen3_5",
        {
            **WITHOUT_PREFIXES,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        },
    ),
}


@pytest.fixture(scope="module")
def trained():
    """What each of these engines did."""
    options = {"max_num_batched_tokens": 256, "max_model_len": 1024, **BY_VECTORS}
    ask = Ask([row["prompt"] for row in recall(16)], {"max_tokens": 8})
    engines = [
        Engine(checkpoint(family), "atom", [ask, ask], {**options, **more}, poisoned=True)
        for family, more in TRAINED.values()
    ]
    script = Path(__file__).with_name("states_as_asked.py")
    return dict(zip(TRAINED, run(engines, environ=ENVIRON, script=script), strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_trained_ones_answer_what_only_a_kept_state_knows(trained, name):
    ran, options = trained[name], TRAINED[name][1]
    for asked in ran.answers:
        assert [answer.text.split("\n")[0].strip() for answer in asked] == [row["answer"] for row in recall(16)]
    if "speculative_config" in options:
        accepted, drafted = (ran.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
        assert accepted > (0 if "ngram" in name else 0.5 * drafted)
    else:
        assert ran.counters["vllm:prefix_cache_hits"] > 0
    if "mamba_ssm_cache_dtype" in options:
        assert f"torch.{options['mamba_ssm_cache_dtype']}" in ran.state_dtypes


def test_a_multimodal_checkpoint_is_refused_but_for_its_text(tmp_path):
    folder = make_hybrid(tmp_path, "Qwen3_5ForConditionalGeneration", 1, (1,)).folder
    cases = [
        {"args": {"model": folder, "model_impl": "atom", **args}, "environ": {}, "build": False}
        for args in ({}, WRAPPER)
    ]
    given, wanted = tmp_path / "cases.json", tmp_path / "problems.json"
    given.write_text(json.dumps(cases))
    finished = run_script(Path(__file__).with_name("configure.py"), [str(given), str(wanted)], ENVIRON, 300)
    assert finished.returncode == 0, finished.tail()
    refused, taken = json.loads(wanted.read_text())
    assert "Add --language-model-only to serve the text model of a multimodal checkpoint." in refused
    assert taken is None


@pytest.mark.slow
def test_a_server_of_its_text_refuses_an_image_in_one_line(tmp_path):
    folder, (row,) = wrapped(checkpoint("qwen3_5"), tmp_path / "wrapper"), recall(1)
    flags = ("--model-impl", "atom", "--language-model-only", "--dtype", "float32", "--max-model-len", "1024")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    with VllmServer(folder, *flags, "--served-model-name", "wrapper", environ=ENVIRON) as server:
        client = connect(server)
        asked = {"model": "wrapper", "max_tokens": 8, "temperature": 0}
        text = client.completions.create(prompt=row["prompt"], **asked).choices[0].text
        assert text.split("\n")[0].strip() == row["answer"]
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(messages=[{"role": "user", "content": [image]}], **asked)
        assert refused.value.body["message"] == "wrapper is not a multimodal model"
        assert client.completions.create(prompt=row["prompt"], **asked).choices[0].text == text


#: For the newer runner, whose interpreted kernels take long; with them blocks have 64 tokens, where prompts are cut.
FEWER_STEPS = {**OPTIONS, "max_num_batched_tokens": 128, "enforce_eager": True}
SHORTER = {**EXACTLY, "max_tokens": 8}
#: Of as many tokens behind 128 as verify 1 or 3 drafts; several end shortly before the end of a block.
LENGTHS_BY_64 = (1, 2, 7, 55, 56, 57, 58, 59, 60, 63, 130, 132)


def mtp(count: int) -> dict[str, object]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


#: As `WAYS`.
NEWER_WAYS = {
    "dense": ("Qwen3_5ForCausalLM", 24, {}),
    "text of a dense one, 3 drafts": ("Qwen3_5ForConditionalGeneration", 36, {**WRAPPER, **mtp(3)}),
    "Next, 1 draft": ("Qwen3NextForCausalLM", 28, mtp(1)),
}


def asked_newer(options) -> list[list[int]]:
    """Which prompts come at once: one token, one prompt in two steps, all, one of them, again, and all and one more.

    The one more is of one token; it must wait until others end, and comes while some run.
    """
    last, everything = LENGTHS_BY_64.index(129 + (num_drafts(options) or 1)), list(range(NUM_PROMPTS))
    return [[0], [last], everything, [NUM_PROMPTS - 1], [NUM_PROMPTS - 1], [*everything, 0]]


@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.smoke if "3" in it else ()) for it in NEWER_WAYS])
def test_the_newer_runner_gives_them_behind_cached_prefixes_with_drafts_too(name, tmp_path):
    """Also of requests that lost their states and came back (vllm#53912)."""
    architecture, blocks, options = NEWER_WAYS[name]
    hybrid = make_hybrid(tmp_path, architecture, SHORTER["max_tokens"], LENGTHS_BY_64)
    asks = [Ask([hybrid.prompts[row] for row in rows], SHORTER) for rows in asked_newer(options)]
    asks[-1] = replace(asks[-1], aborted=hybrid.prompts[4:10])
    few = {**FEWER_STEPS, "num_gpu_blocks_override": blocks, **options}
    engine = Engine(hybrid.folder, "atom", asks, few, poisoned=True, stepped=True)
    (ran,) = run([engine], environ=NEWER_RUNNER, script=Path(__file__).with_name("interpreted.py"))
    assert_answers(name, asked_newer(options), ran, hybrid)
    assert_cached(ran.answers[2], ran.answers[4])
    assert ran.counters["vllm:num_preemptions"] > 0
    if not installed("vllm").version.startswith(("0.30.", "0.31.", "0.32.")):  # which cut prompts elsewhere
        assert_steps(ran.steps, num_drafts(options), 128)
    if num_drafts(options):
        assert ran.counters["vllm:spec_decode_num_accepted_tokens"] > 0
    else:
        assert "greedy_tokens" in ran.kernels


#: What rounding in bfloat16 decides otherwise; answers of the weights before they are in FP8 are beyond it.
DOUBT = 0.4


def test_weights_in_fp8_blocks_and_a_draft_of_such(tmp_path):
    plain = make_hybrid(tmp_path / "plain", "Qwen3_5ForCausalLM", NUM_TOKENS, (1, 2, 50, 120), **WHOLE_BLOCKS)
    hybrid = in_fp8_blocks(plain, tmp_path / "fp8")
    assert max(doubt(hybrid, plain.answers, torch.bfloat16)) > DOUBT
    together = Ask(hybrid.prompts, EXACTLY)
    engine = Engine(
        hybrid.folder, "atom", [together, together], {**OPTIONS, **drafts(1), "dtype": "bfloat16"}, poisoned=True
    )
    (ran,) = run([engine], environ=ENVIRON)
    for answers in ran.answers:
        found = [answer.tokens for answer in answers]
        assert [len(tokens) for tokens in found] == [NUM_TOKENS] * len(found)
        assert all(it <= DOUBT for it in doubt(hybrid, found, torch.bfloat16))
    assert ran.kernels["fp8_block_linear"] == "reference"
    assert ran.draft_class == "AtomQwen35Draft"
    accepted, drafted = (ran.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    assert accepted > 0.5 * drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"enable_expert_parallel": True}], ids=["shared heads and experts", "whole experts"]
)
def test_two_ranks_give_the_tokens_of_one(tmp_path, options):
    hybrid = make_hybrid(tmp_path, "Qwen3_5MoeForCausalLM", NUM_TOKENS)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **drafts(2), **options}
    engine = Engine(hybrid.folder, "atom", [Ask(hybrid.prompts, EXACTLY)], {**OPTIONS, **two})
    (ran,) = run([engine], environ={**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert [answer.tokens for answer in ran.answers[0]] == hybrid.answers
    assert ran.counters["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.slow
def test_stages_keep_the_states_of_their_layers(tmp_path):
    types = ["linear_attention", "full_attention"] * 2
    hybrid = make_hybrid(tmp_path, "Qwen3NextForCausalLM", NUM_TOKENS, layer_types=types)
    two = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = Engine(hybrid.folder, "atom", [Ask(hybrid.prompts, EXACTLY)] * 2, {**OPTIONS, **two})
    (ran,) = run([engine], environ={**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    for asked in ran.answers:
        assert [answer.tokens for answer in asked] == hybrid.answers


@pytest.mark.slow
def test_data_parallel_ranks_that_share_the_experts_give_the_tokens_of_one(tmp_path):
    folder = checkpoint("qwen3_next")
    with two_data_parallel_ranks(folder, "--enable-expert-parallel", "--max-model-len", "1024") as server:
        rows = recall(4)
        # Alone, the other rank runs along with nothing; together, both have states.
        for asked in (rows[:1], rows * COPIES):
            found = greedy_at_once(server, [row["prompt"] for row in asked])
            texts = AutoTokenizer.from_pretrained(folder).batch_decode(found)
            assert [text.split("\n")[0].strip() for text in texts] == [row["answer"] for row in asked]
