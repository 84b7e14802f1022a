"""Equal inputs give byte-equal plans, independent of process, hash seed and earlier plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sites import two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan

SUPPORT = str(Path(__file__).parents[2] / "support")


def plan_yaml(nodes: int) -> str:
    """Return a plan.yaml, chosen among all strategies."""
    return best_plan(named("gpt_3_6b"), Batch(256, 4, 2048), two_clusters(nodes), PlanOptions(), Costs()).to_yaml()


@pytest.mark.integration
def test_plans_of_equal_inputs_are_equal_bytes() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        " from test_equal_plans import plan_yaml; print(plan_yaml(1), end='')"
    )
    other_processes = [
        subprocess.run(
            [sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__))],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": SUPPORT},
        ).stdout
        for seed in ("1", "2")
    ]
    plan_yaml(2)
    assert other_processes[0] == other_processes[1] == plan_yaml(1)
