"""Each layer has its own mixer: full attention, a window and latents may follow one another in one model."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom_core.cache import KVCacheView, LatentCacheView
from atom_core.config import LayerConfig, MlaConfig
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner, build_runtime, random_model
from tests.unit.core.test_config import values_of

TOKENS = [(7 * index) % 61 for index in range(40)]


def runner_of(layers):
    """A small model of random weights with these layers."""
    config = read_model_config(values_of("qwen3", head_dim=16))
    runner = Runner.__new__(Runner)
    runner.config = replace(config, layers=layers)
    runner.runtime = build_runtime(torch.device("cpu"), torch.float32, 64)
    runner.max_model_len, runner.page_size = 64, 16
    runner.model = random_model(runner.config, runner.runtime)
    return runner


def test_layers_of_three_kinds_give_the_same_logits_whole_and_in_chunks():
    attention = read_model_config(values_of("qwen3", head_dim=16)).layers[0].mixer
    mla = MlaConfig(4, None, rank=24, nope_dim=8, rope_dim=16, value_dim=12, scale=24**-0.5)
    runner = runner_of(tuple(LayerConfig(it) for it in (attention, mla, replace(attention, window=8))))
    caches = runner.caches(1)
    assert [type(caches[index]) for index in range(3)] == [KVCacheView, LatentCacheView, KVCacheView]
    whole = runner.logits(TOKENS)
    chunks = [
        runner.model.logits(runner.step(caches, [begin], [TOKENS[begin:end]]))
        for begin, end in ((0, 19), (19, 20), (20, 40))
    ]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-4, atol=1e-5)
    full = runner_of(tuple(LayerConfig(it) for it in (attention, mla, attention)))
    assert not torch.allclose(full.logits(TOKENS)[20:], whole[20:], atol=1e-4), "the window is the last layer's alone"
