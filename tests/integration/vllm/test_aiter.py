"""The real vLLM with the kernels that it would have on gfx942 and gfx950: the answers are right, and ours.

aiter is the fake of tests/fakes; what runs in Triton there is our reference here, since its interpreter is slow: one
engine runs in it, with what is chosen where nothing is forced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.questions import MAX_TOKENS, checkpoint, read_rows
from tests.integration.vllm.offline import Ask, Engine, run
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, make_fp8

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 6
KERNELS = {"ATOM_KERNELS": "embedding=reference,qk_norm_rope_cache=reference"}
SHUFFLED = {"ATOM_SHUFFLED_CACHE": "1"}
CASES = {
    "plain pages": ("qwen3", KERNELS, {}),
    "shuffled pages": ("qwen3", KERNELS | SHUFFLED, {}),
    "a window": ("mistral", KERNELS, {}),
    "a window, shuffled pages": ("mistral", KERNELS | SHUFFLED, {}),
    "the cache filled by aiter": (
        "qwen3",
        {"ATOM_KERNELS": "embedding=reference", "ATOM_AITER_QK_NORM_ROPE_CACHE": "1"} | SHUFFLED,
        {},
    ),
    "weights in FP8": ("qwen3", KERNELS, {"quantization": "fp8"}),
    "weights in FP8, in blocks": ("qwen3", KERNELS, {}),
    "experts": ("qwen3_moe", KERNELS, {}),
}
#: On gfx950 what differs: FP8, and the compute units that decoding is split over.
ARCHITECTURES = {"gfx942": tuple(CASES), "gfx950": ("shuffled pages", "weights in FP8", "weights in FP8, in blocks")}
ENGINES = [(arch, name) for arch, names in ARCHITECTURES.items() for name in names]


@pytest.fixture(scope="module")
def rows():
    return read_rows()[:NUM_ROWS]


def ask(rows):
    return [Ask([row.prompt for row in rows], {"max_tokens": MAX_TOKENS})]


OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "dtype": "bfloat16"}
SCRIPT = Path(__file__).with_name("as_on_amd.py")


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory):
    asks, found = ask(rows), {}
    in_blocks = tmp_path_factory.mktemp("blocks") / "qwen3"
    make_fp8(Path(checkpoint("qwen3")), in_blocks, BLOCK_FORMATS[0])
    for arch, names in ARCHITECTURES.items():
        engines = [
            Engine(str(in_blocks) if "blocks" in name else checkpoint(family), "atom", asks, OPTIONS | more, environ)
            for name, (family, environ, more) in ((name, CASES[name]) for name in names)
        ]
        results = run(engines, environ={"GPU_ARCHS": arch}, script=SCRIPT)
        found |= {(arch, name): result for name, result in zip(names, results, strict=True)}
    return found


@pytest.mark.parametrize(("arch", "name"), ENGINES)
def test_every_answer_is_right(arch, name, ran, rows):
    assert [answer.text for answer in ran[arch, name].answers[0]] == [f" {row.answer}\n" for row in rows]


@pytest.mark.parametrize(("arch", "name"), ENGINES)
def test_the_kernels_are_aiters(arch, name, ran):
    kernels = ran[arch, name].kernels
    assert {kernels[op] for op in ("rms_norm", "linear", "gated_activation")} == {"aiter"}
    assert kernels["attention"] == ("aiter_shuffled" if "ATOM_SHUFFLED_CACHE" in CASES[name][1] else "aiter")
    assert kernels["decode_attention"] == "separate"
    assert kernels["qk_norm_rope_cache"] == ("aiter" if "filled by aiter" in name else "reference")
    assert {kernels.get(op) for op in ("moe_routing", "experts")} == {"aiter" if name == "experts" else None}
    assert kernels.get("fp8_linear") == ("aiter" if name == "weights in FP8" else None)
    assert kernels.get("fp8_block_linear") == ("aiter" if "blocks" in name else None)
    for op in ("fp8_rms_norm", "fp8_gated_activation"):
        assert kernels.get(op) == ("aiter" if "FP8" in name else None)


def test_by_default_plain_pages_are_decoded_in_one_launch_of_tritons(rows):
    # Triton's interpreter multiplies no bfloat16.
    options = OPTIONS | {"dtype": "float16"}
    engine = Engine(checkpoint("qwen3"), "atom", ask(rows[:2]), options, {"ATOM_KERNELS": "embedding=reference"})
    (found,) = run([engine], environ={"GPU_ARCHS": "gfx942", "TRITON_INTERPRET": "1"}, script=SCRIPT)
    assert [answer.text for answer in found.answers[0]] == [f" {row.answer}\n" for row in rows[:2]]
    chosen = {op: found.kernels[op] for op in ("qk_norm_rope_cache", "attention", "decode_attention")}
    assert chosen == {"qk_norm_rope_cache": "triton", "attention": "aiter", "decode_attention": "triton"}
