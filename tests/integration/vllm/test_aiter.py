"""The real vLLM with the kernels that it would have on gfx942 and gfx950: the answers are right, and ours.

aiter is the fake of tests/fakes; what runs in Triton there is our reference here, since its interpreter is too slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.select import Target
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings
from tests.aiter_fake import fake_aiter
from tests.integration.deepseek import RIGHT
from tests.integration.mixtures import DEEPSEEKS_OWN, FP8_ALIKE, first_tokens_on, make_served, share_alike
from tests.integration.once import once
from tests.integration.questions import MAX_TOKENS, checkpoint, read_rows, right_tokens
from tests.integration.vllm.offline import Ask, Engine, Ran, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 6
SHUFFLED = {"ATOM_SHUFFLED_CACHE": "1"}
FILLED_BY_AITER = {"ATOM_AITER_QK_NORM_ROPE_CACHE": "1"}
QUANTIZING = ("fp8_rms_norm", "fp8_gated_activation")
FP8_CACHE = {"kv_cache_dtype": "fp8"}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@dataclass(frozen=True)
class Case:
    """One engine, and which of its kernels must be aiter's beside norms and products."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    ops: tuple[str, ...] = ("attention",)
    form: str | None = None
    """Of a copy in FP8 that is made."""
    settings: dict[str, Any] | None = None
    """Of a model with random weights that is made, in place of the trained one."""


CASES = {
    "plain pages": Case("qwen3"),
    "shuffled pages": Case("qwen3", environ=SHUFFLED),
    "a window": Case("mistral"),
    "a window, shuffled pages": Case("mistral", environ=SHUFFLED),
    "the cache filled by aiter": Case("qwen3", environ=FILLED_BY_AITER | SHUFFLED),
    "FP8 weights": Case("qwen3", {"quantization": "fp8"}, ops=("fp8_linear", *QUANTIZING, "attention")),
    "FP8 cache": Case("qwen3", FP8_CACHE),
    "FP8 cache, shuffled pages": Case("qwen3", FP8_CACHE, SHUFFLED),
    "FP8 blocks": Case(
        "qwen3",
        FP8_CACHE,
        ops=("fp8_block_linear", *QUANTIZING, "attention"),
        form="fp8, blocks",
    ),
    "experts": Case("qwen3_moe", ops=("moe_routing", "experts", "attention")),
    "experts in groups": Case(
        "glm4_moe",
        environ=SHUFFLED | {"ATOM_KERNELS": "shared_experts=separate"},  # with them among the others we route ourselves
        ops=("moe_routing", "experts", "attention"),
    ),
    "FP8 experts": Case(
        "qwen3_moe",
        ops=("fp8_linear", "moe_routing", "fp8_experts", "attention"),
        form="compressed, channel, dynamic",
        settings={},
    ),
    "latents in FP8": Case("deepseek_v2", FP8_CACHE, ops=("experts",)),
    "drafts": Case("deepseek_v3", MTP, ops=("experts",)),
    "DeepSeek's own sizes": Case(
        "deepseek_v3",
        ops=("fp8_experts", "mla_prefill", "mla_attention"),
        form="fp8, blocks",
        settings=DEEPSEEKS_OWN,
    ),
}
#: On gfx950 what differs: FP8, the compute units that decoding is split over, and the shapes that MLA's decode has.
ARCHITECTURES = {
    "gfx942": (
        "plain pages",
        "shuffled pages",
        "a window",
        "a window, shuffled pages",
        "the cache filled by aiter",
        "FP8 weights",
        "FP8 cache",
        "FP8 cache, shuffled pages",
        "experts",
        "FP8 experts",
        "latents in FP8",
        "drafts",
    ),
    "gfx950": (
        "shuffled pages",
        "FP8 weights",
        "FP8 cache, shuffled pages",
        "FP8 blocks",
        "experts in groups",
        "FP8 experts",
        "DeepSeek's own sizes",
        "drafts",
    ),
}
ENGINES = [(arch, name) for arch, names in ARCHITECTURES.items() for name in names]
TRAINED = [(arch, name) for arch, name in ENGINES if CASES[name].settings is None]
RANDOM = [(arch, name) for arch, name in ENGINES if CASES[name].settings is not None]


OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "dtype": "bfloat16"}
SCRIPT = Path(__file__).with_name("as_on_amd.py")


@pytest.fixture(scope="module")
def rows():
    return read_rows()[:NUM_ROWS]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, int]]]:
    """What a case serves: the folder, and of a random model prompts, each with the token that our model alone gives."""

    @once
    def made(name: str) -> tuple[Path, dict[str, int]]:
        case = CASES[name]
        return make_served(tmp_path_factory.mktemp("made") / "it", case.model, case.form, case.settings)

    return made


@pytest.fixture(scope="module")
def ran(rows, made) -> Callable[[str, str], Ran]:
    """What an engine did; those of one GPU run in one process."""

    @once
    def ran_on(arch: str) -> dict[str, Ran]:
        engines = {}
        for name in ARCHITECTURES[arch]:
            case, (model, tokens) = CASES[name], made(name)
            ask = Ask([row.prompt for row in rows], {"max_tokens": MAX_TOKENS})
            if tokens:
                ask = Ask(list(tokens), {"max_tokens": 1, "ignore_eos": True})
            engines[name] = Engine(str(model), "atom", [ask], OPTIONS | case.options, case.environ)
        results = run(list(engines.values()), environ={"GPU_ARCHS": arch}, script=SCRIPT)
        return dict(zip(engines, results, strict=True))

    return lambda arch, name: ran_on(arch)[name]


@pytest.mark.parametrize(("arch", "name"), TRAINED)
def test_every_answer_is_right(arch, name, ran, rows):
    assert [answer.tokens for answer in ran(arch, name).answers[0]] == right_tokens(CASES[name].model, rows)


@pytest.mark.parametrize(("arch", "name"), RANDOM)
def test_random_models_answer_as_ours_alone_does(arch, name, ran, made):
    folder, tokens = made(name)
    if CASES[name].model == "qwen3_moe":  # all of its products and experts are aiter's, rounded as on the GPU
        tokens = first_tokens_on(arch, folder, tokens)
    assert share_alike([answer.tokens for answer in ran(arch, name).answers[0]], tokens) >= FP8_ALIKE


@pytest.mark.parametrize(("arch", "name"), ENGINES)
def test_the_kernels_are_aiters(arch, name, ran):
    case, kernels = CASES[name], ran(arch, name).kernels
    # Of several choices for an op the last is known: of a mixture's products its router's, which may be in float32.
    product = () if "experts" in "".join(case.ops) else ("linear",)
    expected = dict.fromkeys(("rms_norm", "gated_activation", *product, *case.ops), "aiter")
    if SHUFFLED.items() <= case.environ.items():
        expected["attention"] = "aiter_shuffled"
    if FILLED_BY_AITER.items() <= case.environ.items():
        expected["qk_norm_rope_cache"] = "aiter"
    assert {op: kernels[op] for op in expected} == expected


def test_pages_of_256_tokens_in_fp8_answer_as_those_of_16(tmp_path):
    # Decoded by aiter's pa_persistent_fwd and pa_decode_gluon.
    folder, prompts = make_served(tmp_path / "it", "qwen3_moe", "compressed, channel, dynamic", {"head_dim": 128})
    asks = [Ask([prompt * 6 for prompt in list(prompts)[:3]], {"max_tokens": 8, "ignore_eos": True})]
    engines = [
        Engine(str(folder), "atom", asks, OPTIONS | FP8_CACHE | {"block_size": size}, SHUFFLED) for size in (16, 256)
    ]
    small, large = run(engines, environ={"GPU_ARCHS": "gfx942"}, script=SCRIPT)
    assert [it.tokens for it in large.answers[0]] == [it.tokens for it in small.answers[0]]


def test_by_default_plain_pages_are_decoded_in_one_launch_of_tritons(rows):
    # Triton's interpreter multiplies no bfloat16.
    options, ask = OPTIONS | {"dtype": "float16"}, Ask([row.prompt for row in rows[:1]], {"max_tokens": MAX_TOKENS})
    engine = Engine(checkpoint("qwen3"), "atom", [ask], options, {"ATOM_KERNELS": "embedding=reference"})
    environ = {"GPU_ARCHS": "gfx942", "TRITON_INTERPRET": "1", "TRITON_TOO": "1"}
    (found,) = run([engine], environ=environ, script=SCRIPT)
    assert [answer.tokens for answer in found.answers[0]] == right_tokens("qwen3", rows[:1])
    chosen = {op: found.kernels[op] for op in ("qk_norm_rope_cache", "attention", "decode_attention")}
    assert chosen == {"qk_norm_rope_cache": "triton", "attention": "aiter", "decode_attention": "triton"}


def test_drafts_are_right_as_often_as_elsewhere(ran):
    drafted = ran("gfx942", "drafts")
    assert drafted.draft_class == "AtomDeepseekV3Draft"
    proposed, right = (drafted.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert right / proposed >= RIGHT


@pytest.mark.parametrize("variable", ["ATOM_SHUFFLED_CACHE", "ATOM_KERNELS"])
def test_an_error_names_the_setting_that_asked_for_a_kernel_that_cannot_run(variable):
    value = {"ATOM_SHUFFLED_CACHE": "1", "ATOM_KERNELS": "attention=aiter_shuffled"}[variable]
    spec = PagedAttentionSpec(4, 2, 96, 96**-0.5, torch.bfloat16, torch.bfloat16)
    with fake_aiter("gfx942"):
        kernels = chosen_kernels(Target("rocm", "gfx942"), load_settings({variable: value}))
        with pytest.raises(ValueError, match=f"^{variable} asks for attention=aiter_shuffled, .*, not 96") as raised:
            kernels.select(ATTENTION, spec)
    remedy = "Unset ATOM_SHUFFLED_CACHE" if value == "1" else "Leave attention out of ATOM_KERNELS"
    assert str(raised.value).endswith(f"{remedy} to have one chosen.")
