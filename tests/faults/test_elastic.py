"""Elastic runs on the testbed: a lost node's spare continues, and all figures equal those of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import interruptions
import pytest
from faults import silent, until

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory

pytestmark = [pytest.mark.slurm, pytest.mark.breaking]
LIMIT_S = 12.0  # from the loss to the first step after it, on an idle machine
HIT = 10  # the step after which the node is lost


def first_step_of(run: RunDirectory, attempt: int) -> dict:
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return next((line for line in lines if line["attempt"] == attempt), {})


def test_an_undisturbed_elastic_run_trains_as_a_plain_one(root: Path, whole: interruptions.Figures) -> None:
    run = interruptions.submit(root / "undisturbed", "elastic.enabled=true")
    interruptions.follow_to_end(run)
    assert interruptions.figures(run) == whole and run.attempt == 1
    started = [RunDirectory(root / name) for name in ("whole", "undisturbed")]
    seconds = [first_step_of(r, 1)["time"] - r.read_run()["slurm"]["submitted"] for r in started]
    print(f"first step after submission: plain {seconds[0]:.1f} s, elastic {seconds[1]:.1f} s")


@pytest.mark.parametrize(("kind", "node"), [("killed", "ib2"), ("silent", "roce2")])
def test_a_spare_takes_over(kind: str, node: str, root: Path, whole: interruptions.Figures) -> None:
    run = interruptions.submit(
        root / f"{kind}-{time.time():.0f}", "elastic.enabled=true", "train.checkpoint_async=false"
    )
    until(lambda: interruptions.last_step(run) >= HIT, f"step {HIT}")
    with contextlib.ExitStack() as repair:
        if kind == "killed":
            beds.kill_node(node)
            repair.callback(beds.up)
        else:
            repair.enter_context(silent(node))
        lost_at, load = time.time(), os.getloadavg()[0]
        until(lambda: first_step_of(run, 2), "a step of the second attempt")
        state = interruptions.follow_to_end(run)
    first = first_step_of(run, 2)
    seconds, last = first["time"] - lost_at, interruptions.steps_of(run, 1)[-1]
    print(f"{node} {kind}: first step after {seconds:.1f} s, {last + 1 - first['step']} steps again, load {load:.1f}")
    attempts, log = run.read_run()["attempts"], (run.logs / "batch.txt").read_text()
    assert [a.get("ended") for a in attempts] == ["node lost", None], (state, log)
    reason = "its agent ended" if kind == "killed" else "silent for 3."
    assert f"lost node {node} ({reason}" in log
    assert interruptions.figures(run) == whole
    assert last + 1 - first["step"] <= interruptions.INTERVAL
    assert seconds < LIMIT_S
