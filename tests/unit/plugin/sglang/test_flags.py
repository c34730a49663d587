"""SGLang's settings: the table by itself, without SGLang."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from atom_plugin.common.flags import Ours, Refused, Theirs, listed, refusals
from atom_plugin.sglang.flags import OTHERWISE, TABLE

ROOT = Path(__file__).parents[4]


def row(setting: str) -> Refused:
    """What is refused of a setting."""
    return next(row for row in refusals(TABLE) if row.setting == setting)


def test_each_setting_is_in_one_row_with_a_reason():
    assert len(listed(TABLE)) > 1400
    assert all(row.why for row in TABLE if isinstance(row, Theirs))
    assert all(row.how for row in TABLE if isinstance(row, Ours))
    assert all(row.what for row in refusals(TABLE))
    flags = [flag for row in refusals(TABLE) for flag in row.flags]
    assert len(set(flags)) == len(flags)
    assert all(flag.startswith("--") for flag in flags)


@pytest.mark.parametrize("test", sorted({row.test for row in TABLE if isinstance(row, Ours)}))
def test_what_is_honoured_has_a_test(test):
    path, _, name = test.partition("::")
    names = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in names


def test_the_table_imports_neither_framework():
    script = "import sys, atom_plugin.sglang.flags; assert {'sglang', 'vllm', 'torch'}.isdisjoint(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("value", "refused"), [(None, False), ("0", False), ("False", False), ("1", True), ("yes", True)]
)
def test_a_variable_is_read_as_sglang_reads_it(value, refused):
    assert row("SGLANG_SIMULATE_UNIFORM_EXPERTS").is_refused(value) is refused


def test_a_refusal_of_a_kernel_says_what_to_use():
    assert row("ServerArgs.fp8_gemm_runner_backend").message("triton", OTHERWISE) == (
        "atom-plugin does not support SGLang's kernels for FP8 linear layers (--fp8-gemm-backend triton); "
        "supported: auto. Our models have their own kernels: leave it out and use "
        "ATOM_KERNELS=fp8_block_linear=IMPLEMENTATION, or unset SGLANG_EXTERNAL_MODEL_PACKAGE."
    )


def test_kernels_are_chosen_by_names_of_our_ops():
    from atom_core.kernels import OPS

    named = {row.instead.partition("ATOM_KERNELS=")[2].partition("=")[0] for row in refusals(TABLE)} - {""}
    assert named <= {op.name for op in OPS}
