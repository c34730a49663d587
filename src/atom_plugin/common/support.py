"""What is supported: architecture x framework x quantisation x device, derived from the core's model registry.

The README's table, the documentation and `atom-plugin models` are made from `support_rows`, so none can drift from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atom_core.models.registry import MODELS
from atom_core.quant import CHECKPOINT_METHODS, SUPPORTED

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class FrameworkSupport:
    """What one adapter can run."""

    framework: str
    quantizations: tuple[str, ...]
    devices: tuple[str, ...]
    refuses: tuple[tuple[str, str], ...] = ()
    """A quantisation of one architecture's own checkpoints, and a device where the framework itself refuses it."""


@dataclass(frozen=True)
class SupportRow:
    """One architecture under one framework, at one quantisation, on one kind of device."""

    architecture: str
    family: str
    framework: str
    quantization: str
    device: str


FRAMEWORKS = (
    FrameworkSupport("vllm", quantizations=SUPPORTED, devices=("cpu", "cuda", "rocm")),
    FrameworkSupport("sglang", SUPPORTED, devices=("cpu", "cuda", "rocm"), refuses=(("mxfp4", "cpu"),)),
)


@dataclass(frozen=True)
class RefusedFlag:
    """A flag of a framework that asks for what our models cannot do, but for the values in `allowed`."""

    flag: str
    reason: str
    allowed: tuple[str, ...] = ()


_NO_LORA = "our models take no LoRA adapters"
_TEXT_ONLY = "our models generate text only"
_NO_QUANTIZATION = "this quantisation is not supported"
_NO_OFFLOAD = "our models cannot keep weights in host memory"
_NO_OVERLAP = "our models cannot overlap two batches"
_NO_CONTEXT_SPLIT = "our models cannot split a context over ranks"
_NO_ATTENTION_DP = "our models cannot split attention by requests"
_NO_EXPERT_EXCHANGE = "each rank of our models sees every token"
_NO_EXPERT_BALANCE = "experts stay on their ranks"
_NO_CACHE_DTYPE = "this dtype of the cache is not supported"
_SAFETENSORS_ONLY = "checkpoints are read as safetensors"

#: Values of SGLang's `--load-format` that read safetensors, and the dtypes that its pool can have beside the model's.
#: SGLang itself has no fp8_e5m2 on a CPU, and takes either FP8 on ROCm for the one that the GPU has.
SGLANG_LOAD_FORMATS = ("auto", "safetensors", "dummy", "fastsafetensors", "runai_streamer", "layered")
SGLANG_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
#: Values of `--quantization`; SGLang has a second name for ModelOpt's FP8, and for leaving weights as they are.
SGLANG_QUANTIZATIONS = ("unquant", *dict.fromkeys(("fp8", *CHECKPOINT_METHODS)), "modelopt_fp8")
#: SGLang's ways to draft: a head on the target's last hidden states (two names for it), and a model of its own.
SGLANG_DRAFTS = ("EAGLE", "NEXTN", "STANDALONE")

SGLANG_REFUSED_FLAGS = (
    RefusedFlag("--enable-lora", _NO_LORA),
    RefusedFlag("--lora-paths", _NO_LORA),
    RefusedFlag("--is-embedding", _TEXT_ONLY),
    RefusedFlag("--quantization", _NO_QUANTIZATION, allowed=SGLANG_QUANTIZATIONS),
    RefusedFlag("--cpu-offload-gb", _NO_OFFLOAD, allowed=("0",)),
    RefusedFlag("--offload-group-size", _NO_OFFLOAD, allowed=("-1", "0")),
    RefusedFlag("--enable-two-batch-overlap", _NO_OVERLAP),
    RefusedFlag("--enable-dp-attention", _NO_ATTENTION_DP),
    RefusedFlag("--attn-dp-size", _NO_ATTENTION_DP, allowed=("1",)),
    RefusedFlag("--attention-data-parallel-size", _NO_ATTENTION_DP, allowed=("1",)),
    RefusedFlag("--attn-cp-size", _NO_CONTEXT_SPLIT, allowed=("1",)),
    RefusedFlag("--attention-context-parallel-size", _NO_CONTEXT_SPLIT, allowed=("1",)),
    RefusedFlag("--dcp-size", _NO_CONTEXT_SPLIT, allowed=("1",)),
    RefusedFlag("--decode-context-parallel-size", _NO_CONTEXT_SPLIT, allowed=("1",)),
    RefusedFlag("--moe-dp-size", _NO_EXPERT_EXCHANGE, allowed=("1",)),
    RefusedFlag("--moe-data-parallel-size", _NO_EXPERT_EXCHANGE, allowed=("1",)),
    RefusedFlag("--moe-a2a-backend", _NO_EXPERT_EXCHANGE, allowed=("none",)),
    RefusedFlag("--enable-eplb", _NO_EXPERT_BALANCE),
    RefusedFlag("--ep-num-redundant-experts", _NO_EXPERT_BALANCE, allowed=("0",)),
    RefusedFlag("--init-expert-location", _NO_EXPERT_BALANCE, allowed=("trivial",)),
    RefusedFlag("--enable-pdmux", "our models cannot multiplex prefill and decode"),
    RefusedFlag("--enable-torch-compile", "our kernels are fused already"),
    RefusedFlag("--enable-deterministic-inference", "our kernels do not promise it"),
    RefusedFlag("--dllm-algorithm", "our models generate one token after another"),
    RefusedFlag("--speculative-algorithm", "this way to draft is not supported", allowed=SGLANG_DRAFTS),
    RefusedFlag("--speculative-eagle-topk", "our drafts are chains", allowed=("1",)),
    RefusedFlag("--speculative-adaptive", "our drafts have a fixed length"),
    RefusedFlag("--enable-unified-memory", "our attention reads slots where they are"),
    RefusedFlag("--kv-cache-dtype", _NO_CACHE_DTYPE, allowed=SGLANG_CACHE_DTYPES),
    RefusedFlag("--load-format", _SAFETENSORS_ONLY, allowed=SGLANG_LOAD_FORMATS),
)


def support_rows() -> tuple[SupportRow, ...]:
    """Every supported combination."""
    return tuple(
        SupportRow(entry.architecture, entry.family, support.framework, quantization, device)
        for entry in MODELS.values()
        for support in FRAMEWORKS
        for quantization in (support.quantizations if entry.quantized else ("none", *entry.own_quantizations))
        for device in support.devices
        if quantization not in entry.own_quantizations or (quantization, device) not in support.refuses
    )


_HEADINGS = ("Architecture", "Family", "Framework", "Quantisation", "Devices")


def _lines(rows: Sequence[SupportRow]) -> list[tuple[str, ...]]:
    """One line for all devices and quantisations of an architecture and framework."""
    cells: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        quantizations, devices = cells.setdefault((row.architecture, row.family, row.framework), ({}, {}))
        quantizations[row.quantization] = None
        devices[row.device] = None
    return [(*key, ", ".join(quantizations), ", ".join(devices)) for key, (quantizations, devices) in cells.items()]


def as_table(rows: Sequence[SupportRow]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table(*_HEADINGS)
    for line in _lines(rows):
        table.add_row(*line)
    return table


def as_markdown(rows: Sequence[SupportRow]) -> str:
    """For a page."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS)]
    lines += [(f"`{architecture}`", *rest) for architecture, *rest in _lines(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_json(rows: Sequence[SupportRow]) -> str:
    """For a program: one object a combination."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
