"""What a decoder layer launches and moves in a decoding step: ours, counted, beside ATOM's and vLLM's, read.

    python -m benchmarks.launches            # all tables, with the name of each launch; no GPU is needed
    python -m benchmarks.launches --table    # the table of docs/amd-kernels.md
    python -m benchmarks.launches --model qwen3-8b --device gfx942 --batch 1     # ours alone, launch by launch

See :mod:`benchmarks._launches` for how ours are counted, and :mod:`benchmarks._launches_elsewhere` for the others'.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from atom_core.config import AttentionConfig, GatedDeltaNetConfig, LayerConfig, ModelConfig
from atom_core.kernels.select import Target
from atom_core.loading import build_on_meta_device
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_plugin.bench.floor import cache_bytes, decodes, weight_bytes
from atom_plugin.bench.models import read_config
from benchmarks._launches import Launch, count
from benchmarks._launches_elsewhere import Case, Read, atom, vllm

CONTEXT = 2048
GFX942, GFX950 = Target("rocm", "gfx942"), Target("rocm", "gfx950")
HOPPER = Target("cuda", "sm90")
SHUFFLED = "aiter_shuffled"
#: Bytes a second of the memory, as AMD's data sheets have it.
BANDWIDTHS = {"MI300X": 5.3e12, "MI355X": 8.0e12}


@dataclass(frozen=True)
class Row:
    """A layer of a model: the last of so many, which is like those before it."""

    model: str
    said: str
    layers: int
    batch: int
    ranks: int
    expert_parallel: bool = False

    @property
    def title(self) -> str:
        """The first cells of its row."""
        ranks = f"{self.ranks}{', EP' if self.expert_parallel else ''}"
        return f"| {self.said} | {self.batch} | {ranks} |"

    @property
    def case(self) -> Case:
        """As the others' lists take it."""
        fp8 = "quantization_config" in read_config(self.model)
        return Case(_config(self.model, self.layers), fp8, self.batch, self.ranks, CONTEXT, self.expert_parallel)


def rows() -> Iterator[Row]:
    """All of the tables."""
    for model, said, layers in (
        ("qwen3-8b", "Qwen3 8B, bf16", 2),
        ("qwen3-8b-fp8", "Qwen3 8B, FP8 blocks", 2),
        ("qwen3-30b-a3b", "Qwen3 30B-A3B, bf16", 2),
        ("qwen3-30b-a3b-fp8", "Qwen3 30B-A3B, FP8 blocks", 2),
        ("deepseek-v3", "DeepSeek V3, FP8 blocks", 5),
    ):
        for ranks in (1, 8):
            # An eighth of an expert of it would cut blocks.
            whole = ranks > 1 and model == "qwen3-30b-a3b-fp8"
            for batch in (1, 64):
                yield Row(model, said, layers, batch, ranks, whole)
    # An eighth of a shared expert would cut blocks.
    for model, said, more in (
        ("qwen3.5-27b", "Qwen3.5 27B, bf16", 8),
        ("qwen3.5-35b-a3b", "Qwen3.5 35B-A3B, bf16", 8),
        ("qwen3.5-35b-a3b-fp8", "Qwen3.5 35B-A3B, FP8 blocks", 4),
    ):
        # Each fourth layer has full attention.
        for kind, layers in (("linear", 5), ("full", 8)):
            for ranks in (1, more):
                for batch in (1, 64):
                    yield Row(model, f"{said}, {kind} attention", layers, batch, ranks)


def _config(model: str, layers: int) -> ModelConfig:
    return read_model_config(read_config(model, layers))


@functools.cache
def ours(row: Row, target: Target, shuffled: bool = False) -> tuple[Launch, ...]:
    """The launches of our layer."""
    kernels = {"attention": SHUFFLED} if shuffled else None
    found = count(
        row.model,
        target,
        row.batch,
        row.ranks,
        row.layers,
        CONTEXT,
        kernels=kernels,
        expert_parallel=row.expert_parallel,
    )
    return tuple(found)


def kernels(launches: Iterable[Launch | Read]) -> int:
    """How many there are."""
    return sum(it.kernels for it in launches)


def weights_and_cache(row: Row) -> tuple[int, int]:
    """Bytes of the layer's weights and cached tokens that one rank reads, and of states, which it writes too."""

    def both(layers: int) -> tuple[int, int]:
        config = _config(row.model, layers)
        quant = read_quantization(read_config(row.model), None)
        model = build_on_meta_device(config, torch.bfloat16, row.ranks, quant, row.expert_parallel)
        return weight_bytes(model, row.batch), cache_bytes(
            _of_rank(config, row.ranks), decodes(row.batch, CONTEXT), torch.bfloat16
        )

    (weights, cache), (fewer_weights, less_cache) = both(row.layers), both(row.layers - 1)
    return weights - fewer_weights, cache - less_cache


def _of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """``config`` with a rank's key/value heads and states; latents are whole on every rank."""

    def mine(layer: LayerConfig) -> LayerConfig:
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig):
            return replace(layer, mixer=replace(mixer, num_kv_heads=max(1, mixer.num_kv_heads // ranks)))
        if isinstance(mixer, GatedDeltaNetConfig):
            return replace(layer, mixer=replace(mixer, num_value_heads=mixer.num_value_heads // ranks))
        return layer

    return replace(config, layers=tuple(map(mine, config.layers)))


def activations(row: Row) -> tuple[float, float, float]:
    """Bytes of activations that the layer moves on a rank: ours on gfx942, ATOM's and vLLM's."""
    elsewhere = (row.batch * sum(it.numbers for it in read(row.case)) for read in (atom, vllm))
    mine = float(sum(it.activations for it in ours(row, GFX942)))
    return mine, *elsewhere


def _marked(shown: str, more: bool) -> str:
    return f"{shown} **more**" if more else shown


def launch_table() -> Iterator[str]:
    """How many launches, and where ours are more than the fewest of the others."""
    yield "| Model | Batch | TP | ours, gfx942 | ours, gfx950 | ours, shuffled cache | ATOM | vLLM | ours, sm_90 |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows():
        least = min(kernels(atom(row.case)), kernels(vllm(row.case)))
        # Layers of linear attention have no such cache.
        paged = isinstance(row.case.mixer, AttentionConfig)
        shuffled = None if not paged else ours(row, GFX942, shuffled=True)
        cells = [ours(row, GFX942), ours(row, GFX950), shuffled]
        shown = ["" if it is None else _marked(str(kernels(it)), kernels(it) > least) for it in cells]
        other = [str(kernels(it)) for it in (atom(row.case), vllm(row.case), ours(row, HOPPER))]
        yield f"{row.title} {' | '.join([*shown, *other])} |"


def table() -> Iterator[str]:
    """Launches and bytes of a rank in one table."""
    yield "| Model | Batch | TP | Launches: gfx942 | gfx950 | ATOM | vLLM | MB: ours | ATOM | vLLM |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows():
        launches = ours(row, GFX942), ours(row, GFX950), atom(row.case), vllm(row.case)
        read = sum(weights_and_cache(row))
        moved = [f"{(read + size) / 1e6:.1f}" for size in activations(row)]
        yield f"{row.title} {' | '.join([*(str(kernels(it)) for it in launches), *moved])} |"


def byte_table() -> Iterator[str]:
    """Bytes of a rank, where ours are more than the fewest of the others, and the time that they take at least."""
    yield (
        "| Model | Batch | TP | weights | cache | activations: ours | ATOM | vLLM | "
        + " | ".join(f"{name}: ours | ATOM | vLLM" for name in BANDWIDTHS)
        + " |"
    )
    yield "| --- | --- | --- |" + " --- |" * (5 + 3 * len(BANDWIDTHS))
    for row in rows():
        weights, cache = weights_and_cache(row)
        moved = activations(row)
        mine, *others = (f"{size / 1e6:.2f}" for size in moved)
        mine = _marked(mine, moved[0] > min(moved[1:]))
        sizes = [f"{weights / 1e6:.2f}", f"{cache / 1e6:.2f}", mine, *others]
        times = [
            f"{(weights + cache + size) / bandwidth * 1e6:.1f}" for bandwidth in BANDWIDTHS.values() for size in moved
        ]
        yield f"{row.title} {' | '.join([*sizes, *times])} |"


def named() -> Iterator[str]:
    """The launches of each row in order, where they differ from those of the row before."""
    for row in rows():
        yield f"**{row.said}, batch {row.batch}, {row.title.split('|')[3].strip()} rank{'s' * (row.ranks > 1)}**"
        yield ""
        yield f"- ours on gfx942: {_names(ours(row, GFX942))}"
        if _names(ours(row, GFX950)) != _names(ours(row, GFX942)):
            yield f"- ours on gfx950: {_names(ours(row, GFX950))}"
        yield f"- ATOM: {_names(atom(row.case))}"
        yield f"- vLLM: {_names(vllm(row.case))}"
        yield f"- ours on sm_90: {_names(ours(row, HOPPER))}"
        yield ""


def sources() -> Iterator[str]:
    """Where each launch of the others was read."""
    for title, read in (("ATOM", atom), ("vLLM", vllm)):
        yield f"| {title}'s launch | Read at |"
        yield "| --- | --- |"
        found: dict[str, list[str]] = {}
        for row in rows():
            for it in read(row.case):
                lines = found.setdefault(it.name, [])
                lines.extend({it.source: None}.keys() - set(lines))
        for name, lines in found.items():
            yield f"| {name} | {'; '.join(lines)} |"
        yield ""


def _names(launches: Iterable[Launch | Read]) -> str:
    return ", ".join(str(it) for it in launches)


def markdown() -> str:
    """All of it."""
    parts = (
        ("Launches", launch_table),
        ("Bytes and the least time", byte_table),
        ("By name", named),
        ("Where the others' were read", sources),
    )
    return "\n".join(f"## {title}\n\n" + "\n".join(part()) + "\n" for title, part in parts)


def listed(launches: Iterable[Launch]) -> str:
    """One layer's launches with their bytes."""
    rows = list(launches)
    lines = [f"{it.activations:>12,}  {it}" for it in rows]
    return "\n".join([*lines, f"{sum(it.activations for it in rows):>12,}  in {kernels(rows)} launches"])


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description="See the module's text.")
    parser.add_argument("--table", action="store_true", help="print the table of docs/amd-kernels.md alone")
    parser.add_argument("--model", help="as `atom-plugin bench step` takes it; left out: all tables")
    parser.add_argument("--device", choices=[it.arch for it in (GFX942, GFX950, HOPPER)], default=GFX942.arch)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2, help="the last of so many is shown")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--expert-parallel", action="store_true")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table()))
        return 0
    if given.model is None:
        print(markdown())
        return 0
    target = next(it for it in (GFX942, GFX950, HOPPER) if it.arch == given.device)
    try:
        found = count(
            given.model,
            target,
            given.batch,
            given.ranks,
            given.layers,
            given.context,
            expert_parallel=given.expert_parallel,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(listed(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
