"""The runner without a framework: chunks, batches and pages change nothing; what it cannot run it says."""

from __future__ import annotations

import json

import pytest
import torch

from atom_core.standalone import Runner
from tests.unit.core.hugging_face import FAMILIES, LOGITS_TOLERANCE, distance, make_config, make_model, random_tokens

QWEN3 = FAMILIES[3]
TOKENS = random_tokens(40)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path, make_config(QWEN3))
    return tmp_path


@every_family
@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(tmp_path, family, chunk):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    caches = runner.caches(1)
    with torch.inference_mode():
        chunks = [
            runner.model.logits(runner.step(caches, [begin], [TOKENS[begin : begin + chunk]]))
            for begin in range(0, len(TOKENS), chunk)
        ]
    assert distance(torch.cat(chunks), runner.logits(TOKENS)) <= LOGITS_TOLERANCE


@every_family
def test_requests_in_one_batch_do_not_see_each_other(tmp_path, family):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    prompts = [TOKENS[:17], TOKENS[20:21], TOKENS[5:21]]
    caches = runner.caches(3)
    with torch.inference_mode():
        found = runner.model.logits(runner.step(caches, [0, 0, 0], prompts))
    for part, prompt in zip(found.split([len(prompt) for prompt in prompts]), prompts, strict=True):
        assert distance(part, runner.logits(prompt)) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_the_size_of_a_page_changes_nothing(directory, page_size):
    expected = Runner(directory).generate([TOKENS[:9], TOKENS[:2]], 12)
    assert Runner(directory, page_size=page_size).generate([TOKENS[:9], TOKENS[:2]], 12) == expected


@pytest.mark.parametrize("length", [0, 61])
def test_a_prompt_that_does_not_fit_is_refused(directory, length):
    with pytest.raises(ValueError, match=f"A prompt has {length} tokens; with 4 to generate and max_model_len=64"):
        Runner(directory).generate([TOKENS[:3], [1] * length], 4)


def test_the_longest_prompt_fits(directory):
    (generated,) = Runner(directory).generate([[1] * 60], 4)
    assert len(generated) == 4


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantised_checkpoint_is_refused(directory, key):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="Quantisation 'awq' is not supported; supported: unquantised"):
        Runner(directory)


def test_a_forced_kernel_that_cannot_run_is_refused(directory):
    with pytest.raises(ValueError, match="attention=triton, which cannot run on cpu"):
        Runner(directory, kernels={"attention": "triton"})


def test_the_kernels_that_were_chosen_can_be_listed(directory):
    choices = Runner(directory).runtime.kernels.choices()
    assert [choice.op for choice in choices] == [
        "embedding",
        "rms_norm",
        "linear",
        "normed_linear",
        "qk_norm_rope_cache",
        "attention",
        "decode_attention",
        "gated_activation",
    ]
    faster = [choice.op for choice in choices if choice.implementation == "torch"]
    assert faster == ["rms_norm", "qk_norm_rope_cache", "attention"]
