"""How commands share a model out over ranks, and what the doctor says of a checkpoint then."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom_plugin.doctor.checkpoint import check_checkpoint
from atom_plugin.doctor.command import parse_command
from atom_plugin.doctor.sharing import Sharing

NEXT = Path(__file__).parents[3] / "checkpoints" / "qwen3_next"


@pytest.mark.parametrize(
    ("flags", "sharing"),
    [
        ("", Sharing()),
        ("--tensor-parallel-size 4", Sharing(4)),
        ("-tp 4 --enable-expert-parallel", Sharing(4, True)),
        ("--enable-expert-parallel -tp 2 --data-parallel-size 8", Sharing(2, True, 8)),
        ("-ep -dp 2", Sharing(1, True, 2)),
    ],
)
def test_of_vllm(flags, sharing):
    assert Sharing.of(parse_command(f"vllm serve {NEXT} {flags}".split())) == sharing


@pytest.mark.parametrize(
    ("flags", "sharing"),
    [
        ("--tp 4", Sharing(4)),
        ("--tp-size 4 --ep-size 1", Sharing(4)),
        ("--tp-size 4 --ep 4", Sharing(4, True)),
        ("--tp 8 --attn-dp-size 4", Sharing(2, False, 4)),
        ("--tp 8 --dp 8 --enable-dp-attention --expert-parallel-size 8", Sharing(1, True, 8)),
        # Whole copies of the model, which share nothing.
        ("--tp 4 --dp 2", Sharing(4)),
        # Another check refuses these.
        ("--tp 4 --attn-dp-size 3", Sharing(4, False, 3)),
        ("--tp 4 --attn-dp-size 0", Sharing(4)),
        ("--tp 4 --attn-dp-size=-2", Sharing(4)),
    ],
)
def test_of_sglang(flags, sharing):
    assert Sharing.of(parse_command(f"sglang serve {NEXT} {flags}".split())) == sharing


def problems(line):
    command = parse_command(line.split())
    given = {"load_format": command.flags.get("--load-format", "auto"), **Sharing.of(command)._asdict()}
    return [finding.problem for finding in check_checkpoint(NEXT, framework=command.framework, **given)]


def test_heads_go_by_the_ranks_that_share_attention():
    (problem,) = problems(f"sglang serve {NEXT} --tp 4")
    assert "linear_num_key_heads" in problem
    assert not problems(f"sglang serve {NEXT} --tp 4 --attn-dp-size 4")
    assert not problems(f"sglang serve {NEXT} --tp 4 --attn-dp-size 2 --ep-size 4")


def test_whole_experts_divide_over_all_ranks():
    (problem,) = problems(f"vllm serve {NEXT} --enable-expert-parallel --data-parallel-size 3")
    assert "experts" in problem
    assert not problems(f"vllm serve {NEXT} --enable-expert-parallel --data-parallel-size 2")


def test_files_that_a_server_does_not_read_are_not_looked_at(tmp_path):
    (tmp_path / "config.json").write_text((NEXT / "config.json").read_text())
    assert len(list(check_checkpoint(tmp_path))) == 1
    assert not list(check_checkpoint(tmp_path, load_format="dummy"))
