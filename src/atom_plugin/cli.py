"""The command line: `atom-plugin doctor | models | flags | env | check | bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from atom_plugin.bench.cli import app as bench_app
from atom_plugin.common import flag_tables, support, versions
from atom_plugin.common.flags import Row
from atom_plugin.common.settings import load_settings, readable_settings, unknown_variables, variables
from atom_plugin.doctor import checkpoint, command, environment, hybrid, overrides, report, sharing, speculation
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import FRAMEWORKS, VLLM
from atom_plugin.sglang.flags import TABLE as SGLANG_FLAGS
from atom_plugin.vllm.flags import TABLE as VLLM_FLAGS

#: The tables of the adapters, by the framework's package.
FLAGS: Mapping[str, Sequence[Row]] = {"vllm": VLLM_FLAGS, "sglang": SGLANG_FLAGS}
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


@app.callback()
def about() -> None:
    """Faster models for vLLM and SGLang, without leaving either."""


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="A server's command line to examine; it is not run."),
    ] = None,
) -> None:
    """Print what is installed and what prevents a server from running our models; exit 1 if anything does.

    For example: atom-plugin doctor -- vllm serve ./my-model --model-impl atom

    Or: atom-plugin doctor -- SGLANG_EXTERNAL_MODEL_PACKAGE=atom_plugin.sglang.models sglang serve ./my-model
    """
    examined = _parse(arguments or [])
    environ = {**os.environ, **examined.environment}
    asked = examined.framework
    frameworks = environment.installed_frameworks() if asked is None else (asked,)
    plugins = environment.plugins()
    from atom_plugin.doctor.aiter import check_aiter, rocm_line  # imports torch

    target = report.this_device()
    findings: list[Finding] = [
        *environment.check_versions(frameworks, allow_untested=readable_settings(environ).allow_untested_framework),
        *environment.check_entry_points(plugins, frameworks),
        *environment.check_variables(environ, frameworks),
        *(environment.check_platforms(plugins, environ) if VLLM in frameworks else ()),
        *command.check_command(examined, environ if target.kind == "rocm" else _without_rocm(environ)),
    ]
    findings += check_aiter(target, readable_settings(environ))
    model = command.local_model(examined)
    if model and asked:
        findings += checkpoint.check_checkpoint(
            model,
            framework=asked,
            overrides=overrides.overrides_of(examined),
            load_format=examined.flags.get("--load-format", "auto"),
            **sharing.Sharing.of(examined)._asdict(),
        )
        findings += hybrid.check_images(model, examined)
        findings += hybrid.check_states(model, examined, environ, target)
        findings += speculation.check_own_layers(model, examined)
        findings += hybrid.check_sglang_settings(model, examined, target)
        findings += hybrid.check_sglang_drafts(model, examined, environ)

    console = _console()
    console.print(report.version_table(versions.installed_versions(), _supported_ranges()))
    console.print(report.plugin_table(plugins))
    if rocm := rocm_line(target):
        console.print(rocm)
    console.print(report.kernel_table(target))
    if examined.model and not model:
        console.print(f"{examined.model} is not a folder on this machine: its configuration was not examined.")
    for line in report.finding_lines(findings):
        console.print(line)
    console.print(report.verdict(len(findings), frameworks))
    raise typer.Exit(1 if findings else 0)


@app.command()
def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table in Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object a combination.")] = False,
) -> None:
    """List what is supported: architecture, framework, quantisation, device."""
    rows = support.support_rows()
    if markdown or as_json:
        typer.echo((support.as_json(rows) if as_json else support.as_markdown(rows)).rstrip())
    else:
        _console().print(support.as_table(rows))


@app.command()
def flags(
    framework: Annotated[str, typer.Argument(help="Whose: vllm or sglang.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page in Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object a setting.")] = False,
) -> None:
    """List a framework's settings: its own, those that our models honour, and those that are refused."""
    if framework not in FLAGS:
        raise typer.BadParameter(f"{framework!r} is not one of {', '.join(FLAGS)}", param_hint="FRAMEWORK")
    rows = FLAGS[framework]
    if markdown or as_json:
        typer.echo((flag_tables.as_json(rows) if as_json else flag_tables.as_markdown(rows)).rstrip())
    else:
        _console().print(flag_tables.as_table(rows))


@app.command()
def env(markdown: Annotated[bool, typer.Option("--markdown", help="As a table in Markdown.")] = False) -> None:
    """List all environment variables and their values."""
    if markdown:
        typer.echo(variables_markdown().rstrip())
        return
    table = Table("Variable", "Form", "Value here", "What it does")
    for variable in variables():
        table.add_row(variable.name, variable.form, os.environ.get(variable.name, "(not set)"), variable.description)
    _console().print(table)
    for message in unknown_variables(os.environ).values():
        typer.echo(message, err=True)


def variables_markdown() -> str:
    """The environment variables, for a page."""
    lines = ["| Variable | Form | What it does |", "| --- | --- | --- |"]
    lines += [f"| `{variable.name}` | `{variable.form}` | {variable.description} |" for variable in variables()]
    return "\n".join(lines) + "\n"


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or a name in Hugging Face's cache.")],
    prompt: Annotated[str | None, typer.Option(help="A text to compare on; by default random tokens.")] = None,
    dtype: Annotated[str, typer.Option(help="Of both models: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Of both models: cpu or cuda.")] = "cpu",
) -> None:
    """Compare our logits with Hugging Face's, layer by layer, without any framework; exit 1 if they differ."""
    import torch

    from atom_core.check import TOLERANCES, compare
    from atom_core.hugging_face import require_transformers
    from atom_plugin.common.kernels import forced_kernels
    from atom_plugin.doctor.agreement import stage_table

    dtypes = {str(known).removeprefix("torch."): known for known in TOLERANCES}
    if dtype not in dtypes:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(dtypes)}", param_hint="--dtype")
    try:
        require_transformers()
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    from atom_plugin.common.hub import cached_folder  # huggingface_hub comes with it

    folder = cached_folder(model)
    if folder is None:
        message = f"{model!r} is neither a folder nor a name in Hugging Face's cache; nothing is downloaded."
        raise typer.BadParameter(message, param_hint="MODEL")
    try:
        settings = load_settings()
        result = compare(
            folder,
            prompt=prompt,
            dtype=dtypes[dtype],
            device=torch.device(device),
            kernels=forced_kernels(settings),
            with_aiter=settings.aiter,
        )
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    _console().print(stage_table(result))
    typer.echo(str(result))
    raise typer.Exit(0 if result.passed else 1)


def _without_rocm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ`` without the variables that vLLM reads only on AMD GPUs."""
    return {name: value for name, value in environ.items() if not name.startswith("VLLM_ROCM_")}


def _parse(arguments: list[str]) -> command.Command:
    if not arguments:
        return command.Command()
    try:
        return command.parse_command(arguments)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _supported_ranges() -> dict[str, str]:
    try:
        return {framework.package: versions.supported_range(framework.package) for framework in FRAMEWORKS}
    except ValueError:
        # Not installed; `check_entry_points` reports it.
        return {}


def _console() -> Console:
    # Into a pipe or a log, a table keeps its width instead of wrapping at 80 columns.
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
