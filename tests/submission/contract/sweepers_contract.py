"""Hydra's sweepers with our launchers: one evaluation per trial, even if a sampler repeats a point.
Needs hydra-optuna-sweeper.

    make submission-contract
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna")
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]
LAUNCHERS = {
    "basic": [],
    "holmes_local": ["hydra/launcher=holmes_local"],
    "one component": ["hydra/launcher=holmes_slurm", "hydra.launcher.partition=ib", "hydra.launcher.timeout_min=5"],
    "two components": [
        "hydra/launcher=holmes_slurm",
        "hydra.launcher.timeout_min=5",
        "hydra.launcher.components=[{partition:ib},{partition:eth}]",
    ],
}
NOISY = """
import os, random, uuid, hydra
@hydra.main(config_path=None, config_name=None, version_base="1.3")
def app(cfg):
    if int(os.environ.get("SLURM_PROCID", 0)) == 0:
        open(os.path.join(cfg.mark, uuid.uuid4().hex), "w").close()
    return (cfg.x - 1) ** 2 + random.random()
app()
"""
TRIALS = 8
EXAMPLE = """
import logging, os, hydra, submitit
@hydra.main(config_path=".", config_name="config", version_base="1.3")
def app(cfg):
    own = submitit.JobEnvironment()
    logging.getLogger(__name__).info(f"task {cfg.task} of job {own.job_id} in {os.getcwd()}")
    return cfg.task
app()
"""


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_every_optuna_trial_is_evaluated(tmp_path: Path, sampler: str) -> None:
    processes = {name: _start_study(tmp_path / name.replace(" ", "-"), name, sampler) for name in LAUNCHERS}
    results = {name: (study.communicate()[0], study.returncode) for name, study in processes.items()}
    assert not any(code for _, code in results.values()), [text[-1500:] for text, code in results.values() if code]
    evaluations = {name: len(list((tmp_path / name.replace(" ", "-") / "mark").iterdir())) for name in LAUNCHERS}
    print(f"{sampler}: evaluations of {TRIALS} trials by launcher: {evaluations}")
    assert set(evaluations.values()) == {evaluations["basic"]} and (sampler == "grid" or evaluations["basic"] == TRIALS)


def _start_study(folder: Path, launcher: str, sampler: str) -> subprocess.Popen[str]:
    mark = folder / "mark"
    mark.mkdir(parents=True)
    (folder / "app.py").write_text(NOISY)
    return subprocess.Popen(
        [
            sys.executable,
            "app.py",
            "-m",
            "hydra/sweeper=optuna",
            f"hydra/sweeper/sampler={sampler}",
            f"hydra.sweeper.n_trials={TRIALS}",
            "hydra.sweeper.n_jobs=2",
            "+x=choice(1,2)",
            f"+mark={mark}",
            f"hydra.sweep.dir={folder / 'sweep'}",
            *LAUNCHERS[launcher],
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_launcher_from_the_application_config(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(EXAMPLE)
    (tmp_path / "config.yaml").write_text(
        "defaults:\n  - override hydra/launcher: holmes_slurm\ntask: 1\n"
        "hydra: {launcher: {partition: ib, timeout_min: 5, tasks_per_node: 1}}\n"
    )
    done = subprocess.run(
        [sys.executable, "app.py", "-m", "task=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "sweep").glob("*/app.log"))
    assert "task 1 of job" in logs and "task 2 of job" in logs
