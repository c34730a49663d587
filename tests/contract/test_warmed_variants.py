"""No request waits for a kernel to be compiled: what batches launch, the warm-up has launched, in every variant.

Models of their real sizes are laid out on the meta device with the kernels of a GPU, and launches are recorded in place
of made, with what Triton tells compiled variants apart by: constants, and of other arguments the type, whether sixteen
divides them, and whether they are 1. No GPU takes part.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, KernelParam

from atom_core.batch import BatchShape
from atom_core.kernels.decode_attention import hopper as decode_attention
from atom_core.kernels.qk_norm_rope_cache import triton_kernel as qk_norm_rope_cache
from atom_core.kernels.select import Target
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.quant import read_quantization
from atom_core.standalone import Step, build_runtime, empty_caches, finalize
from atom_core.warmup import StateKind, batches_to_serve, run_batch
from atom_plugin.bench.models import read_config
from benchmarks._launches import META, launching

MAX_REQUESTS, MAX_TOKENS, MAX_MODEL_LEN, PAGE_SIZE = 256, 16384, 4096, 64
HOPPER, MI300 = Target("cuda", "sm90"), Target("rocm", "gfx942")
NUM_BATCHES = 150

Variant = tuple[str, tuple[object, ...]]


def variant_of(kernel: JITFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant:
    """What is compiled for a launch."""
    given = dict(zip((it.name for it in kernel.params), args, strict=False)) | kwargs
    told = tuple(_told(it, given.pop(it.name, None)) for it in kernel.params)
    return kernel.fn.__qualname__, (*told, *sorted(given.items()))


def _told(parameter: KernelParam, value: Any) -> tuple[str, object]:
    """What the compiler is told of an argument."""
    special = not parameter.do_not_specialize
    if isinstance(value, torch.Tensor):
        return parameter.name, (value.dtype, special and value.storage_offset() * value.itemsize % 16 == 0)
    if parameter.is_constexpr or value is None:
        return parameter.name, repr(value)
    if isinstance(value, int):
        return parameter.name, ("int", special and value % 16 == 0, special and value == 1)
    if isinstance(value, TensorDescriptor):
        return parameter.name, (value.base.dtype, tuple(value.block_shape), repr(value.layout))
    return parameter.name, type(value)


def served(drafts: int) -> Iterator[BatchShape]:
    """Batches as an engine makes them: decodes, and behind them prompts, whole or in chunks, cached or not.

    A request that decodes verifies as many ``drafts`` as there are, or fewer.
    """
    chance = random.Random(0)
    while True:
        decodes = chance.choice((0, 0, 1, chance.randrange(9), chance.randrange(MAX_REQUESTS)))
        cached = chance.choice((0, 0, 64, 512))
        sizes = chance.choice(((4,), (9,), (64,), (700,), (4, 9, 64, 700), (MAX_MODEL_LEN - cached - drafts,)))
        prompts = [drafts + chance.randint(2, chance.choice(sizes)) for _ in range(chance.choice((0, 1, 1, 2, 8, 64)))]
        least = chance.choice((1, 1 + drafts))
        queries = (*(chance.randint(least, 1 + drafts) for _ in range(decodes)), *prompts)
        if not queries or len(queries) > MAX_REQUESTS or sum(queries) > MAX_TOKENS:
            continue
        longest = max(queries) + cached
        bound = chance.choice((longest, chance.randint(longest, MAX_MODEL_LEN)))
        yield BatchShape(queries, bound, cached, decode_tokens=1 + drafts)


@pytest.mark.parametrize(
    ("model", "num_layers", "target", "drafts"),
    [
        *((model, 2, HOPPER, 0) for model in ("deepseek-v2-lite", "qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "gpt-oss-20b")),
        *((model, 2, HOPPER, 0) for model in ("qwen3-8b", "qwen3-8b-fp8", "llama-3.1-8b")),
        ("deepseek-v3", 4, HOPPER, 0),
        ("deepseek-v3", 4, HOPPER, 1),
        ("glm-4.5-air", 2, HOPPER, 0),
        ("qwen3-next-80b-a3b", 4, HOPPER, 0),
        ("qwen3-next-80b-a3b", 4, HOPPER, 3),
        ("qwen3-next-80b-a3b-fp8", 4, MI300, 0),
        ("qwen3-next-80b-a3b-fp8", 4, MI300, 2),
        ("deepseek-v2-lite", 2, MI300, 0),
        ("qwen3-30b-a3b", 2, MI300, 0),
    ],
)
@torch.inference_mode()
def test_what_batches_launch_the_warm_up_has_launched(model, num_layers, target, drafts):
    assert_warmed(Server(model, num_layers, target, drafts), drafts)


@torch.inference_mode()
def test_rows_that_are_not_aligned_behind_an_odd_number_of_decodes_are_warmed_up():
    """Of one of eight tensor-parallel ranks."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_attention_heads": 3, "num_key_value_heads": 1}
    assert_warmed(Server("qwen3.5-27b", 4, HOPPER, **heads))


def assert_warmed(server: Server, drafts: int = 0) -> None:
    """All variants that batches launch have been launched by the warm-up."""
    server.warm_up()
    warmed = set(server.launched)
    server.serve(islice(served(drafts), NUM_BATCHES))
    assert warmed
    assert {variant: first for variant, first in server.launched.items() if variant not in warmed} == {}


@torch.inference_mode()
def test_where_a_kernel_has_a_tile_more_it_is_warmed_up_though_nobody_else_knows_of_it(monkeypatch):
    """One of so many tokens, and one of so many requests."""
    kernel, usual = decode_attention.HopperDecodeAttention, decode_attention.Tile(64, 2, 4, 1)
    monkeypatch.setattr(qk_norm_rope_cache, "_heads", lambda num_tokens: 4 if num_tokens < 701 else 16)
    monkeypatch.setattr(
        kernel, "tile", lambda self, programs, device: usual._replace(buffers=3 if programs == 8 * 77 else 2)
    )
    server = Server("qwen3-8b", 1, HOPPER)
    server.warm_up()
    by_name: dict[str, list[BatchShape]] = {}
    for (name, _), first in server.launched.items():
        by_name.setdefault(name, []).append(first)
    assert sorted(shape.num_tokens > 700 for shape in by_name["_qk_norm_rope_cache"]) == [False, True]
    assert 77 in {shape.num_requests for shape in by_name["decode_attention_hopper"]}


class Server:
    """A model whose launches are recorded in place of made, with `changes` of its configuration."""

    def __init__(self, model: str, num_layers: int, target: Target, drafts: int = 0, **changes: int) -> None:
        self.states = StateKind(1 + drafts, drafts > 0, drafts > 0)
        hf = read_config(model, num_layers) | changes
        config, quant = read_model_config(hf), read_quantization(hf, None)
        self.launched: dict[Variant, BatchShape] = {}
        """By variant: the batch that launched it first."""

        def launch(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
            self.launched.setdefault(variant_of(kernel, args, kwargs), self.batch)

        self.launch = launch
        with launching(launch):
            self.runtime = build_runtime(
                META, torch.bfloat16, MAX_MODEL_LEN, target=target, quant=quant, with_aiter=False
            )
            self.network = load_model_class(config.architecture)(config, self.runtime)
            finalize(self.network)
            self.pools = empty_caches(self.network, self.runtime, 64, PAGE_SIZE, 1)

    def warm_up(self) -> None:
        """Run what is run before a server is ready."""
        with launching(self.launch):
            limits = MAX_REQUESTS, MAX_TOKENS, MAX_MODEL_LEN
            batches = batches_to_serve(self.network, self.runtime, *limits, self.states.slots)
        self.serve(batches)

    def serve(self, batches: Iterable[BatchShape]) -> None:
        """Run batches."""
        width = MAX_MODEL_LEN // PAGE_SIZE
        with launching(self.launch):
            for self.batch in batches:
                announce = lambda it: nullcontext(Step(it, self.pools))  # noqa: E731
                run_batch(self.batch, self.network, self.runtime, width, announce, self.states)
