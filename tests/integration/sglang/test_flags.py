"""Every setting of the installed SGLang has its row, and says the truth about it where it is cheap to ask."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from atom_plugin.common.flags import Refused, listed, refusals
from atom_plugin.sglang.flags import TABLE
from tests.integration.questions import checkpoint
from tests.integration.sglang.test_refusals import CASES

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

OURS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models"}


def fields() -> set[str]:
    """Fields of the server's arguments, and what SGLang makes of them."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import PortArgs, ServerArgs

    records = {"ServerArgs": ServerArgs, "PortArgs": PortArgs}
    found = {f"{owner}.{field.name}" for owner, record in records.items() for field in record_fields(record)}
    return found | {f"ModelConfig.{name}" for name in list(inspect.signature(ModelConfig).parameters)}


def variables(package: Path) -> set[str]:
    """Environment variables that SGLang declares, or reads somewhere by name."""
    from sglang.srt.environ import _DEPRECATED_ENVS, EnvField, Envs

    declared = {name: value for name, value in vars(Envs).items() if isinstance(value, EnvField)}
    former = {value.deprecated_name for value in declared.values() if hasattr(value, "deprecated_name")}
    paths = {path for folder in ("srt", "kernels") for path in (package / folder).rglob("*.py")}
    quoted = re.compile(r"""["'](SGL(?:ANG)?_[A-Z0-9_]+)["']""")
    read = {name for path in paths - {package / "srt" / "environ.py"} for name in quoted.findall(path.read_text())}
    return {*declared, *former, *_DEPRECATED_ENVS, *read}


def faults(rows: Iterable[str], settings: set[str]) -> tuple[list[str], list[str]]:
    """Settings that are in no row, and rows for settings that there are not."""
    return sorted(settings - set(rows)), sorted(set(rows) - settings)


@pytest.fixture(scope="module")
def installed():
    """Every setting of this SGLang."""
    return fields() | variables(Path(find_spec("sglang").origin).parent)


def test_each_setting_of_this_version_is_in_one_row(installed):
    assert faults(listed(TABLE), installed) == ([], [])


def test_a_new_setting_is_found(installed, tmp_path):
    module = tmp_path / "srt" / "models" / "new.py"
    module.parent.mkdir(parents=True)
    module.write_text('fast = get_bool_env_var("SGLANG_ALL_THE_FASTER")')
    new = {"ServerArgs.enable_all_the_faster", *variables(tmp_path)} | installed
    assert faults(listed(TABLE), new - {"ServerArgs.enable_lora"}) == (
        ["SGLANG_ALL_THE_FASTER", "ServerArgs.enable_all_the_faster"],
        ["ServerArgs.enable_lora"],
    )


@pytest.fixture(scope="module")
def parser():
    """Of SGLang's command line."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def rows_of_fields() -> list[Refused]:
    return [row for row in refusals(TABLE) if row.setting.startswith("ServerArgs.")]


@pytest.mark.parametrize("row", rows_of_fields(), ids=lambda row: row.setting)
def test_a_flag_sets_what_its_row_says_and_its_default_is_served(row, parser):
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    name = row.setting.removeprefix("ServerArgs.")
    assert {actions[flag].dest for flag in row.flags} == {name}
    assert not row.is_refused(parser.get_default(name))


def test_each_refusal_is_asked_for():
    asked = {word for case in CASES.values() for word in (*case.flags, *case.environ)}
    assert [row.setting for row in refusals(TABLE) if asked.isdisjoint({*row.flags, row.setting})] == []


def test_values_that_are_served_are_among_sglangs(parser):
    choices = {action.dest: set(map(str, action.choices)) for action in parser._actions if action.choices}
    for row in rows_of_fields():
        offered = choices.get(row.setting.removeprefix("ServerArgs."))
        assert offered is None or offered.issuperset(row.allowed), row.setting


def test_a_list_of_plugins_without_ours_is_refused(monkeypatch):
    from atom_plugin.sglang.models.dense import Qwen3ForCausalLM

    monkeypatch.setenv("SGLANG_PLUGINS", "smg-servicer, mine")
    with pytest.raises(ValueError, match=r"leaves out 'atom'.*set SGLANG_PLUGINS=smg-servicer,mine,atom"):
        Qwen3ForCausalLM(None)
    monkeypatch.setenv("SGLANG_PLUGINS", ",")
    with pytest.raises(ValueError, match="set SGLANG_PLUGINS=atom"):
        Qwen3ForCausalLM(None)


@pytest.mark.parametrize(("registered", "said"), [(True, []), (False, ["has not run the entry point 'atom'"])])
def test_a_model_without_our_entry_point_says_so_once(registered, said, monkeypatch, caplog):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from atom_plugin.sglang import BACKEND, _build_backend
    from atom_plugin.sglang.causal_lm import check_entry_point

    # Another package's backend of the same name is none of ours.
    monkeypatch.setitem(ATTENTION_BACKENDS, BACKEND, _build_backend if registered else None)
    monkeypatch.setattr(logging.getLogger("sglang.atom_plugin"), "propagate", True)
    check_entry_point()
    assert [line in record.getMessage() for record, line in zip(caplog.records, said, strict=True)] == [True] * len(
        said
    )


def test_overrides_of_the_configuration_are_what_our_models_read():
    from sglang.srt.configs.model_config import ModelConfig as Config

    from atom_core.models.read_config import read_model_config
    from atom_plugin.sglang.checkpoint_config import values_of

    config = Config(checkpoint("qwen3"), model_override_args='{"rms_norm_eps": 0.25}', context_length=64).hf_config
    assert read_model_config(values_of(config)).rms_norm_eps == 0.25
    assert config.context_len == 64


def test_cosines_and_sines_are_float32(monkeypatch):
    from atom_core.rope import RopeConfig, cos_sin_table

    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "0")
    assert str(cos_sin_table(RopeConfig("default", 10000.0, rotary_dim=8, max_position=16), 4).dtype) == "torch.float32"


def test_stages_have_the_layers_that_the_variable_says(monkeypatch):
    from atom_plugin.sglang.runtime import get_pp_indices

    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "1,3")
    assert [get_pp_indices(4, rank, 2) for rank in (0, 1)] == [(0, 1), (1, 4)]


QUANTISED_MIXTRAL = """
import json
import os
from types import SimpleNamespace

from sglang.srt.model_loader.utils import get_model_architecture

hf_config = SimpleNamespace(architectures=["MixtralForCausalLM"])
found = [
    get_model_architecture(SimpleNamespace(hf_config=hf_config, quantization=quantization, model_impl="auto"))[0]
    for quantization in (None, "fp8", "modelopt_fp8", "quark")
]
print(json.dumps([[it.__module__, it.architecture or it.__name__] for it in found]))
"""


def test_mixtral_is_ours_in_each_quantisation():
    finished = subprocess.run(
        [sys.executable, "-c", QUANTISED_MIXTRAL],
        env={**os.environ, **OURS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found == [["atom_plugin.sglang.models.mixtures", "MixtralForCausalLM"]] * 4
