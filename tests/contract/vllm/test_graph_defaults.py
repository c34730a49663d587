"""Which compilation and graph modes vLLM ends up with on a GPU, where our hook fills in what the user left open.

vLLM's own configuration is made, on a platform that calls itself CUDA and is otherwise the bare interface.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import ModelRegistry, platforms
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.platforms.interface import Platform, PlatformEnum

from atom_plugin.vllm import register_models
from atom_plugin.vllm.platform import AtomPlatformMixin

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
    """Makes a configuration; arguments are those of `CompilationConfig`, and `impl`, `eager` and `level`."""
    register_models()

    def configure(*, impl="atom", eager=False, level=None, **compilation):
        monkeypatch.setattr(platforms, "_current_platform", CPU)
        model = ModelConfig(str(CHECKPOINT), model_impl=impl, enforce_eager=eager)
        # What inspects a class imports what only a GPU's vLLM has, if asked on one.
        ModelRegistry.inspect_model_cls(["AtomQwen3ForCausalLM"], model)
        monkeypatch.setattr(platforms, "_current_platform", CudaInName())
        given = {} if level is None else {"optimization_level": level}
        return VllmConfig(model_config=model, compilation_config=CompilationConfig(**compilation), **given)

    return configure


def modes(config):
    """The two modes, by name."""
    compilation = config.compilation_config
    return compilation.mode.name, compilation.cudagraph_mode.name


CASES = {
    "nothing said": ({}, ("NONE", "FULL_DECODE_ONLY")),
    "compiled": ({"mode": CompilationMode.VLLM_COMPILE}, ("VLLM_COMPILE", "FULL_AND_PIECEWISE")),
    "uncompiled": ({"mode": CompilationMode.NONE}, ("NONE", "FULL_DECODE_ONLY")),
    "full graphs": ({"cudagraph_mode": CUDAGraphMode.FULL}, ("NONE", "FULL")),
    "no graphs": ({"cudagraph_mode": CUDAGraphMode.NONE}, ("NONE", "NONE")),
    "piecewise graphs": ({"cudagraph_mode": CUDAGraphMode.PIECEWISE}, ("VLLM_COMPILE", "PIECEWISE")),
    "both kinds of graphs": (
        {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
        ("VLLM_COMPILE", "FULL_AND_PIECEWISE"),
    ),
    "eager": ({"eager": True}, ("NONE", "NONE")),
    "-O0": ({"level": OptimizationLevel.O0}, ("NONE", "NONE")),
    "-O1": ({"level": OptimizationLevel.O1}, ("VLLM_COMPILE", "PIECEWISE")),
    "-O3": ({"level": OptimizationLevel.O3}, ("VLLM_COMPILE", "FULL_AND_PIECEWISE")),
    "vLLM's own model": ({"impl": "auto"}, ("VLLM_COMPILE", "FULL_AND_PIECEWISE")),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_stated_stands_and_the_rest_is_filled_in(configure, name):
    arguments, expected = CASES[name]
    assert modes(configure(**arguments)) == expected


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_when_vllm_looks_again(configure, name):
    arguments, expected = CASES[name]
    config = configure(**arguments)
    config.__post_init__()  # as the engine core and copies for a draft do
    assert modes(config) == expected


def test_a_platform_s_own_defaults_are_kept(configure, monkeypatch):
    def own_defaults(vllm_config):
        vllm_config.compilation_config.custom_ops.append("+silu_and_mul")

    monkeypatch.setattr(Platform, "apply_config_platform_defaults", staticmethod(own_defaults))
    config = configure()
    assert "+silu_and_mul" in config.compilation_config.custom_ops
    assert modes(config) == ("NONE", "FULL_DECODE_ONLY")


def test_what_was_filled_in_is_said_once(configure, monkeypatch):
    from atom_plugin.vllm.graphs import logger

    said = []
    monkeypatch.setattr(logger, "info", lambda message, *args: said.append(message % args))
    configure().__post_init__()
    configure(mode=CompilationMode.VLLM_COMPILE)
    (line,) = (line for line in said if "CUDA graphs" in line)
    assert "not compiled, CUDA graphs FULL_DECODE_ONLY" in line
    assert "-cc.mode=3" in line


def test_nothing_is_filled_in_on_a_cpu(monkeypatch):
    monkeypatch.setattr(platforms, "_current_platform", CPU)
    model = ModelConfig(str(CHECKPOINT), model_impl="atom")
    compilation = VllmConfig(model_config=model).compilation_config
    assert compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
