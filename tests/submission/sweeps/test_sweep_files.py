"""The sweeps under sweeps/: every job of each can be planned for the testbed, and one or two of each are run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import plans
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from holmes_hpc.config.composition import load
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import make_plan

pytestmark = pytest.mark.integration

SWEEPS = Path(__file__).parents[3] / "sweeps"
FILES = sorted((SWEEPS / "sweep").glob("*.yaml"))


def jobs(path: Path) -> list[list[str]]:
    """The overrides of every job, as Hydra's basic sweeper makes them."""
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
    return [list(words) for words in itertools.product(*choices)]


def fixed(path: Path) -> list[str]:
    """What a sweep's file sets for all jobs, as overrides."""
    data = yaml.safe_load(path.read_text())
    return [
        f"{group}.{key}={json.dumps(value).replace(chr(34), '')}"
        for group, values in data.items()
        if group != "hydra"
        for key, value in values.items()
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_job_has_a_plan_on_the_testbed(path: Path) -> None:
    made = []
    for overrides in jobs(path):
        settings = load([*fixed(path), *overrides])
        plan = make_plan(settings, plans.site())
        assert isinstance(plan, Plan)
        assert {c.fabric: c.nodes for c in plan.components} == settings.plan.nodes
        made.append(plan.id)
    assert len(made) > 3


def test_the_environments_are_those_of_the_paper() -> None:
    made = jobs(SWEEPS / "sweep" / "nic_environments.yaml")
    assert {"plan.nodes={eth-a:2}"} <= {word.replace(" ", "") for words in made for word in words}
    assert len({word for words in made for word in words if word.startswith("model.layers=")}) == 2


def test_the_sweeps_of_the_papers_evaluation_are_there() -> None:
    assert {p.stem for p in FILES} >= {"nic_environments", "ablation", "scaling"}


@pytest.mark.slurm
@pytest.mark.usefixtures("testbed")
@pytest.mark.parametrize(
    "name, overrides, jobs",
    [
        ("nic_environments", ["model.layers=8", "plan.nodes={ib-a: 1},{ib-a: 1, roce-a: 1}"], 2),
        ("ablation", ["plan.partition=uniform", "train.overlap_grad_reduce=false", "plan.transport=single"], 1),
        ("scaling", ["plan.nodes={ib-a: 2, roce-a: 2}"], 1),
    ],
)
def test_a_sweep_runs_on_the_testbed_as_it_stands(tmp_path: Path, name: str, overrides: list[str], jobs: int) -> None:
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
    runs = [json.loads((tmp_path / "sweep" / str(i) / "result.json").read_text()) for i in range(jobs)]
    assert [r["state"] for r in runs] == ["completed"] * jobs
    assert all(r["final"]["step"] == 2 and r["final"]["loss"] > 0 for r in runs)
