"""Jobs side by side: each has GPUs of its own, and none outlives its time."""

from __future__ import annotations

import re

import pytest

from benchmarks.side_by_side import read_jobs, run

JOBS = """
# a comment
1 | 60 | first  | sleep 0.5; echo "on $CUDA_VISIBLE_DEVICES"; echo x > $OUT/first.txt
1 | 60 | second | echo "on $CUDA_VISIBLE_DEVICES" | cat; exit 3
2 | 60 | both   | echo "on $CUDA_VISIBLE_DEVICES"
1 | 1  | slow   | sleep 100
"""


def test_jobs_have_gpus_of_their_own_and_none_outlives_its_time(tmp_path):
    codes = run(read_jobs(JOBS, 2), 2, 60.0, tmp_path)
    assert codes == {"first": 0, "second": 3, "both": 0, "slow": -1}
    said = {name: (tmp_path / f"{name}.log").read_text().strip() for name in codes}
    assert {said["first"], said["second"]} == {"on 0", "on 1"}
    assert said["both"] == "on 0,1"
    assert (tmp_path / "first.txt").exists()


def test_what_cannot_begin_in_time_is_said(tmp_path, capsys):
    assert run(read_jobs("1 | 60 | late | true", 1), 1, 1.0, tmp_path) == {"late": -1}
    assert "no time for late" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 | 60 | no command", "is not of the form: GPUs | seconds | name | command"),
        ("one | 60 | name | true", "'one | 60 | name | true' is not"),
        ("1 | 60 | name | true\n1 | 60 | name | false", "Two jobs are named 'name'."),
        ("3 | 60 | name | true", "Job 'name' wants 3 GPUs; there are 2."),
    ],
)
def test_what_is_no_job_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_jobs(text, 2)
