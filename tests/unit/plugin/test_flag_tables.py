"""The adapters' tables of flags: every row is told to people, and each test that one names exists."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atom_plugin.cli import FLAGS, app
from atom_plugin.common.flag_tables import as_json, as_markdown
from atom_plugin.common.flags import Ours, listed, refusals
from atom_plugin.vllm import flags as vllm_flags

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("framework", FLAGS)
def test_each_test_that_is_named_exists(framework):
    for row in FLAGS[framework]:
        if isinstance(row, Ours):
            path, _, name = row.test.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row.test


@pytest.mark.parametrize("framework", FLAGS)
def test_every_setting_is_one_object_and_every_refusal_is_on_the_page(framework):
    table = FLAGS[framework]
    objects = json.loads(as_json(table))
    assert [entry["setting"] for entry in objects] == list(listed(table))
    page = as_markdown(table)
    for row in refusals(table):
        assert f"`{row.flags[0] if row.flags else row.setting}`" in page
        assert row.what in page


def test_the_command_takes_a_framework_and_no_other_word():
    runner = CliRunner()
    assert "VLLM_BATCH_INVARIANT" in runner.invoke(app, ["flags", "vllm"]).output
    assert json.loads(runner.invoke(app, ["flags", "vllm", "--json"]).output)
    refused = runner.invoke(app, ["flags", "vllms"])
    assert refused.exit_code == 2
    assert "'vllms' is not one of" in refused.output


def test_what_is_looked_up_is_where_a_configuration_has_it():
    owners = {row.setting.rpartition(".")[0] for row in (*vllm_flags.refused_by_value(), *vllm_flags.DRAFT)} - {""}
    assert owners <= vllm_flags.OWNERS.keys()


def test_rows_that_are_decided_with_more_and_other_names_are_of_the_table():
    settings = set(listed(vllm_flags.TABLE))
    assert {*vllm_flags.REFUSED_BY_MODEL, *vllm_flags.ARGUMENTS.values()} <= settings
    assert {name for names in vllm_flags.LAST_IN.values() for name in names} <= settings


def test_a_class_is_named_for_one_of_our_architectures():
    row = vllm_flags.refused("ModelConfig.model_class_overrides")
    assert row.is_refused({"Qwen3ForCausalLM": "module:Class"})
    assert row.is_refused({"AtomQwen3ForCausalLM": "module:Class"})
    assert not row.is_refused({"OPTForCausalLM": "module:Class"})
    assert not row.is_refused({})
