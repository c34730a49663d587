"""What pages show of the code is what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _tool():
    spec = importlib.util.spec_from_file_location("generated", ROOT / "tools" / "generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", _tool().pages(), ids=lambda page: page.name)
def test_page_is_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == _tool().updated(text), "run `python tools/generated.py`"


def test_the_readme_has_a_support_table():
    assert "<!-- generated: atom-plugin models --markdown -->" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_page_may_have_several_blocks():
    block = "<!-- generated: atom-plugin env --markdown -->\n{}<!-- end of generated -->\n"
    page = f"{block}between\n{block}".format("", "old\n")
    assert _tool().updated(page).count("`ATOM_KERNELS`") == 2
    assert "\nbetween\n" in _tool().updated(page)
