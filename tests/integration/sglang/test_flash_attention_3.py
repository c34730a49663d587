"""vLLM's FlashAttention 3 in place of SGLang's, for benchmarks: the functions are those of SGLang, the op is vLLM's.

Neither library is here; the op has a stand-in with the parameters that vLLM's own code calls it by.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from atom_plugin.common.settings import unknown_variables
from atom_plugin.sglang.flash_attention import SglangFlashAttention3, why_not_here
from benchmarks._flash_attention_3 import FOLDER, LIBRARY, variables
from benchmarks._ran_with import SGLANG_LINES
from tests.kernel_cases import ATTENTION_CASES, attention_batch, check_attention

pytestmark = pytest.mark.sglang

FUNCTIONS = {"flash_attn_with_kvcache": "OVER_PAGES", "flash_attn_varlen_func": "IN_RANGES"}
#: As vLLM 0.33 calls it.
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> (Tensor, Tensor, Tensor, Tensor)"
)
HEADS, KV_HEADS, DIM, PAGE, METADATA = 4, 2, 16, 4, 5


def attend(q, k, v, scale, causal):
    """Of one request: ``q [T, H, D]`` to ``k, v [S, Hk, D]``."""
    shared = HEADS // KV_HEADS
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    q, k, v = (it.transpose(0, 1) for it in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1)


def forward(*arguments):
    """Attention of requests that the op is told of, over pages or in ranges."""
    names = [part.split()[-1].strip() for part in SCHEMA[4 : SCHEMA.index(")")].split(",")]
    given = dict(zip(names, arguments, strict=True))
    if given["scheduler_metadata"] is not None and len(given["scheduler_metadata"]) != METADATA:
        raise RuntimeError("mha_fwd, flash_api.cpp:1096, scheduler_metadata must have shape (metadata_size)")
    starts = given["cu_seqlens_q"].tolist()
    parts = []
    for request, (begin, end) in enumerate(pairwise(starts)):
        if given["page_table"] is None:
            first, last = given["cu_seqlens_k"].tolist()[request : request + 2]
            k, v = given["k"][first:last], given["v"][first:last]
        else:
            length = int(given["seqused_k"][request])
            pages = given["page_table"][request, : -(-length // given["k"].shape[1])].long()
            k, v = (given[name][pages].flatten(0, 1)[:length] for name in ("k", "v"))
        parts.append(attend(given["q"][begin:end], k, v, given["softmax_scale"], given["is_causal"]))
    out, splits = torch.cat(parts), torch.tensor(given["num_splits"])
    if given["out"] is not None:
        out = given["out"].copy_(out)
    return out, out[..., 0].T.contiguous(), splits, splits.clone()


@pytest.fixture(scope="module")
def module():
    """The functions, over an op that computes what FlashAttention does."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(SCHEMA)
    library.impl("fwd", forward, "CompositeExplicitAutograd")
    spec = importlib.util.spec_from_file_location("flash_attn_of_vllm", FOLDER / "flash_attn.py")
    made = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        loaded = []
        patch.setattr(torch.ops, "load_library", loaded.append)
        patch.setenv(LIBRARY, "/there/_vllm_fa3_C.abi3.so")
        spec.loader.exec_module(made)
        assert loaded == ["/there/_vllm_fa3_C.abi3.so"]
    yield made
    library._destroy()


def signatures():
    """Of SGLang's own functions, whose module cannot be imported without its library."""
    source = Path(importlib.util.find_spec("sgl_kernel").submodule_search_locations[0], "flash_attn.py").read_text()
    found = (it for it in ast.parse(source).body if isinstance(it, ast.FunctionDef))
    return {it.name: [argument.arg for argument in it.args.args] for it in found}


@pytest.mark.parametrize("name", [*FUNCTIONS, "get_scheduler_metadata"])
def test_parameters_are_those_of_sglang_s_kernels(module, name):
    wanted = signatures()[name]
    if name in FUNCTIONS:
        assert list(getattr(module, FUNCTIONS[name])) == wanted
    else:
        assert list(module.get_scheduler_metadata.__code__.co_varnames[: len(wanted)]) == wanted


def paged(lengths):
    """Pages in any order: keys, values, the table, and each request's own keys and values."""
    counts = [-(-length // PAGE) for length in lengths]
    k, v = (torch.randn(sum(counts), PAGE, KV_HEADS, DIM) for _ in range(2))
    pages = torch.randperm(sum(counts)).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    own = [(k[it.long()].flatten(0, 1), v[it.long()].flatten(0, 1)) for it in pages]
    return k, v, table, [(a[:n], b[:n]) for (a, b), n in zip(own, lengths, strict=True)]


@pytest.mark.parametrize("by_places", [False, True])
def test_attention_over_pages_is_that_of_the_requests(module, by_places):
    new, lengths = [1, 5], [9, 7]
    k, v, table, own = paged(lengths)
    q = torch.randn(sum(new), HEADS, DIM)
    named = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "page_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 6], dtype=torch.int32),
        "cu_seqlens_k_new": torch.tensor([0, 9, 16], dtype=torch.int32),
        "max_seqlen_q": 5,
        "softmax_scale": 0.3,
        "causal": True,
        "window_size": (-1, -1),
        "return_softmax_lse": True,
        "ver": 3,
    }
    if by_places:
        defaults = {"causal": False, "softcap": 0.0, "num_splits": 0, "only_qv": False, "sm_margin": 0}
        out, *_, splits = module.flash_attn_with_kvcache(*({**defaults, **named}.get(it) for it in module.OVER_PAGES))
    else:
        out, *_, splits = module.flash_attn_with_kvcache(**named)
    wanted = [attend(part, *each, 0.3, True) for part, each in zip(q.split(new), own, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted))
    assert int(splits) == 0  # the kernel chooses


@pytest.mark.parametrize("size", [METADATA, METADATA + 4])
def test_a_schedule_of_another_size_is_each_layer_s_to_make_which_is_said_once(module, size, caplog):
    k, v, table, own = paged([9])
    q, starts = torch.randn(1, HEADS, DIM), torch.tensor([0, 1], dtype=torch.int32)
    given = {"page_table": table, "cache_seqlens": torch.tensor([9]), "cu_seqlens_q": starts, "max_seqlen_q": 1}
    module._SCHEDULED_BY_LAYERS.clear()
    for _ in range(2):
        metadata = torch.zeros(size, dtype=torch.int32)
        out = module.flash_attn_with_kvcache(q, k, v, **given, causal=True, scheduler_metadata=metadata)
        torch.testing.assert_close(out, attend(q, *own[0], DIM**-0.5, True))
    said = [it for it in caplog.messages if "FlashAttention 3 schedules each layer" in it]
    assert len(said) == (size != METADATA)
    assert all(SGLANG_LINES.kinds["attention"].search(it) for it in said)


def test_attention_in_ranges_is_that_of_the_requests(module):
    q, k, v = torch.randn(6, HEADS, DIM), torch.randn(8, KV_HEADS, DIM), torch.randn(8, KV_HEADS, DIM)
    starts, key_starts = (torch.tensor(it, dtype=torch.int32) for it in ([0, 2, 6], [0, 3, 8]))
    out = module.flash_attn_varlen_func(q, k, v, starts, key_starts, 4, 5, causal=True)
    wanted = [attend(q[:2], k[:3], v[:3], DIM**-0.5, True), attend(q[2:], k[3:], v[3:], DIM**-0.5, True)]
    torch.testing.assert_close(out, torch.cat(wanted))


@pytest.mark.parametrize("name", ["only_qv", "attention_chunk", "score_mod", "rotary_cos", "cache_leftpad", "k"])
def test_what_vllm_s_kernel_does_not_know_is_refused(module, name):
    k, v, table, _ = paged([9])
    lengths, starts = torch.tensor([9]), torch.tensor([0, 1])
    given = {"page_table": table, "cache_seqlens": lengths, "cu_seqlens_q": starts, "max_seqlen_q": 1}
    wrong = {"only_qv": True, "attention_chunk": 128}.get(name, torch.zeros(1))
    with pytest.raises(ValueError, match=f"knows no {name}="):
        module.flash_attn_with_kvcache(torch.randn(1, HEADS, DIM), k, v, **given, **{name: wrong})


@pytest.mark.parametrize("name", ["prefill in chunks", "decode and prefill mixed", "one token a page"])
def test_ours_runs_on_it_too(module, monkeypatch, name):
    package = ModuleType("sgl_kernel")
    package.flash_attn = module
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not_here() is None
    (case,) = (case for case in ATTENTION_CASES if case.name == name)
    assert (case.heads, case.kv_heads) == (HEADS, KV_HEADS)
    kernel = SglangFlashAttention3(case.spec(torch.bfloat16))
    check_attention(kernel, attention_batch(case, torch.bfloat16, torch.device("cpu")))


def test_ours_knows_the_variable_as_none_of_its_own(tmp_path):
    (library := tmp_path / "fa3.so").touch()
    assert not unknown_variables(variables(library))


def test_processes_that_have_the_variables_find_it(tmp_path):
    code = "import sys; print(sys.meta_path[0].find_spec('sgl_kernel.flash_attn').origin)"
    (library := tmp_path / "fa3.so").touch()
    environ = {**os.environ, **variables(library)}
    assert environ[LIBRARY] == str(library)
    said = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True).stdout
    assert Path(said.strip()) == FOLDER / "flash_attn.py"
    assert variables(None) == {}
    with pytest.raises(SystemExit, match="there is no such file"):
        variables(tmp_path / "none.so")
