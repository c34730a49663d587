"""Seeded generator of short questions that have exactly one right answer.

The test checkpoints are trained on these questions because random weights cannot stand in for a model: their top two
logits nearly tie, so neither "same tokens as the reference" nor "still accurate" means anything. Every kind below is
easy enough for a million parameters, and every answer follows from the question alone.

A question belongs to the held-out split when its hash says so. Both splits are therefore disjoint by construction,
whatever seeds they are drawn with.

Beside them stand notes, that somebody has a word, which questions ask for hundreds of tokens later: they show what a
model keeps in its recurrent state.

Run as a script to write the held-out evaluation files::

    python tools/checkpoints/task.py --out tests/evaluation/heldout.jsonl
    python tools/checkpoints/task.py --recall --count 100 --out tests/evaluation/recall.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
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


def _noted(rng: random.Random, names: list[str], *, heldout: bool) -> tuple[str, dict[str, str]]:
    """Notes of one split that give each name a word of three letters, and those words."""
    words: dict[str, str] = {}
    notes = ""
    for name in names:
        note = ""
        while not note or is_heldout(note) != heldout:
            words[name] = _word(rng, 3, 3)
            note = f'{name} has "{words[name]}". '
        notes += note
    return notes, words


def _recall(name: str, words: dict[str, str]) -> Problem:
    return Problem("recall", f"What does {name} have?", words[name])


def remembering(rng: random.Random, source: Iterator[Problem]) -> Iterator[Problem]:
    """The problems of `source`, notes in front of some, and between them a question for each note, once.

    It comes 1 to 28 problems later, all equally likely: an answer would make it easy to give the same one again soon
    after. Then the name, one of four, may be noted with another word.
    """
    names = rng.sample(NAMES, 4)
    words: dict[str, str] = {}
    due: dict[str, int] = {}
    for number in count():
        ripe = [name for name, when in due.items() if when <= number]
        if ripe:
            del due[ripe[0]]
            yield _recall(ripe[0], words)
            continue
        problem = next(source)
        absent = [name for name in names if name not in due]
        if absent and (number == 0 or rng.random() < 0.3):
            chosen = rng.sample(absent, rng.randint(1, min(3, len(absent))))
            notes, new = _noted(rng, chosen, heldout=False)
            words |= new
            due |= {name: number + rng.randint(1, 28) for name in chosen}
            problem = Problem(problem.kind, notes + problem.question, problem.answer)
        yield problem


def heldout_rows(count: int, seed: int, examples: tuple[int, int] = (3, 11)) -> list[dict[str, str]]:
    """Distinct held-out questions behind so many training-split examples each, at least and at most."""
    rng = random.Random(seed)
    train, heldout = problems(rng, heldout=False), problems(rng, heldout=True)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        problem = next(heldout)
        shots = [next(train) for _ in range(rng.randint(*examples))]
        rows[problem.question] = {
            "prompt": few_shot(shots, problem.question),
            "question": problem.question,
            "answer": problem.answer,
            "kind": problem.kind,
        }
    return list(rows.values())


def recall_rows(count: int, seed: int, noted: int = 1) -> list[dict[str, str]]:
    """Questions for one of so many held-out notes, which stand in the first of 8 to 28 training-split examples."""
    rng = random.Random(seed)
    train = problems(rng, heldout=False)
    rows = []
    for _ in range(count):
        notes, words = _noted(rng, rng.sample(NAMES, noted), heldout=True)
        first, *shots = (next(train) for _ in range(rng.randint(8, 28)))
        problem = _recall(rng.choice(list(words)), words)
        shots = [Problem(first.kind, notes + first.question, first.answer), *shots]
        rows.append(
            {
                "prompt": few_shot(shots, problem.question),
                "question": problem.question,
                "answer": problem.answer,
                "kind": problem.kind,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out questions as JSON lines.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--recall", action="store_true", help="questions for notes that stand far before them")
    args = parser.parse_args()
    rows = (recall_rows if args.recall else heldout_rows)(args.count, args.seed)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
