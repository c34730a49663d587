"""How a case of the matrix of flags is judged: what falls short of native is a fault, and nothing else is."""

from __future__ import annotations

import pytest

from tests.flags.case import Case, different, judge

SERVED = Case("a flag")
REFUSED = Case("a flag", refused=("--a-flag", "supported: 1"))
ANSWER = {"answers": [[{"text": "a", "logprobs": [{"5": -0.5}]}]], "ours": True}


def _with(logprob: float, *, ours: bool = True) -> dict[str, object]:
    return {"answers": [[{"text": "a", "logprobs": [{"5": logprob}]}]], "ours": ours}


@pytest.mark.parametrize(
    ("case", "native", "ours", "outcome"),
    [
        (SERVED, ANSWER, _with(-0.50001), "equal"),
        (SERVED, ANSWER, _with(-0.501), "DIFFERS"),
        (SERVED, ANSWER, _with(-0.5, ours=False), "FAILS"),
        (SERVED, ANSWER, {"error": "KeyError: 'a'"}, "FAILS"),
        (SERVED, {"error": "no"}, ANSWER, "native fails"),
        (SERVED, {"error": "no"}, {"error": "no"}, "native fails"),
        (Case("a flag", native_is_wrong="it rounds"), ANSWER, _with(-3.0), "native fails"),
        (Case("a flag", native_is_wrong="it rounds"), ANSWER, {"error": "no"}, "FAILS"),
        (Case("a flag", tolerance=0.01), ANSWER, _with(-0.501), "equal"),
        (
            REFUSED,
            {},
            {"error": "atom-plugin does not support it (--a-flag 2); supported: 1. Leave it out."},
            "refused",
        ),
        (REFUSED, {}, {"error": "it is not supported"}, "FAILS"),
        (REFUSED, {}, {"error": "--a-flag\nsupported: 1"}, "FAILS"),
        (REFUSED, {}, ANSWER, "SERVED"),
    ],
)
def test_outcomes(case, native, ours, outcome):
    verdict = judge(case, native, ours)
    assert verdict.outcome == outcome
    assert verdict.is_fault == outcome.isupper()


def test_the_first_difference_is_told_with_its_place():
    assert different({"a": [1, 2]}, {"a": [1, 3]}, 0.0) == "answers.a[1]: native 2, ours 3"
    assert different({"a": 1}, {"b": 1}, 0.0) == "answers: native has ['a'], ours ['b']"
    assert different([1.0], [1], 0.0) == ""
