"""The draft layer of Qwen3-Next and Qwen3.5 (``mtp.*``) against Hugging Face's layer, as engines run it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atom_core.checkpoint import Checkpoint, read_config_json
from atom_core.config import AttentionConfig
from atom_core.loading import check_files
from atom_core.models.registry import load_draft_class
from atom_core.quant import read_quantization
from atom_core.standalone import Runner, Step, build_runtime, empty_caches, finalize, plan
from atom_core.weights import load_weights
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8, make_plain
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, logits, make_config, make_model, random_tokens
from tests.unit.core.models.test_hybrid_mxfp4 import EXPERT_SIZES, left_out
from tests.unit.core.models.test_hybrid_mxfp4 import SIZES as MXFP4_SIZES
from tests.unit.core.models.test_qwen3_5 import DENSE, MOE, NEXT, plain_modules, whole_blocks
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4

TOKENS = random_tokens(40)
FULL = 1  # the layer of full attention


def count_key(family):
    return "num_nextn_predict_layers" if family is NEXT else "mtp_num_hidden_layers"


every_family = pytest.mark.parametrize("family", [NEXT, DENSE, MOE], ids=str)


class Reference:
    """Hugging Face's model, and around a layer of full attention of its the norms and the product of a draft."""

    def __init__(self, directory, family, **settings):
        model = self.model = make_model(directory, make_config(family, **settings))
        size = model.config.hidden_size
        self.layer = copy.deepcopy(model.model.layers[FULL])
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = copy.deepcopy(model.model.norm)
            self.norms[name].weight.data.normal_(std=0.2)
        for parameter in self.layer.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.fc.weight.data.normal_(std=0.1)
        own = {f"mtp.layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        own |= {f"mtp.{name}.weight": norm.weight.data for name, norm in self.norms.items()}
        file, config = directory / "model.safetensors", directory / "config.json"
        save_file({**load_file(file), **own, "mtp.fc.weight": self.fc.weight.data}, file, metadata={"format": "pt"})
        config.write_text(json.dumps({**json.loads(config.read_text()), count_key(family): 1}))

    @torch.inference_mode()
    def hidden(self, tokens):
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def draft(self, tokens, hidden):
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = self.norms["pre_fc_norm_embedding"](embedded), self.norms["pre_fc_norm_hidden"](hidden)
        x, count = self.fc(torch.cat(both, -1))[None], len(tokens)
        positions = torch.arange(count)[None]
        unseen = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotations = self.model.model.rotary_emb(x, positions)
        left = self.layer(x, attention_mask=unseen, position_ids=positions, position_embeddings=rotations)
        return self.norms["norm"]((left[0] if isinstance(left, tuple) else left)[0])


class Drafter:
    """A target and its draft, each with a runtime and a cache of its own."""

    def __init__(self, directory):
        self.target = Runner(directory)
        hf = read_config_json(directory)
        draft_class = load_draft_class(hf["architectures"][0])
        config = draft_class.from_hf(hf)
        quant = read_quantization(hf)
        check_files(config, directory, quant=quant)
        runtime = build_runtime(torch.device("cpu"), torch.float32, 512, quant=quant)
        self.draft = draft_class(config, runtime)
        load_weights(self.draft, Checkpoint.open(directory).load(), str(directory))
        finalize(self.draft)
        self.draft.share(self.target.model.model.embed_tokens, self.target.model.lm_head)
        self.caches = empty_caches(self.draft, runtime, 32, 16)

    @torch.inference_mode()
    def step(self, cached, tokens, hidden, depth=0):
        batch = plan(self.draft, self.target.batch([cached], [len(tokens)]))
        positions = torch.arange(cached, cached + len(tokens))
        return self.draft(torch.tensor(tokens), positions, hidden, Step(batch, self.caches), depth)


@pytest.mark.parametrize("family", [DENSE, MOE], ids=str)
@pytest.mark.parametrize("vision", ["model.visual.", "visual."])
def test_a_vision_part_of_the_file_is_not_read(tmp_path, family, vision):
    Reference(tmp_path, family)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), f"{vision}patch_embed.proj.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    assert Drafter(tmp_path).draft.config.num_layers == 1


@every_family
@torch.inference_mode()
def test_drafts_are_those_of_hugging_faces_layer(tmp_path, family):
    reference = Reference(tmp_path, family)
    drafter = Drafter(tmp_path)
    assert [type(layer.mixer) for layer in drafter.draft.config.layers] == [AttentionConfig]
    given = reference.hidden(TOKENS)[:-1]
    expected = reference.draft(TOKENS[1:], given)
    ours = drafter.target.step(drafter.target.caches(1), [0], [TOKENS])[:-1]
    found = drafter.step(0, TOKENS[1:], ours)
    assert distance(drafter.draft.logits(found), reference.model.lm_head(expected)) <= LOGITS_TOLERANCE
    # One layer drafts several tokens on its own hidden states.
    token = int(reference.model.lm_head(expected[-1]).argmax())
    further = reference.draft([*TOKENS[1:], token], torch.cat([given, expected[-1:]]))[-1:]
    found = drafter.step(len(TOKENS) - 1, [token], found[-1:], depth=1)
    assert distance(drafter.draft.logits(found), reference.model.lm_head(further)) <= LOGITS_TOLERANCE


#: What published checkpoints in FP8 leave as it is.
PLAIN_DRAFT = ("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate")


def save_experts_one_by_one(folder):
    """As checkpoints in FP8 and MXFP4 have those of a draft; Hugging Face's layer has one tensor a matrix."""
    path, found = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        layer, is_stack, matrix = name.partition(".experts.")
        if name.startswith("mtp.") and is_stack:
            names = ("down_proj",) if matrix == "down_proj" else ("gate_proj", "up_proj")
            for expert, rows in enumerate(tensor):
                for part, of_name in zip(rows.chunk(len(names)), names, strict=True):
                    found[f"{layer}.experts.{expert}.{of_name}.weight"] = part.clone()
        else:
            found[name] = tensor
    save_file(found, path, metadata={"format": "pt"})


def draft_logits(folder, hidden):
    """A draft's alone, behind given hidden states."""
    drafter = Drafter(folder)
    return drafter, drafter.draft.logits(drafter.step(0, TOKENS[1:], hidden))


@every_family
@pytest.mark.parametrize("form", [*BLOCK_FORMATS[:2], FORMATS[2], FORMATS[5]], ids=str)
def test_a_draft_in_fp8_is_what_its_numbers_stand_for(tmp_path, family, form):
    reference = Reference(tmp_path / "source", family, **whole_blocks(family))
    save_experts_one_by_one(tmp_path / "source")
    key = "ignore" if "ignore" in form.config else "modules_to_not_convert"
    config = {**form.config, key: [*form.config.get(key, []), *plain_modules(), *PLAIN_DRAFT]}
    make_fp8(tmp_path / "source", tmp_path / "fp8", replace(form, config=config))
    make_plain(tmp_path / "fp8", tmp_path / "plain")
    given = reference.hidden(TOKENS)[:-1]
    quantized, found = draft_logits(tmp_path / "fp8", given)
    _, expected = draft_logits(tmp_path / "plain", given)
    layer = quantized.draft.mtp.layers[0]
    assert layer.self_attn.qkv_proj.weight.dtype == layer.self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    assert quantized.draft.mtp.fc.weight.dtype == torch.float32
    # One layer: what activations of three bits change of it.
    assert 1e-4 < (found - expected).norm() / expected.norm() <= 0.1


@every_family
def test_a_draft_in_mxfp4_is_what_its_numbers_stand_for(tmp_path, family):
    sizes = MXFP4_SIZES if family is DENSE else {**MXFP4_SIZES, **EXPERT_SIZES}
    reference = Reference(tmp_path / "source", family, **sizes)
    save_experts_one_by_one(tmp_path / "source")
    config = quark_mxfp4(rounded_inputs=False, exclude=[*left_out(), *PLAIN_DRAFT])
    make_quark(tmp_path / "source", tmp_path / "packed", config)
    make_plain_quark(tmp_path / "packed", tmp_path / "plain")
    given = reference.hidden(TOKENS)[:-1]
    quantized, found = draft_logits(tmp_path / "packed", given)
    _, expected = draft_logits(tmp_path / "plain", given)
    assert quantized.draft.mtp.layers[0].self_attn.qkv_proj.weight.dtype == torch.uint8
    assert distance(found, expected) <= LOGITS_TOLERANCE


@every_family
def test_the_model_itself_leaves_its_draft_unread(tmp_path, family):
    reference = Reference(tmp_path, family)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(reference.model, TOKENS)) <= LOGITS_TOLERANCE


@every_family
def test_what_has_no_draft_is_refused_by_name(tmp_path, family):
    make_model(tmp_path, make_config(family))
    path = tmp_path / "config.json"
    draft_class = load_draft_class(family.architecture)
    values = json.loads(path.read_text())
    with pytest.raises(ValueError, match=rf"no layers to draft with .*{count_key(family)}=0"):
        draft_class.from_hf({**values, count_key(family): 0})
    # Qwen3-Next's published configurations do not count it.
    for said in ({}, {count_key(family): 1}):
        config = draft_class.from_hf({**values, **said})
        assert config.num_layers == 1
        with pytest.raises(ValueError, match=rf"no tensor is called mtp\.\*, and 1 such .*{count_key(family)}"):
            check_files(config, tmp_path)


def test_a_draft_with_an_embedding_of_its_own_is_refused():
    values = {**make_config(DENSE).to_dict(), "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings=true is not supported"):
        load_draft_class(DENSE.architecture).from_hf(values)
