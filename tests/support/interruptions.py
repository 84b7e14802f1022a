"""Fault injection on the testbed: interrupted runs must continue as if undisturbed (`make faults`).

    python tests/support/interruptions.py [--runs 24] [--more] [--seed 1] [--minutes 8] [--root runs/faults]

Each run trains one small GPT on 2 InfiniBand and 2 RoCE nodes and has one fault. The seed determines the fault, its
rank and step, and whether checkpoints are written in the background. All losses and gradient norms must equal those
of an undisturbed run bit by bit. No more steps may be repeated than the checkpoint interval (and the steps computed
during an unfinished save). Outcomes are kept in ROOT/outcomes.jsonl; a second start continues with the missing runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults import (
    DISK,
    HOLMES,
    KINDS,
    LIMIT_S,
    MORE_KINDS,
    STEPS,
    Fault,
    Kind,
    Repair,
    Target,
    draw_faults,
    processes,
    saving_step,
    until,
)

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import cancel_run, run_status

INTERVAL = 8
Figures = dict[int, tuple[float, float]]  # of each step: loss and gradient norm
PLAN = (
    "plan.nodes={ib-a: 2, roce-a: 2}",
    "plan.pp=2",
    "plan.schedule=1f1b",
    "model=gpt_tiny",
    "model.layers=2",
    "model.hidden=64",
    "model.ffn=128",
    "batch.global_size=8",
    "batch.sequence_length=32",
)
TRAIN = (
    f"train.steps={STEPS}",
    f"train.checkpoint_interval={INTERVAL}",
    "train.pace_layer_ms=10",
    "train.log_interval=10",
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    `lost`: recorded steps that were repeated; `allowed`: their limit. `how`: how the run continued. `problem`: empty
    if the run is as it must be."""

    fault: Fault
    node: str
    hit_at: int
    resumed_from: int
    lost: int
    allowed: int
    how: str
    seconds: float
    problem: str


def figures(run: RunDirectory) -> Figures:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in run.metrics()}


def steps_of(run: RunDirectory, attempt: int) -> list[int]:
    """Return the steps that one attempt recorded, including those that a later one repeated."""
    lines = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()]
    return [line["step"] for line in lines if line["attempt"] == attempt]


def first_step_of(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """Return the first line of metrics of one attempt; empty if it has none."""
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return next((line for line in lines if line["attempt"] == attempt), {})


def last_step(run: RunDirectory) -> int:
    lines = run.metrics()
    return int(lines[-1]["step"]) if lines else 0


def make_plan(path: Path, *overrides: str) -> None:
    subprocess.run([HOLMES, "plan", *PLAN, *TRAIN, *overrides, "-o", str(path)], check=True, capture_output=True)


def submit(directory: Path, *overrides: str) -> RunDirectory:
    """Submit a run without waiting for it. Its plan is in the folder above, and is made if there is none."""
    plan = directory.parent / "plan.yaml"
    if not plan.exists():
        make_plan(plan)
    result = subprocess.run(
        [HOLMES, "submit", str(plan), f"run_dir={directory}", *TRAIN, *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"holmes submit: {result.stderr.strip()}")
    return RunDirectory(directory)


def inject(fault: Fault, kind: Kind, run: RunDirectory) -> tuple[str, int, int, Repair | None]:
    """Wait for the fault's moment and strike: (node, last recorded step, step being saved or 0, repair)."""
    until(lambda: last_step(run) >= 1, "the first step")
    node = run.read_run()["hosts"][fault.rank]
    until(lambda: last_step(run) >= fault.step, f"step {fault.step}")
    if kind.while_saving:
        until(lambda: saving_step(run), "a save")
    pids, being_saved, step = processes(run, fault.rank), saving_step(run), last_step(run)
    repair = kind.strike(Target(run, node, pids))
    return node, step, saving_step(run) or being_saved, repair  # cutting a link takes some steps, perhaps during a save


# -- one run ----------------------------------------------------------------------------------------------------------


def run_with_fault(fault: Fault, root: Path, expected: Figures) -> Outcome:
    """Run with a fault, to the end."""
    start_s, directory = time.monotonic(), root / fault.name
    if directory.exists():  # left by an interrupted driver
        with contextlib.suppress(Exception):
            cancel_run(RunDirectory(directory))
        shutil.rmtree(directory)
    kind = {**KINDS, **MORE_KINDS}[fault.kind]
    shutil.rmtree(root / DISK / fault.name, ignore_errors=True)  # left by the same driver
    overrides = [o.replace(f"={DISK}", f"={root / DISK}") for o in kind.overrides]
    run = submit(directory, "train.max_restarts=1", f"train.checkpoint_async={fault.background}".lower(), *overrides)
    node, hit_at, being_saved, repair = inject(fault, kind, run)
    if fault.kind == "node killed":
        until(lambda: _state_of(node).startswith("down"), f"Slurm's notice that {node} is down")
    elif kind.ends_attempt:
        until(lambda: run.read_exits() or run.attempt > 1, "an end")
    if repair is not None and kind.ends_attempt:
        repair()
    how = follow_to_end(run)
    if repair is not None and not kind.ends_attempt:
        repair()
    final_figures = figures(run)
    first, second = steps_of(run, 1), steps_of(run, 2)
    resumed_from = second[0] - 1 if second else max(first)
    lost, allowed = max(first) - resumed_from, INTERVAL + max(0, max(first) - being_saved if being_saved else 0)
    problem = ""
    if final_figures != expected:
        problem = f"figures differ, first at step {min(s for s in expected if final_figures.get(s) != expected[s])}"
    elif lost > allowed:
        problem = f"{lost} steps lost, {allowed} allowed"
    elif kind.ends_attempt and run.attempt == 1:
        problem = "the fault struck too late"
    return Outcome(fault, node, hit_at, resumed_from, lost, allowed, how, round(time.monotonic() - start_s, 1), problem)


def _state_of(node: str) -> str:
    return subprocess.run(["sinfo", "-h", "-n", node, "-o", "%T"], capture_output=True, text=True).stdout.strip()


def follow_to_end(run: RunDirectory) -> str:
    """Wait for the run's end and return how it continued; resume it if Slurm does not requeue it."""

    def completed() -> str:
        status = run_status(run)
        return status.state if status.ended and (status.state == "completed" or not _queued(run)) else ""

    state = until(lambda: time.sleep(0.5) or completed(), "the run's end")  # type: ignore[func-returns-value]
    if state == "completed":
        return "requeued" if run.attempt > 1 else "continued"
    subprocess.run([HOLMES, "resume", str(run.path)], check=False, capture_output=True, timeout=LIMIT_S)
    return f"resumed by hand after {state}"


def _queued(run: RunDirectory) -> bool:
    """Return whether Slurm still has the run's job queued."""
    job = str(run.read_run()["slurm"]["job_id"])
    squeue = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True)
    return squeue.returncode != 0 or bool(squeue.stdout.split())


# -- all of them ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def site(root: Path) -> Iterator[None]:
    """Bring up a testbed whose nodes see the small disk."""
    disk = root / DISK
    disk.mkdir(parents=True, exist_ok=True)
    beds.down()
    subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        beds.up(progress=lambda line: print(f"testbed: {line}", flush=True))
        os.environ.update(beds.env())
        yield
    finally:
        beds.down()
        subprocess.run(["umount", "-l", str(disk)], check=False)


def undisturbed_figures(root: Path) -> Figures:
    """Return the figures of a run without faults."""
    run = RunDirectory(root / "whole")
    if not run.exists() or last_step(run) < STEPS:
        shutil.rmtree(run.path, ignore_errors=True)
        run = submit(run.path)
        follow_to_end(run)
    run_figures = figures(run)
    if sorted(run_figures) != list(range(1, STEPS + 1)):
        raise RuntimeError(f"the undisturbed run did not complete: see {run.path}")
    return run_figures


def line_of(outcome: Outcome) -> str:
    f = outcome.fault
    return (
        f"{f.number:3} {f.kind:23} rank {f.rank} on {outcome.node:6} step {outcome.hit_at:2}, saves in the "
        f"{'background' if f.background else 'foreground'}: {outcome.how}, {outcome.lost} steps lost "
        f"(allowed {outcome.allowed}), {outcome.seconds:.0f} s: {outcome.problem or 'equal bit by bit'}"
    )


def summary(outcomes: list[Outcome], requested: int) -> list[str]:
    recovered = [o for o in outcomes if not o.problem]
    kinds = Counter(o.fault.kind for o in outcomes)
    largest_loss = max((o.lost for o in outcomes), default=0)
    over_interval = sum(o.lost > INTERVAL for o in outcomes)
    return [
        f"injected {len(outcomes)} of {requested}: " + ", ".join(f"{k} {kinds[k]}" for k in kinds),
        f"recovered {len(recovered)} of {len(outcomes)}, all losses and gradient norms equal bit by bit",
        f"steps lost: at most {largest_loss}, on average {sum(o.lost for o in outcomes) / max(1, len(outcomes)):.1f}; "
        f"the checkpoint interval is {INTERVAL}; {over_interval} runs lost more, during an unfinished save",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="default: 3 of each kind")
    parser.add_argument(
        "--more", action="store_true", help="the kinds of MORE_KINDS, 3 runs each unless --runs is given"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    parser.add_argument("--root", type=Path, default=Path("runs/faults"))
    parser.add_argument("--testbed", default="/var/lib/holmes-faults", help="folder of a separate testbed")
    options = parser.parse_args()
    end, root = (
        time.monotonic() + 60 * options.minutes,
        options.root.absolute() / f"seed-{options.seed}{'-more' * options.more}",
    )
    os.environ["HOLMES_TESTBED"] = options.testbed
    kinds = tuple(MORE_KINDS if options.more else KINDS)
    options.runs = options.runs or 3 * len(kinds)
    faults, outcomes_path = draw_faults(options.seed, options.runs, kinds), root / "outcomes.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    outcomes = [
        Outcome(**{**data, "fault": Fault(**data["fault"])})
        for data in map(json.loads, outcomes_path.read_text().splitlines() if outcomes_path.exists() else [])
    ]
    outcomes = [o for o in outcomes if o.fault in faults]
    print(f"inputs: seed {options.seed}, {options.runs} runs, {' '.join(PLAN + TRAIN)}", flush=True)
    for outcome in outcomes:
        print(line_of(outcome))
    missing_faults = [f for f in faults if f not in {o.fault for o in outcomes}]
    if missing_faults and time.monotonic() < end:
        with site(root):
            expected = undisturbed_figures(root)
            for fault in missing_faults:
                if time.monotonic() > end:
                    break
                start_s = time.monotonic()
                try:
                    outcomes.append(run_with_fault(fault, root, expected))
                except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as e:
                    outcomes.append(
                        Outcome(
                            fault,
                            "?",
                            0,
                            0,
                            0,
                            INTERVAL,
                            "not recovered",
                            round(time.monotonic() - start_s, 1),
                            f"{type(e).__name__}: {e}",
                        )
                    )
                with outcomes_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcomes[-1])) + "\n")
                print(line_of(outcomes[-1]), flush=True)
    for line in summary(outcomes, options.runs):
        print(line)
    return 0 if len(outcomes) == options.runs and not any(o.problem for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
