"""DeepSeek's layers that draft against Hugging Face's modules, step by step as engines run them."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import Checkpoint, read_config_json
from atom_core.loading import check_files
from atom_core.models.deepseek_mtp import DeepseekV3Draft
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class
from atom_core.quant import read_quantization
from atom_core.standalone import Runner, Step, build_runtime, empty_caches, finalize, plan
from atom_core.weights import load_weights
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8, make_plain
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    MAX_POSITION,
    NUM_LAYERS,
    distance,
    make_config,
    random_tokens,
)
from tests.unit.core.models.test_block_fp8 import ExactInputs
from tests.unit.core.models.test_deepseek import BLOCKS, CLOSE, DENSE, GROUPED, V3, YARN
from tests.unit.core.mtp_checkpoints import make_mtp
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4

TOKENS = random_tokens(32)
CASES = [
    ({}, None),
    ({"q_lora_rank": None, "rope_interleave": False}, None),
    ({"n_shared_experts": 2, "n_group": 1, "topk_group": 1}, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    (DENSE, None),
    ({"first_k_dense_replace": NUM_LAYERS + 3}, None),
    ({"tie_word_embeddings": True}, None),
]


class Drafter:
    """A target and the layers that draft for it, each with a runtime and a cache of its own."""

    def __init__(self, directory, dtype=torch.float32, page_size=16, draft_first=False):
        self.directory, self.dtype = directory, dtype
        if draft_first:
            self._load_draft()
        self.target = Runner(directory, dtype=dtype, page_size=page_size, max_model_len=MAX_POSITION)
        if not draft_first:
            self._load_draft()
        self.draft.share(self.target.model.model.embed_tokens, self.target.model.lm_head)
        self.caches = empty_caches(self.draft, self.runtime, -(-MAX_POSITION // page_size), page_size)

    def _load_draft(self):
        hf = read_config_json(self.directory)
        quant = read_quantization(hf)
        config = DeepseekV3Draft.from_hf(hf)
        check_files(config, self.directory, quant=quant)
        self.runtime = build_runtime(torch.device("cpu"), self.dtype, MAX_POSITION, quant=quant)
        self.draft = load_draft_class(config.architecture)(config, self.runtime)
        load_weights(self.draft, Checkpoint.open(self.directory).load(), str(self.directory))
        finalize(self.draft)

    @torch.inference_mode()
    def step(self, cached, tokens, hidden, depth=0):
        """Draft behind ``tokens``, of which the first is at position ``cached``."""
        metadata = plan(self.draft, self.target.batch([cached], [len(tokens)]))
        positions = torch.arange(cached, cached + len(tokens))
        return self.draft(torch.tensor(tokens), positions, hidden, Step(metadata, self.caches), depth)

    @torch.inference_mode()
    def hidden(self, tokens):
        return self.target.step(self.target.caches(1), [0], [tokens])


@pytest.mark.parametrize(("settings", "rope"), CASES, ids=str)
def test_drafts_are_those_of_hugging_faces_modules(tmp_path, settings, rope):
    reference = make_mtp(tmp_path, make_config(V3, rope, **settings))
    expected = reference.draft(TOKENS[1:], reference.hidden(TOKENS)[:-1])
    drafter = Drafter(tmp_path)
    found = drafter.step(0, TOKENS[1:], drafter.hidden(TOKENS)[:-1])
    assert distance(drafter.draft.logits(found), reference.logits(expected)) <= CLOSE


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_drafts_behind_chunks_are_those_behind_the_whole(tmp_path, chunk):
    make_mtp(tmp_path, make_config(V3))
    drafter = Drafter(tmp_path, page_size=5)
    hidden, rest = drafter.hidden(TOKENS), TOKENS[1:]
    whole = drafter.step(0, rest, hidden[:-1])
    chunks = [
        drafter.step(begin, rest[begin : begin + chunk], hidden[begin : min(begin + chunk, len(rest))])
        for begin in range(0, len(rest), chunk)
    ]
    assert distance(torch.cat(chunks), whole) <= CLOSE


def test_one_layer_drafts_several_tokens_on_its_own_hidden_states(tmp_path):
    reference = make_mtp(tmp_path, make_config(V3))
    drafter = Drafter(tmp_path)
    tokens, given = TOKENS[1:20], reference.hidden(TOKENS[:19])
    found = drafter.step(0, tokens, drafter.hidden(TOKENS[:19]))
    for depth in range(3):
        expected = reference.draft(tokens, given)
        assert distance(drafter.draft.logits(found[-1:]), reference.logits(expected[-1:])) <= 2 * CLOSE
        token = int(reference.logits(expected[-1]).argmax())
        found = drafter.step(len(tokens), [token], found[-1:], depth + 1)
        tokens, given = [*tokens, token], torch.cat([given, expected[-1:]])


def test_two_layers_take_turns(tmp_path):
    reference = make_mtp(tmp_path, make_config(V3), num_drafts=2)
    drafter = Drafter(tmp_path)
    hidden = drafter.hidden(TOKENS)
    first = reference.draft(TOKENS[1:], reference.hidden(TOKENS)[:-1])
    second = reference.draft(TOKENS[2:], first[:-1], depth=1)
    found = drafter.step(0, TOKENS[1:], hidden[:-1])
    assert distance(drafter.step(0, TOKENS[2:], found[:-1], depth=1), second) <= 2 * CLOSE
    assert torch.equal(drafter.step(0, TOKENS[1:], hidden[:-1], depth=2), found)


@pytest.mark.parametrize("draft_first", [False, True], ids=["the target first", "the draft first"])
def test_target_and_draft_know_nothing_of_each_others_runtime(tmp_path, draft_first):
    make_mtp(tmp_path, make_config(V3))
    drafter = Drafter(tmp_path, draft_first=draft_first)
    target, draft = drafter.target, drafter.draft
    hidden = drafter.hidden(TOKENS)
    logits, drafted = target.logits(TOKENS), drafter.step(0, TOKENS[1:], hidden[:-1])
    assert target.runtime.kernels is not drafter.runtime.kernels
    own = {it.data_ptr() for it in draft.model.layers.parameters()}
    assert own.isdisjoint(it.data_ptr() for it in target.model.parameters())
    # The target lives on without its draft ...
    del drafter.draft, drafter.runtime, drafter.caches, draft
    gc.collect()
    assert torch.equal(target.logits(TOKENS), logits)
    # ... and a draft without its target, but for what it was given.
    drafter = Drafter(tmp_path, draft_first=draft_first)
    again = drafter.step(0, TOKENS[1:], hidden[:-1])
    pages = drafter.target.batch([0], [len(TOKENS) - 1])
    drafter.target = None
    del target
    gc.collect()
    step = Step(plan(drafter.draft, pages), drafter.caches)
    with torch.inference_mode():
        found = drafter.draft(torch.tensor(TOKENS[1:]), torch.arange(len(TOKENS) - 1), hidden[:-1], step)
    assert torch.equal(found, again)
    assert torch.equal(found, drafted)


@pytest.mark.parametrize("form", [*BLOCK_FORMATS, FORMATS[0], FORMATS[5]], ids=str)
def test_fp8_drafts_are_those_that_the_checkpoint_stands_for(tmp_path, monkeypatch, form):
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactInputs)
    settings = {**BLOCKS, "first_k_dense_replace": NUM_LAYERS + 1}
    source, folder = tmp_path / "source", tmp_path / "fp8"
    source.mkdir()
    make_mtp(source, make_config(V3, **settings))
    make_fp8(source, folder, form)
    make_plain(folder, tmp_path / "plain")
    ours, plain = Drafter(folder), Drafter(tmp_path / "plain")
    layer = ours.draft.model.layers[str(NUM_LAYERS)]
    # DeepSeek's own checkpoints leave it as it is, and do not say so.
    assert layer.eh_proj.quantized == (form.scale != "weight_scale_inv")
    assert layer.self_attn.o_proj.quantized
    hidden = plain.hidden(TOKENS)[:-1]
    expected = plain.draft.logits(plain.step(0, TOKENS[1:], hidden))
    found = ours.draft.logits(ours.step(0, TOKENS[1:], hidden))
    # Activations are rounded but in blocks, where the test has them exact.
    assert distance(found, expected) <= (LOGITS_TOLERANCE if form in BLOCK_FORMATS else 0.2)


def test_mxfp4_drafts_are_those_that_the_checkpoint_stands_for(tmp_path):
    (tmp_path / "source").mkdir()
    make_mtp(tmp_path / "source", make_config(V3, **{**BLOCKS, **dict.fromkeys(GROUPED, 128)}))
    make_quark(tmp_path / "source", tmp_path / "packed", quark_mxfp4(rounded_inputs=False))
    make_plain_quark(tmp_path / "packed", tmp_path / "plain")
    ours, plain = Drafter(tmp_path / "packed"), Drafter(tmp_path / "plain")
    assert ours.draft.model.layers[str(NUM_LAYERS)].eh_proj.quantized
    hidden = plain.hidden(TOKENS)[:-1]
    expected = plain.draft.logits(plain.step(0, TOKENS[1:], hidden))
    assert distance(ours.draft.logits(ours.step(0, TOKENS[1:], hidden)), expected) <= LOGITS_TOLERANCE


def test_copies_of_the_embedding_and_the_head_are_left_alone(tmp_path):
    make_mtp(tmp_path, make_config(V3))
    file = tmp_path / "model.safetensors"
    before = Drafter(tmp_path)
    hidden = before.hidden(TOKENS)[:-1]
    copies = {
        f"model.layers.{NUM_LAYERS}.{name}.weight": torch.ones(97, 96) for name in ("embed_tokens", "shared_head.head")
    }
    save_file({**load_file(file), **copies}, file)
    assert torch.equal(Drafter(tmp_path).step(0, TOKENS[1:], hidden), before.step(0, TOKENS[1:], hidden))


def test_a_checkpoint_without_such_layers_is_refused(tmp_path):
    make_mtp(tmp_path, make_config(V3))
    values = read_config_json(tmp_path)
    config = DeepseekV3Draft.from_hf(values)
    with pytest.raises(ValueError, match=r"no layers to draft with .* num_nextn_predict_layers=0 in config"):
        DeepseekV3Draft.from_hf({**values, "num_nextn_predict_layers": 0})
    file = tmp_path / "model.safetensors"
    tensors, layer = load_file(file), f"model.layers.{NUM_LAYERS}."
    save_file({name: value for name, value in tensors.items() if name != f"{layer}enorm.weight"}, file)
    with pytest.raises(ValueError, match=rf"missing \(1\): {layer}enorm.weight"):
        check_files(config, tmp_path)
    save_file({name: value for name, value in tensors.items() if not name.startswith(layer)}, file)
    with pytest.raises(ValueError, match=rf"no weights to draft with .*no tensor is called {layer}\*"):
        check_files(config, tmp_path)
    with pytest.raises(ValueError, match="not supported for Qwen3ForCausalLM; supported: DeepseekV3ForCausalLM"):
        load_draft_class("Qwen3ForCausalLM")


def test_the_target_has_as_many_layers_as_it_says(tmp_path):
    reference = make_mtp(tmp_path, make_config(V3))
    config = read_model_config(json.loads((tmp_path / "config.json").read_text()))
    assert (config.num_layers, config.draft_layers) == (NUM_LAYERS, 1)
    assert distance(Runner(tmp_path).logits(TOKENS), reference.logits(reference.hidden(TOKENS))) <= CLOSE
