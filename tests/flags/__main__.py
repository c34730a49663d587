"""Run the matrix of one framework and print its table; exit code 1 where ours falls short of native.

python -m tests.flags vllm|sglang [--only TEXT] [--sample]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path

from tests.flags.case import OUTCOMES, Verdict
from tests.flags.runs import judged


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("vllm", "sglang"))
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--sample", action="store_true", help="those that the ordinary tests run")
    given = parser.parse_args()
    cases = [
        case
        for case in import_module(f"tests.flags.{given.framework}_cases").CASES
        if given.only in case.name and (case.sample or not given.sample)
    ]
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for case, verdict in judged(given.framework, cases, Path(folder)):
            found[verdict.outcome] += 1
            told = f": {verdict.told}" if verdict.told else ""
            print(f"{verdict.outcome:13} {case.name}{told}", flush=True)
    print(", ".join(f"{outcome} {found[outcome]}" for outcome in OUTCOMES))
    return int(any(found[outcome] for outcome in OUTCOMES if Verdict(outcome).is_fault))


if __name__ == "__main__":
    sys.exit(main())
