"""`nox -s fuzz`: thousands of checkpoints with one thing changed, by seed; exit code 1 where one is served wrong.

python -m tests.fuzz --seeds 3 --count 1000
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.fuzz.judge import Verdict, judged
from tests.fuzz.mutants import Mutant, mutate
from tests.fuzz.quantised import SOURCES, is_quantised, make, mutate_quantised
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.hugging_face import VOCABULARY, make_config, make_model

NUM_TOKENS = 72
#: Of changes to a quantised checkpoint, those that a plain one cannot have.
OWN_CHANGES = 0.75
OUTCOMES = ("equal", "refused", "lax", "WRONG", "HANG", "unclear")


def originals(folder: Path) -> list[Path]:
    """A sound checkpoint of every family, and of some in each format of quantised ones; a format after each family."""
    found = []
    for family in ALL_FAMILIES:
        place = folder / f"{family}"
        make_model(place, make_config(family, max_position_embeddings=256))
        found.append(place)
    quantised = [make(source, folder) for source in SOURCES]
    return [it for pair in itertools.zip_longest(found, quantised) for it in pair if it is not None]


def fuzzed(sources: list[Path], folder: Path, seed: int, count: int) -> Iterator[tuple[str, Mutant, Verdict]]:
    """`count` mutants of the checkpoints in turn."""
    rng = random.Random(seed)
    tokens = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    for number in range(count):
        source = sources[number % len(sources)]
        copy = folder / f"{source.name}-{seed}-{number}"
        shutil.copytree(source, copy)
        quantised = is_quantised(copy) and rng.random() < OWN_CHANGES
        mutant = (mutate_quantised if quantised else mutate)(copy, rng)
        yield source.name, mutant, judged(copy, mutant, tokens)
        for place in (copy, copy.with_name(f"{copy.name}-plain")):
            shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Print the table, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        (place := Path(folder, "sound")).mkdir()
        sources = originals(place)
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for family, mutant, verdict in fuzzed(sources, Path(folder), seed, given.count):
                table[mutant.kind, verdict.outcome] += 1
                if verdict.is_fault:
                    print(f"{verdict.outcome}: {family}: {mutant.kind}: {mutant.change}: {verdict.detail}", flush=True)
    print(f"{'':<24}{''.join(f'{outcome:>9}' for outcome in OUTCOMES)}")
    for kind in sorted({kind for kind, _ in table}):
        print(f"{kind:<24}{''.join(f'{table[kind, outcome]:>9}' for outcome in OUTCOMES)}")
    totals = [sum(count for (_, it), count in table.items() if it == outcome) for outcome in OUTCOMES]
    print(f"{'all':<24}{''.join(f'{total:>9}' for total in totals)}")
    return int(any(totals[3:]))


if __name__ == "__main__":
    sys.exit(main())
