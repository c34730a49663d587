"""What a mutant is: Transformers decides, at run time, in the same process."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.mutants import Mutant
from tests.fuzz.quantised import Meaningless, dequantise, is_quantised
from tests.unit.core.models.test_fp8_experts import ExactExperts, ExactLinear

#: Seconds that a mutant may take in each, and bytes that it may have beside what the process has.
SECONDS, MEMORY = 30, 6 * 2**30
#: Of log probabilities, in nats: both compute in float32, in another order.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Verdict:
    """How a mutant went: "equal", "refused", "lax" (served where Transformers refuses), or one of the three faults."""

    outcome: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether it must not be."""
        return self.outcome in ("WRONG", "HANG", "unclear")


def judged(folder: Path, mutant: Mutant, tokens: list[int]) -> Verdict:
    """The verdict, from a child process with limits."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _limit()
        try:
            verdict = _judge(folder, mutant, tokens)
        except BaseException:  # noqa: BLE001 - a mistake of the test's own; what stands around us is the parent's
            verdict = Verdict("unclear", f"the judge failed: {traceback.format_exc()}")
        os.write(writing, f"{verdict.outcome}\n{verdict.detail}".encode()[:60000])
        os._exit(0)
    os.close(writing)
    end, said = time.monotonic() + 2 * SECONDS + 10, b""
    while time.monotonic() < end and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (part := os.read(reading, 65536)):
            break
        said += part
    os.close(reading)
    if not said:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    outcome, _, detail = said.decode(errors="replace").partition("\n")
    return Verdict(outcome or "HANG", detail or "no answer in time")


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)


def _judge(folder: Path, mutant: Mutant, tokens: list[int]) -> Verdict:
    theirs, meaningless = None, ""
    try:
        theirs = _theirs(folder, tokens)
    except Meaningless as error:
        meaningless = str(error)
    signal.alarm(SECONDS)
    try:
        ours = _ours(folder, tokens)
    except ValueError as error:
        message = str(error)
        if "\n" in message:
            return Verdict("unclear", f"several lines: {message}")
        named = any(name in message for name in mutant.names) or str(folder) in message
        return Verdict("refused" if named else "unclear", message)
    except (TimeoutError, MemoryError) as error:
        return Verdict("HANG", type(error).__name__)
    except BaseException as error:  # noqa: BLE001 - whatever else it is, a user would see it raw
        return Verdict("unclear", f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    if meaningless:
        return Verdict("WRONG", f"served, and stands for nothing: {meaningless}")
    if theirs is None:
        return Verdict("lax")
    if ours.shape != theirs.shape:
        return Verdict("WRONG", f"{list(ours.shape)} for {list(theirs.shape)}")
    if torch.equal(torch.isnan(ours), torch.isnan(theirs)) and torch.isnan(theirs).any():
        return Verdict("equal", "NaN in both")
    far = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()
    return Verdict("equal" if far < TOLERANCE else "WRONG", f"{far:.3g} nats")


def _ours(folder: Path, tokens: list[int]) -> torch.Tensor:
    from atom_core.standalone import Runner

    _leave_inputs_alone()
    return Runner(folder, max_model_len=len(tokens) + 8).logits(tokens)


def _leave_inputs_alone() -> None:
    """Have no kernel round activations to FP8: what is left is the weights, and logits must be equal."""
    from atom_core.kernels import fp8_block_linear, fp8_experts, fp8_linear

    fp8_linear.ReferenceFp8Linear = fp8_block_linear.ReferenceFp8BlockLinear = ExactLinear
    fp8_experts.ReferenceFp8Experts = ExactExperts


def _theirs(folder: Path, tokens: list[int]) -> torch.Tensor | None:
    """Transformers' logits; None where it refuses, or fills tensors in that the files do not have.

    Of a quantised checkpoint, those of the numbers that it stands for: the installed Transformers may need a GPU, or
    other packages, to load it.

    Raises:
        Meaningless: it stands for none.
    """
    if is_quantised(folder):
        (plain := folder.with_name(f"{folder.name}-plain")).mkdir()
        dequantise(folder, plain)
        folder = plain
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
            if loaded["missing_keys"] or loaded["mismatched_keys"] or loaded.get("error_msgs"):
                return None
            result: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
            return result
    except BaseException:  # noqa: BLE001 - it refuses, in whatever way
        return None
    finally:
        signal.alarm(0)
