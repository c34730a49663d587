"""A fixed sample of the fuzzer's mutants (`nox -s fuzz` has thousands): served as Transformers does, or refused."""

from __future__ import annotations

from tests.fuzz.__main__ import fuzzed, originals


def test_a_sample_of_mutants_is_served_as_transformers_does_or_refused_by_name(tmp_path):
    (place := tmp_path / "sound").mkdir()
    found = list(fuzzed(originals(place), tmp_path, seed=100, count=100))
    faults = [
        f"{verdict.outcome}: {family}: {mutant.kind}: {mutant.change}: {verdict.detail}"
        for family, mutant, verdict in found
        if verdict.is_fault
    ]
    assert faults == []
    outcomes = [verdict.outcome for _, _, verdict in found]
    assert outcomes.count("equal") > 10
    assert outcomes.count("refused") > 30
