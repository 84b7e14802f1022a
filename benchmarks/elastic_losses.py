"""Measure elastic runs on the testbed: seconds from a loss to the next step, and what an undisturbed run costs.

    PYTHONPATH=tests/support python benchmarks/elastic_losses.py [--runs 5] [--pairs 10] [--minutes 60]

Each run has STEPS steps on 2 InfiniBand and 2 RoCE nodes, and its loss after step HIT. Its figures are compared with
those of a plain run. Outcomes are kept in ROOT/losses.jsonl; a second start continues with the missing runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import interruptions
from faults import agent_and_rank, silent, until

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import run_status

STEPS, HIT, LIMIT_S = 60, 10, 240
ELASTIC = ("elastic.enabled=true", "elastic.copy_every=4", "train.checkpoint_interval=0")
ALONE = (*ELASTIC, "elastic.spares=0")
NODES = ("ib1", "ib2", "roce1", "roce2")
KINDS: dict[str, tuple[str, str, tuple[str, ...], float]] = {  # name: (way, node, options, limit in s)
    "spare, node killed": ("killed", "ib2", ELASTIC, 12),
    "spare, node silent": ("silent", "roce2", ELASTIC, 12),
    "no spare, node killed": ("killed", "roce1", ALONE, 15),
    "no spare, node silent": ("silent", "roce2", ALONE, 15),
    "rank killed": ("rank", "roce2", ALONE, 8),
    "first node killed": ("killed", "ib1", ELASTIC, 25),
    "first node silent": ("silent", "ib1", ELASTIC, 25),
    "plain run, node silent": ("silent", "roce2", (), 6),
    "node stopped for 2 s": ("stopped", "roce1", ELASTIC, 0),
}


def submit(path: Path, *options: str) -> RunDirectory:
    return interruptions.submit(path, f"train.steps={STEPS}", *options)


def wait_for_end(run: RunDirectory) -> None:
    until(lambda: time.sleep(0.2) or run_status(run).ended, "the end", LIMIT_S)  # type: ignore[func-returns-value]
    job = f"{run.read_run()['slurm']['job_id']}"
    until(lambda: not interruptions._queued(run), f"the end of job {job}", LIMIT_S)


def lose(kind: str, path: Path, whole: interruptions.Figures) -> dict[str, Any]:
    """Return the outcome of a run with a loss."""
    way, node, options, limit_s = KINDS[kind]
    run = submit(path, *options)
    until(lambda: interruptions.last_step(run) >= HIT, f"step {HIT}")
    node = run.read_run()["hosts"][NODES.index(node)]  # a node of an earlier run may not be back yet
    with contextlib.ExitStack() as repair:
        if way == "killed":
            beds.kill_node(node)
            repair.callback(beds.up)
        elif way == "silent":
            repair.enter_context(silent(node))
        elif way == "rank":
            os.kill(agent_and_rank(run, node)[1], signal.SIGKILL)
        else:
            pids = agent_and_rank(run, node)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    os.kill(pid, number)
                time.sleep(2)
        lost_at, load, seconds = time.time(), os.getloadavg()[0], 0.0
        if not options:
            noticed = f"node {node} has not answered"
            until(lambda: any(noticed in path.read_text() for path in run.logs.glob("rank-*.txt")), noticed)
            seconds = time.time() - lost_at
        elif way != "stopped":
            seconds = until(lambda: interruptions.first_step_of(run, 2), "a step after")["time"] - lost_at
        wait_for_end(run)
    figures = interruptions.figures(run)
    complete = list(figures) == list(whole)
    differences = [abs(figures[s][0] / whole[s][0] - 1) for s in figures]
    repeated = sum(1 for _ in run.metrics_lines()) - len(figures)
    has_failed = bool(options) and not complete
    return {
        **{"kind": kind, "seconds": round(seconds, 1), "load": round(load, 1), "steps": len(figures)},
        **{"repeated": repeated, "attempts": run.attempt, "difference": max(differences), "ok": not has_failed},
        "in_time": seconds <= limit_s,
    }


def undisturbed(path: Path, *options: str) -> dict[str, float]:
    """Return the seconds until the first step, and the median step time, of an undisturbed run."""
    run, load = submit(path, "train.checkpoint_interval=0", *options), os.getloadavg()[0]
    wait_for_end(run)
    lines = run.metrics()
    start_s = lines[0]["time"] - run.read_run()["slurm"]["submitted"]
    between = [b["time"] - a["time"] for a, b in pairwise(lines[5:])]
    return {"start_s": round(start_s, 2), "step_s": round(statistics.median(between), 5), "load": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each kind of loss")
    parser.add_argument("--pairs", type=int, default=10, help="of undisturbed runs, plain and elastic")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    parser.add_argument("--root", type=Path, default=Path("runs/elastic-losses"))
    options = parser.parse_args()
    end, root = time.monotonic() + 60 * options.minutes, options.root.absolute()
    path = root / "losses.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    (root / "four").mkdir(exist_ok=True)
    beds.up()
    os.environ.update(beds.env())
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    whole = dict[Path, interruptions.Figures]()

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def expected(folder: Path, *overrides: str) -> interruptions.Figures:
        if folder not in whole:
            if not (folder / "plan.yaml").exists():
                interruptions.make_plan(folder / "plan.yaml", *overrides)
            run = RunDirectory(folder / "whole")
            if not run.exists():
                wait_for_end(submit(run.path))
            whole[folder] = interruptions.figures(run)
        return whole[folder]

    for number in range(max(options.runs, options.pairs)):
        for kind in KINDS if number < options.runs else ():
            folder = root / "four" if "no spare" in kind else root  # four layers: for per-stage TP/DP on three nodes
            if sum(row.get("kind") == kind for row in rows) <= number and time.monotonic() < end:
                figures = expected(folder, *(["model.layers=4"] if folder != root else []))
                name = f"{kind.replace(' ', '-').replace(',', '')}-{number}-{time.time():.0f}"
                record(lose(kind, folder / name, figures))
        if sum("plain" in row for row in rows) <= number < options.pairs and time.monotonic() < end:
            pair = {}
            for kind in (("plain", "elastic"), ("elastic", "plain"))[number % 2]:
                more = (ELASTIC[0], "elastic.copy_every=0") if kind == "elastic" else ()
                pair[kind] = undisturbed(root / f"{kind}-{number}-{time.time():.0f}", *more)
            record(pair)
    pairs = [row for row in rows if "plain" in row]
    if pairs:
        ratios = [p["elastic"]["step_s"] / p["plain"]["step_s"] for p in pairs]
        later = [p["elastic"]["start_s"] - p["plain"]["start_s"] for p in pairs]
        print(f"{len(pairs)} pairs: start {statistics.median(later):.1f} s later, step {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
