"""Elastic runs on the testbed: a lost node's spare continues, and all figures equal those of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import interruptions
import pytest
from faults import agent_and_rank, daemon, silent, until
from interruptions import first_step_of

from holmes_hpc import testbed as beds
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import run_status

pytestmark = [pytest.mark.slurm, pytest.mark.breaking]
LIMIT_S = 12.0  # from the loss to the first step after it, on an idle machine
LIMIT_WITHOUT_SPARE_S = 15.0
LIMIT_OF_A_RANK_S = 8.0
LIMIT_OF_THE_FIRST_NODE_S = 25.0
STEPS_AFTER = 30  # compared after a change of the plan
HIT = 10  # the step after which the node is lost
COPY_EVERY, STEPS_OF_A_COPY = 4, 4  # the latter may pass before all ranks know that a copy is complete
COPIES = (f"elastic.copy_every={COPY_EVERY}", "train.checkpoint_interval=0")  # no checkpoint on the disk
PAUSE_S, AWAY_S = 2.0, 60.0  # disturbances without consequences


def test_an_undisturbed_elastic_run_trains_as_a_plain_one(root: Path, whole: interruptions.Figures) -> None:
    run = interruptions.submit(root / "undisturbed", "elastic.enabled=true")
    interruptions.follow_to_end(run)
    assert interruptions.figures(run) == whole and run.attempt == 1
    started = [RunDirectory(root / name) for name in ("whole", "undisturbed")]
    seconds = [first_step_of(r, 1)["time"] - r.read_run()["slurm"]["submitted"] for r in started]
    print(f"first step after submission: plain {seconds[0]:.1f} s, elastic with 2 spares {seconds[1]:.1f} s")
    run = interruptions.submit(root / "without-spares", "elastic.enabled=true", "elastic.spares=0")
    interruptions.follow_to_end(run)
    started_s = first_step_of(run, 1)["time"] - run.read_run()["slurm"]["submitted"]
    print(f"first step after submission: elastic without spares {started_s:.1f} s")


def lose(run: RunDirectory, kind: str, node: str) -> tuple[float, str]:
    """Lose `node`, or only its rank, after step HIT, and follow the run to its end. Return (seconds until the first
    step after the loss, the run's state)."""
    until(lambda: interruptions.last_step(run) >= HIT, f"step {HIT}")
    with contextlib.ExitStack() as repair:
        if kind == "killed":
            beds.kill_node(node)
            repair.callback(beds.up)
        elif kind == "down":
            update = ["scontrol", "update", f"NodeName={node}", "Reason=test"]
            subprocess.run([*update, "State=DOWN"], check=True)
            repair.callback(subprocess.run, [*update, "State=RESUME"], check=False)  # fails if it is up again
        elif kind == "rank killed":
            os.kill(agent_and_rank(run, node)[1], signal.SIGKILL)
        else:
            repair.enter_context(silent(node))
        lost_at, load = time.time(), os.getloadavg()[0]
        until(lambda: first_step_of(run, 2), "a step of the second attempt")
        state = interruptions.follow_to_end(run)
    first, last = first_step_of(run, 2), interruptions.steps_of(run, 1)[-1]
    seconds, repeated = first["time"] - lost_at, last + 1 - first["step"]
    print(f"{node} {kind}: first step after {seconds:.1f} s, {repeated} steps again, load {load:.1f}")
    is_copied = "copies in memory" in run.log_path(0).read_text()
    assert repeated <= (COPY_EVERY + STEPS_OF_A_COPY if is_copied else interruptions.INTERVAL)
    return seconds, state


@pytest.mark.parametrize(("kind", "node"), [("killed", "ib2"), ("silent", "roce2"), ("down", "ib2")])
def test_a_spare_takes_over(kind: str, node: str, root: Path, whole: interruptions.Figures) -> None:
    state_from = ("train.checkpoint_async=false",) if kind == "down" else COPIES
    run = interruptions.submit(root / f"{kind}-{time.time():.0f}", "elastic.enabled=true", *state_from)
    seconds, state = lose(run, kind, node)
    attempts, log = run.read_run()["attempts"], (run.logs / "batch.txt").read_text()
    assert [a.get("ended") for a in attempts] == ["node lost", None], (state, log)
    reason = "silent for 3." if kind == "silent" else "its agent ended"
    assert f"lost node {node} ({reason}" in log and run_status(run).state == "completed"
    assert interruptions.figures(run) == whole
    assert ("from a copy in memory" in run.log_path(0).read_text()) == (state_from is COPIES)
    assert attempts[0]["lost"] == [node] and attempts[1]["nodes"].count(",") == 2, attempts
    assert attempts[1]["loaded"] == ("copy in memory" if state_from is COPIES else "checkpoint")
    assert seconds < LIMIT_S


def test_a_spare_takes_over_in_a_hierarchical_plan(root: Path) -> None:
    folder = root / "hierarchical"
    folder.mkdir()
    interruptions.make_plan(folder / "plan.yaml", "plan.strategy=hierarchical-dp", "plan.pp=1")
    whole = interruptions.undisturbed_figures(folder)
    assert Plan.read(folder / "plan.yaml").strategy_label == "hierarchical-dp"
    run = interruptions.submit(folder / "run", "elastic.enabled=true", *COPIES)
    seconds, state = lose(run, "killed", "ib2")
    attempts, log = run.read_run()["attempts"], (run.logs / "batch.txt").read_text()
    assert [a.get("ended") for a in attempts] == ["node lost", None], (state, log)
    assert interruptions.figures(run) == whole and attempts[1]["loaded"] == "copy in memory"
    assert seconds < LIMIT_S


@pytest.mark.parametrize("kind", ["killed", "silent"])
def test_another_node_coordinates_if_the_first_is_lost(kind: str, root: Path, whole: interruptions.Figures) -> None:
    options = ("elastic.enabled=true", "train.checkpoint_async=false")
    run = interruptions.submit(root / f"first-{kind}-{time.time():.0f}", *options)
    seconds, state = lose(run, kind, "ib1")
    attempts, log = run.read_run()["attempts"], (run.logs / "batch.txt").read_text()
    assert [a.get("ended") for a in attempts] == ["node lost", None], (state, log)
    assert re.search("lost the coordinator: node .* takes its place; lost nodes: ib1\n", log), log
    assert run_status(run).state == "completed"
    assert interruptions.figures(run) == whole
    assert seconds < LIMIT_OF_THE_FIRST_NODE_S
    job = str(run.read_run()["slurm"]["job_id"])
    squeue = ["squeue", "-h", "-j", job, "-t", "running"]
    until(lambda: not subprocess.run(squeue, capture_output=True, check=False).stdout, "the end of the job")


@pytest.mark.parametrize("node", ["ib1", "roce2"])
def test_the_ranks_start_again_if_one_is_killed(node: str, root: Path, whole: interruptions.Figures) -> None:
    options = ("elastic.enabled=true", "elastic.spares=0", "train.checkpoint_async=false")
    run = interruptions.submit(root / f"rank-{time.time():.0f}", *options)
    seconds, state = lose(run, "rank killed", node)
    attempts, log = run.read_run()["attempts"], (run.logs / "batch.txt").read_text()
    assert [a.get("ended") for a in attempts] == ["rank killed", None], (state, log)
    assert "killed by signal 9 (SIGKILL: kill -9, or the kernel for lack of memory): the ranks start again" in log
    assert interruptions.figures(run) == whole
    assert seconds < LIMIT_OF_A_RANK_S


@pytest.mark.parametrize("kind", ["node stopped", "agent stopped", "slurmctld away"])
def test_a_short_disturbance_changes_nothing(kind: str, root: Path, whole: interruptions.Figures) -> None:
    pace = ("train.pace_layer_ms=240",) if kind == "slurmctld away" else ()  # trains for longer than that
    run = interruptions.submit(root / kind.replace(" ", "-"), "elastic.enabled=true", *pace)
    until(lambda: interruptions.last_step(run) >= 3, "step 3")
    if kind == "slurmctld away":
        os.kill(daemon("slurmctld"), signal.SIGKILL)
        time.sleep(AWAY_S)
        beds.up()
        assert interruptions.last_step(run) < max(whole)
    else:
        agent, rank = agent_and_rank(run, "roce1")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in [agent, rank][: 1 + (kind == "node stopped")]:
                os.kill(pid, number)
            time.sleep(PAUSE_S)
    interruptions.follow_to_end(run)
    assert interruptions.figures(run) == whole and run.attempt == 1, (run.logs / "batch.txt").read_text()


@pytest.fixture(scope="module")
def fewer(root: Path) -> Path:
    """Return a folder with the plan of a model whose layers per-stage TP/DP divides best over three nodes."""
    folder = root / "fewer"
    folder.mkdir()
    interruptions.make_plan(folder / "plan.yaml", "model.layers=4")
    return folder


@pytest.mark.parametrize(("kind", "node"), [("killed", "roce1"), ("silent", "roce2")])
def test_without_a_spare_the_run_continues_on_fewer_nodes(kind: str, node: str, fewer: Path) -> None:
    whole = interruptions.undisturbed_figures(fewer)
    options = ("elastic.enabled=true", "elastic.spares=0", *COPIES)
    run = interruptions.submit(fewer / f"{kind}-{time.time():.0f}", *options)
    seconds, state = lose(run, kind, node)
    attempts, log, plan = run.read_run()["attempts"], (run.logs / "batch.txt").read_text(), Plan.read(run.plan_path)
    assert [a.get("ended") for a in attempts] == ["node lost", None], (state, log)
    assert sum(part.nodes for part in plan.components) == 3 and plan.is_per_stage, plan.parallel
    assert attempts[1]["plan_id"] == plan.id != attempts[0]["plan_id"]
    figures = interruptions.figures(run)
    assert list(figures) == list(whole)
    changed, last = first_step_of(run, 2)["step"], max(whole)
    differences = [abs(figures[step][0] / whole[step][0] - 1) for step in range(changed, last + 1)]
    print(f"largest relative difference of {len(differences)} losses: {max(differences):.1e}")
    assert len(differences) >= STEPS_AFTER and max(differences) < 1e-5
    assert seconds < LIMIT_WITHOUT_SPARE_S
