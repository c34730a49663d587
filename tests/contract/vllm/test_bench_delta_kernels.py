"""Gated DeltaNet of vLLM's Qwen models, which `bench kernels` times beside ours, is called as those models call it."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
from vllm.third_party.flash_linear_attention.ops import layernorm_guard

from atom_core.kernels import kernel_set
from atom_core.kernels.gated_delta_net.reference import (
    causal_conv,
    chunked_gated_delta_rule,
    gated_delta_rule,
    gated_rms_norm,
    gates,
)
from atom_core.kernels.select import Target
from atom_core.models.read_config import read_model_config
from atom_plugin.bench.agreement import distance
from atom_plugin.bench.cases import Bench, Run
from atom_plugin.bench.delta_cases import gated_delta_net_cases
from atom_plugin.bench.models import read_config
from atom_plugin.bench.vllm_kernels import Unavailable
from tests.contract.vllm.test_bench_libraries import calls
from tests.integration.questions import checkpoint

CPU = torch.device("cpu")
MODEL = Path(gdn.__file__)


class Library:
    """The functions of vLLM by the reference's, with the keywords that each was called with."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def update(self, x: torch.Tensor, states: torch.Tensor, taps: torch.Tensor, *rest: Any, **given: Any) -> Any:
        """In place of `causal_conv1d_update`: one token of each request."""
        assert rest == (None, "silu")
        self.seen["causal_conv1d_update"] = set(given) - {"out"}
        for row, slot in enumerate(given["conv_state_indices"].tolist()):
            mixed, last = causal_conv(x[row : row + 1], taps, states[slot].T)
            given["out"][row] = mixed[0]
            states[slot] = last.T
        return given["out"]

    def convolve(self, x: torch.Tensor, taps: torch.Tensor, bias: None, **given: Any) -> torch.Tensor:
        """In place of `causal_conv1d_fn`: prompts from their first token on."""
        self.seen["causal_conv1d_fn"] = set(given)
        assert not given["has_initial_state"].any()
        starts, out = given["query_start_loc"].tolist(), torch.empty_like(x)
        assert given["metadata"].nums_dict[8]["tot"] == sum(
            -(-(end - begin) // 8) for begin, end in itertools.pairwise(starts)
        )
        for slot, begin, end in zip(given["cache_indices"].tolist(), starts, starts[1:], strict=False):
            states = given["conv_states"][slot]
            mixed, last = causal_conv(x[:, begin:end].T, taps, torch.zeros_like(states.T))
            out[:, begin:end] = mixed.T
            states.copy_(last.T)
        return out

    def prepare(self, **given: Any) -> tuple[torch.Tensor, ...]:
        """In place of `fused_post_conv_prep`."""
        self.seen["fused_post_conv_prep"] = set(given)
        assert given["apply_l2norm"]
        assert not given["output_g_exp"]
        keys, heads = given["num_k_heads"] * given["head_k_dim"], len(given["A_log"])
        q, k, v = given["conv_output"].split([keys, keys, heads * given["head_v_dim"]], -1)
        q, k = (it.reshape(len(it), -1, given["head_k_dim"]) for it in (q, k))
        g, beta = gates(given["a"], given["b"], given["A_log"], given["dt_bias"])
        return q, k, v.reshape(len(v), heads, -1), g, beta

    def prompts(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of `fi_chunk_gated_delta_rule`; the reference norms queries and keys itself."""
        self.seen["fi_chunk_gated_delta_rule"] = set(given)
        starts, found, states = given["cu_seqlens"].tolist(), [], []
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            sides = (given[name][0, begin:end] for name in ("q", "k", "v", "g", "beta"))
            out, state = chunked_gated_delta_rule(*sides, given["initial_state"][row])
            found.append(out)
            states.append(state)
        return torch.cat(found)[None], torch.stack(states)

    def decode(self, **given: Any) -> None:
        """In place of `fused_recurrent_gated_delta_rule_packed_decode`."""
        self.seen["fused_recurrent_gated_delta_rule_packed_decode"] = set(given)
        states, heads = given["initial_state"], len(given["A_log"])
        values, key_dim = heads * states.shape[2], states.shape[3]
        assert given["scale"] == key_dim**-0.5
        keys = (given["mixed_qkv"].shape[1] - values) // 2
        for row, slot in enumerate(given["ssm_state_indices"].tolist()):
            q, k, v = given["mixed_qkv"][row : row + 1].split([keys, keys, values], -1)
            q, k = (it.reshape(1, -1, key_dim) for it in (q, k))
            g, beta = gates(given["a"][row : row + 1], given["b"][row : row + 1], given["A_log"], given["dt_bias"])
            out, state = gated_delta_rule(q, k, v.reshape(1, heads, -1), g, beta, states[slot])
            given["out"][row] = out
            states[slot] = state

    def norm(self, x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float, **given: Any) -> None:
        """In place of `layer_norm_fwd`."""
        self.seen["layer_norm_fwd"] = set(given)
        assert (given["activation"], given["norm_before_gate"], given["is_rms_norm"]) == ("silu", True, True)
        given["out"].copy_(gated_rms_norm(x, given["z"], weight, eps))


def contender(name: str, which: str = "vllm") -> Run:
    """Of the case of a small model whose name begins so, in float32."""
    config = read_model_config(read_config(checkpoint("qwen3_5")))
    case = next(it for it in gated_delta_net_cases(config, 4) if it.name.startswith(name))
    bench = Bench(CPU, torch.float32, kernel_set(Target.of(CPU)))
    return (case.exact[0] if which == "exact" else case.contenders[which])(bench, 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """vLLM's functions, which a CPU does not have."""
    it = Library()
    monkeypatch.setattr(gdn, "causal_conv1d_update", it.update)
    monkeypatch.setattr(gdn, "causal_conv1d_fn", it.convolve)
    monkeypatch.setattr(gdn, "fused_post_conv_prep", it.prepare)
    monkeypatch.setattr(gdn, "fi_chunk_gated_delta_rule", it.prompts)
    monkeypatch.setattr(gdn, "fused_recurrent_gated_delta_rule_packed_decode", it.decode)
    monkeypatch.setattr(layernorm_guard, "layer_norm_fwd", it.norm)
    for module in ("flashinfer", "flashinfer.gdn_prefill"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    return it


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("decode 8", ["causal_conv1d_update", "fused_recurrent_gated_delta_rule_packed_decode"]),
        ("prefill 1 x 128", ["causal_conv1d_fn", "fused_post_conv_prep", "fi_chunk_gated_delta_rule"]),
    ],
)
def test_a_layer_is_computed_as_in_vllms_model(library: Library, name: str, functions: list[str]) -> None:
    theirs, exact = contender(name), contender(name, "exact")
    for _ in range(2):  # the second goes on from the states of the first
        assert distance(theirs(0).float(), exact(0).float()) < 1e-4
    assert list(library.seen) == [*functions, "layer_norm_fwd"]
    for function, given in library.seen.items():
        assert given in calls(MODEL, function)


def test_without_flashinfer_prompts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", None)
    with pytest.raises(Unavailable, match="FlashInfer's Gated DeltaNet cannot be imported"):
        contender("prefill 1 x 128")
