"""Exits of local ranks, as their parent records them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.submission.lifecycle.failed_rank import (
    MAX_TASKS,
    FailedRank,
    LocalExits,
    find_failed_rank,
    parse_srun_errors,
    read_local_exits,
    record_local_exits,
)


def test_failed_exits_become_srun_errors_in_their_order(tmp_path: Path) -> None:
    record_local_exits(tmp_path, "7", True, [(2, -11), (0, 0), (1, 3)])
    exits = read_local_exits(tmp_path, "7")
    assert exits.is_terminated
    errors = exits.srun_errors("here")
    assert errors == [
        FailedRank(2, "here", "killed by signal 11 (SIGSEGV)"),
        FailedRank(1, "here", "exited with exit code 3"),
    ]
    assert find_failed_rank([], errors[::-1]).rank == 2  # a signal comes before an exit code


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"is_terminated": true, "codes": [1]}', '{"is_terminated": 1, "codes": [["a", 1]]}']
)
def test_a_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "7_ends.json").write_text(text)
    assert read_local_exits(tmp_path, "7") == LocalExits() == read_local_exits(tmp_path, "8")


def test_a_log_line_about_endless_tasks_is_read_at_once() -> None:
    (error,) = parse_srun_errors("srun: error: ib1: tasks 3-99999999999: Killed")
    assert error.rank == 3 and not parse_srun_errors(f"srun: error: ib1: task {'9' * 5000}: Killed")
    assert len(parse_srun_errors("srun: error: ib1: tasks 3-999999999: Killed")) == MAX_TASKS
    assert not parse_srun_errors("srun: error: [[]: task 0: Killed")
