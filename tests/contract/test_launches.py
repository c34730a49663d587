"""The launches of a decoder layer are counted as they are made: the table of docs/amd-kernels.md rests on it."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

from atom_core.batch import Batch, HostLengths, States
from atom_core.cache import StateView
from atom_core.kernels import kernel_set
from atom_core.kernels.aiter_library import CALLED
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.select import Target
from benchmarks._launches import IN_PLACE, RESULTS, CountedGroup, Recorder, _recording, _TorchOps, chosen, count
from benchmarks._launches_elsewhere import ONE_STAGE, atom, vllm
from benchmarks.launches import CONTEXT, kernels, main, ours, rows, weights_and_cache

GFX942, GFX950 = Target("rocm", "gfx942"), Target("rocm", "gfx950")
DOCS = Path(__file__).parents[2] / "docs"


def rows_behind(page, header):
    """The cells of a page's table, by how its header begins."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(header)) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def recorded(run):
    """The launches of torch's ops in ``run``."""
    recorder = Recorder()
    with torch.inference_mode(), _TorchOps(recorder):
        run(recorder)
    return [(it.name, it.activations) for it in recorder.launches.get(None, [])]


def test_views_and_empty_memory_launch_nothing():
    x = torch.zeros(4, 8)

    def run(recorder):
        x.view(8, 4).transpose(0, 1)[1:].unflatten(-1, (2, 4))
        x.split([2, 6], -1)
        x.to(torch.float32).contiguous().reshape(-1)
        torch.empty_like(x).new_empty(3)

    assert recorded(run) == []


def test_copies_and_what_is_written_in_place_launch():
    x = torch.zeros(4, 8)

    def run(recorder):
        x.to(torch.bfloat16)
        x.t().contiguous()
        x.add_(1)

    assert recorded(run) == [("to", 128 + 64), ("contiguous", 256), ("add_", 128)]


def test_what_is_held_is_no_activation():
    x, weight = torch.zeros(2, 4), torch.zeros(3, 4)

    def run(recorder):
        recorder.hold(weight)
        torch.nn.functional.linear(x, weight[:2])

    assert sum(size for _, size in recorded(run)) == x.nbytes + 16


def test_one_rank_reduces_nothing():
    recorder, x = Recorder(), torch.zeros(2, 4)
    assert CountedGroup(recorder, 1).all_reduce(x) is x
    assert not recorder.launches
    CountedGroup(recorder, 8).all_reduce(x)
    assert [it.name for it in recorder.launches[None]] == ["all_reduce"]


def test_it_is_known_of_each_function_of_aiters_what_it_returns():
    called = {path.rpartition(".")[2] for paths in CALLED.values() for path in paths}
    assert called <= RESULTS.keys() | IN_PLACE
    assert not RESULTS.keys() & IN_PLACE


@pytest.mark.parametrize(
    ("dtype", "quantized", "tokens", "kernels"),
    [
        (torch.bfloat16, "No", 64, 3),
        (torch.float8_e4m3fn, "per_1x128", 32, 5),
        (torch.float8_e4m3fn, "per_1x128", 33, 3),
        (torch.float8_e4m3fn, "per_128x128", 33, 3),
        (torch.float8_e4m3fn, "per_Token", 16, 5),
        (torch.float8_e4m3fn, "per_Token", 17, 3),
        (torch.float4_e2m1fn_x2, "per_1x32", 1024, 5),
        (torch.float4_e2m1fn_x2, "per_1x32", 1025, 6),
        (torch.float4_e2m1fn_x2, "per_1x32", 4097, 7),
    ],
)
def test_aiters_fused_experts_are_several_launches(dtype, quantized, tokens, kernels):
    recorder = Recorder()
    x, top = torch.zeros(tokens, 256, dtype=torch.bfloat16), torch.zeros(tokens, 2)
    numbers = 2 if quantized == "per_1x32" else 1  # of a byte
    gate_up, down = (torch.empty(4, 256, size // numbers, dtype=dtype) for size in (256, 128))
    recorder.add_stages(x, gate_up, down, top, top.int(), quant_type=quantized, w1_scale=None)
    found = recorder.launches[None]
    assert len(found) == kernels
    # The last writes a token's sum.
    assert found[-1].activations >= 2 * tokens * 256


def test_a_layer_is_counted_launch_by_launch():
    found = count("qwen3-8b", GFX942, batch=2, ranks=8, num_layers=2, context=100)
    parts = 32 * 8 * (128 + 2)  # float32: of 32 programs a head, and its sums
    assert [(it.name, it.kernels, it.activations // 4) for it in found] == [
        ("all_reduce + add_rms_norm", 1, 4 * 4096),
        ("gemm_a16w16", 1, 4096 + 768),
        ("decode_attention", 1, 768 + 512 + parts),
        ("gemm_a16w16", 1, 512 + 4096),
        ("all_reduce + add_rms_norm", 1, 4 * 4096),
        ("gemm_a16w16", 1, 4096 + 3072),
        ("silu_and_mul", 1, 3072 + 1536),
        ("gemm_a16w16", 1, 1536 + 4096),
    ]
    assert not any(name.partition(".")[0] == "aiter" for name in sys.modules)


def test_norms_and_activations_quantise_what_fp8_products_read():
    found = count("qwen3-8b-fp8", GFX942, batch=16, ranks=8, num_layers=2, context=100)
    parts = 4 * 4 * 32 * (128 + 2)  # float32: of each head those of 32 programs, and their sums
    norm = ("fused_qk_rmsnorm_group_quant", 3 * 2 * 4096 + 4096 + 4 * 32)
    product = "gemm_a8w8_blockscale_bpreshuffle"
    assert [(it.name, it.activations // 16) for it in found] == [
        ("all_reduce", 2 * 4096),
        norm,
        (product, 4096 + 4 * 32 + 2 * 768),
        ("decode_attention", 2 * (768 + 512) + parts),
        ("per_group_quant_hip", 2 * 512 + 512 + 4 * 4),
        (product, 512 + 4 * 4 + 2 * 4096),
        ("all_reduce", 2 * 4096),
        norm,
        (product, 4096 + 4 * 32 + 2 * 3072),
        ("silu_and_mul_quant", 2 * 3072 + 1536 + 4 * 12),
        (product, 1536 + 4 * 12 + 2 * 4096),
    ]


def test_mxfp4_is_multiplied_by_aiter_on_gfx950_and_widened_by_triton_elsewhere():
    def names(target: Target) -> list[str]:
        found = count("qwen3-8b-mxfp4", target, batch=2, ranks=1, num_layers=2, context=100)
        found += count("qwen3-30b-a3b-mxfp4", target, batch=2, ranks=1, num_layers=2, context=100)
        return [it.name for it in found]

    ours = names(GFX950)
    assert ours.count("gemm_a4w4") == ours.count("quant_mxfp4_hip") == 6
    assert [name for name in ours if "moe" in name] == ["moe_sorting", "moe_stage1", "moe_stage2"]
    assert "gemm_a4w4" not in names(GFX942)


def test_linear_attention_is_one_launch_between_its_products():
    found = count("qwen3.5-35b-a3b", GFX950, batch=2, ranks=1, num_layers=5, context=100)
    made = 8192 + 4096 + 64  # q, k and v; z; b and a
    assert [(it.name, it.activations // 4) for it in found][:5] == [
        ("rms_norm", 2 * 2048),
        ("gemm_a16w16", 2048 + made),
        ("gated_delta_decode", made + 4096),
        ("gemm_a16w16", 4096 + 2048),
        ("rms_norm", 2 * 2048),
    ]
    assert [it.name for it in found][5:] == ["gemm_a16w16", "route", "moe_sorting", "moe_stage1", "moe_stage2"]


def test_full_attention_with_an_output_gate_is_one_launch_more():
    found = count("qwen3.5-35b-a3b", GFX950, batch=2, ranks=1, num_layers=8, context=100)
    names = [it.name for it in found]
    assert names[:5] == ["rms_norm", "gemm_a16w16", "decode_attention", "multiply_by_gate", "gemm_a16w16"]
    assert found[3].activations == 2 * 2 * 2 * 4096  # in place


@pytest.mark.parametrize("layers", [5, 8], ids=["linear attention", "full attention"])
@pytest.mark.parametrize("model", ["qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-35b-a3b-fp8", "qwen3-next-80b-a3b-fp8"])
def test_a_layer_of_a_hybrid_takes_no_more_than_ten_launches_of_one_request_on_hopper(model, layers):
    found = count(model, Target("cuda", "sm90"), batch=1, ranks=1, num_layers=layers, context=CONTEXT)
    assert kernels(found) <= 10, [str(it) for it in found]
    assert kernels(found) <= 9, "docs/amd-kernels.md says 5 to 9"


def test_the_page_says_which_hybrids_take_more_than_ten_on_amd():
    table = rows_behind("amd-kernels.md", "| Model | Batch | TP |")
    alone = {
        model: (gfx942, gfx950) for model, batch, ranks, gfx942, gfx950, *_ in table if (batch, ranks) == ("1", "1")
    }
    more = {model: both for model, both in alone.items() if "Qwen3.5" in model and max(map(int, both)) > 10}
    assert more == {
        "Qwen3.5 35B-A3B, bf16, full attention": ("11", "11"),
        "Qwen3.5 35B-A3B, FP8 blocks, linear attention": ("15", "15"),
        "Qwen3.5 35B-A3B, FP8 blocks, full attention": ("14", "14"),
    }


def launches_of_a_prompt(name: str) -> int:
    """Of 4,000 tokens, in one layer of linear attention; the step's first layer does what all need."""
    meta = torch.device("meta")
    spec = GatedDeltaNetSpec(16, 32, 128, 128, 4, torch.bfloat16, torch.float32)
    numbers = 4000, spec.channels
    conv, norm = torch.empty(numbers[1], 4, device=meta), torch.empty(128, device=meta)
    weights = GatedDeltaNetWeights(conv, *torch.empty(2, 32, device=meta), norm, 1e-6)
    cache = StateView(
        (
            torch.empty(3, 3, numbers[1], dtype=torch.bfloat16, device=meta),
            torch.empty(3, 32, 128, 128, device=meta),
        )
    )
    lengths = torch.full((1,), 4000, dtype=torch.int32, device=meta)
    batch = Batch(
        torch.empty(2, dtype=torch.int32, device=meta),
        lengths,
        num_requests=1,
        num_tokens=4000,
        max_query_len=4000,
        max_seq_len=4000,
        states=States(lengths[:, None]),
        host=HostLengths((0, 4000), (4000,)),
    )
    qkvz, ba = (torch.empty(4000, size, dtype=torch.bfloat16, device=meta) for size in (numbers[1] + 4096, 64))
    recorder = Recorder()
    with _recording(recorder), torch.inference_mode():
        kernel = kernel_set(GFX942, {"gated_delta_net": name}).select(GATED_DELTA_NET, spec)
        for recorder.layer in (0, 1):
            kernel(qkvz, ba, weights, cache, batch, qkvz.new_empty(4000, 32, 128))
    return kernels(recorder.launches[1])


def test_a_prompt_takes_a_third_of_aiters_launches_at_most():
    assert 3 * launches_of_a_prompt("triton") <= launches_of_a_prompt("aiter") == 14


@pytest.mark.parametrize(("tokens", "fused"), [(15, True), (16, False)])
def test_many_tokens_are_summed_and_normed_one_after_the_other(tokens, fused):
    found = [it.name for it in count("qwen3-8b", GFX942, batch=tokens, ranks=8, num_layers=2, context=100)]
    one, two = ["all_reduce + add_rms_norm"], ["all_reduce", "rmsnorm2d_fwd_with_add"]
    assert found[: 1 if fused else 2] == (one if fused else two)
    assert len(found) == (8 if fused else 10)


@pytest.mark.parametrize(("tokens", "fused"), [(1, True), (15, True), (16, False)])
def test_few_tokens_are_quantised_with_the_sum_and_the_norm(tokens, fused):
    found = count("qwen3-8b-fp8", GFX942, batch=tokens, ranks=8, num_layers=2, context=100)
    product = "gemm_a8w8_blockscale_bpreshuffle"
    one, two = ["all_reduce + add_rms_norm + quant"], ["all_reduce", "fused_qk_rmsnorm_group_quant"]
    assert [it.name for it in found if "norm" in it.name or "reduce" in it.name] == 2 * (one if fused else two)
    assert [it.name for it in found][: 2 if fused else 3] == [*(one if fused else two), product]
    if fused:
        # Parts, the stream, the sum, and what the product reads.
        assert found[0].activations == tokens * (3 * 2 * 4096 + 4096 + 4 * 32)


def test_an_unknown_model_is_refused_in_words():
    with pytest.raises(ValueError, match="the known models"):
        count("no-such-model", GFX942, batch=1, ranks=1, num_layers=2, context=100)


def test_bytes_of_a_layer_are_those_of_its_matrices_and_its_keys():
    first = next(rows())
    weights, cache = weights_and_cache(first)
    matrices = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12288
    assert weights == 2 * (matrices + 2 * 4096 + 2 * 128)
    assert cache == 2 * 2 * 8 * 128 * (CONTEXT + 1)


def test_a_dense_layer_in_16_bits_launches_no_more_than_the_others():
    dense = [row for row in rows() if row.model == "qwen3-8b"]
    assert len(dense) == 4
    for row in dense:
        least = min(kernels(atom(row.case)), kernels(vllm(row.case)))
        assert kernels(ours(row, GFX942)) < kernels(ours(row, GFX942, shuffled=True)) <= least


def test_no_row_has_more_launches_than_both_others_have_unless_it_is_asked_for():
    table = rows_behind("amd-kernels.md", "| Model | Batch | TP |")
    assert len(table) == len(list(rows()))
    for _, _, _, gfx942, gfx950, theirs, others, *_ in table:
        assert max(int(gfx942), int(gfx950)) <= min(int(theirs), int(others))


def test_no_row_has_more_bytes_than_both_others_by_more_than_two_percent():
    for *_, mine, theirs, others in rows_behind("amd-kernels.md", "| Model | Batch | TP |"):
        assert float(mine) <= 1.02 * min(float(theirs), float(others))


def test_the_page_says_which_kernel_runs_each_op_on_each_gpu():
    told = {
        op: cells for ops, *cells, _ in rows_behind("amd.md", "| Op | gfx942 |") for op in re.findall(r"`(\w+)`", ops)
    }
    found = set()
    for column, target in enumerate((GFX942, GFX950)):
        run: dict[str, set[str]] = {}
        for model, layers, ranks, quantization in (
            ("qwen3-8b", 2, 8, None),
            ("qwen3-8b", 2, 1, "fp8"),
            ("qwen3-8b-fp8", 2, 1, None),
            ("qwen3-8b-mxfp4", 2, 1, None),
            ("qwen3-30b-a3b", 2, 1, None),
            ("qwen3-30b-a3b-fp8", 2, 1, None),
            ("qwen3-30b-a3b-mxfp4", 2, 1, None),
            ("gpt-oss-20b", 2, 1, None),
            ("deepseek-v3", 5, 1, None),
            ("qwen3.5-27b", 5, 1, None),
            ("qwen3.5-35b-a3b-fp8", 5, 1, None),
        ):
            for op, name in chosen(model, target, ranks, layers, quantization):
                run.setdefault(op, set()).add(name)
        # What fuses kernels of Triton's does not run beside aiter's, which the page says behind its table.
        run = {op: names for op, names in run.items() if names != {"separate"}}
        assert {op: set(re.findall(r"\b(?:aiter|triton|routed)\b", told[op][column].lower())) for op in run} == run
        found |= run.keys()
    assert found == told.keys()


def test_no_row_lies_between_the_limits_of_one_kernel_that_reduces():
    cases = [row.case for row in rows() if row.ranks > 1]
    assert {(case.ranks, case.reduces_in_one(quantized=False)) for case in cases} == {(8, True), (8, False), (4, True)}
    for case in cases:
        assert not 2**20 // case.ranks < case.batch * case.hidden * 2 <= ONE_STAGE // case.ranks


def test_one_layer_is_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launches", "--model", "qwen3-0.6b", "--device", "gfx950"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["8,192", "rmsnorm2d_fwd_with_add"]
    assert lines[-1].endswith("in 8 launches")


def test_what_cannot_be_shared_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launches", "--model", "qwen3-30b-a3b-fp8", "--ranks", "8"])
    assert main() == 1
    assert "would cut FP8 blocks" in capsys.readouterr().err
