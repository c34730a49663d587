"""Modules that hooks are on: where nothing is fused over modules, each runs by its own call, and gives tensors."""

from __future__ import annotations

import pytest
import torch

from atom_core.layers.latent_expansion import LatentExpansion
from atom_core.layers.norm import HeadNorm
from atom_core.layers.rotary import RotaryTable
from atom_core.mixers.cache_scales import CacheScales
from atom_core.mixers.gated_delta_net import CausalConv
from atom_core.standalone import Runner
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, make_config, make_model
from tests.unit.core.ranks import build, on_ranks, run

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
#: What holds parameters that attention applies together with others, or no parameters at all.
WITHOUT_A_CALL = (HeadNorm, CausalConv, LatentExpansion, CacheScales, RotaryTable, torch.nn.ModuleList)
every_family = pytest.mark.parametrize("family", ALL_FAMILIES, ids=str)


def seen(model, runner):
    """What a hook on each module sees, by the module's name, and the logits."""
    outputs = {}
    for name, module in model.model.named_modules(prefix="model"):
        module.register_forward_hook(lambda _, inputs, output, name=name: outputs.update({name: output}))
    model.lm_head.register_forward_hook(lambda _, inputs, output: outputs.update(lm_head=output))
    logits = model.logits(run(runner, model, TOKENS))
    return outputs, logits


def tensors_of(output):
    return [it for it in (output if isinstance(output, tuple) else (output,)) if it is not None]


@every_family
def test_each_module_is_called_and_gives_tensors(tmp_path, family):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    model = build(runner, tmp_path, fuse_modules=False)
    outputs, logits = seen(model, runner)
    assert distance(logits, runner.logits(TOKENS)) <= LOGITS_TOLERANCE
    called = {name for name, it in model.named_modules() if name and not isinstance(it, WITHOUT_A_CALL)}
    assert set(outputs) == called
    for name, output in outputs.items():
        assert all(isinstance(it, torch.Tensor) for it in tensors_of(output)), name


@every_family
def test_layers_give_what_is_to_be_added_and_the_stream(tmp_path, family):
    """As layers of the frameworks do, and on every rank the same."""
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    alone, _ = seen(build(runner, tmp_path, fuse_modules=False), runner)

    @torch.inference_mode()
    def work(group):
        model = build(runner, tmp_path, fuse_modules=False, tensor_parallel=group)
        return seen(model, runner)[0]

    mixer = "self_attn" if "model.layers.0.self_attn" in alone else "linear_attn"
    out = "o_proj" if mixer == "self_attn" else "out_proj"
    for outputs in on_ranks(2, work):
        for name in (mixer, f"{mixer}.{out}", "input_layernorm"):
            name = f"model.layers.0.{name}"
            for found, expected in zip(tensors_of(outputs[name]), tensors_of(alone[name]), strict=True):
                assert distance(found, expected) <= LOGITS_TOLERANCE, name
        last, stream = outputs["model.layers.0"]
        expected_last, expected = alone["model.layers.0"]
        assert distance(last, expected_last) <= LOGITS_TOLERANCE
        assert distance(stream, expected) <= LOGITS_TOLERANCE


@every_family
def test_hooks_are_called_on_a_model_that_runs_fused(tmp_path, family):
    """As users of vLLM's `apply_model` put them on; without them it is fused again."""
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    expected, seen = runner.logits(TOKENS), []
    modules = {name: it for name, it in runner.model.named_modules() if not isinstance(it, WITHOUT_A_CALL)}
    hooks = [it.register_forward_hook(lambda *_, name=name: seen.append(name)) for name, it in modules.items()]
    found = runner.logits(TOKENS)
    assert set(seen) | {""} == set(modules)
    assert distance(found, expected) <= LOGITS_TOLERANCE
    for hook in hooks:
        hook.remove()
    assert torch.equal(runner.logits(TOKENS), expected)
