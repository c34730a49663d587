"""A few instructions of PTX on a CPU: what a kernel's assembly does to two words of 16 bits at a time."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

_32 = (1 << 32) - 1


def run_pairs(code: str, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Results of ``code``, of 16 bits, by ``words [..., N]`` of which two neighbours are a register.

    Args:
        code: PTX whose ``$1`` has two words, the first one in the lower half, and whose ``$0`` is two results.
        words: int16.
        dtype: of the results.
    """
    pairs = words.reshape(-1).view(torch.int32).to(torch.int64) & _32
    result = run(code, pairs)
    signed = torch.where(result > _32 >> 1, result - (1 << 32), result).to(torch.int32)
    return signed.view(dtype).reshape(words.shape)


def run(code: str, given: torch.Tensor) -> torch.Tensor:
    """``$0`` after ``code`` with ``$1``: registers of 32 bits, int64 from 0 on."""
    registers = {"$1": given}

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.full_like(given, int(name, 0))

    for statement in code.strip().strip("{}").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        operation, operands = statement.split(maxsplit=1)
        to, *sources = re.split(r",\s*", operands.strip())
        registers[to] = _INSTRUCTIONS[operation](*map(value, sources)) & _32
    return registers["$0"]


def _multiplied(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Of two numbers in each register."""

    def numbers(register: torch.Tensor, shift: int) -> torch.Tensor:
        half = register >> shift & 0xFFFF
        return torch.where(half > 0x7FFF, half - (1 << 16), half).to(torch.int16).view(dtype)

    def multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        low, high = (
            (numbers(one, at) * numbers(other, at)).view(torch.int16).to(torch.int64) & 0xFFFF for at in (0, 16)
        )
        return high << 16 | low

    return multiply


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda x: x,
    "shl.b32": torch.bitwise_left_shift,
    "shr.u32": torch.bitwise_right_shift,
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "mul.rn.bf16x2": _multiplied(torch.bfloat16),
    "mul.rn.f16x2": _multiplied(torch.float16),
}
