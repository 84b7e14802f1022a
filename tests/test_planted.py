"""What another user of the file system left for this one: no code of it runs, and each is refused in one line."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plans
import pytest
from command_line import holmes  # noqa: F401 (a fixture)
from hostile_pickle import Code

from holmes_hpc import cli
from holmes_hpc.config.composition import load
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle import status
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest

SOMEBODY = 54321
ROOT = os.getuid() == 0
pytestmark = pytest.mark.skipif(not ROOT, reason="only root can give files away")


def planted(path: Path, owner: int = SOMEBODY) -> None:
    """Give it, and what is in it, to somebody else."""
    for place in (path, *(() if path.is_symlink() else path.rglob("*"))):
        os.chown(place, owner, owner, follow_symlinks=False)


def run_of_somebody(path: Path, ran: Path) -> RunDirectory:
    plan = plans.plan("ib-a", "roce-a")
    run = RunDirectory.create(
        path,
        plan.to_yaml(),
        config=load(["launcher=local"]).to_dict(),
        overrides=[],
        plan_id=plan.id,
        slurm={"job_id": 7},
    )
    run.write_result({"state": "failed", "error": "x"})
    (path / "submission").mkdir()
    for name in ("7_submitted.pkl", "7_0_result.pkl"):
        (path / "submission" / name).write_bytes(pickle.dumps(Code(ran)))
    planted(path)
    return run


@pytest.mark.parametrize("what", ["run", "replaced run", "plan", "plan to submit", "site"])
def test_no_code_runs_and_one_line_is_said(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran, place, says = tmp_path / "ran", tmp_path / "theirs", "belongs to user 54321"
    if "run" in what:
        run_of_somebody(place, ran)
        words = ["resume", str(place)]
        if what == "replaced run":  # the run is one's own, but somebody may put another one in its place
            os.chown(place, 0, 0)
            tmp_path.chmod(0o777)
            says = "can be written by everybody"
    else:
        place.write_text(f"!!python/object/apply:os.mkdir [{ran}]\n")
        words = {
            "plan": ["predict", str(place)],
            "plan to submit": ["submit", str(place), "--dry-run"],
            "site": ["plan", "model=gpt_tiny", "--site", str(place)],
        }[what]
        says = str(place)
        planted(place)
    monkeypatch.setattr(sys, "argv", ["holmes", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err.strip().splitlines()
    tmp_path.chmod(0o755)
    assert ended.value.code == 2 and says in told[-1] and not ran.exists()
    assert not any("Traceback" in line for line in told)


@pytest.mark.integration
def test_cancel_ends_no_process_that_another_users_record_names(holmes: Any, tmp_path: Path) -> None:
    run = run_of_somebody(tmp_path / "run", tmp_path / "ran")
    run.result_path.unlink()
    with subprocess.Popen(["sleep", "60"]) as process:
        local = {"pid": process.pid, "host": socket.gethostname(), "started": time.time()}
        run.update_run(slurm=None, local=local)
        for owner, reason in ((SOMEBODY, "belongs to another user"), (0, "may be another program")):
            planted(run.path, owner)
            code, _, err = holmes("cancel", str(run.path))
            assert code in (1, 2) and process.poll() is None and reason in err
        process.kill()


@pytest.mark.parametrize("attack", ["link", "mode"])
def test_resume_starts_nothing_from_a_folder_of_others(attack: str, holmes: Any, tmp_path: Path) -> None:
    run = run_of_somebody(tmp_path / "run", tmp_path / "ran")
    planted(run.path, owner=0)
    submission = run.path / "submission"
    if attack == "mode":
        submission.chmod(0o777)
    else:
        submission.rename(tmp_path / "theirs")
        planted(tmp_path / "theirs")
        submission.symlink_to(tmp_path / "theirs")
    code, _, err = holmes("resume", str(run.path))
    assert code == 2 and "so other users could change the code that runs" in err


def test_rm_follows_no_link_of_another_user_and_keeps_other_files(holmes: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved" / "data"
    (saved / "step-00000001").mkdir(parents=True)
    (saved / "thesis").mkdir()
    runs = [run_of_somebody(tmp_path / name / "data", tmp_path / "ran") for name in ("theirs", "copy", "own")]
    for run in runs:
        run.checkpoints.rmdir()
        run.checkpoints.symlink_to(saved)
    theirs, copy, own = runs
    link = tmp_path / "link"
    link.symlink_to(own.path)
    planted(link)
    for run in (copy, own):
        planted(run.path, owner=0)
        run.update_run(config={**run.config, "run_dir": str(own.path)})
    for path in (theirs.path, link):
        code, _, err = holmes("rm", str(path), "--yes")
        assert code == 2 and "belongs to another user" in err and path.exists()
    code, _, err = holmes("rm", str(copy.path), "--yes")
    assert code == 0 and f"kept: {saved}" in err and len(list(saved.iterdir())) == 2
    assert holmes("rm", str(own.path), "--yes")[0] == 0 and list(saved.iterdir()) == [saved / "thesis"]


def test_cancel_follows_no_link_or_sweep_of_another_user(
    holmes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = list[str]()
    monkeypatch.setattr(SlurmHetJob, "cancel", lambda job, check=True: cancelled.append(job.job_id))
    monkeypatch.setattr(SlurmHetJob, "slurm_state", lambda *_: JobState("PENDING"))
    monkeypatch.setattr(status, "job_field", lambda _, field: "0" if field == "%U" else None)
    own = run_of_somebody(tmp_path / "own", tmp_path / "ran")
    planted(own.path, owner=0)
    own.result_path.unlink()
    theirs, link, sweep = tmp_path / "theirs", tmp_path / "link", tmp_path / "sweep"
    for folder in (theirs, sweep):
        folder.mkdir()
    (theirs / "run.yaml").symlink_to(own.run_path)
    link.symlink_to(own.path)
    open_manifest(sweep).put(SweepJob(0, (), "0", "plain", "slurm", "7", ".", submitted=time.time()))
    for path in (theirs, link, sweep):
        planted(path)
        code, _, err = holmes(*(["sweep"] if path == sweep else []), "cancel", str(path))
        assert code == 2 and "belongs to another user" in err
    assert cancelled == []
    assert holmes("cancel", str(own.path))[0] == 0 and cancelled == ["7"]
