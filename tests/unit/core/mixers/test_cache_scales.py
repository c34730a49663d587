"""Scales of an FP8 cache: under which names they come, what they do, and which are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import Checkpoint
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.loading import check_files
from atom_core.mixers.cache_scales import SCALE_NAMES
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.runtime import PipelineStage
from atom_core.standalone import Runner, build_runtime
from atom_core.weights import cache_scales, load_weights
from tests.unit.core.hugging_face import FAMILIES, distance, logits, make_config, make_model, random_tokens

QWEN3 = FAMILIES[3]
CONFIG = make_config(QWEN3)
TOKENS = random_tokens(40)
E4M3 = torch.float8_e4m3fn
#: Numbers of one byte are off by up to 1/16 (e5m2: 1/8) each, which moves these logits by 0.08 (0.11) of their spread.
#: A scale that only the writing or only the reading knows moves them by 0.58 and more.
FP8_TOLERANCE = 0.2

every_fp8_dtype = pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path, CONFIG)
    return tmp_path


def add(directory, scales, layer=1):
    """Store ``scales``, numbers or tensors by name, beside the projections of a layer."""
    path = directory / "model.safetensors"
    tensors = {f"model.layers.{layer}.self_attn.{name}": torch.as_tensor(scale) for name, scale in scales.items()}
    save_file({**load_file(path), **tensors}, path)


def scales_of(runner, layer=1):
    attention = runner.model.model.layers[layer].self_attn.attn
    return pytest.approx((attention.mixer.k_scale, attention.mixer.v_scale))


@pytest.mark.parametrize("name", SCALE_NAMES)
def test_a_scale_is_found_under_each_of_its_names(directory, name):
    add(directory, {name: 0.3})
    wanted = tuple(0.3 if side in SCALE_NAMES[name] else 1.0 for side in ("key", "value"))
    runner = Runner(directory, cache_dtype=E4M3)
    assert wanted == scales_of(runner)
    assert scales_of(runner, layer=0) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_scale_is_one_number_of_any_dtype(directory, shape, dtype):
    add(directory, {"k_scale": torch.full(shape, 0.25, dtype=dtype), "v_scale": torch.full(shape, 3.0, dtype=dtype)})
    assert scales_of(Runner(directory, cache_dtype=E4M3)) == (0.25, 3.0)


def test_a_side_with_a_scale_of_its_own_takes_not_the_one_for_both(directory):
    add(directory, {"kv_scale": 0.5, "attn.v_scale": 0.125})
    assert scales_of(Runner(directory, cache_dtype=E4M3)) == (0.5, 0.125)


def test_e4m3fnuz_has_twice_the_scale_and_one_where_there_is_none(directory):
    add(directory, {"k_scale": 0.3})
    runner = Runner(directory, cache_dtype=torch.float8_e4m3fnuz)
    assert scales_of(runner) == (0.6, 1.0)
    (scales,) = {scales for name, scales in cache_scales(runner.model).items() if ".layers.2." in name}
    scales.adopt_one(0.7, "somebody")
    assert scales_of(runner, layer=2) == (1.4, 1.4)


def test_a_cache_that_is_not_fp8_has_no_scales(directory):
    before = Runner(directory).logits(TOKENS)
    add(directory, {"k_scale": torch.ones(2, 3), "v_scale": -1.0})
    check_files(read_model_config(CONFIG), directory)
    runner = Runner(directory)
    for scales in cache_scales(runner.model).values():
        scales.adopt_one(float("nan"), "somebody")
    assert scales_of(runner) == (1.0, 1.0)
    assert torch.equal(runner.logits(TOKENS), before)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_what_cannot_scale_is_refused_by_name(directory, scale):
    add(directory, {"v_proj.v_scale": scale})
    with pytest.raises(
        ValueError, match=rf"model\.layers\.1\.self_attn\.v_proj\.v_scale scales a KV cache by {scale};"
    ):
        Runner(directory, cache_dtype=E4M3)


def test_a_scale_for_each_head_is_refused_by_name(directory):
    add(directory, {"k_scale": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.k_scale is \[2\]; supported: one scale for keys and one"
    ):
        Runner(directory, cache_dtype=E4M3)


def test_scales_of_a_layer_that_the_model_has_not_are_unexpected(directory):
    add(directory, {"k_scale": 1.0}, layer=9)
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.layers\.9\.self_attn\.k_scale"):
        Runner(directory, cache_dtype=E4M3)


def test_a_pipeline_stage_leaves_other_stages_scales_alone(directory):
    add(directory, {"k_scale": -1.0}, layer=2)
    add(directory, {"k_scale": 0.5}, layer=0)
    runtime = build_runtime(torch.device("cpu"), torch.float32, 16, cache_dtype=E4M3)
    config = read_model_config(CONFIG)
    model = load_model_class(config.architecture)(config, replace(runtime, pipeline=PipelineStage(0, 1)))
    load_weights(model, Checkpoint.open(directory).load())
    assert model.model.layers[0].self_attn.attn.mixer.k_scale == 0.5


@every_fp8_dtype
@pytest.mark.parametrize("kernels", [None, {"attention": "reference", "qk_norm_rope_cache": "reference"}], ids=str)
def test_logits_are_near_hugging_faces_with_any_scales(tmp_path, cache_dtype, kernels):
    model = make_model(tmp_path, CONFIG)
    expected = logits(model, TOKENS)
    for scales in ({}, {"k_scale": 0.11, "v_scale": 0.013}):
        for layer in range(3):
            add(tmp_path, scales, layer)
        runner = Runner(tmp_path, cache_dtype=cache_dtype, kernels=kernels)
        assert distance(runner.logits(TOKENS), expected) < FP8_TOLERANCE
    add(tmp_path, {"k_scale": 1e-6, "v_scale": 1e-6})  # saturates all of a layer's keys and values
    assert distance(Runner(tmp_path, cache_dtype=cache_dtype, kernels=kernels).logits(TOKENS), expected) > FP8_TOLERANCE
