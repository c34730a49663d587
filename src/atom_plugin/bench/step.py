"""The GPU time of one step: the model in one captured graph, replayed without an engine and its host work.

The graph has the embedding, all layers, the final norm, the head and the argmax over tokens. Weights, cached keys and
values, and the order of pages are random. A layer with a window has the pages of the window alone, as in vLLM.

Requests decode one token each, or bring a chunk of their prompt (``--chunk``), or some do the one and some the other,
as in most steps of a loaded server. Engines run steps with chunks piecewise, where launches may cost more than here.
Without the command line's packages:

    python -m atom_plugin.bench.step qwen3-0.6b --batch 1
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atom_core.config import ModelConfig
from atom_core.loading import UNQUANTIZED, build_on_meta_device
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.runtime import Runtime
from atom_core.standalone import build_runtime, random_model
from atom_plugin.bench.batches import MAX_MODEL_LEN, PAGE_SIZE, stepping
from atom_plugin.bench.device import (
    Ceiling,
    Timing,
    capture,
    measure,
    measure_ceiling,
    measure_products,
    require_gpu,
    warm,
)
from atom_plugin.bench.floor import Request, Traffic, cache_bytes, decodes, lengths_of, operations, weight_bytes
from atom_plugin.bench.memory import weight_memory, why_too_large
from atom_plugin.bench.models import read_config
from atom_plugin.bench.profile import KernelTime, profile
from atom_plugin.bench.profile import lines as profile_lines
from atom_plugin.bench.routing import send_to_given_experts
from atom_plugin.common.kernels import forced_kernels
from atom_plugin.common.settings import load_settings

#: The longest context that is measured.
MAX_CONTEXT = 131_072
#: The most new tokens of a step.
MAX_NEW = 131_072

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CACHE_DTYPES = {**_DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class StepOptions:
    """What is measured."""

    model: str
    """A checkpoint's folder, a config.json, or a known model's name."""
    batch: int | None = None
    """Requests that decode; None: one of each context; 0: the step has chunks of prompts alone."""
    context: tuple[int, ...] = (128,)
    """Cached tokens of the requests, which take them in turns."""
    dtype: str = "bfloat16"
    cache_dtype: str = "auto"
    quantization: str | None = None
    """The value of an engine's flag of that name; None: as in the configuration."""
    layers: int | None = None
    repetitions: int = 20
    profile: bool = False
    """Also show the time of each kernel."""
    seconds: float = 0.0
    """Also measure the mean over this time without pauses, in which a GPU reaches its power limit; 0: do not."""
    max_model_len: int | None = None
    """Graphs are captured for sequences of up to so many tokens; None: see :data:`MAX_MODEL_LEN`."""
    chunk: tuple[int, ...] = ()
    """New tokens of each further request, whose prompt is in the step; behind those that decode."""
    chunk_context: int = 0
    """Cached tokens of each of those."""
    page_size: int = PAGE_SIZE
    """Tokens of a page."""

    @property
    def num_decodes(self) -> int:
        """Requests that decode."""
        return len(self.context) if self.batch is None else self.batch

    @property
    def chunks(self) -> tuple[Request, ...]:
        """Requests that bring a chunk of their prompt."""
        return tuple(Request(self.chunk_context, new) for new in self.chunk)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All, those that decode first."""
        return (*decodes(self.num_decodes, self.context), *self.chunks)

    @property
    def graph_len(self) -> int:
        """The tokens of the longest sequence that the graph is captured for."""
        needed = max(MAX_MODEL_LEN, *(it.length for it in self.requests))
        return needed if self.max_model_len is None else self.max_model_len

    def check(self) -> None:
        """Raise a ValueError for an unsupported option."""
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions}: a positive number is needed.")
        if self.batch is not None and self.batch < (0 if self.chunk else 1):
            raise ValueError(f"--batch {self.batch}: a positive number is needed, or 0 with --chunk.")
        if self.batch == 0 and self.context != StepOptions.context:
            raise ValueError(
                f"--context {self.context[0]}: with --batch 0 no request decodes. "
                "What a chunk has cached is --chunk-context."
            )
        if self.page_size < 1:
            raise ValueError(f"--page-size {self.page_size}: a positive number is needed.")
        for tokens in self.chunk:
            if not 1 < tokens <= MAX_NEW:
                raise ValueError(f"--chunk {tokens}: supported: 2 to {MAX_NEW} new tokens of a prompt.")
        if self.chunk_context and not self.chunk:
            raise ValueError(f"--chunk-context {self.chunk_context}: only with --chunk.")
        if not 0 <= self.chunk_context <= MAX_CONTEXT:
            raise ValueError(f"--chunk-context {self.chunk_context}: supported: 0 to {MAX_CONTEXT}.")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"--seconds {self.seconds}: a number from 0 on is needed.")
        for tokens in self.context:
            if not 0 <= tokens <= MAX_CONTEXT:
                raise ValueError(f"--context {tokens}: supported: 0 to {MAX_CONTEXT}.")
        if 0 < self.num_decodes < len(self.context):
            raise ValueError(f"--batch {self.batch}: {len(self.context)} contexts need at least as many requests.")
        longest = max(self.requests, key=lambda it: it.length)
        if self.graph_len < longest.length:
            new = "a new one" if longest.new == 1 else f"{longest.new} new ones"
            raise ValueError(
                f"--max-model-len {self.max_model_len}: a context of {longest.cached} tokens and {new} need "
                f"{longest.length} or more."
            )
        torch_dtype(self.dtype)
        cache_torch_dtype(self.cache_dtype, torch_dtype(self.dtype))


@dataclass(frozen=True)
class StepResult:
    """A step's time and its minimum time."""

    options: StepOptions
    ceiling: Ceiling
    traffic: Traffic
    timing: Timing
    kernels: dict[str, str]
    profile: tuple[KernelTime, ...] = ()
    """Empty unless asked for."""
    sustained: float | None = None
    """Mean seconds per step without pauses; None unless asked for."""
    operations: int | None = None
    """Of the step's products; None: of a step of decodes alone, which memory bounds."""
    products: float | None = None
    """Operations per second of torch's own product in the model's dtype; None: also where layers are quantised."""

    @property
    def floor(self) -> float:
        """The minimum time in seconds: at the measured bandwidth, or by :attr:`products` if that is longer."""
        return max(self.traffic.seconds(self.ceiling.bandwidth), self._computing)

    @property
    def _computing(self) -> float:
        return 0.0 if self.operations is None or self.products is None else self.operations / self.products

    def as_json(self) -> dict[str, Any]:
        """All figures, in the units that the keys name; "context" is a list where requests differ."""
        datasheet, options = self.ceiling.datasheet, self.options
        return {
            **asdict(options),
            "batch": options.num_decodes,
            "context": options.context[0] if len(options.context) == 1 else list(options.context),
            "max_model_len": options.graph_len,
            "device": self.ceiling.device,
            "torch": torch.__version__,
            "kernels": self.kernels,
            "milliseconds": self.timing.median * 1e3,
            "least_milliseconds": self.timing.least * 1e3,
            "most_milliseconds": self.timing.most * 1e3,
            "sustained_milliseconds": None if self.sustained is None else self.sustained * 1e3,
            "weight_bytes": self.traffic.weights,
            "cache_bytes": self.traffic.cache,
            "operations": self.operations,
            "products_a_second": self.products,
            "copy_bytes_a_second": self.ceiling.copy,
            "read_bytes_a_second": self.ceiling.read,
            "floor_milliseconds": self.floor * 1e3,
            "share_of_floor": self.floor / self.timing.median,
            "datasheet_bytes_a_second": datasheet,
            "datasheet_floor_milliseconds": None if datasheet is None else self.traffic.seconds(datasheet) * 1e3,
            "share_of_datasheet_floor": (
                None if datasheet is None else self.traffic.seconds(datasheet) / self.timing.median
            ),
            "profile": [asdict(it) for it in self.profile],
        }

    def lines(self) -> list[str]:
        """The result as printed text."""
        options, timing, ceiling, traffic = self.options, self.timing, self.ceiling, self.traffic
        cut = "" if options.layers is None else f" cut to {options.layers} layers"
        quantized = "" if options.quantization is None else f", {options.quantization}"
        reached = traffic.total / timing.median
        lines = [
            f"{options.model}{cut}, {self._requests()}, {options.dtype}{quantized}, on {ceiling.device}",
            f"  kernels    {', '.join(f'{op}={name}' for op, name in self.kernels.items())}",
            f"  step       {timing.median * 1e3:.4f} ms ({timing.least * 1e3:.4f} to {timing.most * 1e3:.4f})",
            *self._sustained_lines(),
            f"  moves      {traffic.weights / 1e9:.3f} GB of weights, {traffic.cache / 1e9:.3f} GB of cache: "
            f"{reached / 1e12:.2f} TB/s",
            *self._product_lines(),
            f"  floor      {self.floor * 1e3:.4f} ms at {self._bound()}, measured here): "
            f"{self.floor / timing.median:.0%} of it reached",
        ]
        if ceiling.datasheet is not None:
            least = traffic.seconds(ceiling.datasheet)
            lines.append(
                f"  datasheet  {least * 1e3:.4f} ms at {ceiling.datasheet / 1e12:.2f} TB/s: "
                f"{least / timing.median:.0%} of it reached"
            )
        if self.profile:
            lines += profile_lines(self.profile, timing.median)
        return lines

    def _product_lines(self) -> list[str]:
        if self.operations is None:
            return []
        reached = self.operations / self.timing.median
        return [f"  computes   {self.operations / 1e12:.2f} TFLOP in products: {reached / 1e12:.0f} TFLOP/s"]

    def _bound(self) -> str:
        """What the floor is by, without the last bracket."""
        ceiling = self.ceiling
        if self.products is not None and self.floor == self._computing:
            return f"{self.products / 1e12:.0f} TFLOP/s (torch's own product"
        return (
            f"{ceiling.bandwidth / 1e12:.2f} TB/s (copying {ceiling.copy / 1e12:.2f}, reading {ceiling.read / 1e12:.2f}"
        )

    def _requests(self) -> str:
        options = self.options
        parts = [f"batch {options.num_decodes}, {self._contexts()}"] if options.num_decodes else []
        if options.chunk:
            behind = f" behind {options.chunk_context} each" if options.chunk_context else ""
            counts = ", ".join(f"{options.chunk.count(it)} of {it}" for it in dict.fromkeys(options.chunk))
            parts.append(f"chunks of prompts: {counts} tokens{behind}")
        if options.graph_len != MAX_MODEL_LEN:
            parts.append(f"graph for up to {options.graph_len}")
        if options.page_size != PAGE_SIZE:
            parts.append(f"pages of {options.page_size}")
        return ", ".join(parts)

    def _contexts(self) -> str:
        given, options = self.options.context, self.options
        lengths = lengths_of(options.num_decodes, given)
        text = f"{given[0]} tokens of context each"
        if len(given) > 1:
            text = (
                f"contexts in turns: {', '.join(f'{lengths.count(it)} of {it}' for it in dict.fromkeys(given))} tokens"
            )
        return text

    def _sustained_lines(self) -> list[str]:
        if self.sustained is None:
            return []
        longer = self.sustained / self.timing.median - 1
        return [
            f"  sustained  {self.sustained * 1e3:.4f} ms ({longer:+.1%}), the mean of {self.options.seconds:g} s "
            "without a pause"
        ]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `--dtype`; a ValueError if it is not supported."""
    if name not in _DTYPES:
        raise ValueError(f"--dtype {name!r}: supported: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def cache_torch_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of a `--cache-dtype`; "auto" is the model's. A ValueError if it is not supported."""
    if name == "auto":
        return dtype
    if name not in _CACHE_DTYPES:
        raise ValueError(f"--cache-dtype {name!r}: supported: auto, {', '.join(_CACHE_DTYPES)}.")
    # gfx942 has an e4m3 of its own.
    if name == "fp8_e4m3" and torch.version.hip and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName:
        return torch.float8_e4m3fnuz
    return _CACHE_DTYPES[name]


def decoding(
    model: DecoderForCausalLM, config: ModelConfig, runtime: Runtime, batch: int, context: int | Sequence[int]
) -> Callable[[], None]:
    """A decoding step from token ids to the argmax tokens; see :func:`atom_plugin.bench.batches.step_batch`."""
    return stepping(model, config, runtime, decodes(batch, context))


@torch.inference_mode()
def measure_step(options: StepOptions) -> StepResult:
    """Build the model, capture its step, and time it.

    Raises:
        ValueError: no GPU, an unsupported model or option, or too little memory.
    """
    options.check()
    hf = read_config(options.model, options.layers)
    quant = read_quantization(hf, options.quantization)
    config = read_model_config(hf)
    device = require_gpu()
    dtype = torch_dtype(options.dtype)
    cache_dtype = cache_torch_dtype(options.cache_dtype, dtype)
    layout = build_on_meta_device(config, dtype, quant=quant)
    requests = options.requests
    tokens = sum(it.new for it in requests)
    traffic = Traffic(weight_bytes(layout, tokens), cache_bytes(config, requests, cache_dtype))
    free, _ = torch.cuda.mem_get_info(device)
    weights = weight_memory(list(layout.parameters()), config, options.graph_len)
    batch, page_size, chunks = options.num_decodes, options.page_size, options.chunks
    if line := why_too_large(config, weights, batch, options.context, cache_dtype, page_size, free, chunks):
        raise ValueError(line)
    ceiling = measure_ceiling(device)
    products = measure_products(device, dtype) if chunks and quant.name == UNQUANTIZED.name else None
    torch.cuda.empty_cache()

    settings = load_settings()
    runtime = build_runtime(
        device,
        dtype,
        options.graph_len,
        forced_kernels(settings),
        cache_dtype=cache_dtype,
        quant=quant,
        with_aiter=settings.aiter,
    )
    try:
        model = random_model(config, runtime)
        send_to_given_experts(model, config, tokens)
        graph = capture(stepping(model, config, runtime, requests, page_size))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"The step needs more than the {free / 1e9:.1f} GB of free GPU memory, by what its kernels work in: use a "
            "smaller --batch, less --context or fewer --layers."
        ) from error
    timing = measure(graph.replay, options.repetitions, sample_seconds=0.05)
    sustained = warm(graph.replay, options.seconds) if options.seconds else None
    kernels = {choice.op: choice.implementation for choice in runtime.kernels.choices()}
    profiled = profile(graph) if options.profile else ()
    computed = operations(config, requests) if chunks else None
    return StepResult(options, ceiling, traffic, timing, kernels, profiled, sustained, computed, products)


def write_json(result: StepResult, path: Path) -> None:
    """Write the result as a JSON file."""
    path.write_text(json.dumps(result.as_json(), indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m atom_plugin.bench.step`: the same options as `atom-plugin bench step`."""
    parser = argparse.ArgumentParser(prog="python -m atom_plugin.bench.step", description="See the module's text.")
    parser.add_argument("model")
    for name in ("batch", "layers", "repetitions", "max-model-len", "chunk-context", "page-size"):
        parser.add_argument(f"--{name}", type=int, default=getattr(StepOptions, name.replace("-", "_")))
    parser.add_argument("--context", type=int, action="append", help="may be repeated, for requests in turns")
    parser.add_argument("--chunk", type=int, action="append", help="may be repeated")
    parser.add_argument("--dtype", default=StepOptions.dtype)
    parser.add_argument("--cache-dtype", default=StepOptions.cache_dtype)
    parser.add_argument("--quantization")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--seconds", type=float, default=StepOptions.seconds)
    parser.add_argument("--json", type=Path)
    given = vars(parser.parse_args(arguments))
    path = given.pop("json")
    given["context"] = tuple(given["context"] or StepOptions.context)
    given["chunk"] = tuple(given["chunk"] or ())
    try:
        result = measure_step(StepOptions(**given))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join(result.lines()) + "\n")
    if path is not None:
        write_json(result, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
