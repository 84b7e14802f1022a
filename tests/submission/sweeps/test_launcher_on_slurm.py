"""Hydra's conformance suite for launchers, and users' sweeps, on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

from holmes_hpc.submission.sweeps.sweep_table import collect, sweep_status

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]
COMPONENTS = [
    "hydra.launcher.components=[{partition:ib,constraint:nic_ib,nodes:1},{partition:eth,nodes:1}]",
    "hydra.launcher.timeout_min=3",
]


@pytest.mark.parametrize("launcher_name, overrides", [("holmes_slurm", COMPONENTS)])
class TestSlurm(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    "task_launcher_cfg, extra_flags",
    [({}, ["-m", "hydra/launcher=holmes_slurm", "hydra.launcher.partition=eth", "hydra.launcher.timeout_min=3"])],
)
class TestSlurmIntegration(IntegrationTestSuite):
    pass


APPLICATION = """
import os, sys, time, hydra
@hydra.main(config_path=None, config_name=None, version_base="1.3")
def app(cfg):
    rank = os.environ["SLURM_PROCID"]
    open(os.path.join(cfg.mark, f"{cfg.x}-{rank}-{len(os.listdir(cfg.mark))}"), "w").close()
    while cfg.x == 3 and not os.path.exists(cfg.mark + ".go"):
        time.sleep(0.1)
    if cfg.x == 2 and not os.path.exists(cfg.mark + ".good"):
        raise ValueError("not yet")
    return cfg.x * 10
app()
"""


def sweep(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "mark").mkdir(exist_ok=True)
    return subprocess.run(
        [
            sys.executable,
            "app.py",
            "-m",
            "+x=1,2,3",
            f"+mark={tmp_path / 'mark'}",
            "hydra/launcher=holmes_slurm",
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
            *COMPONENTS,
            *overrides,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def final_states(directory: Path, timeout_s: float = 120) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while True:
        rows = sweep_status(directory)
        if all(r.ended for r in rows) or time.monotonic() > deadline:
            return {r.overrides[0]: r.state for r in rows}
        time.sleep(1)


def test_detached_sweep_is_reattached_and_repeated(tmp_path: Path) -> None:
    start = time.monotonic()
    done = sweep(tmp_path, "hydra.launcher.detach=true")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 30 and "holmes sweep status" in done.stdout
    assert not all(row.ended for row in sweep_status(tmp_path / "sweep"))  # the launch did not wait for the third job
    (tmp_path / "mark.go").touch()
    manifest = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [j["num"] for j in manifest["jobs"]] == [0, 1, 2] and {j["tasks"] for j in manifest["jobs"]} == {2}
    assert final_states(tmp_path / "sweep") == {"+x=1": "completed", "+x=2": "failed", "+x=3": "completed"}
    jobs: dict[Any, Any] = {c["overrides"][0]: c for c in collect(tmp_path / "sweep")}
    assert jobs["+x=1"]["final"] == 10 and "not yet" in jobs["+x=2"]["error"]
    (tmp_path / "mark.good").touch()
    done = sweep(tmp_path)  # attached: only the failed job runs again
    assert done.returncode == 0, done.stderr
    assert final_states(tmp_path / "sweep") == {"+x=1": "completed", "+x=2": "completed", "+x=3": "completed"}
    repeated = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    changed = [
        a["num"]
        for a, b in zip(sorted(repeated["jobs"], key=lambda j: j["num"]), manifest["jobs"], strict=True)
        if a["job_id"] != b["job_id"]
    ]
    assert changed == [1]
    marks = Counter(path.name[0] for path in (tmp_path / "mark").iterdir())  # one per start of a rank
    # Slurm may kill one of two failing ranks before its mark.
    assert marks["1"] == marks["3"] == 2 and marks["2"] in (3, 4)


def test_detach_is_refused_with_a_sweeper_that_needs_results(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "needs.py").write_text(
        "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\nclass NeedsResults(BasicSweeper): pass\n"
    )
    (tmp_path / "app.py").write_text(APPLICATION)
    done = subprocess.run(
        [
            sys.executable,
            "app.py",
            "-m",
            "+x=1,2",
            "hydra/launcher=holmes_slurm",
            "hydra.launcher.detach=true",
            "hydra.sweeper._target_=hydra_plugins.needs.NeedsResults",
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
            *COMPONENTS,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "needs the jobs' results" in done.stderr
    assert not (tmp_path / "sweep" / "sweep.json").exists()
