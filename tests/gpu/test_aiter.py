"""aiter itself on an AMD GPU: what our kernels make of it, and whether its signatures are those that were recorded."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from atom_core.kernels.aiter_library import ARCHITECTURES, aiter_function
from atom_core.kernels.select import Target
from tests.aiter_cases import cases_on

GPU = torch.device("cuda")

if torch.version.hip and Target.of(GPU).arch in ARCHITECTURES:
    RECORD = json.loads((Path(__file__).parents[1] / "fakes" / "aiter_signatures.json").read_text())["functions"]

    HERE = cases_on(Target.of(GPU).arch)

    @pytest.mark.parametrize("name", HERE)
    def test_it_is_the_reference(name):
        HERE[name](Target.of(GPU), GPU)

    @pytest.mark.parametrize("path", RECORD)
    def test_its_signature_is_the_recorded_one(path):
        names = [part.partition(":")[0].partition("=")[0] for part in _parameters(RECORD[path]["signature"])]
        names = [name for name in names if name != "*"]
        found = list(inspect.signature(aiter_function(path)).parameters)
        assert found[: len(names)] == names


def _parameters(signature: str) -> list[str]:
    """The parameters of a recorded signature, whose commas may stand in brackets."""
    parts, depth = [""], 0
    for letter in signature[1:-1]:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
