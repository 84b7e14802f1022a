"""A rank's entry point, before and beside its training."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import holmes  # noqa: F401 (a fixture)

from holmes_hpc import train
from holmes_hpc.config.composition import load
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import LocalJob

pytestmark = pytest.mark.integration


def test_a_rank_whose_packages_are_absent_says_so_and_its_run_has_failed(
    holmes: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    config = {**load().to_dict(), "run_dir": str(run.path)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys; sys.modules['torch'] = None\n"
            "from holmes_hpc.rank import run_rank; from holmes_hpc.submission.plan_job import RankTask\n"
            f"RankTask(run_rank, json.loads({json.dumps(config)!r}))()",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stderr and len(done.stdout.splitlines()) == 1  # no stack
    assert [(end["rank"], end["state"]) for end in run.read_exits()] == [(0, "failed")]
    assert "the package torch is not installed; pip install" in run.read_exits()[0]["error"]
    for name in ("1_0_log.out", "1_0_result.pkl"):  # submitit's, of a local job: an exception is a result as well
        (run.path / "submission").mkdir(exist_ok=True)
        (run.path / "submission" / name).write_bytes(b"")
    assert LocalJob(run, 1, socket.gethostname(), 0.0).state().state == "FAILED"
    run.logs.mkdir(exist_ok=True)
    run.log_path(0).write_text(done.stdout)
    run.update_run(local={"pid": 2**23, "host": socket.gethostname(), "started": 1.0})  # no process has that number
    _, out, _ = holmes("status", str(run.path))
    said = [line for line in out.splitlines() if line.startswith("run: ")]
    assert said == [f"run: rank 0 on {socket.gethostname()}: {done.stdout.removeprefix('failed: ').strip()}"]
    assert not any(line.startswith("  | ") for line in out.splitlines())


def test_ctrl_c_in_a_sweep_is_an_exit_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["train", "-m", "train.lr=1e-3,2e-3"])
    monkeypatch.setattr(train.hydra, "main", lambda **_: lambda _: interrupted)
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 130 and capsys.readouterr().err == "holmes: interrupted\n"
