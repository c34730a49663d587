"""Which compilation and graph modes vLLM ends up with on a GPU, where our hook fills in what the user left open.

vLLM's own configuration is made, on a platform that calls itself CUDA and is otherwise the bare interface.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path

import pytest
from vllm import platforms
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.vllm import OptimizationLevel, default_breakable_cudagraph_architectures
from vllm.platforms.interface import Platform, PlatformEnum

from atom_plugin.vllm import AtomPlatformMixin, graphs, register_models
from atom_plugin.vllm.attention import is_compiled

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
CPU = platforms.current_platform


class CudaInName(AtomPlatformMixin, Platform):
    """Our mixin over a platform that says that it is CUDA and captures graphs."""

    _enum = PlatformEnum.CUDA
    device_name, device_type = "cuda", "cpu"

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True


@pytest.fixture
def configure(monkeypatch):
    """Makes a configuration; arguments are those of `CompilationConfig`, and some that stand in front of them."""
    register_models()

    def configure(*, impl="atom", eager=False, level=None, ranks=1, stages=1, seqs=None, tokens=2048, **compilation):
        monkeypatch.setattr(platforms, "_current_platform", CPU)
        model = ModelConfig(str(CHECKPOINT), model_impl=impl, enforce_eager=eager)
        monkeypatch.setattr(platforms, "_current_platform", CudaInName())
        given = {} if level is None else {"optimization_level": level}
        if ranks * stages > 1:
            # A launcher that vLLM does not start: the test's machine has no GPUs to count.
            given["parallel_config"] = ParallelConfig(
                tensor_parallel_size=ranks,
                pipeline_parallel_size=stages,
                distributed_executor_backend="external_launcher",
            )
        if seqs is not None:
            given["scheduler_config"] = SchedulerConfig(
                max_model_len=model.max_model_len,
                is_encoder_decoder=False,
                max_num_seqs=seqs,
                max_num_batched_tokens=tokens,
            )
        return VllmConfig(model_config=model, compilation_config=CompilationConfig(**compilation), **given)

    return configure


def modes(config):
    """Whether our model would be compiled, and the graphs, by name."""
    return is_compiled(config), config.compilation_config.cudagraph_mode.name


#: Whether it is compiled, the graphs, and whether they break.
CASES = {
    "nothing said": ({}, (False, "FULL_AND_PIECEWISE"), True),
    "compiled": ({"mode": CompilationMode.VLLM_COMPILE}, (True, "FULL_AND_PIECEWISE"), False),
    "uncompiled": ({"mode": CompilationMode.NONE}, (False, "FULL_DECODE_ONLY"), False),
    "full graphs": ({"cudagraph_mode": CUDAGraphMode.FULL}, (False, "FULL"), False),
    "no graphs": ({"cudagraph_mode": CUDAGraphMode.NONE}, (False, "NONE"), False),
    "piecewise graphs": ({"cudagraph_mode": CUDAGraphMode.PIECEWISE}, (False, "PIECEWISE"), True),
    "both kinds of graphs": (
        {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
        (False, "FULL_AND_PIECEWISE"),
        True,
    ),
    "both kinds, compiled": (
        {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
        (True, "FULL_AND_PIECEWISE"),
        False,
    ),
    "eager": ({"eager": True}, (False, "NONE"), False),
    "-O0": ({"level": OptimizationLevel.O0}, (False, "NONE"), False),
    "-O1": ({"level": OptimizationLevel.O1}, (True, "PIECEWISE"), False),
    "-O3": ({"level": OptimizationLevel.O3}, (True, "FULL_AND_PIECEWISE"), False),
    "vLLM's own model": ({"impl": "auto"}, (True, "FULL_AND_PIECEWISE"), False),
}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    """Each test begins without the variable, and leaves none behind."""
    monkeypatch.setattr(graphs._Ours, "is_set", False)
    monkeypatch.setenv(graphs.BREAKABLE, "1")  # for monkeypatch to know what was there
    monkeypatch.delenv(graphs.BREAKABLE)


@pytest.mark.parametrize("name", CASES)
def test_what_is_stated_stands_and_the_rest_is_filled_in(configure, name):
    arguments, expected, breaks = CASES[name]
    assert modes(configure(**arguments)) == expected
    assert os.environ.get(graphs.BREAKABLE) == ("1" if breaks else None)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_when_vllm_looks_again(configure, name):
    arguments, expected, breaks = CASES[name]
    config = configure(**arguments)
    config.__post_init__()  # as the engine core and copies for a draft do
    assert modes(config) == expected
    assert os.environ.get(graphs.BREAKABLE) == ("1" if breaks else None)


@pytest.mark.parametrize("name", [name for name, (_, _, breaks) in CASES.items() if breaks])
def test_it_is_the_same_in_a_process_that_starts_with_the_variable(configure, monkeypatch, name):
    arguments, expected, _ = CASES[name]
    config = configure(**arguments)
    monkeypatch.setattr(graphs._Ours, "is_set", False)  # as in the engine's own process
    config.__post_init__()
    assert modes(config) == expected
    assert os.environ[graphs.BREAKABLE] == "1"


def test_graphs_do_not_break_where_the_user_does_not_want_it(configure, monkeypatch):
    monkeypatch.setenv(graphs.BREAKABLE, "0")
    assert modes(configure()) == (False, "FULL_DECODE_ONLY")
    assert modes(configure(cudagraph_mode=CUDAGraphMode.PIECEWISE)) == (True, "PIECEWISE")
    assert os.environ[graphs.BREAKABLE] == "0"


def test_graphs_do_not_break_around_vllms_attention(configure, monkeypatch):
    monkeypatch.setenv("ATOM_DISABLE_VLLM_ATTENTION", "1")
    assert modes(configure()) == (False, "FULL_DECODE_ONLY")
    assert graphs.BREAKABLE not in os.environ


def test_graphs_break_on_several_gpus_that_share_each_layer(configure):
    assert modes(configure(ranks=2)) == (False, "FULL_AND_PIECEWISE")
    assert os.environ[graphs.BREAKABLE] == "1"


def test_graphs_do_not_break_in_a_pipeline(configure):
    assert modes(configure(stages=2)) == (False, "FULL_DECODE_ONLY")
    assert graphs.BREAKABLE not in os.environ


def sizes(config):
    return config.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize("seqs", [1, 7, 64, 256, 1024])
def test_prefills_are_captured_that_are_longer_than_vllms(configure, seqs):
    native = sizes(configure(impl="auto", seqs=seqs))
    config = configure(seqs=seqs)
    # vLLM 0.30 leaves out the largest batch of requests itself.
    assert {*native, *graphs.LONGER} <= set(sizes(config)) <= {*native, *graphs.LONGER, seqs}
    assert config.compilation_config.max_cudagraph_capture_size == 1024
    found = sizes(config)
    config.__post_init__()
    assert sizes(config) == found


def test_no_prefill_is_captured_that_is_longer_than_a_batch(configure):
    assert max(sizes(configure(seqs=256, tokens=700))) == 640
    assert max(sizes(configure(seqs=256, tokens=300))) == 300


@pytest.mark.parametrize(
    "stated", [{"cudagraph_capture_sizes": [1, 2, 8]}, {"max_cudagraph_capture_size": 8}, {"cudagraph_mode": "FULL"}]
)
def test_sizes_that_are_stated_stand_and_full_graphs_have_vllms(configure, stated):
    given = {key: CUDAGraphMode[value] if isinstance(value, str) else value for key, value in stated.items()}
    assert sizes(configure(**given)) == sizes(configure(impl="auto", **given))


def test_a_second_engine_in_the_process_has_the_graphs_of_the_first(configure):
    first, second = configure(seqs=256), configure(seqs=256)
    assert modes(second) == modes(first) == (False, "FULL_AND_PIECEWISE")
    assert sizes(second) == sizes(first)
    assert modes(configure(eager=True)) == (False, "NONE")


def test_a_model_of_vllms_own_in_the_same_process_has_vllms_defaults(configure):
    configure()
    assert modes(configure(impl="auto")) == (True, "FULL_AND_PIECEWISE")
    assert graphs.BREAKABLE not in os.environ
    assert modes(configure()) == (False, "FULL_AND_PIECEWISE")


def test_a_platform_s_own_defaults_are_kept(configure, monkeypatch):
    def own_defaults(vllm_config):
        vllm_config.compilation_config.custom_ops.append("+silu_and_mul")

    monkeypatch.setattr(Platform, "apply_config_platform_defaults", staticmethod(own_defaults))
    config = configure()
    assert "+silu_and_mul" in config.compilation_config.custom_ops
    assert modes(config) == (False, "FULL_AND_PIECEWISE")


def test_what_was_filled_in_is_said_once(configure, monkeypatch):
    from atom_plugin.vllm.graphs import logger

    said = []
    monkeypatch.setattr(logger, "info", lambda message, *args: said.append(message % args))
    configure(mode=CompilationMode.VLLM_COMPILE)
    configure().__post_init__()
    (line,) = (line for line in said if "CUDA graphs" in line)
    assert "not compiled, CUDA graphs FULL_AND_PIECEWISE" in line
    assert "-cc.mode=3" in line


def test_nothing_is_filled_in_on_a_cpu(monkeypatch):
    monkeypatch.setattr(platforms, "_current_platform", CPU)
    model = ModelConfig(str(CHECKPOINT), model_impl="atom")
    compilation = VllmConfig(model_config=model).compilation_config
    assert compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE


def test_vllm_has_no_other_way_to_breakable_graphs_than_its_variable(configure, monkeypatch):
    """Red once vLLM has one: then graphs.py needs no variable, and the entry in CONTRIBUTING.md goes."""
    config = configure(impl="auto")
    owners = [config, *(value for value in vars(config).values() if is_dataclass(value))]
    assert [field.name for owner in owners for field in fields(owner) if "breakable" in field.name] == []
    assert not signature(is_breakable_cudagraph_enabled).parameters
    assert not is_breakable_cudagraph_enabled()
    # vLLM writes the variable for its own models, and has no list that another package could add to.
    assert isinstance(default_breakable_cudagraph_architectures(), frozenset)
    monkeypatch.setattr(VllmConfig, "_uses_breakable_cudagraph_by_default", lambda config: True)
    monkeypatch.setattr(graphs, "restore_graph_defaults", lambda config: None)
    configure(impl="auto")
    assert os.environ[graphs.BREAKABLE] == "1"
    assert is_breakable_cudagraph_enabled()
