"""Attention layers over latents: both forms agree, whoever owns the cache, and padding reaches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.attention.mla import LatentLayerSpec, PagedLatentAttention, RadixLatentAttention
from atom_core.kernels.latent_cache import LatentWeights
from atom_core.standalone import Step, build_runtime
from tests.kernel_cases import NAN
from tests.latent_cases import LatentCase, latent_batch

CPU = torch.device("cpu")
#: Largest difference between the two forms in float32, as a share of the largest number.
AGREE = 1e-4
CASE = LatentCase("", ((9, 1), (0, 30), (20, 3), (40, 1)), heads=6, rank=64, nope_dim=24, value_dim=20)


class NamedAttention(PagedLatentAttention):
    """As an adapter's: metadata and cache are bound to the layer."""

    bound = None

    def metadata(self):
        return self.bound[0]

    def cache(self):
        return self.bound[1]


def layer_of(kind, case=CASE):
    angles = torch.rand(512, case.rope_dim // 2, generator=torch.Generator().manual_seed(3)) * 6.28
    norm = torch.rand(case.rank, generator=torch.Generator().manual_seed(4)) + 0.5
    weights = LatentWeights(
        torch.cat((angles.cos(), angles.sin()), -1), norm, 1e-6, latent_batch(case, torch.float32, CPU).expand
    )
    spec = LatentLayerSpec("model.layers.0.self_attn.attn", 0, case.spec(torch.float32))
    return kind(spec, weights, build_runtime(CPU, torch.float32, 512))


def inputs_of(batch, case=CASE):
    """Raw queries and latents of the batch's tokens, and their positions."""
    generator = torch.Generator().manual_seed(5)
    tokens = batch.q.shape[0]
    q = torch.randn(tokens, case.heads * (case.nope_dim + case.rope_dim), generator=generator)
    latent = torch.randn(tokens, case.rank + case.rope_dim, generator=generator)
    positions = torch.cat([torch.arange(before, before + new) for before, new in case.requests])
    return q, latent, positions


def answer(layer, batch, metadata):
    q, latent, positions = inputs_of(batch)
    return layer(q, latent, positions, Step(metadata, [batch.cache]))


def test_both_forms_agree_and_leave_the_same_cache():
    layer = layer_of(RadixLatentAttention)
    absorbed, planned = (latent_batch(CASE, torch.float32, CPU) for _ in range(2))
    plan = layer.plan(planned.metadata)
    assert plan.expanded == (1,)
    assert [(run.begin, run.end) for run in plan.absorbed] == [(0, 1), (31, 35)]
    expected = answer(layer, absorbed, absorbed.metadata)
    found = answer(layer, planned, planned.metadata.with_plans({layer.plan_key(): plan}))
    assert (found - expected).abs().max() <= AGREE * expected.abs().max()
    assert torch.equal(planned.cache.rows.isnan(), absorbed.cache.rows.isnan())
    assert torch.equal(planned.cache.rows.nan_to_num(), absorbed.cache.rows.nan_to_num())


@pytest.mark.parametrize("planned", [False, True])
def test_rows_past_the_batch_are_padding_that_reaches_no_cache(planned):
    layer = layer_of(NamedAttention)
    batch = latent_batch(CASE, torch.float32, CPU)
    metadata = batch.metadata
    if planned:
        metadata = metadata.with_plans({layer.plan_key(): layer.plan(metadata)})
    slots = torch.cat((metadata.slot_mapping, torch.zeros(5).long()))
    layer.bound = replace(metadata, slot_mapping=slots), batch.cache
    q, latent, positions = inputs_of(batch)
    expected = layer(q.clone(), latent, positions)
    padded = (torch.cat((x, torch.full((5, x.shape[1]), 7.0))) for x in (q, latent))
    found = layer(*padded, torch.cat((positions, torch.zeros(5).long())))
    assert found.shape[0] == len(q) + 5
    assert torch.equal(found[: len(q)], expected)
    assert not (batch.cache.rows == 7.0).any()


def test_a_run_without_a_batch_gives_zeros_and_touches_no_cache():
    layer = layer_of(NamedAttention)
    batch = latent_batch(CASE, torch.float32, CPU)
    batch.cache.rows.fill_(NAN)
    layer.bound = None, batch.cache
    assert not layer(*inputs_of(batch)).any()
    assert batch.cache.rows.isnan().all()


def test_a_scale_that_is_set_is_the_caches():
    case = replace(CASE, requests=((0, 9),))
    layer = layer_of(RadixLatentAttention, case)
    batch = latent_batch(case, torch.float32, CPU)
    rows = torch.zeros(batch.cache.rows.shape, dtype=torch.float8_e4m3fn)
    layer.set_scales(0.05, 1.0)
    q, latent, positions = inputs_of(batch, case)
    layer(q, latent, positions, Step(batch.metadata, [replace(batch.cache, rows=rows)]))
    found = rows.flatten(0, 1)[batch.metadata.slot_mapping][:, : case.rank].float() * 0.05
    wide = latent[:, : case.rank]
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt() * layer.weights.norm
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.01)


def test_the_weights_stay_the_models_and_are_no_second_parameters():
    assert not list(layer_of(RadixLatentAttention).parameters())
