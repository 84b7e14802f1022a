"""The sweeps under sweeps/: every job can be planned for the testbed, and one or two jobs of each run there."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import plans
import pytest
import thorough
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from holmes_hpc.config.composition import load
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import make_plan

pytestmark = pytest.mark.integration

SWEEPS = Path(__file__).parents[3] / "sweeps"
FILES = sorted((SWEEPS / "sweep").glob("*.yaml"))


def job_overrides(path: Path) -> list[list[str]]:
    """Return the overrides of every job, as Hydra's basic sweeper composes them."""
    params = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
    parsed = OverridesParser.create().parse_overrides(
        [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in params.items()]
    )
    choices = [
        [f"{o.get_key_element()}={c}" for c in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [f"{o.get_key_element()}={o.get_value_element_as_str()}"]
        for o in parsed
    ]
    return [list(overrides) for overrides in itertools.product(*choices)]


def common_overrides(path: Path) -> list[str]:
    """Return a sweep's settings for all jobs as overrides."""
    data = yaml.safe_load(path.read_text())
    return [
        f"{group}.{key}={json.dumps(value).replace(chr(34), '')}"
        for group, values in data.items()
        if group != "hydra"
        for key, value in values.items()
    ]


@pytest.mark.parametrize("path", thorough.all_but(FILES, *(path for path in FILES if path.stem != "nic_environments")))
def test_every_job_has_a_plan_on_the_testbed(path: Path) -> None:
    plan_ids = []
    for overrides in job_overrides(path):
        settings = load([*common_overrides(path), *overrides])
        plan = make_plan(settings, plans.site())
        assert isinstance(plan, Plan)
        assert {c.pool: c.nodes for c in plan.components} == settings.plan.nodes
        plan_ids.append(plan.id)
    assert len(plan_ids) > 3


def test_environments_are_those_of_the_paper() -> None:
    jobs = job_overrides(SWEEPS / "sweep" / "nic_environments.yaml")
    assert {"plan.nodes={eth-a:2}"} <= {override.replace(" ", "") for job in jobs for override in job}
    assert len({override for job in jobs for override in job if override.startswith("model.layers=")}) == 2


def test_sweeps_of_the_paper_exist() -> None:
    assert {p.stem for p in FILES} >= {"nic_environments", "ablation", "scaling"}


@pytest.mark.slurm
@pytest.mark.usefixtures("testbed")
@pytest.mark.parametrize(
    "name, overrides, num_jobs",
    [
        ("nic_environments", ["model.layers=8", "plan.nodes={ib-a: 1},{ib-a: 1, roce-a: 1}"], 2),
        pytest.param(
            "ablation",
            ["plan.partition=uniform", "train.overlap_grad_reduce=false", "plan.transport=single"],
            1,
            marks=pytest.mark.thorough,
        ),
        pytest.param("scaling", ["plan.nodes={ib-a: 1, roce-a: 1}"], 1, marks=pytest.mark.thorough),
    ],
)
def test_sweep_runs_on_the_testbed(tmp_path: Path, name: str, overrides: list[str], num_jobs: int) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holmes_hpc.train",
            "-m",
            "--config-dir",
            str(SWEEPS),
            f"+sweep={name}",
            "hydra/launcher=holmes_slurm",
            *overrides,
            "train.steps=2",
            "train.pace_layer_ms=null",
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads((tmp_path / "sweep" / str(i) / "result.json").read_text()) for i in range(num_jobs)]
    assert [r["state"] for r in runs] == ["completed"] * num_jobs
    assert all(r["final"]["step"] == 2 and r["final"]["loss"] > 0 for r in runs)
