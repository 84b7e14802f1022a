"""Hydra's sweepers over our launchers: as many evaluations as trials, whatever the sampler asks for twice. Needs
hydra-optuna-sweeper.

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
def test_optuna_has_every_trial_evaluated(tmp_path: Path, sampler: str) -> None:
    started = {name: _study(tmp_path / name.replace(" ", "-"), name, sampler) for name in LAUNCHERS}
    ended = {name: (study.communicate()[0], study.returncode) for name, study in started.items()}
    assert not any(code for _, code in ended.values()), [text[-1500:] for text, code in ended.values() if code]
    made = {name: len(list((tmp_path / name.replace(" ", "-") / "mark").iterdir())) for name in LAUNCHERS}
    print(f"{sampler}: evaluations of {TRIALS} trials by launcher: {made}")
    assert set(made.values()) == {made["basic"]} and (sampler == "grid" or made["basic"] == TRIALS)


def _study(place: Path, launcher: str, sampler: str) -> subprocess.Popen[str]:
    mark = place / "mark"
    mark.mkdir(parents=True)
    (place / "app.py").write_text(NOISY)
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
            f"hydra.sweep.dir={place / 'sweep'}",
            *LAUNCHERS[launcher],
        ],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_application_that_names_the_launcher_in_its_own_configuration(tmp_path: Path) -> None:
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
