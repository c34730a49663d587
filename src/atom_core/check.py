"""Compare our model with Hugging Face's on the same tokens, stage by stage, and find the first difference.

The stages are the residual stream after the embedding, after each decoder layer and after the final norm, and the
logits. Both models load one local checkpoint; nothing is downloaded, and none of the checkpoint's code runs.

Rope variants that depend on the sequence length (longrope) use the length that is checked here, not a server's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from atom_core.checkpoint import config_of
from atom_core.config import ModelConfig
from atom_core.hugging_face import check_reference, load_reference, load_tokenizer, one_line, require_transformers
from atom_core.models.decoder import Decoder
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner

#: Largest |difference| of a stage, as a share of its spread. In float32 another order of sums changes about 1e-6 of it,
#: a mistake more than 1e-3. 16-bit dtypes round after every op, and rounding errors add up over layers.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Stage:
    """The difference between the two models at one stage."""

    name: str
    difference: float
    """Largest |difference|; NaN where either model has one."""
    spread: float
    """Largest minus smallest of Hugging Face's values."""

    @property
    def relative(self) -> float:
        """The difference as a share of the spread."""
        return self.difference / self.spread if self.spread else self.difference


@dataclass(frozen=True)
class Continuation:
    """Each model's greedy continuation of the prompt."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    tied: bool
    """At the first different token, Hugging Face's two logits are equal within the tolerance."""

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that differs."""
        both = enumerate(zip(self.ours, self.theirs, strict=True))
        return next((index for index, (ours, theirs) in both if ours != theirs), None)


@dataclass(frozen=True)
class Report:
    """What was compared, and the result."""

    directory: Path
    architecture: str
    dtype: torch.dtype
    num_tokens: int
    tolerance: float
    stages: tuple[Stage, ...]
    continuation: Continuation

    @property
    def first_difference(self) -> Stage | None:
        """The first stage whose difference exceeds the tolerance."""
        return next((stage for stage in self.stages if not stage.relative <= self.tolerance), None)  # or is NaN

    @property
    def passed(self) -> bool:
        """Whether our model agrees with Hugging Face's."""
        tokens = self.continuation
        return self.first_difference is None and (tokens.first_difference is None or tokens.tied)

    def __str__(self) -> str:
        """The verdict in one or two sentences."""
        tokens = self.continuation
        count, index = len(tokens.ours), tokens.first_difference
        if (stage := self.first_difference) is not None:
            return (
                f"{self.architecture} differs from Hugging Face, first at {stage.name}: "
                f"{stage.relative:.1e} of the spread, allowed {self.tolerance:.0e}."
            )
        agreed = (
            f"{self.architecture} agrees with Hugging Face at every stage, within {self.tolerance:.0e} of the spread"
        )
        if index is None:
            return f"{agreed}, and in all {count} tokens that follow."
        if tokens.tied:
            return f"{agreed}. Token {index + 1} of the {count} that follow is a tie that was broken differently."
        return f"{agreed}, but not in token {index + 1} of the {count} that follow: decoding differs from prefill."


def compare(
    directory: Path,
    *,
    prompt: str | None = None,
    num_tokens: int = 64,
    new_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    tolerance: float | None = None,
    kernels: Mapping[str, str] | None = None,
    with_aiter: bool = True,
) -> Report:
    """Compare our model of a checkpoint with Hugging Face's.

    Args:
        directory: the checkpoint.
        prompt: a text for the checkpoint's tokenizer; None: random tokens from a fixed seed.
        num_tokens: the number of random tokens; fewer if the model's context is shorter.
        new_tokens: the number of tokens that both models generate.
        dtype, device: of both models.
        tolerance: a share of each stage's spread; None: :data:`TOLERANCES`.
        kernels: forced implementations by op, as in ``ATOM_KERNELS``.
        with_aiter: see :func:`atom_core.kernels.kernel_set`.

    Raises:
        ValueError: we or Hugging Face's models cannot run the checkpoint, its quantisation has no reference (see
            :func:`atom_core.hugging_face.check_reference`), ``transformers`` is not installed, or the prompt does not
            fit.
    """
    require_transformers()
    device = device or torch.device("cpu")
    hf = config_of(directory)
    config = read_model_config(hf)
    check_reference(directory, hf)
    tokens = _tokenize(directory, prompt) if prompt is not None else _sample(config, num_tokens, new_tokens)
    length = len(tokens) + new_tokens
    if not new_tokens < length <= config.max_position:
        raise ValueError(
            f"The prompt has {len(tokens)} tokens; with {new_tokens} to follow, it must have 1 to "
            f"{config.max_position - new_tokens} (max_position_embeddings={config.max_position})."
        )
    runner = Runner(directory, dtype=dtype, device=device, kernels=kernels, max_model_len=length, with_aiter=with_aiter)
    reference = load_reference(directory, dtype, device)
    return compare_models(runner, reference, tokens, new_tokens, tolerance or TOLERANCES[dtype], directory)


@torch.inference_mode()
def compare_models(
    runner: Runner, reference: Any, tokens: Sequence[int], new_tokens: int, tolerance: float, directory: Path
) -> Report:
    """Compare two loaded models; see :func:`compare`."""
    with _recorded_of_ours(runner.model.model) as ours:
        ours["logits"] = runner.logits(tokens)
    with one_line(directory, "run"), _recorded(reference.model) as theirs:
        theirs["logits"] = reference(torch.tensor([list(tokens)], device=runner.runtime.device)).logits[0]
    assert ours.keys() == theirs.keys(), "both models have the same stages"
    stages = tuple(_stage(name, ours[name], theirs[name]) for name in ours)
    return Report(
        directory=directory,
        architecture=runner.config.architecture,
        dtype=runner.runtime.dtype,
        num_tokens=len(tokens),
        tolerance=tolerance,
        stages=stages,
        continuation=_continue(runner, reference, tokens, new_tokens, tolerance, directory),
    )


def _sample(config: ModelConfig, num_tokens: int, new_tokens: int) -> list[int]:
    count = max(1, min(num_tokens, config.max_position - new_tokens))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def _tokenize(directory: Path, prompt: str) -> list[int]:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{directory} has no tokenizer to split the prompt with ({', '.join(_TOKENIZER_FILES)}).")
    tokens: list[int] = load_tokenizer(directory)(prompt)["input_ids"]
    return tokens


@contextmanager
def _recorded(decoder: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Record the residual stream ``[T, hidden]`` of Hugging Face's ``decoder`` inside the ``with``, by stage name."""
    stages: dict[str, torch.Tensor] = {}
    layers = [(f"layer {name}", it) for name, it in decoder.get_submodule("layers").named_children()]
    modules = [("the embedding", decoder.get_submodule("embed_tokens")), *layers]
    modules += [("the final norm", decoder.get_submodule("norm"))]
    handles = [_record(stages, name, module) for name, module in modules]
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _recorded_of_ours(decoder: Decoder) -> Iterator[dict[str, torch.Tensor]]:
    """As :func:`_recorded`, for our decoder, whose layers run fused."""
    stages: dict[str, torch.Tensor] = {}
    fused = decoder.fused
    assert fused is not None
    fused.observer = lambda index, stream: stages.update({f"layer {index}": stream})
    handles = [_record(stages, "the embedding", decoder.embed_tokens), _record(stages, "the final norm", decoder)]
    try:
        yield stages
    finally:
        fused.observer = None
        for handle in handles:
            handle.remove()


def _record(stages: dict[str, torch.Tensor], name: str, module: nn.Module) -> RemovableHandle:
    def hook(module: nn.Module, inputs: object, output: Any) -> None:
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        stages[name] = first.flatten(0, -2).clone()

    return module.register_forward_hook(hook)


def _stage(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> Stage:
    ours, theirs = ours.double(), theirs.double()
    return Stage(name, (ours - theirs).abs().max().item(), (theirs.max() - theirs.min()).item())


def _continue(
    runner: Runner, reference: Any, tokens: Sequence[int], new_tokens: int, tolerance: float, directory: Path
) -> Continuation:
    (ours,) = runner.generate([tokens], new_tokens)
    theirs: list[int] = []
    tied, step, cache = False, list(tokens), None
    for own in ours:
        with one_line(directory, "run"):
            given = torch.tensor([step], device=runner.runtime.device)
            result = reference(given, past_key_values=cache, use_cache=True)
        logits, cache = result.logits[0, -1].double(), result.past_key_values
        token = int(logits.argmax())
        if token != own and theirs == ours[: len(theirs)]:
            tied = bool(logits[token] - logits[own] <= tolerance * (logits.max() - logits.min()))
        theirs.append(token)
        step = [token]
    return Continuation(tuple(ours), tuple(theirs), tied)
