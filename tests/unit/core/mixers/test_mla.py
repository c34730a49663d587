"""Attention layers over latents: both forms agree, whoever owns the cache, and padding reaches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.batch import Pages
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.mixers.base import PagedAttention, RadixAttention
from atom_core.mixers.mla import MlaMixer
from atom_core.standalone import Step, build_runtime
from tests.kernel_cases import NAN
from tests.latent_cases import LatentCase, latent_batch

CPU = torch.device("cpu")
#: Largest difference between the two forms in float32, as a share of the largest number.
AGREE = 1e-4
CASE = LatentCase("", ((9, 1), (0, 30), (20, 3), (40, 1)), heads=6, rank=64, nope_dim=24, value_dim=20)


class NamedAttention(PagedAttention):
    """As an adapter's: batch and cache are bound to the layer."""

    bound = None
    max_requests = 8

    def batch(self):
        return self.bound[0]

    def cache(self):
        return self.bound[1]


def layer_of(kind, case=CASE):
    angles = torch.rand(512, case.rope_dim // 2, generator=torch.Generator().manual_seed(3)) * 6.28
    norm = torch.rand(case.rank, generator=torch.Generator().manual_seed(4)) + 0.5
    weights = MlaWeights(
        torch.cat((angles.cos(), angles.sin()), -1), norm, 1e-6, latent_batch(case, torch.float32, CPU).expand
    )
    mixer = MlaMixer("model.layers.0.self_attn.attn", 0, case.spec(torch.float32), weights)
    return kind(mixer, build_runtime(CPU, torch.float32, 512))


def inputs_of(inputs, case=CASE):
    """Raw queries and latents of the batch's tokens, and their positions."""
    generator = torch.Generator().manual_seed(5)
    tokens = inputs.q.shape[0]
    q = torch.randn(tokens, case.heads * (case.nope_dim + case.rope_dim), generator=generator)
    latent = torch.randn(tokens, case.rank + case.rope_dim, generator=generator)
    positions = torch.cat([torch.arange(before, before + new) for before, new in case.requests])
    return q, latent, positions


def answer(layer, inputs, batch):
    q, latent, positions = inputs_of(inputs)
    return layer((q, latent), positions, Step(batch, {0: inputs.cache}))


def test_both_forms_agree_and_leave_the_same_cache():
    layer = layer_of(RadixAttention)
    absorbed, planned = (latent_batch(CASE, torch.float32, CPU) for _ in range(2))
    plan = layer.mixer.plan(planned.batch)
    assert plan.expanded == (1,)
    assert [(run.begin, run.end) for run in plan.absorbed] == [(0, 1), (31, 35)]
    expected = answer(layer, absorbed, absorbed.batch)
    found = answer(layer, planned, planned.batch.with_plans({layer.mixer.plan_key(): plan}))
    assert (found - expected).abs().max() <= AGREE * expected.abs().max()
    assert torch.equal(planned.cache.rows.isnan(), absorbed.cache.rows.isnan())
    assert torch.equal(planned.cache.rows.nan_to_num(), absorbed.cache.rows.nan_to_num())


@pytest.mark.parametrize("planned", [False, True])
def test_rows_past_the_batch_are_padding_that_reaches_no_cache(planned):
    layer = layer_of(NamedAttention)
    inputs = latent_batch(CASE, torch.float32, CPU)
    batch = inputs.batch
    if planned:
        batch = batch.with_plans({layer.mixer.plan_key(): layer.mixer.plan(batch)})
    slots = torch.cat((batch.pages.slots, torch.zeros(5).long()))
    layer.bound = replace(batch, pages=Pages(batch.pages.table, slots)), inputs.cache
    q, latent, positions = inputs_of(inputs)
    expected = layer((q.clone(), latent), positions)
    padded = tuple(torch.cat((x, torch.full((5, x.shape[1]), 7.0))) for x in (q, latent))
    found = layer(padded, torch.cat((positions, torch.zeros(5).long())))
    assert found.shape[0] == len(q) + 5
    assert torch.equal(found[: len(q)], expected)
    assert not (inputs.cache.rows == 7.0).any()


def test_a_run_without_a_batch_gives_zeros_and_touches_no_cache():
    layer = layer_of(NamedAttention)
    inputs = latent_batch(CASE, torch.float32, CPU)
    inputs.cache.rows.fill_(NAN)
    layer.bound = None, inputs.cache
    q, latent, positions = inputs_of(inputs)
    assert not layer((q, latent), positions).any()
    assert inputs.cache.rows.isnan().all()


def test_a_scale_that_is_set_is_the_caches():
    case = replace(CASE, requests=((0, 9),))
    layer = layer_of(RadixAttention, case)
    inputs = latent_batch(case, torch.float32, CPU)
    rows = torch.zeros(inputs.cache.rows.shape, dtype=torch.float8_e4m3fn)
    layer.set_scales(0.05, 1.0)
    q, latent, positions = inputs_of(inputs, case)
    layer((q, latent), positions, Step(inputs.batch, {0: replace(inputs.cache, rows=rows)}))
    found = rows.flatten(0, 1)[inputs.batch.pages.slots][:, : case.rank].float() * 0.05
    wide = latent[:, : case.rank]
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt() * layer.mixer.weights.norm
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.01)


def test_the_weights_stay_the_models_and_are_no_second_parameters():
    assert not list(layer_of(RadixAttention).parameters())
