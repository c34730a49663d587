"""New weights in a model that has run: its logits are those of a fresh start from them, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import Checkpoint
from atom_core.kernels.select import Target
from atom_core.layers.parameters import ParameterLayer
from atom_core.loading import build_on_meta_device, update_from
from atom_core.runtime import SingleRank
from atom_core.standalone import Runner
from atom_core.updates import IncompleteWeights, ModelWeights
from tests.aiter_fake import fake_aiter
from tests.unit.core.hugging_face import make_config, random_tokens
from tests.unit.core.models.test_deepseek_mtp import Drafter
from tests.unit.core.mtp_checkpoints import make_mtp
from tests.unit.core.ranks import build, on_ranks, run, tensor_parallel_logits
from tests.unit.core.update_cases import CASES, MADE_AT_LOAD

TRAINED = Path(__file__).parents[2] / "checkpoints"
#: Where aiter's kernels are stood in for, and Triton's would be interpreted.
ON_CPU = dict.fromkeys(
    (
        "embedding",
        "qk_norm_rope_cache",
        "head_linear",
        "mla_attention",
        "mla_cache",
        "mla_prefill",
        "moe_routing",
    ),
    "reference",
)
TOKENS = random_tokens(9)
CALLS = ("folder", "one list", "buckets", "backwards", "one by one", "a stream")
every_case = pytest.mark.parametrize("case", CASES, ids=str)
DENSE, MIXTURE, LATENT = CASES[0], CASES[2], CASES[4]
NAME = "model.layers.1.self_attn.o_proj.weight"


def buckets(tensors, call):
    """Lists of tensors as a trainer sends them; parts of a layer come in several."""
    items, size = list(tensors.items()), {"one list": len(tensors), "buckets": 5, "backwards": 3, "one by one": 1}[call]
    if call == "backwards":
        items.reverse()
    return [items[first : first + size] for first in range(0, len(items), size)]


def tensors_of(directory):
    return dict(Checkpoint.open(directory).load())


def send(runner, tensors, call):
    send_to(runner.weights, tensors, call)


def send_to(weights, tensors, call):
    if call == "a stream":
        weights.update(iter(tensors.items()), "a trainer", whole=True)
        return
    for bucket in buckets(tensors, call):
        weights.update(bucket, "a trainer", whole=False)


@pytest.fixture(autouse=True)
def small_lots(monkeypatch):
    """A stream comes in several, as a large model's does."""
    monkeypatch.setattr("atom_core.updates._BATCH_BYTES", 100_000)


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("call", CALLS)
@every_case
def test_after_an_update_logits_are_those_of_a_fresh_start(tmp_path, case, call):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner, expected = case.runner(old), case.runner(new).logits(TOKENS)
    before = runner.logits(TOKENS)
    assert not torch.equal(before, expected)
    for directory, logits in ((new, expected), (old, before)):
        if call == "folder":
            runner.reload(directory)
        else:
            send(runner, tensors_of(directory), call)
        runner.weights.check_ready()
        assert torch.equal(runner.logits(TOKENS), logits)


@every_case
def test_a_part_of_a_packed_layer_may_come_alone(tmp_path, case):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner = case.runner(old)
    part = {
        name: it
        for name, it in tensors_of(new).items()
        if any(word in name for word in ("k_proj", "0.gate_proj", "q_b_proj", "norm"))
    }
    assert part
    runner.weights.update(list(part.items()), "a trainer", whole=False)
    edit(old, lambda tensors: tensors.update(part))
    assert torch.equal(runner.logits(TOKENS), case.runner(old).logits(TOKENS))


PLAIN = {"linear": "reference", "experts": "reference"}


@every_case
def test_what_graphs_have_captured_stays_where_it_is(tmp_path, case):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner = case.runner(old, kernels=PLAIN)

    def addresses():
        own = [it for module in runner.model.modules() if (it := getattr(module, "method", None))]
        kept = [tensor for it in own for tensor in vars(it).values() if isinstance(tensor, torch.Tensor)]
        return [tensor.data_ptr() for tensor in (*runner.model.parameters(), *runner.model.buffers(), *kept)]

    before = addresses()
    runner.reload(new)
    send(runner, tensors_of(old), "buckets")
    assert addresses() == before


def spoil(directory, how):
    """Make a folder's file one that cannot be taken."""
    path = directory / "model.safetensors"
    if how == "missing":
        edit(directory, lambda tensors: tensors.pop(NAME))
    elif how == "misshapen":
        edit(directory, lambda tensors: tensors.update({NAME: tensors[NAME][:-1].contiguous()}))
    elif how == "another dtype":
        edit(directory, lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.float8_e4m3fn)}))
    elif how == "unexpected":
        edit(directory, lambda tensors: tensors.update({"model.layers.1.extra": tensors[NAME].clone()}))
    else:
        path.write_bytes(path.read_bytes()[:-100])


FAULTS = {
    "missing": rf"missing \(1\): {re.escape(NAME)}",
    "misshapen": rf"{re.escape(NAME)} in model.safetensors is \[",
    "another dtype": rf"{re.escape(NAME)} in model.safetensors is stored as F8_E4M3",
    "unexpected": r"unexpected \(1\): model\.layers\.1\.extra in model\.safetensors",
    "cut short": r"model\.safetensors is damaged",
}


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("case", [DENSE, MIXTURE, LATENT], ids=str)
def test_a_bad_folder_is_refused_before_anything_is_overwritten(tmp_path, case, how):
    old, bad = case.make(tmp_path / "old", 0), case.make(tmp_path / "bad", 1)
    runner = case.runner(old)
    before = runner.logits(TOKENS)
    spoil(bad, how)
    with pytest.raises(ValueError, match=FAULTS[how]) as caught:
        runner.reload(bad)
    assert str(bad) in str(caught.value)
    assert "Nothing was overwritten" in str(caught.value)
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), before)


BAD_LISTS = {
    "misshapen": (NAME, lambda tensor: tensor[:-1], r"misshapen \(1\): .*o_proj\.weight is \["),
    "another dtype": (NAME, lambda tensor: tensor.to(torch.uint8), r"o_proj\.weight is stored as U8"),
    "unexpected": ("model.layers.9.mlp.up_proj.weight", None, r"unexpected \(1\): model\.layers\.9"),
}


@pytest.mark.parametrize("how", BAD_LISTS)
@pytest.mark.parametrize("case", [DENSE, MIXTURE, LATENT], ids=str)
def test_a_bad_list_is_refused_before_anything_is_overwritten(tmp_path, case, how):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner, tensors, (name, change, message) = case.runner(old), tensors_of(new), BAD_LISTS[how]
    before = runner.logits(TOKENS)
    tensors[name] = tensors[NAME] if change is None else change(tensors[name])
    with pytest.raises(ValueError, match=f"(?s)weights of a trainer do not fit.*{message}.*Nothing was overwritten"):
        runner.weights.update(list(tensors.items()), "a trainer", whole=False)
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), before)


@pytest.mark.parametrize("case", [it for it in CASES if it.options == MADE_AT_LOAD or "fp8" in it.name], ids=str)
def test_numbers_that_cannot_be_what_they_are_are_seen_before(tmp_path, case):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner, tensors = case.runner(old), tensors_of(new)
    before = runner.logits(TOKENS)
    name = next(name for name in tensors if "o_proj.weight_scale" in name or (case.options and "o_proj.weight" in name))
    tensors[name] = torch.full_like(tensors[name], float("inf"))
    with pytest.raises(ValueError, match=f"{re.escape(name)} holds .*finite"):
        runner.weights.update(list(tensors.items()), "a trainer", whole=False)
    if not case.options:
        save_file(tensors, new / "model.safetensors")
        with pytest.raises(ValueError, match=f"{re.escape(name)} in .*model.safetensors holds .*finite"):
            runner.reload(new)
    assert torch.equal(runner.logits(TOKENS), before)


def test_between_two_buckets_nothing_is_served(tmp_path):
    old, new = DENSE.make(tmp_path / "old", 0), DENSE.make(tmp_path / "new", 1)
    runner, sent = DENSE.runner(old), buckets(tensors_of(new), "buckets")
    runner.weights.begin()
    runner.weights.check_ready()
    for bucket in sent:
        runner.weights.update(bucket, "a trainer", whole=False)
        with pytest.raises(IncompleteWeights, match=r"the update has not ended\. Not arrived: "):
            runner.weights.check_ready()
    runner.weights.end()
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), DENSE.runner(new).logits(TOKENS))


def test_after_a_refused_bucket_nothing_is_served_until_it_has_come_again(tmp_path):
    old, new = DENSE.make(tmp_path / "old", 0), DENSE.make(tmp_path / "new", 1)
    runner, (first, second, *rest) = DENSE.runner(old), buckets(tensors_of(new), "buckets")
    runner.weights.begin()
    runner.weights.update(first, "a trainer", whole=False)
    bad = [(name, tensor[:-1]) for name, tensor in second]
    with pytest.raises(ValueError, match="do not fit"):
        runner.weights.update(bad, "a trainer", whole=False)
    for bucket in rest:
        runner.weights.update(bucket, "a trainer", whole=False)
    runner.weights.end()
    with pytest.raises(IncompleteWeights, match=rf"a part of an update was refused.*Until {len(second)} more"):
        runner.weights.check_ready()
    runner.weights.update(second, "a trainer", whole=False)
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), DENSE.runner(new).logits(TOKENS))


def test_a_stream_that_breaks_off_is_followed_by_a_whole_one(tmp_path):
    old, new = MIXTURE.make(tmp_path / "old", 0), MIXTURE.make(tmp_path / "new", 1)
    runner = MIXTURE.runner(old)

    def broken():
        yield from list(tensors_of(new).items())[:-3]
        raise OSError("the disk is gone")

    with pytest.raises(ValueError, match=r"broke off after \d+ of \d+ tensors: the disk is gone"):
        runner.weights.update(broken(), "somewhere", whole=True, checked=True)
    with pytest.raises(IncompleteWeights, match=r"an update from somewhere broke off .*Until 3 more have arrived"):
        runner.weights.check_ready()
    runner.reload(new)
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), MIXTURE.runner(new).logits(TOKENS))


STORED_LATENTS = [it for it in CASES if it.name in ("mla, fp8 by row", "mla, fp8 in blocks")]


@pytest.mark.parametrize("end", [".weight", ""], ids=["the weight", "what stands beside it"])
@pytest.mark.parametrize("case", STORED_LATENTS, ids=str)
def test_a_latent_layers_stored_projection_may_come_without_its_scale(tmp_path, case, end):
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner, tensors = case.runner(old), tensors_of(new)
    found = {name: it for name, it in tensors.items() if "kv_b_proj" in name and name.endswith(".weight") == bool(end)}
    assert found
    runner.weights.update(list(found.items()), "a trainer", whole=False)
    edit(old, lambda tensors: tensors.update(found))
    assert torch.equal(runner.logits(TOKENS), case.runner(old).logits(TOKENS))


SHARED_OUT = [it for it in CASES if it.name in ("dense, bf16", "mixture, bf16", "mla, bf16", "dense, fp8 made at load")]


@pytest.mark.parametrize("call", ["folder", "buckets"])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("case", SHARED_OUT, ids=str)
def test_every_rank_has_the_logits_of_a_fresh_start(tmp_path, case, expert_parallel, call):
    case = replace(case, options={**case.options, "dtype": torch.float32})
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner = case.runner(new)

    @torch.inference_mode()
    def updated(group):
        model = build(runner, old, tensor_parallel=group, expert_parallel=expert_parallel)
        weights = ModelWeights(model)
        if call == "folder":
            update_from(weights, runner.config, new, runner.runtime.quant)
        else:
            send_to(weights, tensors_of(new), call)
        return model.logits(run(runner, model, TOKENS))

    fresh = tensor_parallel_logits(runner, new, TOKENS, 2, expert_parallel=expert_parallel)
    for found, expected in zip(on_ranks(2, updated), fresh, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("call", CALLS)
def test_layers_that_draft_are_updated_and_what_they_borrow_is_not(tmp_path, call):
    drafters = []
    for seed, name in enumerate(("old", "new")):
        make_mtp(tmp_path / name, make_config(LATENT.family), seed=seed)
        drafters.append(Drafter(tmp_path / name))
    old, new = drafters
    old.draft.share(old.target.model.model.embed_tokens, old.target.model.lm_head)
    new.draft.share(new.target.model.model.embed_tokens, new.target.model.lm_head)
    weights = ModelWeights(old.draft)
    for it, config in ((old.target.weights, old.target.config), (weights, old.draft.config)):
        if call == "folder":
            update_from(it, config, tmp_path / "new", old.runtime.quant)
        else:
            send_to(it, tensors_of(tmp_path / "new"), call)
    hidden = new.hidden(TOKENS)
    assert torch.equal(old.hidden(TOKENS), hidden)
    found, expected = (it.step(0, TOKENS[1:], hidden[:-1]) for it in (old, new))
    assert torch.equal(found, expected)
    assert torch.equal(old.draft.logits(found), new.draft.logits(expected))


MOVED = {
    "experts": ("qwen3_moe", {}),
    "fp8 linear": ("qwen3", MADE_AT_LOAD),
    "fp8 experts": ("qwen3_moe", MADE_AT_LOAD),
    "latents": ("deepseek_v3", {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", MOVED)
def test_weights_in_aiters_order_are_moved_again(tmp_path, which, call):
    family, options = MOVED[which]
    shutil.copytree(TRAINED / family, tmp_path / "new")
    edit(tmp_path / "new", lambda tensors: tensors.update({name: it.flip(0) for name, it in tensors.items()}))
    with fake_aiter("gfx950"):
        options = {
            "dtype": torch.bfloat16,
            "max_model_len": 256,
            "target": Target("rocm", "gfx950"),
            "kernels": ON_CPU,
            **options,
        }
        runner, new = Runner(TRAINED / family, **options), tensors_of(tmp_path / "new")
        expected = Runner(tmp_path / "new", **options).logits(TOKENS)
        if call == "folder":
            runner.reload(tmp_path / "new")
        else:
            send(runner, new, call)
        assert torch.equal(runner.logits(TOKENS), expected)


@every_case
def test_weights_are_read_under_their_names_in_the_checkpoint(tmp_path, case):
    directory = case.make(tmp_path / "it", 0)
    runner = case.runner(directory)
    before, unread = runner.logits(TOKENS), []
    #: Of numbers that are rounded to bfloat16, or to FP8 by the largest of a row.
    close = 0.07 if case.options == MADE_AT_LOAD else 2**-8
    for name, tensor in tensors_of(directory).items():
        found = runner.weights.read(name)
        if found is None or ("experts" in name and "input_scale" in name and found.isnan().all()):
            unread.append(name)
            continue
        expected = tensor.float()
        # One scale for all rows is kept a row.
        expected = expected.view(found.shape) if expected.numel() == found.numel() else expected.expand_as(found)
        assert (found - expected).abs().max() <= close * expected.abs().max(), name
    assert all("input_scale" in name or "lm_head" in name for name in unread)
    assert runner.weights.read("no such tensor") is None
    assert torch.equal(runner.logits(TOKENS), before)


@every_case
def test_what_kernels_have_in_forms_of_their_own_can_be_had_as_it_was_loaded(tmp_path, case):
    runner = case.runner(case.make(tmp_path / "it", 0))
    before, layers = runner.logits(TOKENS), dict(runner.model.named_modules())
    found = {path: layer.as_loaded() for path, layer in layers.items() if isinstance(layer, ParameterLayer)}
    assert torch.equal(runner.logits(TOKENS), before)
    for path, layer in layers.items():
        if isinstance(layer, ParameterLayer):
            layer.open_weights(whole=True)
            assert {name: it.shape for name, it in layer.named_parameters(recurse=False)} == {
                name: it.shape for name, it in found[path].items()
            }
            for name, parameter in layer.named_parameters(recurse=False):
                parameter.data.copy_(found[path][name])
            layer.close_weights()
    assert torch.equal(runner.logits(TOKENS), before)


@pytest.mark.parametrize("how", ["missing", "misshapen", "broken off"])
def test_a_stream_that_turns_out_bad_is_followed_by_a_whole_one(tmp_path, how):
    old, new = MIXTURE.make(tmp_path / "old", 0), MIXTURE.make(tmp_path / "new", 1)
    runner, tensors = MIXTURE.runner(old), tensors_of(new)
    *_, last = tensors

    def stream():
        for name, tensor in tensors.items():
            if name == last and how == "broken off":
                raise OSError("the connection is gone")
            if name != last or how == "misshapen":
                yield name, tensor[:-1] if name == last else tensor

    with pytest.raises(ValueError, match=r"The update from a trainer broke off: (?s:.*)No request is served until"):
        runner.weights.update(stream(), "a trainer", whole=True)
    with pytest.raises(IncompleteWeights, match=re.escape(last)):
        runner.weights.check_ready()
    send(runner, tensors, "a stream")
    runner.weights.check_ready()
    assert torch.equal(runner.logits(TOKENS), MIXTURE.runner(new).logits(TOKENS))


@pytest.mark.parametrize("kernels", [None, PLAIN], ids=["packed", "plain"])
@every_case
def test_weights_come_back_into_memory_that_was_given_back(tmp_path, case, kernels):
    """As after `sleep(2)` or `release_memory_occupation`: frameworks keep buffers, and of all else the addresses."""
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner = case.runner(old, kernels=kernels)
    methods = [it for module in runner.model.modules() if (it := getattr(module, "method", None))]
    kept = [tensor for it in methods for tensor in vars(it).values() if isinstance(tensor, torch.Tensor)]
    for tensor in (*runner.model.parameters(), *kept):
        data = tensor.data.view(torch.uint8) if tensor.is_floating_point() else tensor.data
        data.fill_(0xFF)
    runner.reload(new)
    assert torch.equal(runner.logits(TOKENS), case.runner(new, kernels=kernels).logits(TOKENS))


def test_a_folder_of_another_model_with_the_same_shapes_is_refused(tmp_path):
    old, new = DENSE.make(tmp_path / "old", 0), DENSE.make(tmp_path / "new", 1)
    runner = DENSE.runner(old)
    before, path = runner.logits(TOKENS), new / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 128}))
    runner.reload(new)
    runner.reload(old)
    path.write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(
        ValueError, match=r"new/config.json is of another model than .*rms_norm_eps is 0.001, served is"
    ):
        runner.reload(new)
    assert torch.equal(runner.logits(TOKENS), before)
    path.unlink()
    runner.reload(new)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_other_experts_refuse_the_same(tmp_path, rank):
    case = replace(MIXTURE, options={"dtype": torch.float32})
    old, new = case.make(tmp_path / "old", 0), case.make(tmp_path / "new", 1)
    runner, tensors = case.runner(new), tensors_of(new)
    model = build(runner, old, tensor_parallel=SingleRank(rank, 2), expert_parallel=True)
    layout = partial(build_on_meta_device, runner.config, torch.float32)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        bad = [(name, tensors[name][:-1])]
        with pytest.raises(ValueError, match=re.escape(name)):
            ModelWeights(model, layout).update(bad, "a trainer", whole=False)
        ModelWeights(model, layout).update([(name, tensors[name])], "a trainer", whole=False)
    other = f"model.layers.1.mlp.experts.{3 - 3 * rank}.up_proj.weight"
    assert ModelWeights(model, layout).read(other).isnan().all()


def test_scales_of_a_cache_in_use_cannot_become_others(tmp_path):
    name = "model.layers.0.self_attn.k_scale"
    old, new = DENSE.make(tmp_path / "old", 0), DENSE.make(tmp_path / "new", 1)
    for directory in (old, new):
        edit(directory, lambda tensors: tensors.update({name: torch.tensor(0.5)}))
    runner = DENSE.runner(old, cache_dtype=torch.float8_e4m3fn)
    runner.reload(new)
    send(runner, tensors_of(old), "buckets")
    before = runner.logits(TOKENS)
    edit(new, lambda tensors: tensors.update({name: torch.tensor(0.25)}))
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(new))} cannot be loaded while serving: {re.escape(name)} would"
    ):
        runner.reload(new)
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} would turn scales \(0\.5, 1\.0\) of the cache into \(0\.25"
    ):
        send(runner, tensors_of(new), "one list")
    assert torch.equal(runner.logits(TOKENS), before)
