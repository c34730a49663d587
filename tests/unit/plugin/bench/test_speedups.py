"""The README's figure shows the ratios of the performance page, and marks what native lacked."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.speedups import BAR, FIGURE, NOTES, PALE_BAR, REQUESTS, SLOWER, draw
from tools.performance import MARKS, runs


def run_of(ratio, native="its defaults", machine="H200", framework="vLLM"):
    return {
        "model": "a <model>",
        "framework": framework,
        "version": "1.2",
        "machine": machine,
        "in_table": True,
        "native_ran_with": native,
        "results": [{"requests": requests, "ratio": ratio} for requests in REQUESTS],
    }


def test_the_figure_is_current():
    assert FIGURE.read_text(encoding="utf-8") == draw(runs()), "run `python -m benchmarks.speedups`"


def test_it_is_well_formed_and_has_each_ratio_as_a_number():
    texts = [it.text for it in ET.fromstring(draw([run_of(1.25), run_of([1.1, 1.5], framework="SGLang")])).iter()]
    assert texts.count("1.25") == texts.count("1.10 to 1.50") == len(REQUESTS)
    assert texts.count("a <model>") == 2


def test_several_comparisons_are_one_row():
    texts = [it.text for it in ET.fromstring(draw([run_of(1.25), run_of(1.1)])).iter()]
    assert texts.count("1.10 to 1.25") == len(REQUESTS)


@pytest.mark.parametrize("lacking", MARKS)
def test_what_native_lacked_is_pale_and_has_its_footnote(lacking):
    svg = draw([run_of(1.25, native=lacking)])
    assert svg.count(PALE_BAR) == len(REQUESTS)
    assert BAR not in svg
    assert f"a &lt;model&gt; {MARKS[lacking]}" in svg
    assert NOTES.keys() == set(MARKS.values())


def test_what_is_slower_looks_so():
    assert draw([run_of(0.9)]).count(SLOWER) == len(REQUESTS)
    assert SLOWER not in draw([run_of(1.0)])


def test_what_is_measured_on_a_cpu_or_not_on_the_page_is_left_out():
    hidden = {**run_of(1.25), "in_table": False}
    assert "1.25" not in draw([run_of(1.25, machine="CPU"), hidden])


@pytest.mark.parametrize(
    ("run", "says"), [(run_of([1.2, 2.5]), "2.5"), (run_of(0.5), "0.5"), (run_of(1.2, machine="H300"), "vLLM on H300")]
)
def test_what_cannot_be_shown_is_an_error(run, says):
    with pytest.raises(ValueError, match=says):
        draw([run])
