"""FP8 models as on gfx942 and gfx950, on a CPU: norms and activations quantise what products read, in one call each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from atom_core.fusion.linear import Stream
from atom_core.kernels.select import Target
from atom_core.standalone import Runner
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.hugging_face import Family, distance, make_config, make_model, random_tokens
from tests.unit.core.test_aiter_models import MLA, REFERENCES, TESTS, answers, at, mutated, questions

DYNAMIC, STATIC, BLOCKS = FORMATS[0], FORMATS[1], BLOCK_FORMATS[0]
#: Each op by itself.
SEPARATE = {"fp8_rms_norm": "separate", "fp8_gated_activation": "separate"}
LAYERS = 5
every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)


@pytest.fixture(params=[DYNAMIC, BLOCKS], ids=str)
def form(request):
    return request.param


def make(folder: Path, form) -> Path:
    make_fp8(TESTS / "checkpoints" / "qwen3", folder / "fp8", form)
    return folder / "fp8"


def runner(folder: Path, arch: str, **kernels: str) -> Runner:
    return Runner(
        folder,
        dtype=torch.bfloat16,
        max_model_len=256,
        target=Target("rocm", arch),
        kernels={**REFERENCES, **kernels},
    )


def counted(it: Runner) -> Counter[str]:
    """What one step calls, after the first."""
    tokens = questions("qwen3")[0][0]
    it.logits(tokens)
    calls().clear()
    it.logits(tokens)
    return Counter(call.path.rpartition(".")[2] for call in calls())


@every_gpu
def test_it_answers_right_in_fewer_calls(tmp_path, form, arch):
    folder = make(tmp_path, form)
    with fake_aiter(arch):
        it = runner(folder, arch)
        assert answers(it, "qwen3")
        found = counted(it)
        chosen = {choice.op: choice.implementation for choice in it.runtime.kernels.choices()}
        separate = counted(runner(folder, arch, **SEPARATE))
    assert (chosen["fp8_rms_norm"], chosen["fp8_gated_activation"]) == ("aiter", "aiter")
    # Attention, the network, and the model's last norm, which nothing quantises behind.
    assert sum(found[name] for name in ("rms_norm", "rmsnorm2d_fwd_with_add")) == 1
    blocks = form is BLOCKS
    assert found["fused_qk_rmsnorm_group_quant" if blocks else "fused_qk_rmsnorm_per_token_quant"] == 2 * LAYERS
    assert found["silu_and_mul_quant" if blocks else "fused_clamp_act_mul"] == LAYERS
    assert found["silu_and_mul"] == 0
    # What attention answers is the one input that nothing in front quantises.
    assert found["per_group_quant_hip" if blocks else "dynamic_per_token_scaled_quant"] == LAYERS
    assert sum(separate.values()) - sum(found.values()) == 3 * LAYERS


@every_gpu
def test_it_is_near_what_separate_calls_answer(tmp_path, form, arch):
    folder = make(tmp_path, form)
    tokens = questions("qwen3")[0][0]
    with fake_aiter(arch):
        found, expected = runner(folder, arch).logits(tokens), runner(folder, arch, **SEPARATE).logits(tokens)
    # Numbers that are not rounded to 16 bits before they are quantised fall to another one of FP8 here and there.
    assert 0 < distance(found, expected) <= 0.1


@every_gpu
@pytest.mark.usefixtures("exact_fp8_casts")
def test_our_norm_quantises_for_aiters_products(tmp_path, form, arch):
    """As for norms of 1 + w, which aiter does not have."""
    folder = make(tmp_path, form)
    tokens = questions("qwen3")[0][0]
    ours = {"rms_norm": "triton", "fp8_rms_norm": "triton"}
    with fake_aiter(arch):
        it = runner(folder, arch, **ours)
        found, expected = it.logits(tokens), runner(folder, arch, **SEPARATE).logits(tokens)
        chosen = {choice.op: choice.implementation for choice in it.runtime.kernels.choices()}
    assert chosen["fp8_rms_norm"] == "triton"
    assert distance(found, expected) <= 0.1


def test_a_scale_from_the_checkpoint_is_taken_by_itself(tmp_path):
    folder = make(tmp_path, STATIC)
    with fake_aiter("gfx942"):
        it = runner(folder, "gfx942")
        found = counted(it)
        assert not {"fp8_rms_norm", "fp8_gated_activation"} & {it.op for it in it.runtime.kernels.choices()}
    assert found["static_per_tensor_quant"] == 4 * LAYERS


GROUPS = "aiter.fused_qk_rmsnorm_group_quant"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (GROUPS, at(2, lambda x: x.roll(1, 1))),
        (GROUPS, at(3, lambda weight: -weight)),
        ("aiter.silu_and_mul_quant", at(1, lambda x: x.roll(x.shape[1] // 2, 1))),
        ("aiter.gemm_a8w8_blockscale_bpreshuffle", at(2, lambda scales: scales.t().contiguous().view(scales.shape))),
    ],
    ids=["the input", "the weight", "gate and up", "order of scales"],
)
def test_what_is_told_wrongly_shows_in_the_answers(tmp_path, path, change):
    folder = make(tmp_path, BLOCKS)
    with fake_aiter("gfx942"):
        it = runner(folder, "gfx942")
        mutated(path, change)
        assert not answers(it, "qwen3")


@every_gpu
def test_compressed_queries_and_the_shared_expert(tmp_path, arch):
    sizes = {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
    more = {"head_dim": 64, "v_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
    others = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    family = Family("DeepseekV3ForCausalLM", "deepseek_v3", {**sizes, **more, **experts, **others})
    make_model(tmp_path / "source", make_config(family, hidden_size=256, intermediate_size=384))
    make_fp8(tmp_path / "source", tmp_path / "fp8", BLOCKS)
    # A shared expert that is among the routed ones has no network of its own.
    kernels = {**MLA, "moe_routing": "reference", "shared_experts": "separate"}
    with fake_aiter(arch):
        it = runner(tmp_path / "fp8", arch, **kernels)
        assert bool(torch.isfinite(it.logits(random_tokens(24))).all())
        calls().clear()
        it.logits(random_tokens(24))
        called = Counter(call.path.rpartition(".")[2] for call in calls())
        separate = runner(tmp_path / "fp8", arch, **kernels, **SEPARATE)
        results = [list(results_of(runner.model.model.fused.layers)) for runner in (it, separate)]
    # In front of attention and of its queries, and of the first layer's network: a router reads 16 bits.
    assert called["fused_qk_rmsnorm_group_quant"] == 2 * 3 + 1
    assert called["silu_and_mul_quant"] == 3
    # A few in a hundred numbers fall to the next one of FP8, up to an eighth away, in front of one or two products.
    for mine, theirs in zip(*results, strict=True):
        assert 0 < (mine.float() - theirs.float()).norm() <= 0.05 * theirs.float().norm()


def results_of(layers):
    """What single layers of DeepSeek's answer to the same numbers."""
    last, residual = (torch.randn(24, 256, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    (attention, dense), (_, mixture) = layers[:2]
    with torch.inference_mode():
        down, _ = attention.down(Stream(last, residual))
        yield down
        # Queries are some of the columns of what is one product with the latents.
        wide = torch.cat([residual, last], 1)
        yield attention.queries(Stream(None, wide[:, :256]))[0]
        yield dense(Stream(last, residual)).last
        # No gate weighs DeepSeek's shared expert: the router's logits are not read.
        yield mixture.shared.partial(last, torch.zeros_like(last), last[:, :0])


@every_gpu
def test_it_is_compiled_in_one_graph(tmp_path, form, arch):
    folder = make(tmp_path, form)
    with fake_aiter(arch):
        _, layer = runner(folder, arch).model.model.fused.layers[0]

        def body(x, residual):
            last, stream, _ = layer(Stream(x, residual))
            return last, stream

        x, residual = (torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16() for _ in range(2))
        with torch.inference_mode():
            expected = body(x, residual)
            found = torch.compile(body, fullgraph=True, dynamic=True, backend="aot_eager")(x, residual)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
