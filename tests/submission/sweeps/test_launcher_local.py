"""Hydra's conformance suite for launchers, and sweeps of local processes."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

from holmes_hpc.records.files import locked
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest
from holmes_hpc.submission.sweeps.sweep_table import collect


def test_discovery() -> None:
    launchers = {c.__name__ for c in Plugins.instance().discover(Launcher)}
    assert {"HolmesSlurmLauncher", "HolmesLocalLauncher"} <= launchers


@pytest.mark.integration
@pytest.mark.thorough  # the same suite runs on Slurm
@pytest.mark.parametrize("launcher_name, overrides", [("holmes_local", [])])
class TestLocal(LauncherTestSuite):
    pass


@pytest.mark.integration
@pytest.mark.thorough
@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [({}, ["-m", "hydra/launcher=holmes_local"])])
class TestLocalIntegration(IntegrationTestSuite):
    pass


APPLICATION = """
import os, sys, time
sys.path.insert(0, {here!r})
import cloudpickle, hydra, plans
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import CPU, Pool, NicType, Site
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.plan_job import PlannedJob
cloudpickle.register_pickle_by_value(plans)

def rank(config):
    number, run = int(os.environ["RANK"]), RunDirectory(config["run_dir"])
    if number == 0:
        run.start_attempt({{}})
        run.append_metrics({{"step": 1, "loss": config["x"] / 2, "attempt": run.attempt}})
    if config["x"] == 2 and not os.path.exists(config["good"]):
        run.write_exit(number, "failed", "ValueError: not yet")
        sys.exit(1)
    run.write_exit(number, "completed")

def plan_job(cfg, where):
    if cfg.x > 8:
        raise PlanError(f"x is {{cfg.x}}", where="plan", hint="use less")
    config = {{"x": cfg.x, "good": cfg.good, "train": {{"steps": 1, "max_restarts": 0}}}}
    return PlannedJob(plans.local_plan(), config, rank, SlurmSettings(timeout_min=1))

def app(cfg):
    raise AssertionError("a job with a plan is run by its ranks")

app.plan_job = plan_job
hydra.main(config_path=None, config_name=None, version_base="1.3")(app)()
"""


def sweep(folder: Path, xs: str, *overrides: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APPLICATION.format(here=str(Path(__file__).parents[2] / "support")))
    return subprocess.run(
        [
            sys.executable,
            "app.py",
            "-m",
            f"+x={xs}",
            f"+good={folder / 'good'}",
            "hydra/launcher=holmes_local",
            f"hydra.sweep.dir={directory or folder / 'sweep'}",
            *overrides,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep whose second job fails."""
    folder = tmp_path_factory.mktemp("failed")
    done = sweep(folder, "1,2")
    assert done.returncode != 0 and "not yet" in done.stderr
    return folder


@pytest.mark.integration
def test_repeated_sweep_reuses_completed_and_resumes_failed_plan_jobs(failed: Path, tmp_path: Path) -> None:
    shutil.copytree(failed / "sweep", tmp_path / "sweep")
    jobs = {c["overrides"][0]: c for c in collect(tmp_path / "sweep")}
    assert jobs["+x=1"]["state"] == "completed" and jobs["+x=1"]["final"]["loss"] == 0.5
    assert jobs["+x=2"]["state"] == "failed" and "not yet" in jobs["+x=2"]["error"]
    assert (tmp_path / "sweep" / "0" / ".hydra" / "config.yaml").exists()
    (failed / "good").touch()
    done = sweep(failed, "1,2", directory=tmp_path / "sweep")
    (failed / "good").unlink()
    assert done.returncode == 0, done.stderr
    assert "reused: #0 : +x=1" in done.stdout and "(completed as job" in done.stdout
    assert {c["state"] for c in collect(tmp_path / "sweep")} == {"completed"}
    assert RunDirectory(tmp_path / "sweep" / "0").attempt == 1 and RunDirectory(tmp_path / "sweep" / "1").attempt == 2


@pytest.mark.integration
def test_job_does_not_resume_the_run_of_another_job(failed: Path, tmp_path: Path) -> None:
    shutil.copytree(failed / "sweep", tmp_path / "sweep")
    done = sweep(failed, "2", directory=tmp_path / "sweep")  # now job 0, whose directory is that of x=1
    assert done.returncode != 0 and "holds a run of another configuration" in done.stderr
    assert RunDirectory(tmp_path / "sweep" / "0").attempt == 1
    done = sweep(failed, "1", directory=tmp_path / "sweep")
    assert done.returncode == 0 and "completed as job" in done.stdout


@pytest.mark.integration
@pytest.mark.parametrize(
    "xs, overrides, error",
    [("1,9", (), "1 of 2 jobs cannot be planned"), ("1", ("hydra.launcher.nodes=2",), "nodes comes from the plan")],
)
def test_impossible_job_prevents_all_submissions(
    tmp_path: Path, xs: str, overrides: tuple[str, ...], error: str
) -> None:
    done = sweep(tmp_path, xs, *overrides)
    assert done.returncode != 0 and error in done.stderr
    assert not (tmp_path / "sweep").exists()  # nor an empty folder


@pytest.mark.integration
@pytest.mark.thorough  # so does a run, in tests/submission/lifecycle
def test_directory_with_a_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    assert sweep(tmp_path, "1").returncode == 0
    (tmp_path / "good2").touch()
    done = sweep(tmp_path, "1", f"good={tmp_path / 'good2'}")
    assert done.returncode != 0 and "holds a run of another configuration" in done.stderr
    assert RunDirectory(tmp_path / "sweep" / "0").attempt == 1


@pytest.mark.integration
@pytest.mark.parametrize("database", ["away", "exit 0"], ids=["away", "without the job"])
def test_no_job_is_repeated_while_slurm_does_not_answer(tmp_path: Path, fake_slurm: Any, database: str) -> None:
    """A job without a known state may have ended or may still run while Slurm is away, so it is not repeated."""
    no_answer = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    for command in ("sacct", "squeue", "scontrol"):
        fake_slurm.answer(command, database if command == "sacct" and database != "away" else no_answer)
    fake_slurm.answer("sbatch", "echo 50")
    manifest = open_manifest(tmp_path / "sweep")
    manifest.path.parent.mkdir()
    manifest.put(SweepJob(0, ("+x=1", f"+good={tmp_path / 'good'}"), "0", "plain", "slurm", "41", "x"))
    command = [
        sys.executable,
        "app.py",
        "-m",
        "+x=1",
        f"+good={tmp_path / 'good'}",
        "hydra/launcher=holmes_slurm",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]
    (tmp_path / "app.py").write_text(WAITS)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Slurm does not answer" in done.stderr, done.stderr
    assert fake_slurm.calls("sbatch") == []


def test_copies_and_launcher_settings_give_separate_entries(tmp_path: Path) -> None:
    manifest = open_manifest(tmp_path)
    jobs = [
        SweepJob(num, overrides, str(num), "plain", "slurm", str(num), "x", digest="d", copy=copy)
        for num, (overrides, copy) in enumerate(
            [(("+x=1",), 0), (("+x=1",), 1), (("+x=1", "hydra.launcher.nodes=2"), 0)]
        )
    ]
    for job in jobs:
        manifest.put(job)
    loaded = open_manifest(tmp_path)
    assert loaded.jobs == jobs
    assert [loaded.find(job.key, "d") for job in jobs] == jobs and loaded.find(("+x=2",), "d") is None


@pytest.mark.integration
@pytest.mark.thorough
def test_repeated_overrides_are_two_jobs_and_a_percent_sign_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good").touch()
    for _ in range(2):
        done = sweep(tmp_path, "1,1")
        assert done.returncode == 0, done.stderr
    assert [(j.num, j.copy) for j in open_manifest(tmp_path / "sweep").jobs] == [(0, 0), (1, 1)]
    assert [RunDirectory(tmp_path / "sweep" / str(i)).attempt for i in range(2)] == [1, 1]
    done = sweep(tmp_path, "1", "hydra.sweep.subdir=a%j")
    assert done.returncode != 0 and "remove '%'" in done.stderr


@pytest.mark.integration
def test_concurrent_launches_into_one_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep").mkdir()
    with locked(tmp_path / "sweep" / ".sweep.lock"):
        done = sweep(tmp_path, "1")
    assert done.returncode != 0 and "another writer has held the lock" in done.stderr
    assert not (tmp_path / "sweep" / "sweep.json").exists()


def test_result_of_a_missing_module_is_collected(tmp_path: Path) -> None:
    manifest = open_manifest(tmp_path / "sweep")
    manifest.path.parent.mkdir()
    manifest.put(SweepJob(0, ("+x=1",), "0", "plain", "local", "41", "."))
    module = types.ModuleType("not_here")
    sys.modules["not_here"] = module
    exec("class Score:\n    def __init__(self): self.x = 1\nclass Sum(float): pass", module.__dict__)
    path = manifest.path.parent / "41_0_result.pkl"
    (manifest.path.parent / "41_outcome.json").write_text('{"state": "completed"}')  # without a plain value
    for value, text in ((module.Score(), "a not_here.Score"), (module.Sum(1.0), "a not_here.Sum")):
        path.write_bytes(pickle.dumps(("success", value)))
        del sys.modules["not_here"]
        row = collect(tmp_path / "sweep")[0]
        assert (row["state"], str(row["final"])) == ("completed", text)
        sys.modules["not_here"] = module
    del sys.modules["not_here"]
    path.write_bytes(b"half of it")
    assert collect(tmp_path / "sweep")[0]["final"] is None


WAITS = """
import os, time, hydra
@hydra.main(config_path=None, config_name=None, version_base="1.3")
def app(cfg):
    open(os.path.join(cfg.mark, f"{cfg.x}-{len(os.listdir(cfg.mark))}"), "w").close()
    while not os.path.exists(cfg.mark + ".good"):
        time.sleep(0.1)
    return cfg.x * 10
app()
"""


@pytest.mark.integration
def test_same_command_continues_the_sweep_after_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WAITS)
    (tmp_path / "mark").mkdir()
    command = [
        sys.executable,
        "app.py",
        "-m",
        "+x=1,2",
        f"+mark={tmp_path / 'mark'}",
        "hydra/launcher=holmes_local",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]
    with (
        (tmp_path / "output").open("w") as output,
        subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stdin=subprocess.DEVNULL, start_new_session=True
        ) as first,
    ):
        end = time.monotonic() + 60
        while len(list((tmp_path / "mark").iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGINT)  # a terminal sends Ctrl-C to all processes of the group
        first.wait(timeout=60)
    log = (tmp_path / "output").read_text()
    assert first.returncode != 0 and "the jobs continue" in log and "holmes sweep status" in log
    (tmp_path / "mark.good").touch()
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert second.returncode == 0, second.stderr
    assert len(list((tmp_path / "mark").iterdir())) == 2  # no job ran twice
    assert {c["final"] for c in collect(tmp_path / "sweep")} == {10, 20}
