"""A hybrid in FP8 with scales of blocks, as such checkpoints are published, whose layer that drafts is in FP8 too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from atom_core.standalone import Runner
from tests.hybrid_checkpoints import make_hybrid
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_hybrids import COUNT, EXACTLY, PROMPTS, SNAPSHOTS, environ_of
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, LINEARS, make_fp8

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

#: Sizes of which the parts of every weight are whole blocks.
WHOLE_BLOCKS = {
    "hidden_size": 128,
    "head_dim": 128,
    "num_attention_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
DRAFTS = 2
#: Of the answers: sums in another order move a number of e4m3 to the next one now and then, and rounded weights more.
ALIKE, UNLIKE = 0.8, 0.6


def make(folder):
    """The quantised checkpoint, and the one that it was made of."""
    source = make_hybrid(folder / "source", "qwen3_5_moe_vl", **WHOLE_BLOCKS)
    modules = (name.removesuffix(".weight") for name in load_file(source / "model.safetensors"))
    plain = [module for module in modules if module.rpartition(".")[2] not in LINEARS]
    form = BLOCK_FORMATS[0]
    make_fp8(source, folder / "fp8", replace(form, config={**form.config, "modules_to_not_convert": plain}))
    return folder / "fp8", source


def test_tokens_are_those_of_our_model_alone(tmp_path):
    fp8, source = make(tmp_path)
    expected, unlike = (Runner(folder, dtype=torch.float16).generate(PROMPTS, COUNT) for folder in (fp8, source))
    options = {
        "dtype": "float16",
        "disable_cuda_graph": True,
        "chunked_prefill_size": 64,
        "max_total_tokens": 4096,
        "mamba_radix_cache_strategy": "extra_buffer",
    }
    asks = [Ask(PROMPTS, EXACTLY)] * 2
    (ran,) = run([Engine(str(fp8), True, asks, drafting(DRAFTS, **options), environ_of(SNAPSHOTS, DRAFTS))])
    assert "atom-plugin drafts for" in ran.log
    for op in ("fp8_block_linear", "fp8_experts"):
        assert ran.log.count(f"{op:20}reference") == 2, op

    def alike(found):
        return sum(one == other for one, other in zip(found, expected, strict=True)) / len(PROMPTS)

    for answers in ran.answers:
        assert alike([answer.tokens for answer in answers]) >= ALIKE
    assert alike(unlike) <= UNLIKE
    assert ran.answers[1][0].meta["cached_tokens"] >= 64
    right, proposed = (
        sum(answer.meta[name] for answers in ran.answers for answer in answers)
        for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    assert proposed / 2 < right < proposed
