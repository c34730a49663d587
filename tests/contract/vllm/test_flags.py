"""The table of flags has every setting of the installed vLLM, and none that no supported version has."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import platforms
from vllm.config import AttentionConfig, CompilationConfig, KernelConfig, ModelConfig, VllmConfig
from vllm.config.compilation import PassConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.argparse_utils import FlexibleArgumentParser

from atom_core.models.read_config import read_model_config
from atom_plugin import NEWEST
from atom_plugin.common.flags import listed, refusals
from atom_plugin.common.settings import Settings
from atom_plugin.vllm import register_models, runtime
from atom_plugin.vllm.attention import VllmPagedAttention
from atom_plugin.vllm.checkpoint_config import values_of
from atom_plugin.vllm.flags import ARGUMENTS, DRAFT, LAST_IN, OWNERS, TABLE, refused_by_value
from atom_plugin.vllm.flags import refused as rows
from atom_plugin.vllm.routing import refuse, value_of
from tests.framework_diff_tool import load_framework_diff

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
VERSION = ".".join(vllm.__version__.split(".")[:2])
NEWEST_VERSION = ".".join(NEWEST["vllm"][0].split(".")[:2])


@pytest.fixture(scope="module")
def tool():
    return load_framework_diff()


@pytest.fixture(scope="module")
def installed(tool):
    """The source of the installed version."""
    return tool.Version(Path(vllm.__file__).parents[1], "vllm")


def test_every_setting_stands_in_a_row(tool, installed):
    assert tool.unlisted_by_our_adapter(installed) == []


def test_a_setting_that_is_new_is_found(tool, installed):
    new = {
        "KernelConfig.rope_backend": "str = 'auto'",
        "EngineArgs.rope_backend": "str = 'auto'",
        "KernelConfig.counted": "int = field(init=False)",
    }
    found = tool.unlisted(installed.settings() | new, installed.variables() | {"VLLM_NEW"}, listed(TABLE), ARGUMENTS)
    assert found == ["EngineArgs.rope_backend", "KernelConfig.rope_backend", "VLLM_NEW"]


def test_every_variable_of_vllms_list_is_among_those_that_are_looked_for(installed):
    from vllm import envs

    assert {name for name in envs.environment_variables if name.startswith("VLLM_")} <= installed.variables()


def test_no_row_is_of_a_setting_that_is_gone(installed):
    there = installed.settings().keys() | installed.variables()
    if VERSION == NEWEST_VERSION:
        older = {name for names in LAST_IN.values() for name in names}
        assert set(listed(TABLE)) - there == older
    assert set(LAST_IN.get(VERSION, ())) <= there


def test_flags_are_vllms():
    """Of the newest version, which has them all but those of `LAST_IN`."""
    options = set(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions)
    there = {row for row in refusals(TABLE) if row.setting not in {name for it in LAST_IN.values() for name in it}}
    unknown = {flag for row in there for flag in row.flags if flag.partition(".")[0] not in options}
    assert VERSION != NEWEST_VERSION or unknown == set()


def test_nothing_is_refused_where_nothing_is_set():
    register_models()
    config = VllmConfig(model_config=ModelConfig(str(CHECKPOINTS / "qwen3"), model_impl="atom"))
    assert config.model_config.architecture == "AtomQwen3ForCausalLM"
    refuse(config)  # vLLM looks again, by when its own defaults are there


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": {"disable_cascade_attn": False}}, "cascade attention (--no-disable-cascade-attn)"),
        ({"kernel_config": KernelConfig(moe_backend="triton")}, "(--moe-backend triton)"),
        ({"attention_config": AttentionConfig(backend="CPU_ATTN")}, "(--attention-backend CPU_ATTN)"),
        ({"compilation_config": CompilationConfig(custom_ops=["none"])}, "(-cc.custom_ops ['none'])"),
        (
            {"compilation_config": CompilationConfig(pass_config=PassConfig(fuse_norm_quant=True))},
            "(-cc.pass_config.fuse_norm_quant)",
        ),
    ],
)
def test_what_asks_for_code_of_vllms_own_models_is_refused_by_name(given, says):
    register_models()
    model = ModelConfig(str(CHECKPOINTS / "qwen3"), model_impl="atom", **given.get("model", {}))
    with pytest.raises(ValueError, match=re.escape(says)):
        VllmConfig(model_config=model, **{name: it for name, it in given.items() if name != "model"})


#: A value that is refused, where it is not just any word.
WRONG = {
    "CacheConfig.block_size": 24,
    "CompilationConfig.custom_ops": ["-rms_norm"],
    "ModelConfig.disable_cascade_attn": False,
    "ModelConfig.model_class_overrides": {"Qwen3ForCausalLM": "module:Class"},
    "ParallelConfig.decode_context_parallel_size": 2,
    "ParallelConfig.prefill_context_parallel_size": 2,
    "ParallelConfig.ubatch_size": 2,
}
OF_FIELDS = [row for row in (*refused_by_value(), *DRAFT) if "." in row.setting]


@pytest.mark.parametrize("row", OF_FIELDS, ids=lambda row: row.setting)
def test_a_refused_value_is_found_where_the_configuration_has_it(row):
    owner, _, name = row.setting.rpartition(".")
    value = WRONG.get(row.setting, "what nobody has")
    config = place = SimpleNamespace(
        cache_config=SimpleNamespace(user_specified_block_size=True),
        model_config=SimpleNamespace(runner_type="pooling"),
    )
    for part in filter(None, OWNERS[owner].split(".")):
        setattr(place, part, getattr(place, part, SimpleNamespace()))
        place = getattr(place, part)
    setattr(place, name, SimpleNamespace(load_format=value) if name == "draft_load_config" else value)
    assert row.is_refused(value_of(row.setting, config))
    assert (
        value_of(row.setting, SimpleNamespace(cache_config=None, model_config=SimpleNamespace(runner_type=None)))
        is None
    )


@pytest.mark.parametrize(("platform", "refused"), [(PlatformEnum.ROCM, True), (PlatformEnum.CUDA, False)])
def test_variables_of_amds_are_looked_at_on_its_gpus_alone(monkeypatch, platform, refused):
    class Elsewhere(Platform):
        _enum = platform

    monkeypatch.setattr(platforms, "_current_platform", Elsewhere())
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_MHA", "0")
    value = value_of("VLLM_ROCM_USE_AITER_MHA", None)
    assert (value is not None and rows("VLLM_ROCM_USE_AITER_MHA").is_refused(value)) == refused


def test_a_window_that_is_switched_off_is_none_of_ours():
    model = str(CHECKPOINTS / "mistral")
    windows = [
        {layer.mixer.window for layer in read_model_config(values_of(config, "MistralForCausalLM")).layers}
        for config in (ModelConfig(model), ModelConfig(model, disable_sliding_window=True))
    ]
    assert None not in windows[0]
    assert windows[1] == {None}


@pytest.mark.parametrize("disabled", [False, True])
def test_ranks_leave_each_others_memory_alone_where_vllm_is_told_to(monkeypatch, disabled):
    groups = SimpleNamespace(rank_in_group=0, world_size=2, device=torch.device("cuda:0"))
    monkeypatch.setattr(runtime, "get_tp_group", lambda: groups)
    monkeypatch.setattr(runtime, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    config = AsyncEngineArgs(str(CHECKPOINTS / "qwen3"), model_impl="atom").create_engine_config()
    config.parallel_config.disable_custom_all_reduce = disabled  # a CPU's platform has set it by itself
    built = runtime.build_runtime(config, config.model_config, 4, VllmPagedAttention, Settings())
    assert built.tensor_parallel.reads_peers is not disabled
