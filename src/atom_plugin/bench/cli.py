"""`atom-plugin bench step | kernels`: the command line of what the other modules measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures there.")]


@app.callback()
def about() -> None:
    """Measure the kernels and the decoding step on this GPU, beside its own limits; no framework takes part."""


@app.command()
def step(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, a config.json, or a name such as qwen3-8b.")],
    batch: Annotated[int, typer.Option(help="Requests that decode.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each has in the cache.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    cache_dtype: Annotated[str, typer.Option(help="auto, fp8_e4m3, fp8_e5m2, or one of those.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="fp8: quantise the layers, as an engine would.")] = None,
    layers: Annotated[int | None, typer.Option(help="Keep so many layers.")] = None,
    repetitions: Annotated[int, typer.Option(help="Samples; each is many replays.")] = 20,
    profile: Annotated[bool, typer.Option("--profile", help="Also tell which kernels take the time.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Also take the mean of so many without a pause, at the GPU's limit of power.")
    ] = 0.0,
    json: _JsonFile = None,
) -> None:
    """Time the GPU's part of one decoding step: a whole model of random weights in one captured graph."""
    from atom_plugin.bench.step import StepOptions, measure_step, write_json

    options = StepOptions(
        model, batch, context, dtype, cache_dtype, quantization, layers, repetitions, profile, seconds
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
    op: Annotated[list[str] | None, typer.Option(help="An op, more than once for several; left out: all.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Whose shapes; qwen3-0.6b and qwen3-8b if left out.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    repetitions: Annotated[int, typer.Option(help="Samples; each is many calls.")] = 10,
    against: Annotated[str | None, typer.Option(help="vllm: also its kernels and FlashAttention 3.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Find the fastest tiles instead, and keep them.")] = False,
    rows: Annotated[list[int] | None, typer.Option(help="With --tune: for inputs of so many rows alone.")] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where --tune writes; left out: beside the kernels.")
    ] = None,
    json: _JsonFile = None,
) -> None:
    """Time each kernel on the shapes of models, beside torch's and vLLM's and the GPU's own limits."""
    from atom_plugin.bench.kernels import DEFAULT_MODELS, KernelOptions, execute

    if against not in (None, "vllm"):
        raise typer.BadParameter(f"{against!r} is not vllm", param_hint="--against")
    options = KernelOptions(
        models=tuple(model or DEFAULT_MODELS),
        ops=tuple(op or ()),
        against_vllm=against is not None,
        dtype=dtype,
        repetitions=repetitions,
        rows=tuple(rows or ()),
    )
    try:
        execute(options, json, tune, output, typer.echo)
    except ValueError as error:
        _fail(error)


def _fail(error: ValueError) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(1) from None
