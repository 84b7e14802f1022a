"""Equal inputs give byte-equal plans, whatever the process, its hash seed, and what it has planned before."""

from __future__ import annotations

import os
import subprocess
import sys

from sites import two_clusters

from holmes_hpc.planning.costs import Costs
from holmes_hpc.planning.model import Batch
from holmes_hpc.planning.models import named
from holmes_hpc.planning.options import PlanOptions
from holmes_hpc.planning.search import best_plan


def text(nodes: int) -> str:
    """A plan.yaml, chosen among all strategies."""
    made = best_plan(named("gpt_3_6b"), Batch(256, 4, 2048), two_clusters(nodes), PlanOptions(), Costs())
    return made.to_yaml()


def test_plans_of_equal_inputs_are_equal_bytes() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_equal; print(test_equal.text(1), end='')"
    elsewhere = [subprocess.run(
        [sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__))], check=True, capture_output=True,
        text=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    text(2)
    assert elsewhere[0] == elsewhere[1] == text(1)
