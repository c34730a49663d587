"""Mixtures of experts of FP8 checkpoints: their logits are those of the weights that the checkpoint stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, Format, make_fp8, make_plain, widen
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, Family, distance, make_config, make_model, random_tokens
from tests.unit.core.ranks import build, on_ranks, tensor_parallel_logits

TOKENS = random_tokens(24)
#: Whole blocks where weights are merged or shared, and a smaller last block of hidden numbers.
SIZES = {"hidden_size": 200, "head_dim": 128, "num_attention_heads": 4}
QWEN3 = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
)
MIXTRAL = Family("MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "intermediate_size": 256})
GLM4 = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 256},
)
BLOCKS = BLOCK_FORMATS[0]
every_format = pytest.mark.parametrize("form", [*FORMATS, *BLOCK_FORMATS], ids=str)
every_family = pytest.mark.parametrize("family", [QWEN3, MIXTRAL, GLM4], ids=str)

#: As in test_fp8.py: what activations of three bits after the first do to logits. A token whose router holds two
#: experts for nearly equal may change to the other, so not every token is held to it.
ROUNDED_INPUTS = 0.15


def make(folder: Path, form: Format, family: Family = QWEN3, **settings) -> Path:
    make_model(folder / "source", make_config(family, **{**SIZES, **settings}))
    make_fp8(folder / "source", folder / "fp8", form)
    return folder / "fp8"


class ExactLinear:
    """A kernel that quantises no activation: what is left is the weights, and the answer must be exact."""

    def adopt(self, weight, weight_scale=None):
        pass

    def __call__(self, x, weight, weight_scale, *others):
        wide = widen(weight_scale, weight.shape) if weight_scale.dim() == 2 else weight_scale[:, None]
        return torch.nn.functional.linear(x, weight.float() * wide, others[-1])


class ExactExperts:
    """The same of experts."""

    def __init__(self, spec):
        self.spec = spec

    def adopt(self, layer):
        pass

    def __call__(self, x, weights, experts, layer):
        from atom_core.kernels.experts import ExpertsSpec, ExpertWeights

        def plain(stored, scales):
            wide = [
                widen(scale, weight.shape) if self.spec.block else scale[:, None]
                for weight, scale in zip(stored, scales, strict=True)
            ]
            return stored.float() * torch.stack(wide)

        given = vars(self.spec) | {"bias": False}
        del given["block"]
        return ReferenceExperts(ExpertsSpec(**given))(
            x,
            weights,
            experts,
            ExpertWeights(plain(layer.gate_up, layer.gate_up_scale), plain(layer.down, layer.down_scale)),
        )


@pytest.fixture
def exact_inputs(monkeypatch):
    monkeypatch.setattr("atom_core.kernels.fp8_linear.ReferenceFp8Linear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_experts.ReferenceFp8Experts", ExactExperts)


@every_family
@every_format
@pytest.mark.usefixtures("exact_inputs")
def test_weights_are_those_that_the_checkpoint_stands_for(tmp_path, form, family):
    folder = make(tmp_path, form, family)
    make_plain(folder, tmp_path / "plain")
    found, expected = Runner(folder), Runner(tmp_path / "plain")
    assert distance(found.logits(TOKENS), expected.logits(TOKENS)) <= LOGITS_TOLERANCE
    experts = {name: module for name, module in found.model.named_modules() if name.endswith(".experts")}
    assert experts
    assert all(
        module.gate_up_proj.dtype == module.down_proj.dtype == torch.float8_e4m3fn for module in experts.values()
    )


@every_format
def test_logits_are_near_those_of_unrounded_activations(tmp_path, form):
    folder = make(tmp_path, form)
    make_plain(folder, tmp_path / "plain")
    runner = Runner(folder)
    found, expected = runner.logits(TOKENS), Runner(tmp_path / "plain").logits(TOKENS)
    error = (found - expected).abs().amax(-1) / (expected.max() - expected.min())
    assert 1e-4 < error.median() <= ROUNDED_INPUTS
    assert "fp8_experts" in {choice.op for choice in runner.runtime.kernels.choices()}


@every_format
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
@pytest.mark.usefixtures("exact_inputs")
def test_ranks_that_share_them_answer_as_one(tmp_path, expert_parallel, form):
    folder = make(tmp_path, form)
    runner = Runner(folder)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, folder, TOKENS, 2, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


def test_a_rank_holds_the_scales_of_its_part(tmp_path):
    folder = make(tmp_path, BLOCKS)
    runner = Runner(folder)
    whole = runner.model.model.layers[0].feed_forward.experts

    def work(group, expert_parallel):
        found = build(runner, folder, tensor_parallel=group, expert_parallel=expert_parallel)
        return found.model.layers[0].feed_forward.experts

    gate, up = whole.gate_up_scale.chunk(2, 1)
    for rank, part in enumerate(on_ranks(2, lambda group: work(group, False))):
        assert torch.equal(part.gate_up_scale, torch.cat([it[:, rank : rank + 1] for it in (gate, up)], 1))
        assert torch.equal(part.down_scale, whole.down_scale[:, :, rank : rank + 1])
    for rank, part in enumerate(on_ranks(2, lambda group: work(group, True))):
        here = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(part.gate_up_scale, whole.gate_up_scale[here])
        assert torch.equal(part.down_scale, whole.down_scale[here])


@every_family
def test_an_unquantised_mixture_can_be_quantised_while_it_is_loaded(tmp_path, family):
    per_row = next(form for form in FORMATS if form.per_row)
    folder = make(tmp_path, per_row, family)
    online, offline = Runner(tmp_path / "source", quantization="fp8"), Runner(folder)
    found, expected = (runner.model.model.layers[1].feed_forward.experts for runner in (online, offline))
    for name in ("gate_up", "down"):
        assert torch.equal(getattr(found, f"{name}_scale"), getattr(expected, f"{name}_scale"))
        weights = [getattr(it, f"{name}_proj").float() for it in (found, expected)]
        # The checkpoint's tool divides by scales; we multiply, which rounds few numbers the other way.
        assert (weights[0] != weights[1]).float().mean() < 1e-3
    error = (online.logits(TOKENS) - offline.logits(TOKENS)).abs().amax(-1)
    assert error.median() <= 0.05


def check(folder: Path, tensor_parallel_size: int, expert_parallel: bool) -> None:
    hf = json.loads((folder / "config.json").read_text())
    check_files(read_model_config(hf), folder, tensor_parallel_size, read_quantization(hf), expert_parallel)


def test_ranks_that_would_cut_a_block_are_refused_and_may_share_out_whole_experts(tmp_path):
    folder = make(tmp_path, BLOCKS, moe_intermediate_size=384, num_key_value_heads=4)
    says = (
        r"size 2 would cut FP8 blocks of model.layers.0.mlp.experts.0.gate_proj: a rank would hold 192 of its 384 rows"
        r".* whole blocks \(1\), or share out whole experts \(expert parallelism\)"
    )
    with pytest.raises(ValueError, match=says):
        check(folder, 2, expert_parallel=False)
    check(folder, 2, expert_parallel=True)


def test_experts_smaller_than_a_block_are_refused(tmp_path):
    folder = make(tmp_path, BLOCKS, moe_intermediate_size=64)
    with pytest.raises(ValueError, match=r"mlp.experts.0.up_proj is merged with other .* begins at row 64: within"):
        Runner(folder)


@pytest.mark.parametrize("form", [form for form in FORMATS if form.static], ids=str)
def test_tokens_have_scales_of_their_own_where_the_checkpoint_has_static_ones(tmp_path, form):
    make_model(tmp_path / "source", make_config(QWEN3, **SIZES))
    found = []
    for name, of_experts in (("one", 0.05), ("another", 1e-4)):
        make_fp8(
            tmp_path / "source",
            tmp_path / name,
            form,
            input_scale=lambda module, it=of_experts: it if ".experts." in module else 0.05,
        )
        found.append(Runner(tmp_path / name).logits(TOKENS))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (None, r"missing \(1\): {}"),
        (torch.ones(2), r"{} in .* is \[2\], should be one number"),
        (torch.tensor(float("nan")), "{} holds a scale that is no finite number"),
    ],
    ids=["none", "two", "no number"],
)
def test_static_scales_that_are_none_are_named(tmp_path, scale, says):
    folder = make(tmp_path, next(form for form in FORMATS if form.static))
    name = "model.layers.1.mlp.experts.2.down_proj.input_scale"
    tensors = load_file(folder / "model.safetensors")
    assert name in tensors
    tensors = {it: scale if it == name else tensor for it, tensor in tensors.items()}
    save_file({it: tensor for it, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=says.format(name)):
        Runner(folder)


def test_experts_that_the_checkpoint_leaves_out_stay_as_they_are(tmp_path):
    form = Format(
        "", {**BLOCKS.config, "modules_to_not_convert": ["model.layers.1.mlp"]}, block=True, scale=BLOCKS.scale
    )
    make_model(tmp_path / "source", make_config(QWEN3, **SIZES))
    make_fp8(tmp_path / "source", tmp_path / "fp8", form, keep=lambda module: ".1.mlp." in module)
    layers = Runner(tmp_path / "fp8").model.model.layers
    assert [layer.feed_forward.experts.gate_up_proj.dtype for layer in layers[:2]] == [
        torch.float8_e4m3fn,
        torch.float32,
    ]


NAME = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{NAME}.weight_scale_inv": None}, rf"missing \(1\): {NAME}.weight_scale_inv"),
        ({f"{NAME}.weight_scale_inv": torch.ones(2)}, rf"{NAME}.weight_scale_inv in .* is \[2\], should be \[2, 2\]"),
        ({f"{NAME}.weight": torch.ones(256, 200)}, f"{NAME}.weight in .* is stored as F32, but config.json says FP8"),
        ({f"{NAME}.weight_scale_inv": torch.full((2, 2), -1.0)}, f"{NAME}.weight_scale_inv holds a scale that is no"),
    ],
    ids=["no scale", "too few scales", "no FP8", "negative"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, says):
    folder = make(tmp_path, BLOCKS)
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=says):
        Runner(folder)
