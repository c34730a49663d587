"""How vLLM shares layers out over pipeline stages, of which the doctor has a copy."""

from __future__ import annotations

import pytest
from vllm.distributed.utils import get_pp_indices

from atom_plugin.vllm.hybrids import stages_of


@pytest.mark.parametrize("partition", [None, "2,3,1"])
def test_layers_are_shared_out_as_vllm_does(monkeypatch, partition):
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    counts = [(6, 3)] if partition else [(layers, count) for count in range(1, 9) for layers in range(count, 65)]
    for layers, count in counts:
        assert stages_of(layers, count, partition) == [get_pp_indices(layers, stage, count) for stage in range(count)]
