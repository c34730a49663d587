"""Attention layers: where the cache and the metadata come from, and what becomes of padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.attention.base import AttentionSpec, PagedAttention, RadixAttention
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.metadata import KVCacheView
from atom_core.standalone import Step, build_runtime
from tests.kernel_cases import NAN, AttentionCase, QkvCase, attention_batch

CPU = torch.device("cpu")
#: Rope that turns nothing: cosines 1, sines 0.
STILL = QkvWeights(torch.cat((torch.ones(64, 8), torch.zeros(64, 8)), -1))


class NamedAttention(PagedAttention):
    """As an adapter's: metadata and cache are bound to the layer."""

    bound = None

    def metadata(self):
        return self.bound[0]

    def cache(self):
        return self.bound[1]


def layer_of(kind, case):
    spec = AttentionSpec("model.layers.0.self_attn.attn", 0, QkvCase("").spec(torch.float32), case.dim**-0.5)
    return kind(spec, STILL, None, build_runtime(CPU, torch.float32, 64))


@pytest.fixture
def prefill():
    """A prompt's qkv, its step over an empty cache, and the answer."""
    case = AttentionCase("", ((0, 11), (0, 3)))
    batch = attention_batch(case, torch.float32, CPU)
    keys, values = (_rows(side, batch.metadata.slot_mapping) for side in (batch.cache.key, batch.cache.value))
    qkv = torch.cat((batch.q.flatten(1), keys, values), -1)
    for side in (batch.cache.key, batch.cache.value):
        side.fill_(NAN)
    return case, qkv, torch.arange(14), batch


def _rows(side, slots):
    return side[slots // side.shape[2], :, slots % side.shape[2]].flatten(1)


def test_radix_attention_takes_both_from_the_step(prefill):
    case, qkv, positions, batch = prefill
    found = layer_of(RadixAttention, case)(qkv, positions, Step(batch.metadata, [batch.cache]))
    torch.testing.assert_close(found.view(14, 4, 16).double(), batch.expected, rtol=1e-5, atol=1e-6)


def test_paged_attention_takes_both_from_its_adapter_and_looks_at_no_step(prefill):
    case, qkv, positions, batch = prefill
    layer = layer_of(NamedAttention, case)
    layer.bound = batch.metadata, batch.cache
    found = layer(qkv, positions, step=object())
    torch.testing.assert_close(found.view(14, 4, 16).double(), batch.expected, rtol=1e-5, atol=1e-6)


def test_a_run_without_a_batch_gives_zeros_and_touches_no_cache(prefill):
    case, qkv, positions, batch = prefill
    layer = layer_of(NamedAttention, case)
    layer.bound = None, batch.cache
    assert not layer(qkv, positions).any()
    assert batch.cache.key.isnan().all()


def test_rows_past_the_batch_are_padding_that_reaches_no_cache(prefill):
    case, qkv, positions, batch = prefill
    layer = layer_of(NamedAttention, case)
    metadata = replace(batch.metadata, slot_mapping=torch.cat((batch.metadata.slot_mapping, torch.zeros(5).long())))
    layer.bound = metadata, batch.cache
    padded = torch.cat((qkv, torch.full((5, qkv.shape[1]), 7.0)))
    found = layer(padded, torch.cat((positions, torch.zeros(5).long())))
    assert found.shape[0] == 19
    torch.testing.assert_close(found[:14].view(14, 4, 16).double(), batch.expected, rtol=1e-5, atol=1e-6)
    assert not (batch.cache.key == 7.0).any()


def test_the_norms_weights_stay_the_models_and_are_no_second_parameters(prefill):
    case, *_ = prefill
    assert not list(layer_of(RadixAttention, case).parameters())


def test_a_packed_cache_is_seen_as_keys_and_values_without_a_copy():
    packed = torch.arange(2 * 3 * 4 * 10.0).view(2, 3, 4, 10)
    view = KVCacheView.of_packed(packed, 5)
    assert view.page_size == 4
    assert torch.equal(torch.cat((view.key, view.value), -1), packed)
    assert view.key.data_ptr() == packed.data_ptr()
