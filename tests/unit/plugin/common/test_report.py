"""The table that a server prints: a line a choice of kernels."""

from __future__ import annotations

import pytest

from atom_core.kernels.select import Choice
from atom_plugin.common.report import kernel_lines


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
