"""The command line of `atom-plugin bench step | kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures to this file.")]


@app.callback()
def about() -> None:
    """Measure the kernels and the decoding step on this GPU, next to its limits, without a framework."""


@app.command()
def step(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, a config.json, or a name such as qwen3-8b.")],
    batch: Annotated[int | None, typer.Option(help="Requests that decode; default: one of each context.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Cached tokens per request, up to 131072; repeat for requests that differ; default: 128."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    cache_dtype: Annotated[str, typer.Option(help="auto, fp8_e4m3, fp8_e5m2, or a --dtype.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="fp8: quantise the layers, as an engine's flag does.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Keep only the first layers.")] = None,
    repetitions: Annotated[int, typer.Option(help="Samples of many replays each.")] = 20,
    profile: Annotated[bool, typer.Option("--profile", help="Also show the time of each kernel.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Also measure the mean over this time without pauses, at the GPU's power limit.")
    ] = 0.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Capture the graph for sequences of up to so many tokens; default: 4096 or what is needed."),
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(
            help="New tokens of a further request, whose prompt is in the step; repeat for several; --batch 0: alone."
        ),
    ] = None,
    chunk_context: Annotated[int, typer.Option(help="Cached tokens in front of each chunk.")] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    json: _JsonFile = None,
) -> None:
    """Time one step on the GPU, of decodes, of chunks of prompts or of both: random weights in one captured graph."""
    from atom_plugin.bench.step import StepOptions, measure_step, write_json

    options = StepOptions(
        model=model,
        batch=batch,
        context=tuple(context or StepOptions.context),
        dtype=dtype,
        cache_dtype=cache_dtype,
        quantization=quantization,
        layers=layers,
        repetitions=repetitions,
        profile=profile,
        seconds=seconds,
        max_model_len=max_model_len,
        chunk=tuple(chunk or ()),
        chunk_context=chunk_context,
        page_size=page_size,
    )
    try:
        result = measure_step(options)
    except ValueError as error:
        _fail(error)
    typer.echo("\n".join(result.lines()))
    if json is not None:
        write_json(result, json)


@app.command()
def kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="An op; repeat for several; default: all, of a grid two.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model whose shapes to use; default: qwen3-0.6b and qwen3-8b.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    repetitions: Annotated[int, typer.Option(help="Samples of many calls each.")] = 10,
    against: Annotated[str | None, typer.Option(help="vllm: also time its kernels and FlashAttention 3.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Instead find and save the fastest tiles.")] = False,
    rows: Annotated[list[int] | None, typer.Option(help="With --tune: only inputs with this many rows.")] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where --tune writes; default: next to the kernels.")
    ] = None,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Instead time decoding attention on a grid, beside FlashAttention 3 and FlashMLA."),
    ] = False,
    requests: Annotated[
        list[int] | None, typer.Option(help="With --grid: requests; default: 1, 8, 32, 64, 128.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="With --grid: tokens of each; default: 512, 2048, 8192, 32768, 131072.")
    ] = None,
    group: Annotated[list[int] | None, typer.Option(help="With --grid: query heads a key head; default: 4.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="With --grid: a head's size; default: 128.")] = None,
    kv_heads: Annotated[list[int] | None, typer.Option(help="With --grid: key heads; default: 8.")] = None,
    heads: Annotated[
        list[int] | None, typer.Option(help="With --grid: query heads over latents; default: 16, 128.")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(help="With --grid: tokens of a page; default: 16, of latents 64.")
    ] = None,
    cache_dtype: Annotated[
        list[str] | None, typer.Option(help="With --grid: auto, fp8_e4m3 or fp8_e5m2; default: auto.")
    ] = None,
    all_shapes: Annotated[
        bool,
        typer.Option(
            "--all-shapes",
            help="With --grid: groups 4, 5, 7, 8, 16, head sizes 64, 128, 256, pages of 16, 64, caches auto, fp8_e4m3.",
        ),
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="With --grid: tokens that graphs are captured for; default: 131072.")
    ] = None,
    json: _JsonFile = None,
) -> None:
    """Time each kernel on models' shapes, next to torch's and vLLM's kernels and the GPU's limits."""
    from atom_plugin.bench.kernels import KernelCommand, execute

    if against not in (None, "vllm"):
        raise typer.BadParameter(f"{against!r} is not vllm", param_hint="--against")
    axes = {
        "requests": requests,
        "tokens": tokens,
        "group": group,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "heads": heads,
        "page_size": page_size,
        "cache_dtype": cache_dtype,
    }
    command = KernelCommand(
        models=tuple(model or ()),
        ops=tuple(op or ()),
        against_vllm=against is not None,
        dtype=dtype,
        repetitions=repetitions,
        rows=tuple(rows or ()),
        path=json,
        tune=tune,
        output=output,
        grid=grid,
        axes={name: tuple(values) for name, values in axes.items() if values},
        all_shapes=all_shapes,
        max_model_len=max_model_len,
    )
    try:
        execute(command, typer.echo)
    except ValueError as error:
        _fail(error)


def _fail(error: ValueError) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(1) from None
