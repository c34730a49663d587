"""Seeded generator of short questions that have exactly one right answer.

The test checkpoints are trained on these questions because random weights cannot stand in for a model: their top two
logits nearly tie, so neither "same tokens as the reference" nor "still accurate" means anything. Every kind below is
easy enough for a million parameters, and every answer follows from the question alone.

A question belongs to the held-out split when its hash says so. Both splits are therefore disjoint by construction,
whatever seeds they are drawn with.

Run as a script to write the held-out evaluation file::

    python tools/checkpoints/task.py --out tests/evaluation/heldout.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = "Ann Ben Carl Dana Emma Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split()
THINGS = "apples books cards coins cups eggs keys pears pens shells stamps stones".split()
LETTERS = "ABCDEFGHIJKLMNOPRSTUVWXYZ"  # Q is left out: only "Question" starts with it.
TIMES = {2: "two", 3: "three", 4: "four"}
SYSTEM_PROMPTS = ("Answer with the result only.", "You are a helpful assistant.")
HELDOUT_SHARE = 16  # One question in this many is held out.


@dataclass(frozen=True)
class Problem:
    """One question; `kind` only labels it for per-kind scores."""

    kind: str
    question: str
    answer: str


def _word(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))


def _add(rng: random.Random) -> tuple[str, str]:
    name, other = rng.sample(NAMES, 2)
    thing, a, b = rng.choice(THINGS), rng.randint(2, 49), rng.randint(2, 49)
    question = rng.choice(
        (
            f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?",
            f"There are {a} {thing} in a box. {name} puts in {b} more. How many {thing} are in the box?",
            f"{name} has {a} {thing} and {other} has {b} {thing}. How many {thing} do they have together?",
        )
    )
    return question, str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    name, thing, a = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, 99)
    b = rng.randint(2, a - 1)
    question = rng.choice(
        (
            f"{name} has {a} {thing} and loses {b}. How many {thing} are left?",
            f"There are {a} {thing} in a box. {name} takes {b}. How many {thing} are left?",
        )
    )
    return question, str(a - b)


def _multiply(rng: random.Random) -> tuple[str, str]:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    return f"{name} buys {a} bags with {b} {thing} in each. How many {thing} is that?", str(a * b)


def _compare(rng: random.Random) -> tuple[str, str]:
    (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b = rng.sample(range(2, 100), 2)
    more = rng.random() < 0.5
    question = f"{name} has {a} {thing} and {other} has {b} {thing}. Who has {'more' if more else 'fewer'} {thing}?"
    return question, name if (a > b) == more else other


def _extreme(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(10, 100), 3)
    adjective, pick = rng.choice((("largest", max), ("smallest", min)))
    return f"Which number is the {adjective}: {numbers[0]}, {numbers[1]} or {numbers[2]}?", str(pick(numbers))


def _occurrences(rng: random.Random) -> tuple[str, str]:
    letter, count, length = rng.choice(LETTERS), rng.randint(1, 4), rng.randint(4, 6)
    others = rng.choices([other for other in LETTERS if other != letter], k=length - count)
    letters = [letter] * count + others
    rng.shuffle(letters)
    return f'How many times is the letter "{letter}" in "{"".join(letters)}"?', str(count)


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 5)
    return f'Write "{word}" backwards.', word[::-1]


def _repeat(rng: random.Random) -> tuple[str, str]:
    word, times = _word(rng, 2, 4), rng.choice(tuple(TIMES))
    return f'Write "{word}" {TIMES[times]} times.', " ".join([word] * times)


def _letter(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 6)
    which, index = rng.choice((("first", 0), ("last", -1)))
    return f'What is the {which} letter of "{word}"?', word[index]


def _join(rng: random.Random) -> tuple[str, str]:
    first, second = _word(rng, 2, 4), _word(rng, 2, 4)
    return f'Join "{first}" and "{second}".', first + second


def _count(rng: random.Random) -> tuple[str, str]:
    low, length = rng.randint(1, 90), rng.randint(3, 9)
    numbers = list(range(low, low + length))
    word = "up"
    if rng.random() < 0.5:
        numbers.reverse()
        word = "down"
    return f"Count {word} from {numbers[0]} to {numbers[-1]}.", " ".join(map(str, numbers))


KINDS: dict[str, tuple[Callable[[random.Random], tuple[str, str]], int]] = {
    "add": (_add, 5),
    "subtract": (_subtract, 5),
    "multiply": (_multiply, 2),
    "compare": (_compare, 3),
    "extreme": (_extreme, 2),
    "occurrences": (_occurrences, 2),
    "reverse": (_reverse, 2),
    "repeat": (_repeat, 1),
    "letter": (_letter, 1),
    "join": (_join, 1),
    "count": (_count, 1),
}
"""Each kind's generator and its relative frequency: arithmetic is the slowest to learn, so it comes up most."""


def is_heldout(question: str) -> bool:
    """Whether the question's hash puts it in the held-out split."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % HELDOUT_SHARE == 0


def problems(rng: random.Random, *, heldout: bool) -> Iterator[Problem]:
    """Draw problems of one split without end."""
    names = tuple(KINDS)
    weights = [KINDS[name][1] for name in names]
    while True:
        kind = rng.choices(names, weights)[0]
        question, answer = KINDS[kind][0](rng)
        if is_heldout(question) == heldout:
            yield Problem(kind, question, answer)


def ask(question: str) -> str:
    """The question as a completion prompt; the answer follows after one space."""
    return f"Question: {question}\nAnswer:"


def reply(answer: str) -> str:
    """The text that completes `ask`; end-of-text follows the newline."""
    return f" {answer}\n"


def few_shot(shots: list[Problem], question: str) -> str:
    """A completion prompt with solved examples in front."""
    return "".join(ask(shot.question) + reply(shot.answer) + "\n" for shot in shots) + ask(question)


def heldout_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Distinct held-out questions behind three to eleven training-split examples each."""
    rng = random.Random(seed)
    train, heldout = problems(rng, heldout=False), problems(rng, heldout=True)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        problem = next(heldout)
        shots = [next(train) for _ in range(rng.randint(3, 11))]
        rows[problem.question] = {
            "prompt": few_shot(shots, problem.question),
            "question": problem.question,
            "answer": problem.answer,
            "kind": problem.kind,
        }
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out questions as JSON lines.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2024)
    args = parser.parse_args()
    rows = heldout_rows(args.count, args.seed)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
