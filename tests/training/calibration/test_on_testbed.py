"""Calibration by a job on the testbed, and its use by the planner. Without torch, which is slow to collect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holmes_hpc.planning.cost.calibration import Calibration


@pytest.mark.slurm
def test_job_on_three_fabrics_measures_their_networks(testbed, tmp_path: Path) -> None:
    """Two nodes of each fabric. With this calibration the planner assumes no published link."""
    file = tmp_path / "site.cal.yaml"
    holmes = str(Path(sys.executable).with_name("holmes"))
    environment = {**os.environ, "HOLMES_RUNS": str(tmp_path)}
    done = subprocess.run(
        [
            holmes,
            "calibrate",
            "name=measured",
            "train.pace_layer_ms=20",
            "train.steps=4",
            "model.layers=3",
            "-o",
            str(file),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    calibration = Calibration.from_dict(yaml.safe_load(file.read_text()))
    assert {f.fabric: set(f.links) for f in calibration.fabrics} == {
        fabric: {"ethernet", *(f"{nic}{suffix}" for suffix in ("", ".reduce_scatter", ".all_gather"))}
        for fabric, nic in (("ib-a", "ib"), ("roce-a", "roce"), ("eth-a", "ethernet"))
    }
    assert {frozenset(b.between) for b in calibration.between} >= {frozenset(("ib-a", "roce-a"))}
    planned = subprocess.run(
        [holmes, "plan", f"calibration={file}", "train.pace_layer_ms=20", "plan.nodes={ib-a: 2, roce-a: 2}", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert planned.returncode == 0, planned.stderr
    assert not [a for a in json.loads(planned.stdout)["assumptions"] if "published" in a]
