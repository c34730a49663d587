"""Rows of the tables that say what becomes of each setting."""

from __future__ import annotations

import pytest

from atom_plugin.common.flags import Ours, Refused, Theirs, counts, listed, refusals, settings_of

OTHERWISE = "Leave --model-impl out to use it."


def test_a_setting_that_is_set_is_refused_but_for_what_is_allowed() -> None:
    row = Refused("CacheConfig.cache_dtype", "this cache", flags=("--kv-cache-dtype",), allowed=("auto", "fp8"))
    assert not row.is_refused("auto")
    assert row.is_refused("nvfp4")
    assert not Refused("ServerArgs.enable_lora", "LoRA adapters").is_refused(None)
    assert Refused("ServerArgs.dwdp_size", "it", refuses=lambda size: size > 1).is_refused(2)


def test_a_refusal_names_flag_value_what_is_supported_and_what_to_do() -> None:
    row = Refused("CacheConfig.cache_dtype", "this cache", flags=("--kv-cache-dtype",), allowed=("auto", "fp8"))
    assert row.message("nvfp4", OTHERWISE) == (
        "atom-plugin does not support this cache (--kv-cache-dtype nvfp4); supported: auto, fp8. " + OTHERWISE
    )
    assert (
        Refused("A.b", "LoRA", flags=("--enable-lora",))
        .message(True, OTHERWISE)
        .endswith(f"(--enable-lora). {OTHERWISE}")
    )
    assert "(VLLM_X=1). Unset it." in Refused("VLLM_X", "it", instead="Unset it.").message(1, OTHERWISE)
    assert "(VLLM_X=1)." in Refused("VLLM_X", "it").message(True, OTHERWISE)
    assert Refused("A.b", "it").message(True, OTHERWISE) == f"atom-plugin does not support it. {OTHERWISE}"
    assert "(--no-b)." in Refused("A.b", "it", flags=("--no-b",)).message(False, OTHERWISE)


@pytest.mark.parametrize(
    ("flag", "text", "refused"),
    [
        ("--size", "24", True),
        ("--size", "32", False),
        ("--b", "", True),
        ("--b", "false", False),
        ("--no-b", "", False),
        ("--name", "eagle", True),
        ("--name", "mtp", False),
    ],
)
def test_a_value_is_looked_at_as_it_stands_on_a_command_line(flag: str, text: str, refused: bool) -> None:
    rows = {
        "--size": Refused("A.size", "it", refuses=lambda size: size % 16 != 0),
        "--name": Refused("A.name", "it", allowed=("mtp",)),
    }
    assert rows.get(flag, Refused("A.b", "it")).is_refused_on_the_command_line(flag, text) == refused


def test_settings_are_counted_by_who_acts_on_them() -> None:
    rows = (Theirs("the scheduler", settings_of("A", "b c")), Ours("the head", "t", ("VLLM_X",)), Refused("A.d", "it"))
    assert counts(rows) == {"Theirs": 2, "Ours": 1, "Refused": 1}


def test_no_setting_stands_in_two_rows() -> None:
    rows = (Theirs("the scheduler", settings_of("A", "b c")), Ours("the head", "t", ("VLLM_X",)), Refused("A.d", "it"))
    assert listed(rows) == ("A.b", "A.c", "VLLM_X", "A.d")
    assert [row.setting for row in refusals(rows)] == ["A.d"]
    with pytest.raises(AssertionError, match=r"A\.b"):
        listed((*rows, Refused("A.b", "it")))
