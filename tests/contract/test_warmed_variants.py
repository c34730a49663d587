"""No request waits for a kernel to be compiled: what batches launch, the warm-up has launched, in every variant.

Models of their real sizes are laid out on the meta device with the kernels of a GPU, and launches are recorded in place
of made, with what Triton tells compiled variants apart by: constants, and of other arguments the type, whether sixteen
divides them, and whether they are 1. No GPU takes part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction, KernelParam

from atom_core.kernels.select import Target
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.quant import read_quantization
from atom_core.standalone import Step, build_runtime, empty_caches, finalize
from atom_core.warmup import BatchShape, batches_to_serve, run_batch
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
    return parameter.name, type(value)


def served() -> Iterator[BatchShape]:
    """Batches as an engine makes them: decodes, and behind them prompts, whole or in chunks, cached or not."""
    chance = random.Random(0)
    while True:
        decodes = chance.choice((0, 0, 1, chance.randrange(9), chance.randrange(MAX_REQUESTS)))
        cached = chance.choice((0, 0, 64, 512))
        sizes = chance.choice(((4,), (9,), (64,), (700,), (4, 9, 64, 700), (MAX_MODEL_LEN - cached,)))
        prompts = [chance.randint(2, chance.choice(sizes)) for _ in range(chance.choice((0, 1, 1, 2, 8, 64)))]
        queries = (1,) * decodes + tuple(prompts)
        if not queries or len(queries) > MAX_REQUESTS or sum(queries) > MAX_TOKENS:
            continue
        longest = max(queries) + cached
        yield BatchShape(queries, chance.choice((longest, chance.randint(longest, MAX_MODEL_LEN))), cached)


@pytest.mark.parametrize(
    ("model", "num_layers", "target"),
    [
        *((model, 2, HOPPER) for model in ("deepseek-v2-lite", "qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "gpt-oss-20b")),
        *((model, 2, HOPPER) for model in ("qwen3-8b", "qwen3-8b-fp8", "llama-3.1-8b")),
        ("deepseek-v3", 4, HOPPER),
        ("glm-4.5-air", 2, HOPPER),
        ("deepseek-v2-lite", 2, MI300),
        ("qwen3-30b-a3b", 2, MI300),
    ],
)
@torch.inference_mode()
def test_what_batches_launch_the_warm_up_has_launched(model, num_layers, target):
    launched: dict[Variant, BatchShape | None] = {}
    batch: BatchShape | None = None

    def launch(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launched.setdefault(variant_of(kernel, args, kwargs), batch)

    hf = read_config(model, num_layers)
    config = read_model_config(hf)
    quant = read_quantization(hf, None)
    with launching(launch):
        runtime = build_runtime(META, torch.bfloat16, MAX_MODEL_LEN, target=target, quant=quant, with_aiter=False)
        network = load_model_class(config.architecture)(config, runtime)
        finalize(network)
        pools = empty_caches(network, runtime, 64, PAGE_SIZE)
        width = MAX_MODEL_LEN // PAGE_SIZE

        def run(batch: BatchShape) -> None:
            run_batch(batch, network, runtime, width, lambda metadata: nullcontext(Step(metadata, pools)))

        for batch in batches_to_serve(MAX_REQUESTS, MAX_TOKENS, MAX_MODEL_LEN):
            run(batch)
        warmed = set(launched)
        for batch in islice(served(), NUM_BATCHES):
            run(batch)
    assert warmed
    assert {variant: first for variant, first in launched.items() if variant not in warmed} == {}
