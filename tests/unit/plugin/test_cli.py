"""`atom-plugin models` and `env`."""

from __future__ import annotations

import json

from atom_core.models.registry import MODELS
from tests.integration.files import LAYOUTS, hub_environ, laid_out, on_hub
from tests.unit.plugin.installed import run_cli


def test_models_lists_every_architecture():
    result = run_cli("models")
    assert result.returncode == 0, result.stderr
    assert all(architecture in result.stdout for architecture in MODELS)


def test_models_as_json():
    result = run_cli("models", "--json")
    assert {row["architecture"] for row in json.loads(result.stdout)} == set(MODELS)


def test_env_shows_what_is_set():
    result = run_cli("env", ATOM_KERNELS="attention=reference")
    assert result.returncode == 0, result.stderr
    assert "attention=reference" in result.stdout
    assert "(not set)" in result.stdout


def test_env_says_which_variables_do_not_exist():
    result = run_cli("env", ATOM_KERNAL="attention=reference")
    assert "did you mean ATOM_KERNELS?" in result.stderr


def test_without_a_command_the_help_is_shown():
    result = run_cli()
    assert "doctor" in result.stdout + result.stderr


def test_check_needs_a_folder_or_a_name_that_the_cache_has(tmp_path):
    result = run_cli("check", str(tmp_path / "missing"))
    assert result.returncode == 2
    assert "is neither a folder nor a name in Hugging Face's cache" in " ".join(result.stderr.split())


def test_check_takes_a_name_that_the_cache_has_and_chooses_its_files_as_those_of_a_folder(tmp_path):
    home = tmp_path / "home"
    for layout, says in (("a release of Mistral's", None), ("two models", LAYOUTS["two models"].says)):
        result = run_cli("check", on_hub(laid_out(layout, tmp_path), home), **hub_environ(home))
        assert result.returncode == (0 if says is None else 1), result.stderr
        assert ("agrees with Hugging Face" if says is None else says) in " ".join(
            (result.stdout + result.stderr).split()
        )
