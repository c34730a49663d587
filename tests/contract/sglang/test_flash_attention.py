"""FlashAttention 3 as the adapter calls it: SGLang's binding takes the arguments, and they mean what is meant.

The binding's Python runs, over an op that stands in for the compiled one. Its parameters are read from the library,
which cannot be loaded without a GPU's driver.
"""

from __future__ import annotations

import importlib.util
import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from atom_core.kernels import OPS
from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3
from atom_core.kernels.attention.long_prompts import DispatchByPrompts
from atom_core.kernels.select import KernelSet, Target
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings
from atom_plugin.sglang.flash_attention import SglangFlashAttention3, why_not_here
from atom_plugin.sglang.gpu_kernels import gpu_kernels
from tests.flash_attention_stand_in import attend, batch_of
from tests.kernel_cases import ATTENTION_CASES, AttentionCase, attention_batch, check_attention

pytestmark = pytest.mark.sglang

HOPPER = Target("cuda", "sm90")
SPEC = AttentionCase("", (), heads=32, kv_heads=8, dim=128).spec(torch.bfloat16)
#: Of the kernel package, which is not imported.
(FOLDER,) = map(Path, importlib.util.find_spec("sgl_kernel").submodule_search_locations)  # type: ignore[union-attr]
CASES = [case for case in ATTENTION_CASES if case.packed and case.dim % 8 == 0]


def load(name: str) -> ModuleType:
    """A file of the kernel package."""
    spec = importlib.util.spec_from_file_location(f"sgl_kernel.{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calls() -> Iterator[list[dict[str, Any]]]:
    """What the compiled op was given: the reference stands in for it."""
    with (
        (FOLDER / "flash_ops.abi3.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as it,
    ):
        start = it.find(b"fwd(Tensor")
        schema = it[start : it.find(b"\0", start)].decode()
    library = torch.library.Library("sgl_kernel", "DEF")
    library.define(schema)
    names = [argument.name for argument in torch.ops.sgl_kernel.fwd.default._schema.arguments]
    seen: list[dict[str, Any]] = []

    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        seen.append(dict(zip(names, arguments, strict=False)))
        return compiled(**seen[-1])

    library.impl("fwd", forward, "CompositeExplicitAutograd")
    yield seen
    library._destroy()


def compiled(**given: Any) -> tuple[torch.Tensor, ...]:
    """The op's meaning, by the binding's docstring, and what the library's own messages ask for."""
    q, k, v, out, sinks, table = (given[name] for name in ("q", "k", "v", "out", "sinks", "page_table"))
    assert given["is_causal"]
    # Partial results would take memory that nobody has counted.
    assert given["num_splits"] == 1
    assert sinks is None or (sinks.dtype, sinks.is_contiguous()) == (torch.bfloat16, True)
    for name in ("page_table", "cu_seqlens_q", "seqused_k"):
        assert (given[name].dtype, given[name].stride(-1)) == (torch.int32, 1)
    others = given.keys() - {"q", "k", "v", "out", "sinks", "page_table", "cu_seqlens_q", "seqused_k", "max_seqlen_q"}
    assert all(given[name] is None for name in others if name.endswith(("_new", "descale", "metadata", "_fine")))
    starts, lengths = given["cu_seqlens_q"], given["seqused_k"]
    assert int(starts.diff().max()) <= given["max_seqlen_q"]
    batch = batch_of(q, starts, lengths, table, given["max_seqlen_q"], table.shape[1] * k.shape[1])
    window = given["window_size_left"], given["window_size_right"]
    attend(*(q, k, v, batch, sinks, out), scale=given["softmax_scale"], window=window, soft_cap=given["softcap"])
    return out, *(torch.empty(0) for _ in range(3))


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file, imported as if its library could be loaded."""
    package = ModuleType("sgl_kernel")
    package.flash_ops = ModuleType("sgl_kernel.flash_ops")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.debug_utils", load("debug_utils"))
    module = package.flash_attn = load("flash_attn")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    return module


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_arguments_mean_what_is_meant(calls: list[dict[str, Any]], case: AttentionCase) -> None:
    kernel = SglangFlashAttention3(case.spec(torch.bfloat16))
    inputs = attention_batch(case, torch.bfloat16, torch.device("cpu"))
    calls.clear()
    check_attention(kernel, inputs)
    (call,) = calls
    # No copy of the pool is made.
    assert (call["k"].data_ptr(), call["v"].data_ptr()) == (inputs.cache.key.data_ptr(), inputs.cache.value.data_ptr())


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_pages_are_those_that_sglangs_own_backend_passes(page_size: int, kv_heads: int) -> None:
    from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from atom_plugin.sglang.attention_backend.kv_view import Pools
    from tests.integration.sglang.test_graph_state import make_runner

    runner = make_runner(page_size, False)
    runner.token_to_kv_pool = MHATokenToKVPool(
        size=256,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=kv_heads,
        head_dim=64,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    view = Pools(runner).view(0)
    buffers = runner.token_to_kv_pool.get_key_buffer(0), runner.token_to_kv_pool.get_value_buffer(0)
    for ours, buffer in zip((view.key, view.value), buffers, strict=True):
        passed, native = ours.transpose(1, 2), paged_kv_view(buffer, page_size, kv_heads, 64)
        assert (passed.shape, passed.stride()) == (native.shape, native.stride())
        assert passed.data_ptr() == native.data_ptr()


@pytest.mark.parametrize(
    ("mode", "new", "cached", "long"),
    [
        ("EXTEND", (1024,), 3000, True),
        ("EXTEND", (200,) * 8, 0, False),
        ("MIXED", (1024, 1, 1, 1), 500, True),
        ("TARGET_VERIFY", (8,) * 256, 500, False),
        ("DRAFT_EXTEND_V2", (8,) * 256, 500, False),
        ("DECODE", (1,) * 2048, 500, False),
    ],
)
def test_prompts_and_what_decodes_beside_them_go_to_it(
    mode: str, new: tuple[int, ...], cached: int, long: bool
) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.batch import requests_of

    verified = new[0] if mode == "TARGET_VERIFY" else 0  # SGLang's lengths are without what is verified
    lengths = torch.tensor(new) + cached - verified
    forward_batch = SimpleNamespace(
        forward_mode=ForwardMode[mode],
        batch_size=len(new),
        spec_info=SimpleNamespace(draft_token_num=new[0]),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=list(new),
    )
    batch = requests_of(forward_batch, 8192)  # type: ignore[arg-type]
    assert batch.max_query_len == max(new)
    assert int(batch.seq_lens.max()) == max(new) + cached
    ours, other = (Mock(order="plain", graph_support="always", **{"plan_key.return_value": None}) for _ in range(2))
    assert DispatchByPrompts(SPEC, ours, other).chosen(batch) is (other if long else ours)


def test_attention_to_prompts_is_outside_of_captured_graphs_and_knows_the_lengths_of_each_step() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    assert callable(RadixAttention._eager_attention.run_eager), "it breaks the graph"
    captured = AtomAttentionBackend.use_captured_forward_metadata_for_breakable_cuda_graph
    backend, step, padded = Mock(skips_prefill_metadata_on_idle_dp_rank=False), Mock(), Mock()
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(attn_backend=backend), use_captured_attn_metadata=captured, _is_full_backend=False
    )
    PrefillCudaGraphRunner._prepare_forward_metadata_for_replay(runner, step, padded, Mock())
    backend.init_forward_metadata.assert_called_once_with(step)


def test_a_machine_without_the_package_says_so() -> None:
    reason = why_not_here() or ""
    assert "SGLang's FlashAttention 3 cannot be imported" in reason
    assert gpu_kernels()["attention"].supports(SPEC, HOPPER) == reason


def test_it_can_run_where_sglang_says_so(monkeypatch: pytest.MonkeyPatch, binding: ModuleType) -> None:
    monkeypatch.setattr(binding, "is_fa3_supported", lambda: False)
    assert "no FlashAttention 3 for this machine" in (why_not_here() or "")
    monkeypatch.setattr(binding, "is_fa3_supported", lambda: True)
    assert why_not_here() is None
    kernels = KernelSet(HOPPER, OPS, contributed=gpu_kernels())
    assert kernels.chosen(ATTENTION, SPEC) == TRITON_AND_FLASH_ATTENTION_3
    assert isinstance(kernels.select(ATTENTION, SPEC), DispatchByPrompts)
    assert kernels.chosen(ATTENTION, replace(SPEC, cache_dtype=torch.float8_e4m3fn)) == "triton"


def test_its_name_is_known_on_every_device() -> None:
    names = f"attention={TRITON_AND_FLASH_ATTENTION_3},all_reduce_norm=aiter"
    kernels = chosen_kernels(Target("cpu", ""), load_settings({"ATOM_KERNELS": names}), gpu_kernels())
    with pytest.raises(ValueError, match=f"attention={TRITON_AND_FLASH_ATTENTION_3}, which cannot run on cpu"):
        kernels.select(ATTENTION, SPEC)
