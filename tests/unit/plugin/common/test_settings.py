"""Every ATOM_* variable parses, or says what it takes."""

from __future__ import annotations

import dataclasses

import pytest

from atom_plugin.common.settings import Settings, load_settings, variables


def test_nothing_set_is_all_defaults():
    assert load_settings({}) == Settings()


def test_reads_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("ATOM_DISABLE_VLLM_ATTENTION", "1")
    assert load_settings().disable_vllm_attention is True


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_settings({}).kernels = {}


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("false", False), ("TRUE", True), (" 1", True)])
def test_booleans(text, value):
    assert load_settings({"ATOM_DISABLE_VLLM_PLUGIN": text}).disable_vllm_plugin is value


@pytest.mark.parametrize("text", ["", "2", "yes", "on", "no"])
def test_other_booleans_are_refused(text):
    with pytest.raises(ValueError, match=rf"ATOM_DISABLE_VLLM_PLUGIN='{text}': it takes one of 0, 1, false, true\."):
        load_settings({"ATOM_DISABLE_VLLM_PLUGIN": text})


def test_kernels():
    settings = load_settings({"ATOM_KERNELS": "attention=triton, rms_norm = reference"})
    assert settings.kernels == {"attention": "triton", "rms_norm": "reference"}


@pytest.mark.parametrize("text", ["", "attention", "attention=", "=triton", "a=b=c", "a=b,,c=d", "a=b,a=c"])
def test_kernels_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match=r"ATOM_KERNELS='.*': it takes the form \"op=implementation"):
        load_settings({"ATOM_KERNELS": text})


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"ATOM_KERNEL \(value 'x'\): did you mean ATOM_KERNELS\?"):
        load_settings({"ATOM_KERNEL": "x"})


def test_an_unknown_variable_near_none_lists_them_all():
    with pytest.raises(ValueError, match=r"known variables: ATOM_DISABLE_VLLM_PLUGIN, .*ATOM_KERNELS"):
        load_settings({"ATOM_XYZ": "1"})


def test_variables_of_others_are_not_ours():
    assert load_settings({"VLLM_PLUGINS": "", "ATOMIC": "1"}) == Settings()


def test_every_variable_is_documented():
    assert {variable.name for variable in variables()} == {
        f"ATOM_{field.name.upper()}" for field in dataclasses.fields(Settings)
    }
    assert all(variable.description and variable.form for variable in variables())


def test_settings_that_force_a_kernel():
    from atom_plugin.common.kernels import forced_kernels

    both = {"ATOM_SHUFFLED_CACHE": "1", "ATOM_AITER_QK_NORM_ROPE_CACHE": "1", "ATOM_KERNELS": "rms_norm=triton"}
    assert forced_kernels(load_settings(both)) == {
        "rms_norm": "triton",
        "attention": "aiter_shuffled",
        "qk_norm_rope_cache": "aiter",
    }
    assert forced_kernels(load_settings({})) == {}
    contradicting = {"ATOM_SHUFFLED_CACHE": "1", "ATOM_KERNELS": "attention=triton"}
    with pytest.raises(ValueError, match="ATOM_SHUFFLED_CACHE=1 asks for attention=aiter_shuffled"):
        forced_kernels(load_settings(contradicting))
