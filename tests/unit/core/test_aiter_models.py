"""Whole models as on gfx942 and gfx950, on a CPU: aiter's kernels by the fake, the others by our references.

Triton's interpreter would take a minute for each: it runs in two tests, over plain pages and shuffled ones.

The trained checkpoints must answer held-out questions, and with the tokens of the references. What aiter is told
wrongly must show: each mutation of a call turns the answers.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from atom_core.checkpoint import Checkpoint
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.select import Target
from atom_core.standalone import Runner, finalize
from atom_core.weights import load_weights
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.unit.core.hugging_face import FAMILIES, Family, distance, held_out, make_config, make_model, random_tokens
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, make_quark, quark_mxfp4
from tests.unit.core.wide_checkpoints import widen

TESTS = Path(__file__).parents[2]
CHECKPOINTS = ("qwen3", "llama", "qwen2", "mistral")
#: And what of aiter's routes and runs their experts: shared experts among them are not routed by aiter, and neither are
#: DeepSeek V3's, of two in a group.
APART = {"shared_experts": "separate"}
ROUTED = {"moe_routing": "reference"}
MIXTURES = [
    ("qwen3_moe", {}, {"topk_softmax", "fused_moe"}),
    ("glm4_moe", APART, {"biased_grouped_topk_hip", "fused_moe"}),
    ("glm4_moe", ROUTED, {"fused_moe"}),
    ("deepseek_v2", APART, {"topk_softmax", "fused_moe"}),
    ("deepseek_v2", ROUTED, {"fused_moe"}),
    ("deepseek_v3", ROUTED, {"fused_moe"}),
    ("deepseek_v3", APART | ROUTED, {"fused_moe"}),
]
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
)
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)
REFERENCES = {"embedding": "reference", "qk_norm_rope_cache": "reference"}
MLA = dict.fromkeys(("head_linear", "mla_attention", "mla_cache", "mla_prefill"), "reference")
GATED_DELTA_CALLS = (
    "build_gated_delta_rule_prefill_metadata",
    "causal_conv1d_split_qkv_triton_fn",
    "chunk_gated_delta_rule_opt_vk",
)
SHUFFLED = {**REFERENCES, "attention": "aiter_shuffled"}


@cache
def questions(family: str, longest: bool = False) -> tuple[list[list[int]], list[list[int]]]:
    """The shortest or longest held-out prompts of two kinds, and the tokens of their only right answers."""
    tokenizer = AutoTokenizer.from_pretrained(str(TESTS / "checkpoints" / family))
    rows = sorted(held_out(), key=lambda row: len(row["prompt"]), reverse=longest)
    first = rows[0]
    other = next(row for row in rows if row["kind"] != first["kind"])
    prompts = [tokenizer(row["prompt"]).input_ids for row in (first, other)]
    answers = [tokenizer(f" {row['answer']}\n").input_ids for row in (first, other)]
    return prompts, answers


def runner(family: str, arch: str, kernels=REFERENCES, dtype=torch.bfloat16, max_model_len=256, **settings) -> Runner:
    return Runner(
        TESTS / "checkpoints" / family,
        dtype=dtype,
        max_model_len=max_model_len,
        target=Target("rocm", arch),
        kernels=kernels,
        **settings,
    )


def answers(it: Runner, family: str, longest: bool = False) -> bool:
    """Whether both answers are right."""
    prompts, right = questions(family, longest)
    found = it.generate(prompts, max(len(tokens) for tokens in right))
    return [tokens[: len(wanted)] for tokens, wanted in zip(found, right, strict=True)] == right


def called() -> set[str]:
    return {call.path.rpartition(".")[2] for call in calls()}


@every_gpu
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_it_answers_as_the_references_do(family, arch):
    with fake_aiter(arch):
        it = runner(family, arch)
        assert answers(it, family)
        assert called() >= {"rms_norm", "rmsnorm2d_fwd_with_add", "silu_and_mul", "gemm_a16w16", "unified_attention"}


@every_gpu
@pytest.mark.parametrize(
    ("family", "forced", "calls"), MIXTURES, ids=[f"{family}{forced or ''}" for family, forced, _ in MIXTURES]
)
def test_mixtures_answer_as_the_references_do(family, forced, calls, arch):
    with fake_aiter(arch):
        it = runner(family, arch, kernels=REFERENCES | MLA | forced)
        assert answers(it, family)
        assert called() >= calls | {"rms_norm", "shuffle_weight"}
        chosen = {choice.op: choice.implementation for choice in it.runtime.kernels.choices()}
        assert chosen["experts"] == "aiter"
        shared = None if family == "qwen3_moe" else forced.get("shared_experts", "routed")
        assert chosen.get("shared_experts") == shared


@every_gpu
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_shared_experts_are_among_the_routed_ones(family, arch):
    with fake_aiter(arch):
        it = runner(family, arch, kernels=None)
    chosen = {choice.op: choice for choice in it.runtime.kernels.choices()}
    assert (chosen["shared_experts"].implementation, chosen["moe_routing"].implementation) == ("routed", "triton")
    assert ("aiter", "aiter's routing writes the experts that it chooses alone, and none that all tokens share.") in (
        chosen["moe_routing"].passed_over
    )


@pytest.fixture
def gpt_oss(monkeypatch):
    """Runs it, its experts by our reference: aiter has none with biases, and Triton's interpreter is too slow."""
    build = "atom_core.kernels.experts.triton_kernel.TritonExperts"
    monkeypatch.setattr(build, lambda spec, overlap: ReferenceExperts(spec))
    return partial(runner, "gpt_oss", kernels=REFERENCES | ROUTED, max_model_len=512)


@every_gpu
def test_sinks_and_every_other_layers_window_answer_as_the_references_do(gpt_oss, arch):
    with fake_aiter(arch):
        it = gpt_oss(arch)
        assert answers(it, "gpt_oss", longest=True)
        assert called() >= {"rms_norm", "gemm_a16w16", "unified_attention"}
        chosen = {choice.op: choice for choice in it.runtime.kernels.choices()}
        assert chosen["experts"].implementation == "triton"
        assert dict(chosen["experts"].passed_over)["aiter"] == "aiter's experts add biases in MXFP4 alone."


@every_gpu
def test_experts_in_fp8(tmp_path, arch):
    make_model(tmp_path, make_config(QWEN3_MOE, hidden_size=256, head_dim=64))
    tokens = random_tokens(24)
    expected = Runner(tmp_path, dtype=torch.bfloat16, quantization="fp8").logits(tokens)
    with fake_aiter(arch):
        it = Runner(tmp_path, dtype=torch.bfloat16, quantization="fp8", target=Target("rocm", arch), kernels=REFERENCES)
        found = it.logits(tokens)
        assert called() >= {"fused_moe"}
        assert "fp8_experts" in {it.op for it in it.runtime.kernels.choices() if it.implementation == "aiter"}
    # As in models/test_fp8_experts.py: a token whose router holds two experts for nearly equal may go to the other.
    error = (found.float() - expected.float()).abs().amax(-1) / (expected.max() - expected.min())
    assert error.median() <= 0.15


def in_mxfp4(family: str, folder: Path) -> Runner:
    """A trained checkpoint with weights and activations in MXFP4, on gfx950, in sizes that aiter's kernels take."""
    widen(TESTS / "checkpoints" / family, folder / "wide", 256)
    make_quark(folder / "wide", folder / "packed")
    settings = {"dtype": torch.bfloat16, "max_model_len": 256, "kernels": REFERENCES}
    return Runner(folder / "packed", target=Target("rocm", "gfx950"), **settings)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_mxfp4_is_multiplied_as_such_on_gfx950(tmp_path, family):
    used = {"mxfp4_linear", "mxfp4_experts"} if family == "qwen3_moe" else {"mxfp4_linear"}
    with fake_aiter("gfx950"):
        it = in_mxfp4(family, tmp_path)
        assert answers(it, family)
        assert called() >= {"gemm_a4w4", "quant_mxfp4_hip"} | ({"fused_moe"} if family == "qwen3_moe" else set())
        chosen = {choice.op: choice.implementation for choice in it.runtime.kernels.choices()}
        assert {op: chosen.get(op) for op in used} == dict.fromkeys(used, "aiter")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_in_mxfp4_that_are_loaded_anew_are_put_in_order_anew(tmp_path, family):
    tokens = random_tokens(24)
    with fake_aiter("gfx950"):
        it = in_mxfp4(family, tmp_path)
        expected = it.logits(tokens)
        load_weights(it.model, Checkpoint.open(tmp_path / "packed").load(), "packed")
        assert not torch.equal(it.logits(tokens), expected)
        finalize(it.model)
        assert torch.equal(it.logits(tokens), expected)


def rolled(dim: int):
    """Bytes one further along ``dim``."""

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        return marked(tensor.view(torch.uint8).roll(1, dim).view(tensor.dtype))

    return turn


@pytest.mark.parametrize(
    ("family", "path", "index", "dim"),
    [
        ("qwen3", "aiter.gemm_a4w4", 0, 1),
        ("qwen3", "aiter.gemm_a4w4", 1, 0),
        ("qwen3", "aiter.gemm_a4w4", 2, 1),
        ("qwen3", "aiter.gemm_a4w4", 3, 1),
        ("qwen3_moe", "aiter.fused_moe.fused_moe", 1, 1),
        ("qwen3_moe", "aiter.fused_moe.fused_moe", 2, 1),
    ],
    ids=["activations", "rows", "scales of activations", "scales", "gates and ups", "downs"],
)
def test_mxfp4_in_another_order_shows_in_the_answers(tmp_path, family, path, index, dim):
    with fake_aiter("gfx950"):
        it = in_mxfp4(family, tmp_path)
        __import__(path.rpartition(".")[0])
        mutated(path, at(index, rolled(dim)))
        assert not answers(it, family)


@pytest.mark.parametrize("model", ["weights alone", "GPT-OSS"])
def test_activations_that_stay_in_16_bits_are_multiplied_by_triton_on_gfx950(tmp_path, model):
    if model == "GPT-OSS":
        family = Family("GptOssForCausalLM", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2})
    else:
        family = QWEN3_MOE
    make_model(tmp_path / "source", make_config(family, hidden_size=256, intermediate_size=256, head_dim=64))
    if model == "GPT-OSS":
        make_gpt_oss(tmp_path / "source", tmp_path / "packed")
    else:
        make_quark(tmp_path / "source", tmp_path / "packed", quark_mxfp4(rounded_inputs=False))
    with fake_aiter("gfx950"):
        it = Runner(tmp_path / "packed", dtype=torch.bfloat16, target=Target("rocm", "gfx950"))
        chosen = {choice.op: choice for choice in it.runtime.kernels.choices()}
    packed = {op for op in chosen if op.startswith("mxfp4")}
    assert packed == {"mxfp4_experts"} if model == "GPT-OSS" else {"mxfp4_experts", "mxfp4_linear"}
    for op in packed:
        assert chosen[op].implementation == "triton"
        assert "rounded" in dict(chosen[op].passed_over)["aiter"]


@every_gpu
def test_prompts_of_deepseeks_heads_go_through_flash_attention(tmp_path, arch):
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    others = {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    family = Family("DeepseekV2ForCausalLM", "deepseek_v2", {**sizes, **others, "n_shared_experts": 1})
    make_model(tmp_path, make_config(family, hidden_size=128))
    tokens = random_tokens(24)
    expected = Runner(tmp_path, dtype=torch.bfloat16).logits(tokens)
    with fake_aiter(arch):
        kernels = {op: name for op, name in (REFERENCES | MLA | ROUTED).items() if op != "mla_prefill"}
        it = Runner(tmp_path, dtype=torch.bfloat16, target=Target("rocm", arch), kernels=kernels)
        found = it.logits(tokens)
        assert called() >= {"flash_attn_varlen_func", "fused_moe"}
    assert distance(found, expected) <= 0.1  # 16-bit roundings over layers, as `atom-plugin check` allows


@every_gpu
@pytest.mark.parametrize(("cache", "heads"), [("auto", 16), ("auto", 8), ("fp8", 16)])
def test_latents_of_deepseeks_sizes_decode_in_assembly(tmp_path, arch, cache, heads):
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16}
    # Without experts, between which roundings would decide.
    others = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 32}
    others |= {"first_k_dense_replace": 99}
    family = Family("DeepseekV2ForCausalLM", "deepseek_v2", {**sizes, **others})
    make_model(tmp_path, make_config(family, hidden_size=128))
    tokens = random_tokens(24)
    settings = {"dtype": torch.bfloat16} | ({"cache_dtype": FP8[arch]} if cache == "fp8" else {})
    expected = Runner(tmp_path, **settings).logits(tokens)
    with fake_aiter(arch):
        kernels = {op: name for op, name in (REFERENCES | MLA).items() if op != "mla_attention"}
        it = Runner(tmp_path, target=Target("rocm", arch), kernels=kernels, **settings)
        caches = it.caches(1)
        with torch.inference_mode():
            found = [it.model.logits(it.step(caches, [0], [tokens[:18]]))]
            # One token at a time, and several, as behind drafts.
            for begin, end in ((18, 19), (19, 20), (20, 22), (22, 24)):
                found.append(it.model.logits(it.step(caches, [begin], [tokens[begin:end]])))
        made = [call.path.rpartition(".")[2] for call in calls()]
        layers = it.model.config.num_layers
        assert (made.count("mla_decode_fwd"), made.count("get_mla_metadata_v1")) == (4 * layers, 4)
    assert distance(torch.cat(found), expected) <= 0.1  # 16-bit roundings over layers, as `atom-plugin check` allows


@every_gpu
def test_a_hybrids_prompts_go_through_aiters_chunks(tmp_path, arch):
    linear = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2}
    types = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
    sizes = {**linear, **types, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "head_dim": 32}
    make_model(
        tmp_path,
        make_config(Family("Qwen3_5ForCausalLM", "qwen3_5_text", sizes), hidden_size=128, max_position_embeddings=96),
    )
    tokens = random_tokens(90)
    expected = Runner(tmp_path, dtype=torch.bfloat16).logits(tokens)
    plain = dict.fromkeys(("rms_norm", "output_gate"), "reference")
    kernels = REFERENCES | plain | {"decode_attention": "separate", "gated_delta_net": "aiter"}
    with fake_aiter(arch):
        it = Runner(tmp_path, dtype=torch.bfloat16, target=Target("rocm", arch), kernels=kernels)
        caches = it.caches(1)
        with torch.inference_mode():
            steps = (0, 70, 72, 89, 90)
            found = [it.model.logits(it.step(caches, [begin], [tokens[begin:end]])) for begin, end in pairwise(steps)]
        made = [call.path.rpartition(".")[2] for call in calls()]
        counts = [made.count(name) for name in GATED_DELTA_CALLS]
    assert counts == [4, 4 * 2, 4 * 2]
    assert distance(torch.cat(found), expected) <= 0.1  # 16-bit roundings over layers, as `atom-plugin check` allows


@every_gpu
def test_what_is_chosen_where_nothing_is_forced(arch):
    with fake_aiter(arch):
        kernels = runner("qwen3", arch, kernels=None).runtime.kernels
    assert {choice.op: choice.implementation for choice in kernels.choices()} == {
        "embedding": "triton",
        "rms_norm": "aiter",
        "linear": "aiter",
        "normed_linear": "separate",
        "qk_norm_rope_cache": "triton",
        "attention": "aiter",
        "decode_attention": "triton",
        "gated_activation": "aiter",
    }


@every_gpu
@pytest.mark.parametrize(
    ("forced", "reason"),
    [
        ({"attention": "aiter_shuffled"}, "It fuses Triton kernels, and attention is aiter_shuffled here."),
        ({"qk_norm_rope_cache": "aiter"}, "It fuses Triton kernels, and qk_norm_rope_cache is aiter here."),
    ],
    ids=["the cache in aiter's order", "the cache filled by aiter"],
)
def test_what_is_asked_for_of_aiter_decodes_by_aiter(forced, reason, arch):
    with fake_aiter(arch):
        kernels = runner("qwen3", arch, kernels=forced).runtime.kernels
    (choice,) = (it for it in kernels.choices() if it.op == "decode_attention")
    assert (choice.implementation, choice.passed_over) == ("separate", (("triton", reason),))


@pytest.mark.parametrize("forced", [{}, {"decode_attention": "separate"}], ids=["by default", "separately"])
def test_plain_pages_that_aiter_has_the_prompts_of_are_decoded_in_triton(forced):
    with fake_aiter("gfx942"):
        it = runner("qwen3", "gfx942", kernels={"embedding": "reference", **forced}, dtype=torch.float16)
        (prompt, other), (right, other_right) = questions("qwen3")
        assert it.generate([prompt, other], 3) == [right[:3], other_right[:3]]
        prompts = sum(call.path.endswith(".unified_attention") for call in calls())
        assert prompts == (3 if forced else 1) * it.config.num_layers


@every_gpu
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_over_shuffled_pages(family, arch):
    with fake_aiter(arch):
        assert answers(runner(family, arch, kernels=SHUFFLED), family)
        assert ("pa_decode_gluon" in called()) == (family == "qwen3")


@every_gpu
def test_the_cache_is_filled_by_aiter(arch):
    with fake_aiter(arch):
        kernels = {**SHUFFLED, "qk_norm_rope_cache": "aiter"}
        assert answers(runner("qwen3", arch, kernels=kernels), "qwen3")
        assert "fused_qk_norm_rope_cache_pts_quant_shuffle" in called()


def test_tritons_writer_fills_the_pages_that_aiters_kernels_read():
    with fake_aiter("gfx942"):
        it = runner("qwen3", "gfx942", kernels={"attention": "aiter_shuffled"})
        (prompt, _), (right, _) = questions("qwen3")
        assert it.generate([prompt], 2) == [right[:2]]
        assert "pa_decode_gluon" in called()


@every_gpu
def test_weights_and_cache_in_fp8(arch):
    with fake_aiter(arch):
        it = runner("qwen3", arch, quantization="fp8", cache_dtype=FP8[arch], kernels=SHUFFLED)
        assert answers(it, "qwen3")
        assert called() >= {"gemm_a8w8_bpreshuffle", "dynamic_per_token_scaled_quant", "shuffle_weight"}


@every_gpu
def test_heads_of_128_decode_in_assembly(tmp_path, arch):
    make_model(tmp_path, make_config(FAMILIES[3], head_dim=128))
    tokens = random_tokens(24)
    expected = Runner(tmp_path, dtype=torch.bfloat16).logits(tokens)
    with fake_aiter(arch):
        it = Runner(tmp_path, dtype=torch.bfloat16, target=Target("rocm", arch), kernels=SHUFFLED)
        caches = it.caches(1)
        with torch.inference_mode():
            found = [it.model.logits(it.step(caches, [0], [tokens[:20]]))]
            found += [it.model.logits(it.step(caches, [at], [tokens[at : at + 1]])) for at in range(20, 24)]
        assert called() >= {"mha_batch_prefill_func", "pa_fwd_asm"}
    assert distance(torch.cat(found), expected) <= 0.1  # 16-bit roundings over layers, as `atom-plugin check` allows


@every_gpu
@pytest.mark.parametrize("page_size", [256, 1024])
def test_large_pages_in_fp8_are_shared_out_once_a_step(tmp_path, arch, page_size):
    make_model(tmp_path, make_config(FAMILIES[3], head_dim=128, max_position_embeddings=2048))
    tokens = random_tokens(1040)
    cached = {"dtype": torch.bfloat16, "cache_dtype": FP8[arch]}
    expected = Runner(tmp_path, **cached).logits(tokens)[-8:]
    with fake_aiter(arch):
        it = Runner(
            tmp_path,
            **cached,
            target=Target("rocm", arch),
            kernels={**SHUFFLED, "embedding": "reference"},
            page_size=page_size,
        )
        caches = it.caches(1)
        with torch.inference_mode():
            it.step(caches, [0], [tokens[:1032]])
            calls().clear()
            found = [it.model.logits(it.step(caches, [at], [tokens[at : at + 1]])) for at in range(1032, 1040)]
        made = [call.path.rpartition(".")[2] for call in calls()]
    assert (made.count("get_pa_metadata_v1"), made.count("pa_persistent_fwd")) == (8, 8 * it.config.num_layers)
    assert distance(torch.cat(found), expected) <= 0.1  # 16-bit roundings over layers, as `atom-plugin check` allows


def mutated(path, change, **named):
    """Have the fake's function called with some of its arguments changed, and those that are ``named``."""
    module, _, name = path.rpartition(".")
    inner = getattr(sys.modules[module], name)

    def call(*args, **kwargs):
        return inner(*change(list(args)), **kwargs | named)

    setattr(sys.modules[module], name, call)


def at(index, value):
    def change(args):
        args[index] = value(args[index])
        return args

    return change


def marked(weight):
    weight.is_shuffled = True
    return weight


MOE = "aiter.fused_moe.fused_moe"
UNIFIED = "aiter.ops.triton.attention.unified_attention.unified_attention"


@pytest.mark.parametrize(
    ("family", "path", "change"),
    [
        ("qwen3", UNIFIED, at(8, lambda scale: scale * 0.2)),
        ("mistral", UNIFIED, at(10, lambda window: (-1, -1))),
        ("mistral", UNIFIED, at(10, lambda window: (window[0] // 4, 0))),
        ("qwen3", UNIFIED, at(2, lambda value: value.roll(1, 1))),
        ("qwen3", "aiter.rms_norm", at(1, lambda weight: -weight)),
        ("qwen2", "aiter.tuned_gemm.gemm_a16w16", lambda args: [args[0], args[1].roll(1, 0)]),
        ("qwen3_moe", MOE, at(4, lambda experts: (experts + 1) % 8)),
        ("qwen3_moe", MOE, at(3, lambda weights: weights.flip(-1))),
        ("qwen3_moe", MOE, at(1, lambda weight: marked(weight.roll(1, 1)))),
    ],
    ids=[
        *("scale", "no window", "a shorter window", "layout", "norm weight", "rows of a product"),
        *("other experts", "their weights", "gates and ups of others"),
    ],
)
def test_an_argument_that_is_wrong_shows_in_the_answers(family, path, change):
    with fake_aiter("gfx942"):
        it = runner(family, "gfx942")
        __import__(path.rpartition(".")[0])
        mutated(path, change)
        assert not answers(it, family)


@pytest.mark.parametrize("lost", ["sinks", "windows"])
def test_sinks_or_windows_that_are_lost_show_in_the_answers(gpt_oss, lost):
    with fake_aiter("gfx942"):
        it = gpt_oss("gfx942")
        __import__(UNIFIED.rpartition(".")[0])
        if lost == "sinks":
            mutated(UNIFIED, list, sinks=None)
        else:
            mutated(UNIFIED, at(10, lambda window: (-1, -1)))
        # Of short prompts some are answered all the same.
        assert not answers(it, "gpt_oss", longest=True)


@pytest.mark.parametrize("part", ["values in another order", "keys in another order", "negative slots", "a scale"])
def test_shuffled_pages_that_are_read_or_written_wrongly_show(part):
    with fake_aiter("gfx942"):
        filled = "aiter.fused_qk_norm_rope_cache_pts_quant_shuffle"
        it = runner("qwen3", "gfx942", kernels={**SHUFFLED, "qk_norm_rope_cache": "aiter"})
        if part == "negative slots":
            mutated(filled, at(15, lambda slots: torch.where(torch.arange(len(slots)) % 5 == 3, -1, slots)))
        elif part == "a scale":
            mutated("aiter.pa_decode_gluon", at(6, lambda scale: scale * 0.1))
        else:
            index = 14 if part.startswith("values") else 13
            # The bytes of each head as the plain order has them.
            mutated(filled, at(index, lambda side: side.transpose(2, 3)))
        try:
            right = answers(it, "qwen3")
        except (RuntimeError, IndexError, AssertionError):
            right = False  # an order that does not fit is found by its shape
        assert not right
