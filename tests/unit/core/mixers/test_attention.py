"""Attention layers: where the cache and the batch come from, and what becomes of padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.batch import Pages
from atom_core.cache import KVCacheView
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.mixers.attention import AttentionMixer
from atom_core.mixers.base import PagedAttention, RadixAttention
from atom_core.standalone import Step, build_runtime
from tests.kernel_cases import NAN, AttentionCase, QkvCase, attention_batch

CPU = torch.device("cpu")
#: Rope that turns nothing: cosines 1, sines 0.
STILL = QkvWeights(torch.cat((torch.ones(64, 8), torch.zeros(64, 8)), -1))


class NamedAttention(PagedAttention):
    """As an adapter's: batch and cache are bound to the layer."""

    bound = None
    max_requests = 8

    def batch(self):
        return self.bound[0]

    def cache(self):
        return self.bound[1]


def layer_of(kind, case):
    runtime, qkv = build_runtime(CPU, torch.float32, 64), QkvCase("").spec(torch.float32)
    return kind(AttentionMixer("model.layers.0.self_attn.attn", 0, qkv, STILL, None, None, runtime), runtime)


@pytest.fixture
def prefill():
    """A prompt's qkv, its step over an empty cache, and the answer."""
    case = AttentionCase("", ((0, 11), (0, 3)))
    inputs = attention_batch(case, torch.float32, CPU)
    keys, values = (_rows(side, inputs.batch.pages.slots) for side in (inputs.cache.key, inputs.cache.value))
    qkv = torch.cat((inputs.q.flatten(1), keys, values), -1)
    for side in (inputs.cache.key, inputs.cache.value):
        side.fill_(NAN)
    return case, qkv, torch.arange(14), inputs


def _rows(side, slots):
    return side[slots // side.shape[2], :, slots % side.shape[2]].flatten(1)


def test_radix_attention_takes_both_from_the_step(prefill):
    case, qkv, positions, inputs = prefill
    found = layer_of(RadixAttention, case)((qkv,), positions, Step(inputs.batch, {0: inputs.cache}))
    torch.testing.assert_close(found.view(14, 4, 16).double(), inputs.expected, rtol=1e-5, atol=1e-6)


def test_paged_attention_takes_both_from_its_adapter_and_looks_at_no_step(prefill):
    case, qkv, positions, inputs = prefill
    layer = layer_of(NamedAttention, case)
    layer.bound = inputs.batch, inputs.cache
    found = layer((qkv,), positions, step=object())
    torch.testing.assert_close(found.view(14, 4, 16).double(), inputs.expected, rtol=1e-5, atol=1e-6)


def test_a_run_without_a_batch_gives_zeros_and_touches_no_cache(prefill):
    case, qkv, positions, inputs = prefill
    layer = layer_of(NamedAttention, case)
    layer.bound = None, inputs.cache
    assert not layer((qkv,), positions).any()
    assert inputs.cache.key.isnan().all()


def test_rows_past_the_batch_are_padding_that_reaches_no_cache(prefill):
    case, qkv, positions, inputs = prefill
    layer = layer_of(NamedAttention, case)
    batch = replace(
        inputs.batch,
        pages=Pages(inputs.batch.pages.table, torch.cat((inputs.batch.pages.slots, torch.zeros(5).long()))),
    )
    layer.bound = batch, inputs.cache
    padded = torch.cat((qkv, torch.full((5, qkv.shape[1]), 7.0)))
    found = layer((padded,), torch.cat((positions, torch.zeros(5).long())))
    assert found.shape[0] == 19
    torch.testing.assert_close(found[:14].view(14, 4, 16).double(), inputs.expected, rtol=1e-5, atol=1e-6)
    assert not (inputs.cache.key == 7.0).any()


def test_the_norms_weights_stay_the_models_and_are_no_second_parameters(prefill):
    case, *_ = prefill
    assert not list(layer_of(RadixAttention, case).parameters())


def test_a_packed_cache_is_seen_as_keys_and_values_without_a_copy():
    packed = torch.arange(2 * 3 * 4 * 10.0).view(2, 3, 4, 10)
    view = KVCacheView.of_packed(packed, 5)
    assert view.page_size == 4
    assert torch.equal(torch.cat((view.key, view.value), -1), packed)
    assert view.key.data_ptr() == packed.data_ptr()
