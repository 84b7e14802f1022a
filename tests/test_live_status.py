"""The live table of `holmes status --watch`, and the runs that `holmes status` lists among many."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holmes_hpc.cli.live_status import live_table
from holmes_hpc.records.find import recent_runs
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.attempts import last_metrics
from holmes_hpc.submission.lifecycle.status import Status

LONG = "20260101-120000-gpt_tiny-a150e0a4cf4c-with-a-name"


def row(name: str, state: str = "completed", **values: Any) -> Status:
    figures = {"step": 12345, "steps": 100_000, "loss": 12.3456, "step_time_s": 123.456, "attempt": 2}
    return Status(name, "/runs/" + name, "1234567", state, **{**figures, **values})


def lines(rows: list[Status], width: int, height: int = 24, hidden: int = 0) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as text:
        console.print(live_table(rows, width, height, hidden))
    return [line.rstrip() for line in text.get().splitlines()]


@pytest.mark.parametrize("width", [60, 79, 80, 99, 100, 120, 160])
def test_the_live_table_fits_the_terminal_and_keeps_its_figures_whole(width: int) -> None:
    rows = [row(LONG), row("short", "pending", why="the nodes are reserved for maintenance until tomorrow")]
    shown = lines(rows, width)
    assert max(map(len, shown)) <= width and len(shown) == 5
    assert shown[2].startswith("short") and "pending" in shown[2]  # an active run comes first
    for figure in ("12345/100000", "12.3456", "123.456 s"):
        assert figure in shown[2] and figure in shown[3]
    assert ("1234567" in shown[3]) == (width >= 80) and (LONG in shown[3]) == (width >= 160)


def test_the_live_table_is_no_higher_than_the_terminal_and_counts_the_rest() -> None:
    rows = [*(row(f"run-{i}") for i in range(30)), row("active", "running")]
    shown = lines(rows, 80, 10, hidden=5)
    assert len(shown) <= 9 and "30 completed, 1 running" in shown[0]
    assert shown[2].startswith("active") and shown[-1] == "30 more; q leaves"


def run_in(path: Path, result: str = "") -> RunDirectory:
    run = RunDirectory.create(path, plan_text="", config={})
    if result:
        run.result_path.write_text(f'{{"state": "{result}"}}')
    return run


def test_older_runs_are_listed_only_if_they_may_go_on(tmp_path: Path) -> None:
    for name, result in (("0", "completed"), ("1", "preempted"), ("2", ""), ("sweep/3", "failed"), ("4", "failed")):
        run = run_in(tmp_path / name, result)
        for path in run.path.iterdir():
            os.utime(path, (1e9 + int(run.name), 1e9 + int(run.name)))
    runs, hidden = recent_runs(tmp_path, 1)
    assert ([run.name for run in runs], hidden) == (["4", "2", "1"], 2)
    assert [run.name for run in recent_runs(tmp_path, 9)[0]] == ["4", "3", "2", "1", "0"]
    assert recent_runs(tmp_path / "missing", 9) == ([], 0)


def test_the_last_step_is_read_from_the_end_of_the_metrics(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert last_metrics(run) == {}
    for step in range(1, 2000):
        run.append_metrics({"step": step, "loss": 1.0 / step})
    run.append_metrics({"step": 1999, "eval_loss": 3.0})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 20')
    run.metrics = None  # type: ignore[method-assign, assignment]  # the whole file is not read
    assert last_metrics(run) == {"step": 1999, "loss": pytest.approx(1 / 1999, rel=1e-3), "eval_loss": 3.0}


@pytest.mark.integration
def test_watch_shows_new_steps_until_q(tmp_path: Path) -> None:
    run = run_in(tmp_path / "watched")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(HOLMES_RUNS=str(tmp_path), TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-m", "holmes_hpc.cli", "status", "--watch"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    output = b""

    def read_until(text: bytes) -> None:
        nonlocal output
        deadline = time.monotonic() + 60
        while text not in output:
            assert time.monotonic() < deadline, output
            output += os.read(terminal, 4096)

    read_until(b"watched")
    run.append_metrics({"step": 7, "loss": 2.5, "step_time_s": 0.25})
    read_until(b"2.5000")
    os.write(terminal, b"q")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
