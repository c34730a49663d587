"""Our model beside Hugging Face's on the same tokens: how far apart each stage is, and where they part first.

A stage is the residual stream after the embedding, after each decoder layer and after the final norm, and the logits.
Both models are loaded from one local checkpoint; nothing is fetched, and no code of the checkpoint's is run.

Rope variants that depend on a sequence's length (longrope) take here the length that is checked, not one that a server
would be started with.
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
from atom_core.models.decoder import Decoder
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner

#: Largest |difference| of a stage, as a share of its spread. In float32, sums in another order differ by some 1e-6 of
#: it and mistakes by more than 1e-3. The 16-bit types round after every op, and their roundings add up over layers.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Stage:
    """How far apart the two models are at one place."""

    name: str
    difference: float
    """Largest |difference|; NaN where either model has one."""
    spread: float
    """Largest minus smallest of Hugging Face's numbers."""

    @property
    def relative(self) -> float:
        """The difference as a share of the spread."""
        return self.difference / self.spread if self.spread else self.difference


@dataclass(frozen=True)
class Continuation:
    """The most likely next tokens in both, each model going on from its own."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    tied: bool
    """Where they part, Hugging Face holds both tokens for equally likely, within the tolerance."""

    @property
    def parts_at(self) -> int | None:
        """The index of the first token that differs."""
        pairs = enumerate(zip(self.ours, self.theirs, strict=True))
        return next((index for index, (ours, theirs) in pairs if ours != theirs), None)


@dataclass(frozen=True)
class Report:
    """What was compared and how it came out."""

    directory: Path
    architecture: str
    dtype: torch.dtype
    num_tokens: int
    tolerance: float
    stages: tuple[Stage, ...]
    continuation: Continuation

    @property
    def parting(self) -> Stage | None:
        """The first stage where the models are farther apart than the tolerance."""
        return next((stage for stage in self.stages if not stage.relative <= self.tolerance), None)  # NaN is far

    @property
    def passed(self) -> bool:
        """Whether our answers are Hugging Face's."""
        tokens = self.continuation
        return self.parting is None and (tokens.parts_at is None or tokens.tied)

    def __str__(self) -> str:
        """The verdict in one or two sentences."""
        tokens = self.continuation
        count, parts_at = len(tokens.ours), tokens.parts_at
        if self.parting is not None:
            return (
                f"{self.architecture} parts from Hugging Face at {self.parting.name}: "
                f"{self.parting.relative:.1e} of the spread, allowed {self.tolerance:.0e}."
            )
        agreed = (
            f"{self.architecture} agrees with Hugging Face at every stage, within {self.tolerance:.0e} of the spread"
        )
        if parts_at is None:
            return f"{agreed}, and in all {count} tokens that follow."
        if tokens.tied:
            return f"{agreed}. Token {parts_at + 1} of the {count} that follow is a tie, decided differently."
        return f"{agreed}, but not in token {parts_at + 1} of the {count} that follow: decoding differs from prefill."


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
        prompt: a text, split by the checkpoint's tokenizer; None: random tokens from a fixed seed.
        num_tokens: how many random tokens; fewer where the model's context is shorter.
        new_tokens: how many tokens both go on by.
        dtype: of both models.
        device: of both models.
        tolerance: a share of each stage's spread; None: that of ``dtype`` in :data:`TOLERANCES`.
        kernels: forced implementations by op, as in ``ATOM_KERNELS``.
        with_aiter: see :func:`atom_core.kernels.kernel_set`.

    Raises:
        ValueError: we cannot run the checkpoint, ``transformers`` is not installed, or the prompt does not fit.
    """
    require_transformers()
    device = device or torch.device("cpu")
    config = read_model_config(config_of(directory))
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


def require_transformers() -> None:
    """Raise unless Hugging Face's models can be imported.

    Raises:
        ValueError: they are not installed.
    """
    try:
        import transformers  # noqa: F401 - only needed here, so no dependency of the package
    except ImportError as error:
        raise ValueError(
            "Comparing with Hugging Face's model needs the package transformers: pip install transformers."
        ) from error


def load_reference(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Hugging Face's model of a local checkpoint, with attention in plain torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return model.to(device).eval()


@torch.inference_mode()
def compare_models(
    runner: Runner, reference: Any, tokens: Sequence[int], new_tokens: int, tolerance: float, directory: Path
) -> Report:
    """Compare two loaded models; see :func:`compare`."""
    with _recorded_of_ours(runner.model.model) as ours:
        ours["logits"] = runner.logits(tokens)
    with _recorded(reference.model) as theirs:
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
        continuation=_continue(runner, reference, tokens, new_tokens, tolerance),
    )


def _sample(config: ModelConfig, num_tokens: int, new_tokens: int) -> list[int]:
    count = max(1, min(num_tokens, config.max_position - new_tokens))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def _tokenize(directory: Path, prompt: str) -> list[int]:
    from transformers import AutoTokenizer

    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{directory} has no tokenizer to split the prompt with ({', '.join(_TOKENIZER_FILES)}).")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    tokens: list[int] = tokenizer(prompt)["input_ids"]
    return tokens


@contextmanager
def _recorded(decoder: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The residual stream at each stage of whatever Hugging Face's ``decoder`` runs inside the ``with``.

    It is ``[T, hidden]`` by the stage's name.
    """
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
    """As :func:`_recorded`, of our decoder, whose layers run fused."""
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


def _continue(runner: Runner, reference: Any, tokens: Sequence[int], new_tokens: int, tolerance: float) -> Continuation:
    (ours,) = runner.generate([tokens], new_tokens)
    theirs: list[int] = []
    tied, step, cache = False, list(tokens), None
    for own in ours:
        result = reference(torch.tensor([step], device=runner.runtime.device), past_key_values=cache, use_cache=True)
        logits, cache = result.logits[0, -1].double(), result.past_key_values
        token = int(logits.argmax())
        if token != own and theirs == ours[: len(theirs)]:
            tied = bool(logits[token] - logits[own] <= tolerance * (logits.max() - logits.min()))
        theirs.append(token)
        step = [token]
    return Continuation(tuple(ours), tuple(theirs), tied)
