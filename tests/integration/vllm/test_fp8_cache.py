"""A KV cache in FP8 (``--kv-cache-dtype fp8``), with scales from the checkpoint or without.

Numbers of one byte cost an answer now and then, so answers are counted. Scales that were lost on the way, or used once
where they belong twice, leave few right: those here are far from 1.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.questions import checkpoint
from tests.integration.vllm.conftest import ANSWER
from tests.integration.vllm.offline import Ask, Engine, Ran, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 64
RIGHT = 0.95
#: Keys and values are a few units large, so that what is stored is some tens, of the 448 that there are.
SCALE = 0.06
VLLM_HAS_IT = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def scaled_checkpoint(folder: Path) -> str:
    """A copy of the checkpoint with scales in it."""
    copy = folder / "scaled"
    shutil.copytree(checkpoint("qwen3"), copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    for layer in {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}:
        for side, scale in (("k", SCALE), ("v", 2 * SCALE)):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = torch.tensor(scale)
    save_file(tensors, path, {"format": "pt"})
    return str(copy)


@pytest.fixture(scope="module")
def asks(rows) -> list[Ask]:
    """The questions of these tests."""
    return [Ask([row.prompt for row in rows[:NUM_ROWS]], {**ANSWER, "logprobs": 1})]


@pytest.fixture(scope="module")
def ran(asks, tmp_path_factory) -> dict[str, Ran]:
    """Our engines, by what is special about them."""
    plain, scaled = checkpoint("qwen3"), scaled_checkpoint(tmp_path_factory.mktemp("fp8"))
    engines = {
        "the other format": Engine(plain, "atom", asks, {"kv_cache_dtype": "fp8_e5m2"}),
        "scales": Engine(scaled, "atom", asks, {"kv_cache_dtype": "fp8_e4m3"}),
        "scales for a cache that needs none": Engine(scaled, "atom", asks),
        "no FP8": Engine(plain, "atom", asks),
    }
    if VLLM_HAS_IT:
        environ = {"ATOM_DISABLE_VLLM_ATTENTION": "1"}
        engines["vLLM's attention"] = Engine(scaled, "atom", asks, {"kv_cache_dtype": "fp8"}, environ)
    return dict(zip(engines, run(list(engines.values())), strict=True))


def num_right(ran: Ran, rows) -> int:
    """How many answers are as they should be."""
    return sum(answer.text == f" {row.answer}\n" for answer, row in zip(ran.answers[0], rows, strict=False))


@pytest.mark.parametrize("name", ["scales", "the other format"])
def test_answers_are_right_but_for_a_few(name, ran, rows):
    assert "VllmPagedAttention" in ran[name].layer_classes
    assert num_right(ran[name], rows) >= RIGHT * NUM_ROWS


def test_what_is_cached_is_rounded_as_the_format_and_the_scales_say(ran):
    names = ("scales", "the other format", "no FP8")
    found = [ran[name].answers for name in names]
    assert all(found.index(answers) == at for at, answers in enumerate(found))


def test_scales_do_nothing_to_a_cache_that_needs_none(ran):
    assert ran["scales for a cache that needs none"].answers == ran["no FP8"].answers


@pytest.mark.skipif(not VLLM_HAS_IT, reason="vLLM's own attention has an FP8 cache on CPUs with AVX-512 or AMX")
def test_vllms_attention_gets_the_scales(ran, rows):
    assert "FrameworkAttention" in ran["vLLM's attention"].layer_classes
    assert num_right(ran["vLLM's attention"], rows) >= RIGHT * NUM_ROWS


def test_a_scale_that_is_none_ends_the_start(asks, tmp_path):
    scaled = Path(scaled_checkpoint(tmp_path))
    tensors = load_file(scaled / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(-1.0)
    save_file(tensors, scaled / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=r"scales a KV cache by -1\.0; a scale is a finite number"):
        run([Engine(str(scaled), "atom", asks, {"kv_cache_dtype": "fp8"})])
