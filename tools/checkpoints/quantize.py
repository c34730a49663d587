"""Write quantised copies of a small checkpoint, one in each format that our models read.

PYTHONPATH=. python tools/checkpoints/quantize.py tests/checkpoints/qwen3 OUT [FORMAT...]

The formats are those of the tests, whose converters these are: they round to the nearest, and search for nothing.
Scales of activations that a format has beforehand ("static") are the largest that questions of the training split give.
Formats that the model cannot have are said and left out; where they were asked for, that is an error. Needs what
`train.py` needs, and atom-plugin.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from task import few_shot, problems, reply
from transformers import AutoModelForCausalLM, AutoTokenizer

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, make_quark, quark_mxfp4

#: Makes a copy: from where, to where, and the static input scale of a module.
Converter = Callable[[Path, Path, Callable[[str], float]], None]
#: The largest number of e4m3, for which a static scale stands.
LARGEST = 448.0
PROMPTS = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def converters() -> Mapping[str, Converter]:
    """By the format's name on the command line."""

    def fp8(source: Path, target: Path, scale: Callable[[str], float], form: object) -> None:
        make_fp8(source, target, form, input_scale=scale)

    def without_scales(source: Path, target: Path, _: object, make: Callable[[Path, Path], None]) -> None:
        make(source, target)

    found: dict[str, Converter] = {
        str(form).replace(", ", "-").replace(" ", "-"): functools.partial(fp8, form=form)
        for form in (*FORMATS, *BLOCK_FORMATS)
    }
    weights_alone = functools.partial(make_quark, config=quark_mxfp4(rounded_inputs=False))
    for name, make in (
        ("quark-mxfp4", make_quark),
        ("quark-mxfp4-weights-alone", weights_alone),
        ("mxfp4", make_gpt_oss),
    ):
        found[name] = functools.partial(without_scales, make=make)
    return found


@torch.inference_mode()
def input_scales(source: Path) -> dict[str, float]:
    """What each linear layer's input is divided by so that none is cut off, on questions of the training split."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    largest: dict[str, float] = {}

    def watch(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), x.abs().max().item())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: watch(name, given[0]))
    tokenizer = AutoTokenizer.from_pretrained(source)
    source_of_questions = problems(random.Random(1), heldout=False)
    for _ in range(PROMPTS):
        *shots, last = (next(source_of_questions) for _ in range(8))
        text = few_shot(shots, last.question) + reply(last.answer)
        model(input_ids=tokenizer(text, return_tensors="pt").input_ids, use_cache=False)
    return {name: value / LARGEST for name, value in largest.items()}


def check(folder: Path) -> None:
    """Whether our models read it.

    Raises:
        ValueError: they do not.
    """
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_files(read_model_config(hf), folder, quant=read_quantization(hf))


@app.command()
def main(
    source: Annotated[Path, typer.Argument(help="A checkpoint in one file.")],
    out: Annotated[Path, typer.Argument(help="A folder, in which each copy gets one of its own.")],
    formats: Annotated[list[str] | None, typer.Argument(help="Which; all that the model can have.")] = None,
) -> None:
    """Write quantised copies of a checkpoint."""
    known = converters()
    chosen = formats or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; formats: {', '.join(known)}.")
    taken = [str(out / name) for name in chosen if (out / name).exists()]
    if taken:
        raise typer.BadParameter(f"{', '.join(taken)} exists already; name another folder, or remove it.")
    # Found where a format needs them, once.
    scales = functools.cache(lambda: input_scales(source))
    for name in chosen:
        target = out / name
        # Experts in one tensor have none: such a copy cannot be read, which is what the check finds.
        known[name](source, target, lambda module: scales().get(module, 1.0))
        try:
            check(target)
        except ValueError as error:
            shutil.rmtree(target)
            if formats:
                raise
            print(f"left out {name}: {error}")
        else:
            print(f"wrote {target}")


if __name__ == "__main__":
    app()
