"""The table that a server prints: a line a choice of kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import Choice, Target
from atom_core.standalone import build_runtime
from atom_plugin.common.report import kernel_lines, startup_table


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (Choice("linear", "triton", False, ()), "linear              triton"),
        (Choice("linear", "torch", True, ()), "linear              torch       forced by ATOM_KERNELS"),
        (
            Choice("linear", "torch", False, (("triton", "Not here."), ("aiter", "Nor this."))),
            "linear              torch       triton: Not here.; aiter: Nor this.",
        ),
        (Choice("linear", "triton", False, (), "It is slow."), "linear              triton      It is slow."),
        (
            Choice("linear", "triton", True, (), "It is slow."),
            "linear              triton      forced by ATOM_KERNELS; It is slow.",
        ),
        (
            Choice("fp8_gated_activation", "triton_and_flash_attention_3", False, (), "It is slow."),
            "fp8_gated_activation triton_and_flash_attention_3 It is slow.",
        ),
    ],
)
def test_a_line_says_what_was_chosen_and_why(choice: Choice, line: str) -> None:
    assert kernel_lines([choice]) == [line]


def test_the_table_names_what_was_asked_for_in_vain() -> None:
    cpu = torch.device("cpu")
    # The sampler asks for its op later.
    forced = {"rms_norm": "reference", "experts": "reference", "greedy_tokens": "reference"}
    kernels = kernel_set(Target.of(cpu), forced, asked_by={"experts": "ATOM_OTHER"})
    runtime = replace(build_runtime(cpu, torch.float32, 64), kernels=kernels)
    kernels.select(RMS_NORM, RmsNormSpec(64, torch.float32))
    *_, used, unused = startup_table("a framework", "AModel", "AnAttention", runtime).splitlines()
    assert used.split() == "rms_norm reference forced by ATOM_KERNELS".split()
    assert unused.split() == "experts - ATOM_OTHER asks for reference; no layer of this model uses it here".split()
