"""The real SGLang with the kernels that it would have on gfx942 and gfx950: the answers are right, and ours.

aiter is the fake of tests/fakes; what runs in Triton there is our reference here, since its interpreter is too slow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atom_plugin.sglang.kernels import unfit_pages
from tests.integration.deepseek import RIGHT
from tests.integration.mixtures import DEEPSEEKS_OWN, FP8_ALIKE, first_tokens_on, make_served, share_alike
from tests.integration.once import once
from tests.integration.questions import right_tokens
from tests.integration.sglang.offline import Ask, Engine, Ran, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

AS_ON_AMD = Path(__file__).with_name("as_on_amd")
NUM_ROWS = 4
QUANTIZING = ("fp8_rms_norm", "fp8_gated_activation")
FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3"}
#: On ROCm the name is ours for our models.
BY_NAME = {"attention_backend": "aiter"}
DRAFTS = drafting(1, dtype="bfloat16")


@dataclass(frozen=True)
class Case:
    """One engine, and which of its kernels must be aiter's beside norms and products."""

    arch: str
    model: str
    options: dict[str, Any]
    ops: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    form: str | None = None
    """Of a copy in FP8 that is made."""
    settings: dict[str, Any] | None = None
    """Of a model with random weights that is made, in place of the trained one."""
    environ: dict[str, str] = field(default_factory=dict)


#: Each family and format once, on the GPU that it is the harder one for.
CASES = {
    "a window, pages of 32": Case("gfx942", "mistral", {"page_size": 32}, ("attention",)),
    "FP8, by name": Case(
        "gfx942",
        "qwen3",
        {"quantization": "fp8", **FP8_CACHE, **BY_NAME, "page_size": 16},
        ("fp8_linear", *QUANTIZING, "attention"),
        ("fused_qk_rmsnorm_per_token_quant",),
    ),
    "FP8 experts": Case(
        "gfx942",
        "qwen3_moe",
        {"page_size": 16},
        ("fp8_rms_norm", "fp8_linear", "fp8_experts", "attention"),
        ("fused_qk_rmsnorm_per_token_quant", "fused_moe"),
        form="compressed, channel, dynamic",
        settings={},
    ),
    "drafts, by name": Case("gfx942", "deepseek_v3", {**DRAFTS, **FP8_CACHE, **BY_NAME}, ("experts",), environ=ENVIRON),
    "drafts": Case("gfx950", "deepseek_v3", DRAFTS, ("experts",), environ=ENVIRON),
    "experts, pages of one token": Case("gfx950", "glm4_moe", {}, ("experts",), ("fused_moe",)),
    "FP8 blocks": Case(
        "gfx950",
        "qwen3",
        {**FP8_CACHE, "page_size": 64},
        ("fp8_block_linear", *QUANTIZING, "attention"),
        ("fused_qk_rmsnorm_group_quant",),
        form="fp8, blocks",
    ),
    "DeepSeek's own sizes": Case(
        "gfx950",
        "deepseek_v3",
        {},
        ("fp8_rms_norm", "fp8_experts", "mla_prefill", "mla_attention"),
        ("fused_qk_rmsnorm_group_quant", "flash_attn_varlen_func", "fused_moe"),
        form="fp8, blocks",
        settings=DEEPSEEKS_OWN,
    ),
}
RANDOM = [name for name, case in CASES.items() if case.settings is not None]
TRAINED = [name for name in CASES if name not in RANDOM]
DRAFTED = [name for name, case in CASES.items() if case.environ]
IN_FP8 = [name for name, case in CASES.items() if "kv_cache_dtype" in case.options]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, int]]]:
    """What a case serves: the folder, and of a random model prompts, each with the token that our model alone gives."""

    @once
    def made(name: str) -> tuple[Path, dict[str, int]]:
        case = CASES[name]
        return make_served(tmp_path_factory.mktemp("made") / "it", case.model, case.form, case.settings)

    return made


@pytest.fixture(scope="module")
def ran(rows, made) -> Callable[[str], Ran]:
    """What the engine of a case did; those of one GPU run one after the other."""

    @once
    def ran_on(arch: str) -> dict[str, Ran]:
        engines = {}
        for name in (name for name, case in CASES.items() if case.arch == arch):
            case, (model, tokens) = CASES[name], made(name)
            ask = Ask([row.prompt for row in rows[:NUM_ROWS]])
            if tokens:
                ask = Ask(list(tokens), {"max_new_tokens": 1, "ignore_eos": True})
            variables = {key: value for key, value in case.environ.items() if key != "PYTHONPATH"}
            engines[name] = Engine(str(model), True, [ask], {"dtype": "bfloat16", **case.options}, variables)
        path = os.pathsep.join([str(AS_ON_AMD), ENVIRON["PYTHONPATH"]])
        environ = {"PYTHONPATH": path, "GPU_ARCHS": arch}
        return dict(zip(engines, run(list(engines.values()), environ=environ), strict=True))

    return lambda name: ran_on(CASES[name].arch)[name]


def kernels(log: str) -> set[tuple[str, str]]:
    """Ops with their implementations by the first table in the log: the model's, not the draft's."""
    start = log.index("\n  kernels\n") + len("\n  kernels\n")
    lines = re.match(r"(?: {4}\S.*\n)+", log[start:])[0].splitlines()
    return {tuple(line.split(maxsplit=2)[:2]) for line in lines}


@pytest.mark.parametrize("name", TRAINED)
def test_every_answer_is_right(name, ran, rows):
    found = [answer.tokens for answer in ran(name).answers[0]]
    assert found == right_tokens(CASES[name].model, rows[:NUM_ROWS])


@pytest.mark.parametrize("name", RANDOM)
def test_random_models_answer_as_ours_alone_does(name, ran, made):
    folder, tokens = made(name)
    if CASES[name].model == "qwen3_moe":  # all of its products and experts are aiter's, rounded as on the GPU
        tokens = first_tokens_on(CASES[name].arch, folder, tokens)
    assert share_alike([answer.tokens for answer in ran(name).answers[0]], tokens) >= FP8_ALIKE


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_aiters(name, ran):
    case, log = CASES[name], ran(name).log
    assert f"rocm ({case.arch})" in log
    assert kernels(log) >= {(op, "aiter") for op in ("rms_norm", "linear", "gated_activation", *case.ops)}
    called = {path.rpartition(".")[2] for path in re.findall(r"^called (\S+)$", log, re.MULTILINE)}
    # Of a model in FP8 the first norm and the activations quantise as well.
    plain = () if QUANTIZING[0] in case.ops else ("rms_norm", "silu_and_mul")
    assert called >= {"rmsnorm2d_fwd_with_add", "gemm_a16w16", *plain, *case.functions}


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_are_right_as_often_as_elsewhere(name, ran):
    assert f"attention  SglangRadixAttention\n  device     rocm ({CASES[name].arch})" in ran(name).log
    answers = ran(name).answers[0]
    right, proposed = (sum(it.meta[f"spec_num_{what}_drafts"] for it in answers) for what in ("correct", "proposed"))
    assert right / proposed >= RIGHT


@pytest.mark.parametrize("name", IN_FP8)
def test_a_cache_in_fp8_has_the_gpus_form(name, ran):
    dtype = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}[CASES[name].arch]
    assert re.search(rf"KV Cache is allocated\. dtype: torch\.{dtype},", ran(name).log)


def test_pages_of_one_token_say_how_to_have_aiters_attention(ran):
    (reason,) = unfit_pages(1).values()
    assert f"aiter: {reason}" in ran("experts, pages of one token").log


@pytest.mark.parametrize(("page_size", "says"), [(1, "--page-size 16"), (8, "have 8."), (24, "a power of two")])
def test_pages_that_aiters_attention_does_not_take(page_size, says):
    assert says in unfit_pages(page_size)["attention", "aiter"]
    assert not any(unfit_pages(size) for size in (16, 32, 64, 1024))
