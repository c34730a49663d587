"""The README's figure shows the ratios that are in its file, and marks what native lacked."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.speedups import BAR, FIGURE, PALE_BAR, RATIOS, SLOWER, draw

FOUR = ("1", "8", "64", "256")


def figure_of(*rows, notes=None):
    """A file of ratios with one group."""
    groups = [{"title": "a group", "rows": list(rows)}]
    return {"title": "a title", "subtitle": "", "requests": FOUR, "notes": notes or {}, "groups": groups}


def row_of(ratios, **keys):
    return {"model": "a <model>", "ratios": dict.fromkeys(FOUR, ratios), **keys}


def test_the_figure_is_current():
    drawn = draw(json.loads(RATIOS.read_text(encoding="utf-8")))
    assert FIGURE.read_text(encoding="utf-8") == drawn, "run `python -m benchmarks.speedups`"


def test_it_is_well_formed_and_has_each_ratio_as_a_number():
    texts = [it.text for it in ET.fromstring(draw(figure_of(row_of([1.25]), row_of([1.1, 1.5])))).iter()]
    assert texts.count("1.25") == texts.count("1.10 to 1.50") == len(FOUR)
    assert "a <model>" in texts


def test_what_native_lacked_is_pale_and_has_its_footnote():
    svg = draw(figure_of(row_of([1.25], note="1"), notes={"1": "without it"}))
    assert svg.count(PALE_BAR) == len(FOUR)
    assert BAR not in svg
    assert "a &lt;model&gt; ¹" in svg
    assert "¹ without it" in svg


def test_what_is_slower_looks_so():
    assert draw(figure_of(row_of([0.9]))).count(SLOWER) == len(FOUR)
    assert SLOWER not in draw(figure_of(row_of([1.0])))


@pytest.mark.parametrize(
    ("row", "says"), [(row_of([1.2, 2.5]), "2.5"), (row_of([0.5]), "0.5"), (row_of([1.2], note="1"), "note '1'")]
)
def test_what_cannot_be_shown_is_an_error(row, says):
    with pytest.raises(ValueError, match=says):
        draw(figure_of(row))
