"""What `atom-plugin bench step` works out without a GPU: the model, the batch, the floor, the report, the errors."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Step, build_runtime, empty_caches, plan, random_model
from atom_plugin.bench import batches, step
from atom_plugin.bench.batches import MAX_MODEL_LEN, PAGE_SIZE, step_batch
from atom_plugin.bench.device import Ceiling, Timing, datasheet_bandwidth
from atom_plugin.bench.floor import Request, Traffic, cache_bytes, decodes, operations, step_traffic
from atom_plugin.bench.memory import cache_memory, most, why_too_large
from atom_plugin.bench.models import CONFIGS, cut, read_config
from atom_plugin.bench.profile import Launch, by_name
from atom_plugin.bench.step import StepOptions, StepResult
from tests.unit.plugin.installed import assert_both_refuse, run_python

TINY = {
    **CONFIGS["qwen3-0.6b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
BF16 = torch.bfloat16
#: Of a layer of TINY: qkv, o, gate and up, down, two norms and those of q and k.
LAYER = 64 * 128 + 64 * 64 + 64 * 192 + 96 * 64 + 2 * 64 + 2 * 16


@pytest.mark.parametrize("name", CONFIGS)
def test_special_tokens_are_in_the_vocabulary(name):
    # vLLM writes to the logits of tokens that must not come yet, whether they exist or not.
    config = CONFIGS[name]
    assert max(config.get("bos_token_id", 0), config["eos_token_id"]) < config["vocab_size"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_known_by_name_is_one_of_ours(name):
    assert read_model_config(read_config(name)).num_layers == CONFIGS[name]["num_hidden_layers"]


def test_a_model_is_a_folder_a_file_or_a_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert read_config(str(tmp_path)) == read_config(str(path)) == TINY
    with pytest.raises(ValueError, match=r"'qwen9' is neither a folder, nor a file, nor one .*: qwen3-0\.6b, "):
        read_config("qwen9")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"model\.json (is not valid JSON|holds a list)"):
        read_config(str(path))


def test_a_model_is_cut_to_its_first_layers():
    types = ["full_attention", "sliding_attention"]
    assert cut({**TINY, "layer_types": types}, 1)["layer_types"] == types[:1]
    assert cut({"text_config": TINY}, 1) == {"text_config": cut(TINY, 1)}
    assert read_config("qwen3-8b", 3)["num_hidden_layers"] == 3
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"--layers {wrong}: the model has num_hidden_layers=2"):
            cut(TINY, wrong)


@pytest.mark.parametrize(("tied", "table"), [(True, 100 * 64), (False, 3 * 64 + 100 * 64)], ids=["tied", "apart"])
def test_the_floor_counts_each_weight_and_cached_token_once(tied, table):
    config = read_model_config({**TINY, "tie_word_embeddings": tied})
    traffic = step_traffic(config, 3, 128, BF16, BF16)
    assert traffic.weights == 2 * (2 * LAYER + 64 + table)
    assert traffic.cache == 3 * 129 * 2 * (2 * 2 * 16) * 2
    assert traffic.seconds(2.0) == traffic.total / 2


def test_the_floor_knows_smaller_numbers_and_windows():
    config = read_model_config({**TINY, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1})
    assert step_traffic(config, 1, 128, BF16, torch.float8_e4m3fn).cache == (129 + 32) * 2 * 2 * 16
    config = read_model_config(TINY)
    quant = read_quantization(TINY, "fp8")
    matrices = 64 * 128 + 64 * 64 + 64 * 192 + 96 * 64
    whole, half = (step_traffic(config, 1, 0, BF16, BF16, it).weights for it in (read_quantization(TINY), quant))
    rows = 128 + 64 + 192 + 64  # a float32 scale each
    assert whole - half == 2 * (matrices - 4 * rows)


def test_public_models_read_what_they_are_known_to():
    traffic = step_traffic(read_model_config(read_config("qwen3-8b")), 1, 128, BF16, BF16)
    assert 15.1e9 < traffic.weights < 15.2e9
    assert traffic.seconds(4.8e12) == pytest.approx(3.15e-3, rel=0.01)


def test_latents_of_a_context_are_read_once_for_all_heads():
    config = read_model_config(read_config("deepseek-v2-lite"))
    assert step_traffic(config, 2, 99, BF16, BF16).cache == 2 * 100 * 27 * (512 + 64) * 2


def test_what_is_folded_into_queries_is_read_in_the_models_dtype():
    hf = {**read_config("deepseek-v3", 1), "intermediate_size": 128, "vocab_size": 128}
    quant = read_quantization(hf)
    one, other = (
        step_traffic(read_model_config({**hf, "kv_lora_rank": rank}), 1, 0, BF16, BF16, quant).weights
        for rank in (512, 384)
    )
    latents = 128 * (7168 + 56 / 128 * 4 + 2)  # rows of FP8 with a scale a block, and the norm
    assert one - other == 128 * 256 * 128 * 2 + latents


def test_the_floor_counts_the_experts_that_some_token_has():
    config = read_model_config(read_config("qwen3-30b-a3b"))
    one, eight, many = (step_traffic(config, batch, 0, BF16, BF16).weights for batch in (1, 8, 10_000))
    an_expert = 48 * 3 * 2048 * 768 * 2
    assert eight - one == pytest.approx((128 * (1 - (120 / 128) ** 8) - 8) * an_expert, rel=1e-4)
    assert many - one == pytest.approx(120 * an_expert, rel=2e-3)  # and rows of the embedding
    assert 5.9e9 < one < 6.7e9


@pytest.mark.parametrize(
    ("device", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("AMD Instinct MI300X OAM", 5.3e12),
        ("NVIDIA H2000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_datasheet_is_known_or_not(device, bandwidth):
    assert datasheet_bandwidth(device) == bandwidth


@pytest.mark.parametrize("context", [0, 15, 16, 40])
def test_each_request_of_the_batch_has_pages_of_its_own(context):
    metadata, num_pages = step_batch(decodes(3, context), torch.device("cpu"))
    used = metadata.pages.table[:, : context // PAGE_SIZE + 1]
    assert sorted(used.flatten().tolist()) == list(range(num_pages))
    assert metadata.pages.table.shape == (3, MAX_MODEL_LEN // PAGE_SIZE)
    assert (metadata.pages.slots // PAGE_SIZE).tolist() == used[:, -1].tolist()
    assert (metadata.pages.slots % PAGE_SIZE == context % PAGE_SIZE).all()
    assert metadata.seq_lens.tolist() == [context + 1] * 3


@pytest.mark.parametrize("context", [(5, 40, 16), (100, 3)])
def test_requests_take_contexts_in_turns(context):
    metadata, num_pages = step_batch(decodes(5, context), torch.device("cpu"), max_model_len=200)
    lengths = [context[at % len(context)] for at in range(5)]
    assert metadata.seq_lens.tolist() == [it + 1 for it in lengths]
    assert metadata.pages.table.shape == (5, 13)
    assert metadata.max_seq_len == 200
    used = [row[: it // PAGE_SIZE + 1].tolist() for row, it in zip(metadata.pages.table, lengths, strict=True)]
    assert sorted(chain(*used)) == list(range(num_pages))
    last = [pages[-1] * PAGE_SIZE + it % PAGE_SIZE for pages, it in zip(used, lengths, strict=True)]
    assert metadata.pages.slots.tolist() == last


def test_a_window_has_the_pages_that_are_read_and_no_more():
    metadata, pages = step_batch(decodes(3, (100, 3)), torch.device("cpu"), window=32)
    table = metadata.pages.table
    # Of 101 tokens the last 32 are read: those from 69 on, in the pages from the fifth to the seventh.
    used = [table[0, 4:7].tolist(), table[1, :1].tolist(), table[2, 4:7].tolist()]
    assert pages == 7
    assert sorted(chain(*used)) == list(range(7))
    assert not table[0, :4].any()
    assert metadata.pages.slots[0] == table[0, 6] * PAGE_SIZE + 100 % PAGE_SIZE


def test_the_floor_of_requests_that_differ_is_the_sum_of_theirs():
    config = read_model_config({**TINY, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1})
    short, long, mixed = (step_traffic(config, 2, it, BF16, BF16).cache for it in (16, 4000, (16, 4000)))
    assert 2 * mixed == short + long


def test_memory_is_what_the_pages_take():
    config = read_model_config({**TINY, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1})
    page = 2 * 2 * 16 * PAGE_SIZE
    requests = decodes(2, (100, 3))
    assert cache_memory(config, requests, BF16, PAGE_SIZE) == 2 * page * ((7 + 1) + (3 + 1))
    assert cache_memory(config, requests, torch.float8_e4m3fn, PAGE_SIZE) == page * 12
    hybrid = read_model_config(read_config("qwen3.5-27b", 4))
    states = 3 * (2 + 1) * 48 * 128 * 128 * 4
    assert cache_memory(hybrid, decodes(2, 0), BF16, PAGE_SIZE) == states + 2 * PAGE_SIZE * 2 * 4 * 256 * 2


def test_a_batch_has_the_memory_that_is_counted(monkeypatch):
    made = []
    hf = {**cut(CONFIGS["gpt-oss-20b"], 2), **SMALL, "intermediate_size": 64}
    config = read_model_config(hf)
    runtime = build_runtime(torch.device("cpu"), BF16, 600, quant=read_quantization(hf))
    monkeypatch.setattr(
        batches, "empty_caches", lambda *given, **named: made.append(empty_caches(*given, **named)) or made[0]
    )
    with torch.inference_mode():
        step.decoding(random_model(config, runtime), config, runtime, 3, (20, 500))()
    sizes = [cache.key.untyped_storage().nbytes() for cache in made[0].values()]
    assert len(set(sizes)) == 2
    assert sum(sizes) == cache_memory(config, decodes(3, (20, 500)), BF16, PAGE_SIZE)


def too_large(batch, context, free, **changes):
    return why_too_large(
        read_model_config({**TINY, **changes}), 10_000, batch, context, BF16, PAGE_SIZE, int(free / 0.95) + 1
    )


def test_what_does_not_fit_is_told_with_what_would():
    page = 2 * 2 * 2 * 16 * 2 * PAGE_SIZE
    assert too_large(4, (40,), 10_000 + 12 * page) is None
    assert too_large(4, (60,), 10_000 + 12 * page) == (
        "--batch 4 --context 60: 0.0 GB of cache and 0.0 GB of weights do not fit in 0.0 GB of free GPU memory; "
        "--batch 3 or --context 47 would."
    )
    assert too_large(1, (10**5,), 10_000 + page).endswith("; --context 15 would.")
    assert too_large(9, (2, 40), 10_000 + 9 * page).endswith(
        "--context 2 --context 40: 0.0 GB of cache and 0.0 GB of "
        "weights do not fit in 0.0 GB of free GPU memory; --batch 5 would."
    )
    assert too_large(2, (2, 40), 10_000 + page).endswith("; use a smaller --batch and less --context.")
    assert too_large(2, (2,), 9_000).endswith("; use fewer --layers, as the weights alone do not.")


@pytest.mark.parametrize("fitting", [0, 1, 6, 7])
def test_the_most_that_fits_is_found(fitting):
    assert most(lambda number: number <= fitting, 7) == fitting


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    """What `bench step` asks of CUDA, answered by a CPU; gives the path of a small model."""
    ran = []
    monkeypatch.setattr(step, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(step, "measure_ceiling", lambda device: Ceiling("a GPU", copy=4e12, read=3e12))
    monkeypatch.setattr(step, "capture", lambda run: SimpleNamespace(replay=lambda: ran.append(run())))
    monkeypatch.setattr(step, "measure", lambda replay, *_, **__: replay() or Timing(2e-3, 1e-3, 3e-3))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    yield str(path)
    assert len(ran) <= 1


def test_long_and_mixed_contexts_are_measured_and_reported(without_gpu, tmp_path, capsys):
    options = [without_gpu, "--context", "512", "--context", "131072", "--json", str(tmp_path / "step.json")]
    assert step.main(options) == 0
    said = capsys.readouterr().out
    assert "batch 2, contexts in turns: 1 of 512, 1 of 131072 tokens, graph for up to 131073, bfloat16" in said
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["batch"], found["context"], found["max_model_len"]) == (2, [512, 131072], 131073)
    assert found["cache_bytes"] == (513 + 131073) * 2 * 2 * 2 * 16 * 2


def test_one_context_stays_a_number_in_the_report(without_gpu, tmp_path, capsys):
    given = [without_gpu, "--batch", "3", "--cache-dtype", "fp8_e4m3", "--max-model-len", "256"]
    assert step.main([*given, "--json", str(tmp_path / "step.json")]) == 0
    assert "batch 3, 128 tokens of context each, graph for up to 256, bfloat16" in capsys.readouterr().out
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["batch"], found["context"], found["max_model_len"]) == (3, 128, 256)


def test_a_step_that_does_not_fit_is_refused_before_it_is_built(without_gpu, capsys):
    assert step.main([without_gpu, "--batch", "64", "--context", "131072"]) == 1
    assert capsys.readouterr().err == (
        "--batch 64 --context 131072: 2.1 GB of cache and 0.0 GB of weights do not fit in 1.1 GB of free GPU memory; "
        "--batch 30 or --context 61727 would.\n"
    )


def test_a_mixed_step_is_measured_and_reported(without_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step, "measure_products", lambda device, dtype: 1e9)
    options = [without_gpu, "--batch", "2", "--chunk", "64", "--chunk", "32", "--chunk-context", "512"]
    assert step.main([*options, "--page-size", "32", "--json", str(tmp_path / "step.json")]) == 0
    said = capsys.readouterr().out
    assert "batch 2, 128 tokens of context each, chunks of prompts: 1 of 64, 1 of 32 tokens behind 512 each, " in said
    assert ", pages of 32, bfloat16" in said
    assert "TFLOP in products: " in said
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["batch"], found["chunk"], found["chunk_context"], found["page_size"]) == (2, [64, 32], 512, 32)
    assert found["operations"] > 98 * 2 * (2 * LAYER - 400)
    assert found["floor_milliseconds"] == pytest.approx(found["operations"] / 1e9 * 1e3)
    assert "TFLOP/s (torch's own product, measured here)" in said


def test_a_prompt_may_have_the_step_alone(without_gpu, monkeypatch, capsys):
    monkeypatch.setattr(step, "measure_products", lambda device, dtype: 1e18)
    assert step.main([without_gpu, "--batch", "0", "--chunk", "300"]) == 0
    said = capsys.readouterr().out
    assert "config.json, chunks of prompts: 1 of 300 tokens, bfloat16" in said
    assert "TB/s (copying 4.00, reading 3.00, measured here)" in said


def test_chunks_that_do_not_fit_are_refused_before_anything_is_built(without_gpu, capsys):
    given = ["--batch", "0", *["--chunk", "131072"] * 20, "--chunk-context", "131072"]
    assert step.main([without_gpu, *given]) == 1
    said = capsys.readouterr().err
    assert said.startswith("--chunk 131072 --chunk 131072")
    assert said.endswith("GB of free GPU memory; use fewer --layers, or fewer and shorter chunks.\n")


def test_kernels_that_find_no_memory_end_the_command_in_one_line(without_gpu, monkeypatch, capsys):
    def capture(run):
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more.")

    monkeypatch.setattr(step, "capture", capture)
    assert step.main([without_gpu]) == 1
    assert capsys.readouterr().err == (
        "The step needs more than the 1.1 GB of free GPU memory, by what its kernels work in: use a smaller --batch, "
        "less --context or fewer --layers.\n"
    )


#: Mixtures in their own words, small.
SMALL = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
MXFP4 = {**cut(CONFIGS["gpt-oss-20b"], 2), **SMALL, "intermediate_size": 64}
BLOCKS = {**cut(CONFIGS["qwen3-30b-a3b-fp8"], 2), **SMALL, "head_dim": 64, "moe_intermediate_size": 128}
QUARK = {**cut(CONFIGS["qwen3-30b-a3b-mxfp4"], 2), **SMALL, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("hf", "quantization", "cache_dtype"),
    [
        *((TINY, method, dtype) for method in (None, "fp8") for dtype in (BF16, torch.float8_e4m3fn)),
        (MXFP4, None, BF16),
        (BLOCKS, None, BF16),
        (QUARK, None, BF16),
    ],
    ids=["plain", "plain, FP8 cache", "FP8", "FP8, FP8 cache", "MXFP4 experts", "FP8 experts in blocks", "MXFP4"],
)
def test_a_step_of_a_random_model_gives_finite_logits(hf, quantization, cache_dtype):
    config = read_model_config(hf)
    quant = read_quantization(hf, quantization)
    runtime = build_runtime(torch.device("cpu"), BF16, MAX_MODEL_LEN, cache_dtype=cache_dtype, quant=quant)
    with torch.inference_mode():
        model = random_model(config, runtime)
        metadata, num_pages = step_batch(decodes(3, 40), runtime.device)
        pools = empty_caches(model, runtime, num_pages, PAGE_SIZE, random=True)
        hidden = model(torch.tensor([1, 2, 3]), torch.full((3,), 40), Step(plan(model, metadata), pools))
        logits = model.logits(hidden)
    assert logits.shape == (3, 100)
    assert logits.isfinite().all()


LATENTS = {
    **cut(CONFIGS["deepseek-v2-lite"], 1),
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 100,
}
HYBRID = {
    **cut(CONFIGS["qwen3.5-27b"], 4),
    **SMALL,
    "intermediate_size": 96,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize("hf", [MXFP4, LATENTS, HYBRID], ids=["windows", "latents", "states"])
@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_requests_of_any_family_may_differ(hf, cache_dtype):
    config, quant = read_model_config(hf), read_quantization(hf)
    runtime = build_runtime(torch.device("cpu"), BF16, 9000, cache_dtype=cache_dtype, quant=quant)
    with torch.inference_mode():
        model = random_model(config, runtime)
        step.decoding(model, config, runtime, 3, (8_192, 0, 77))()
    requests = decodes(3, (8_192, 0, 77))
    least = cache_bytes(config, requests, cache_dtype)
    assert cache_memory(config, requests, cache_dtype, PAGE_SIZE) < 1.2 * least + 2**20


@pytest.mark.parametrize(
    "hf", [TINY, MXFP4, BLOCKS, LATENTS, HYBRID], ids=["plain", "windows", "experts", "latents", "states"]
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_chunks_of_prompts_may_stand_behind_decodes_of_any_family(hf, page_size, num_decodes):
    config, quant = read_model_config(hf), read_quantization(hf)
    runtime = build_runtime(torch.device("cpu"), BF16, 600, quant=quant)
    requests = (*decodes(num_decodes, (300, 0)), Request(0, 70), Request(200, 150))
    with torch.inference_mode():
        model = random_model(config, runtime)
        logits = []
        kept = model.logits
        model.logits = lambda hidden: logits.append(kept(hidden)) or logits[0]
        batches.stepping(model, config, runtime, requests, page_size)()
    assert logits[0].shape == (num_decodes + 2, 100)
    assert logits[0].isfinite().all()


def test_a_chunk_s_tokens_follow_those_that_are_cached():
    requests = (Request(40), Request(3), Request(30, 20), Request(0, 33))
    made, pages = step_batch(requests, torch.device("cpu"), max_model_len=96)
    assert made.query_start_loc.tolist() == [0, 1, 2, 22, 55] == made.host.starts
    assert made.seq_lens.tolist() == [41, 4, 50, 33] == made.host.lengths
    assert (made.num_decode_requests, made.num_decode_tokens, made.max_query_len, made.max_seq_len) == (2, 2, 33, 50)
    used = [row[: -(-it.length // PAGE_SIZE)].tolist() for row, it in zip(made.pages.table, requests, strict=True)]
    assert sorted(chain(*used)) == list(range(pages))
    slots = iter(made.pages.slots.tolist())
    for request, own in zip(requests, used, strict=True):
        for position in range(request.cached, request.length):
            assert next(slots) == own[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    # Of a window of 8 the first new token sees the 7 before it.
    windowed, pages = step_batch(requests, torch.device("cpu"), max_model_len=96, window=8)
    assert pages == 1 + 1 + 3 + 3
    assert windowed.pages.table[2, 0] == 0


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("request_", [Request(100), Request(0, 70), Request(20, 30), Request(90, 50)], ids=str)
def test_products_are_counted_token_by_token(window, request_):
    changes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    config = read_model_config({**TINY, **changes})
    weights = 2 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64)
    pairs = sum(min(at + 1, window or at + 1) for at in range(request_.cached, request_.length))
    attended = 2 * 4 * 2 * 16 * pairs
    assert operations(config, [request_]) == 2 * (request_.new * weights + 64 * 100 + attended)


def test_products_of_public_models_are_what_they_are_known_to_be():
    prompt = [Request(0, 1)]
    dense, mixture = (
        operations(read_model_config(read_config(name)), prompt) for name in ("qwen3-8b", "qwen3-30b-a3b")
    )
    assert dense == pytest.approx(2 * 7.57e9, rel=0.01)
    assert mixture == pytest.approx(2 * 3.04e9, rel=0.02)


def test_random_weights_are_the_same_each_time():
    config = read_model_config(TINY)
    runtime = build_runtime(torch.device("cpu"), torch.float32, 64)
    ours, again, other = (random_model(config, runtime, seed).model.embed_tokens.weight for seed in (0, 0, 1))
    assert torch.equal(ours, again)
    assert not torch.equal(ours, other)


RESULT = StepResult(
    StepOptions("qwen3-0.6b"),
    Ceiling("NVIDIA H200", copy=4.0e12, read=4.2e12),
    Traffic(1_190_000_000, 14_000_000),
    Timing(0.4e-3, 0.39e-3, 0.45e-3),
    {"linear": "triton"},
)


def test_the_report_has_the_share_of_both_floors(tmp_path):
    found = RESULT.as_json()
    assert found["floor_milliseconds"] == pytest.approx(1.204e9 / 4.2e12 * 1e3)
    assert found["share_of_floor"] == pytest.approx(1.204e9 / 4.2e12 / 0.4e-3)
    assert found["share_of_datasheet_floor"] == pytest.approx(1.204e9 / 4.8e12 / 0.4e-3)
    text = "\n".join(RESULT.lines())
    assert "0.4000 ms (0.3900 to 0.4500)" in text
    assert "72% of it reached" in text
    assert "datasheet" in text
    step.write_json(RESULT, tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["model"] == "qwen3-0.6b"


def test_seconds_without_a_pause_are_told_beside_the_samples():
    assert "sustained" not in "\n".join(RESULT.lines())
    assert RESULT.as_json()["sustained_milliseconds"] is None
    result = replace(RESULT, options=replace(RESULT.options, seconds=3.0), sustained=0.00041)
    assert "  sustained  0.4100 ms (+2.5%), the mean of 3 s without a pause" in result.lines()
    assert result.as_json()["sustained_milliseconds"] == pytest.approx(0.41)


def test_an_unknown_device_has_no_datasheet():
    result = StepResult(RESULT.options, Ceiling("a GPU", 1e12, 1e12), RESULT.traffic, RESULT.timing, {})
    assert result.as_json()["share_of_datasheet_floor"] is None
    assert "datasheet" not in "\n".join(result.lines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch 0: a positive number"),
        ({"repetitions": 0}, "--repetitions 0"),
        ({"seconds": -1.0}, "--seconds -1.0: a number from 0 on"),
        ({"seconds": float("nan")}, "--seconds nan"),
        ({"context": (512, 131_073)}, "--context 131073: supported: 0 to 131072"),
        ({"context": (-1,)}, "--context -1"),
        ({"batch": 2, "context": (1, 2, 3)}, "--batch 2: 3 contexts need at least as many requests"),
        ({"context": (4096,), "max_model_len": 4096}, "--max-model-len 4096: a context of 4096 .* 4097 or more"),
        ({"batch": -1, "chunk": (8,)}, "--batch -1: a positive number is needed, or 0 with --chunk"),
        ({"chunk": (1,)}, "--chunk 1: supported: 2 to 131072 new tokens"),
        ({"chunk": (131_073,)}, "--chunk 131073"),
        ({"chunk_context": 5}, "--chunk-context 5: only with --chunk"),
        ({"batch": 0, "chunk": (8,), "context": (64,)}, "--context 64: with --batch 0 no request decodes"),
        ({"chunk": (8,), "chunk_context": -5}, "--chunk-context -5: supported: 0 to 131072"),
        ({"chunk": (90,), "max_model_len": 80}, "--max-model-len 80: a context of 128 tokens and a new one need 129"),
        ({"batch": 0, "chunk": (90,), "max_model_len": 80}, "a context of 0 tokens and 90 new ones need 90 or more"),
        ({"page_size": 0}, "--page-size 0: a positive number"),
        ({"dtype": "int8"}, "--dtype 'int8': supported: bfloat16, float16, float32"),
        ({"cache_dtype": "int8"}, "--cache-dtype 'int8': supported: auto, bfloat16"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StepOptions("qwen3-0.6b", **options).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3-0.6b",), "No GPU that torch"),
        (("qwen9",), "neither a folder"),
        (("qwen3-0.6b", "--batch", "0"), "--batch 0"),
        (("qwen3-0.6b", "--quantization", "awq"), "'awq' is not supported"),
    ],
)
def test_both_command_lines_say_what_is_wrong(arguments, message, capsys):
    assert_both_refuse("step", step.main, arguments, message, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("arguments", [("step", "qwen3-0.6b"), ("kernels",)], ids=" ".join)
def test_each_is_a_module_too(arguments):
    module, *others = arguments
    result = run_python("-m", f"atom_plugin.bench.{module}", *others)
    assert result.returncode == 1
    assert "No GPU that torch" in result.stderr
    assert "Traceback" not in result.stderr


def test_measuring_needs_no_package_of_the_command_line():
    modules = "atom_plugin.bench.step, atom_plugin.bench.kernels"
    result = run_python("-c", f"import sys, {modules}; print('typer' in sys.modules or 'rich' in sys.modules)")
    assert result.stdout.split() == ["False"], result.stderr


def test_a_profile_tells_by_how_much_later_each_kernel_ended():
    once = [("norm", 0, 2), ("product", 1, 32), ("norm", 30, 36), ("norm", 40, 41)]
    launches = [Launch(name, begin * 1e-6 + at, end * 1e-6 + at) for at in (0, 1) for name, begin, end in once]
    found = by_name(launches, runs=2)
    assert [(it.name, it.launches) for it in found] == [("product", 1), ("norm", 3)]
    assert [it.seconds for it in found] == pytest.approx([30e-6, 7e-6])
    text = "\n".join(replace(RESULT, profile=found).lines())
    assert "7.5%  product" in text
    assert replace(RESULT, profile=found).as_json()["profile"][1] == asdict(found[1])
    assert RESULT.as_json()["profile"] == []
