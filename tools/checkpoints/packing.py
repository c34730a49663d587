"""Turn generated problems into fixed-length token rows for training.

Only answers carry a loss: the questions are random, so predicting them would spend capacity on noise. After each answer
the target is end-of-text even where the row goes on with the next example. The model therefore stops after its own
answer however many examples stand in front, and nothing in the text makes stopping ambiguous.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context

import numpy as np
from task import SYSTEM_PROMPTS, Problem, ask, few_shot, problems, remembering, reply
from tokenizer import ASSISTANT, EOS, PAD, SYSTEM, USER
from tokenizers import Tokenizer

IGNORE = -100
Turn = tuple[str, str]  # What is given, what is to be answered.
CHUNK = 500


def _completion(source: Iterator[Problem]) -> Iterator[Turn]:
    """Few-shot text, every answer of which is trained on."""
    separator = ""
    while True:
        problem = next(source)
        yield separator + ask(problem.question), reply(problem.answer)
        separator = "\n"


def _chat(rng: random.Random, source: Iterator[Problem]) -> Iterator[Turn]:
    """A conversation in the chat template's format; some user turns are whole few-shot prompts."""
    before = SYSTEM + rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else ""
    with_examples = rng.random() < 0.3
    while True:
        shots = [next(source) for _ in range(rng.randint(0, 8))] if with_examples else []
        problem = next(source)
        content = few_shot(shots, problem.question) if with_examples else problem.question
        yield before + USER + content + ASSISTANT, problem.answer
        before = EOS


def _row(
    rng: random.Random, source: Iterator[Problem], tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[int]]:
    """One row: as many whole turns as fit. `targets[i]` is the token to predict after `inputs[i]`."""
    turns = _chat(rng, source) if rng.random() < 0.35 else _completion(source)
    pad, eos = tokenizer.encode(PAD + EOS).ids
    inputs: list[int] = []
    targets: list[int] = []
    for given, answer in turns:
        given_ids, answer_ids = (encoded.ids for encoded in tokenizer.encode_batch([given, answer]))
        if len(inputs) + len(given_ids) + len(answer_ids) > length:
            break
        inputs += given_ids + answer_ids
        targets += [IGNORE] * (len(given_ids) - 1) + answer_ids + [eos]
    padding = length - len(inputs)
    return inputs + [pad] * padding, targets + [IGNORE] * padding


def _chunk(seed: str, tokenizer_json: str, length: int, notes: float) -> tuple[np.ndarray, np.ndarray]:
    rng = random.Random(seed)
    source = problems(rng, heldout=False)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rows = [
        _row(rng, remembering(rng, source) if rng.random() < notes else source, tokenizer, length) for _ in range(CHUNK)
    ]
    return np.array([row[0] for row in rows], np.int16), np.array([row[1] for row in rows], np.int16)


def training_rows(
    tokenizer: Tokenizer, rows: int, length: int, seed: int, workers: int, notes: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of shape (rows, length), that share of them with notes; the same for any number of workers."""
    seeds = [f"{seed}/{index}" for index in range(max(1, rows // CHUNK))]
    build = partial(_chunk, tokenizer_json=tokenizer.to_str(), length=length, notes=notes)
    with get_context("spawn").Pool(workers) as pool:
        chunks = pool.map(build, seeds)
    return np.concatenate([chunk[0] for chunk in chunks]), np.concatenate([chunk[1] for chunk in chunks])
