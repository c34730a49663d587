"""`--hf-overrides '{"num_hidden_layers": N}'`: the first layers are served, and those beyond are left unread."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.questions import checkpoint
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

PROMPT = "Tom has 3 apples."
COUNT = 2
#: The first of DeepSeek V3's is no mixture, and the last one drafts; GPT-OSS names the kind of each of its layers.
FAMILIES = {"qwen3": "layers 2 to 4", "gpt_oss": "layers 2 to 3", "deepseek_v3": "layers 2 to 5"}
#: vLLM's own models refuse to read such checkpoints; with made-up weights they serve.
OPTIONS = {"hf_overrides": {"num_hidden_layers": COUNT}, "dtype": "float32"}


def hugging_faces(family: str, num_tokens: int) -> list[int]:
    """The greedy tokens of Hugging Face's model of the first layers."""
    folder = checkpoint(family)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gpt_oss" else {}
    kinds |= {"layer_types": ["full_attention"] * COUNT} if family == "qwen3" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=COUNT, dtype=torch.float32, **kinds)
    inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    (found,) = model.generate(**inputs, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens)
    tokens: list[int] = found[inputs.input_ids.shape[1] :].tolist()
    return tokens


def test_the_layers_beyond_are_left_unread_and_one_line_says_so():
    asks = [Ask([PROMPT], {"max_tokens": 8, "min_tokens": 8})]
    engines = [Engine(checkpoint(family), "atom", asks, OPTIONS) for family in FAMILIES]
    engines.append(Engine(checkpoint("qwen3"), "atom", asks, {**OPTIONS, "load_format": "dummy"}))
    *ran, made_up = run(engines)
    for family, found in zip(FAMILIES, ran, strict=True):
        assert found.answers[0][0].tokens == hugging_faces(family, 8)
    said = [line for line in made_up.log.splitlines() if "left unread" in line]
    assert len(said) == len(FAMILIES)
    for line, (family, which) in zip(said, FAMILIES.items(), strict=True):
        assert f"num_hidden_layers={COUNT}: of {checkpoint(family)}, {which} are left unread" in line
    assert made_up.model_class == "AtomQwen3ForCausalLM"
    assert len(made_up.answers[0][0].tokens) == 8
