"""Runs on the testbed that are interrupted on purpose, and must go on as if nothing had been: `make faults`.

    python tests/support/interruptions.py [--runs 24] [--seed 1] [--minutes 8] [--root runs/faults]

Each run trains one small GPT on 2 InfiniBand and 2 RoCE nodes, and is hit once: by which fault, at which rank and step,
and whether its checkpoints are written in the background, is drawn from the seed. Then it must end as a run that nobody
touched: the losses and gradient norms of all its steps equal bit by bit, and no more steps done twice than the
checkpoint interval (and what was done beside a save that was under way). Outcomes are kept in ROOT/outcomes.jsonl;
started again, it goes on with the runs that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import cancel_run, run_status

HOLMES = str(Path(sys.executable).with_name("holmes"))
STEPS, INTERVAL, RANKS = 40, 8, 4
PLAN = (
    "plan.nodes={ib-a: 2, roce-a: 2}",
    "plan.pp=2",
    "plan.schedule=1f1b",
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
KINDS = (
    "TERM",
    "USR2",
    "KILL of a rank",
    "node killed",
    "RDMA link cut",
    "slurmctld restarted",
    "checkpoint disk full",
    "KILL while saving",
)
DISK = "disk"  # below the root: a small file system, which the testbed's nodes see too
LIMIT_S = 180


@dataclass(frozen=True)
class Fault:
    """What hits a run: at `rank`, once `step` steps are recorded (while saving: at the first save after it)."""

    number: int
    kind: str
    rank: int
    step: int
    background: bool

    @property
    def name(self) -> str:
        return f"{self.number:02}-{self.kind.replace(' ', '-')}"


def drawn(seed: int, runs: int) -> list[Fault]:
    """`runs` faults, every kind as often as any other; the first ones are the same for more runs."""
    return [
        Fault(
            number,
            KINDS[number % len(KINDS)],
            choice.randrange(RANKS),
            choice.randint(3, STEPS - 12),
            choice.random() < 0.5,
        )
        for number in range(runs)
        for choice in [random.Random(f"{seed} {number}")]
    ]


@dataclass(frozen=True)
class Outcome:
    """`lost`: steps that were recorded and had to be done again; `allowed`: how many may be. `how`: what went on with
    the run. `problem`: empty when all is as it must be."""

    fault: Fault
    node: str
    hit_at: int
    resumed_from: int
    lost: int
    allowed: int
    how: str
    seconds: float
    problem: str


def figures(run: RunDirectory) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in run.metrics()}


def steps_of(run: RunDirectory, attempt: int) -> list[int]:
    """The steps that one attempt recorded, those included that a later one did again."""
    lines = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()]
    return [line["step"] for line in lines if line["attempt"] == attempt]


def until(condition: Callable[[], Any], what: str, seconds: float = LIMIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.02)
    return found


def last_step(run: RunDirectory) -> int:
    lines = run.metrics()
    return int(lines[-1]["step"]) if lines else 0


def submit(directory: Path, *overrides: str) -> RunDirectory:
    """Plan, and submit; nothing is waited for."""
    plan = directory.parent / "plan.yaml"
    if not plan.exists():
        subprocess.run([HOLMES, "plan", *PLAN, *TRAIN, "-o", str(plan)], check=True, capture_output=True)
    done = subprocess.run(
        [HOLMES, "submit", str(plan), f"run_dir={directory}", *TRAIN, *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"holmes submit: {done.stderr.strip()}")
    return RunDirectory(directory)


# -- the faults -------------------------------------------------------------------------------------------------------


def processes(run: RunDirectory, rank: int) -> list[int]:
    """The process of a rank, and then what it has forked (writers of checkpoints)."""
    job, found = str(run.read_run()["slurm"]["job_id"]), []
    folder = str(run.path / "submission")  # another testbed's job may have the same number
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = dict(e.partition("=")[::2] for e in (proc / "environ").read_text().split("\0"))
            words = (proc / "cmdline").read_text().split("\0")
            if (
                (own.get("HOLMES_LEADER_JOB_ID"), own.get("SLURM_PROCID")) == (job, str(rank))
                and "submitit.core._submit" in words[:6]
                and folder in words
                and "python" in words[0]
            ):
                started = int((proc / "stat").read_text().rpartition(")")[2].split()[19])
                found.append((started, int(proc.name)))  # by age, for process numbers begin again
    if not found:
        raise ProcessLookupError(f"no process of rank {rank} of job {job}")
    return [pid for _, pid in sorted(found)]


def saving(run: RunDirectory) -> int:
    """The step whose checkpoint is being written, 0 when none is."""
    names = [path.name for path in run.checkpoints.glob(".saving-step-*")]
    return int(names[0].split("-")[2]) if names else 0


def daemon(name: str) -> int:
    return int((Path(os.environ["HOLMES_TESTBED"]) / "run" / f"{name}.pid").read_text())


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def on_node(node: str, command: str) -> None:
    subprocess.run([HOLMES, "testbed", "exec", node, "--", *command.split()], check=True, capture_output=True)


def strike(fault: Fault, run: RunDirectory, node: str, pids: list[int]) -> Callable[[], None]:
    """Let it happen; what repairs the site, once the run has felt it, comes back."""
    if fault.kind in ("TERM", "USR2"):
        os.kill(pids[0], signal.SIGTERM if fault.kind == "TERM" else signal.SIGUSR2)
    elif fault.kind in ("KILL of a rank", "KILL while saving"):
        kill_all(pids)
    elif fault.kind == "node killed":
        beds.kill_node(node)
        return beds.up
    elif fault.kind == "RDMA link cut":
        nic = node.rstrip("0123456789") + "0"
        on_node(node, f"ip link set {nic} down")
        return lambda: on_node(node, f"ip link set {nic} up")
    elif fault.kind == "slurmctld restarted":
        pid = daemon("slurmctld")
        os.kill(pid, signal.SIGTERM)  # as a service is stopped
        until(lambda: not os.path.exists(f"/proc/{pid}/ns/net"), "slurmctld's end")
        beds.up()
    elif fault.kind == "checkpoint disk full":
        ballast = run.path.parent / DISK / "ballast"
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        return ballast.unlink
    return lambda: None


def hit(fault: Fault, run: RunDirectory) -> tuple[str, int, int, Callable[[], None]]:
    """Wait for the fault's moment, and strike: (node, last recorded step, step being saved or 0, repair)."""
    until(lambda: last_step(run) >= 1, "the first step")
    node = run.read_run()["hosts"][fault.rank]
    until(lambda: last_step(run) >= fault.step, f"step {fault.step}")
    if fault.kind == "KILL while saving":
        until(lambda: saving(run), "a save")
    pids, under_way, step = processes(run, fault.rank), saving(run), last_step(run)
    repair = strike(fault, run, node, pids)
    return node, step, saving(run) or under_way, repair  # a link is cut some steps later, perhaps beside a save


# -- one run ----------------------------------------------------------------------------------------------------------


def interrupted(fault: Fault, root: Path, whole: dict[int, tuple[float, float]]) -> Outcome:
    """One run with its fault, to its end."""
    began, directory = time.monotonic(), root / fault.name
    if directory.exists():  # of a driver that was stopped
        with contextlib.suppress(Exception):
            cancel_run(RunDirectory(directory))
        shutil.rmtree(directory)
    more = []
    if fault.kind == "checkpoint disk full":
        shutil.rmtree(root / DISK / fault.name, ignore_errors=True)  # of the same driver
        more = [f"train.checkpoint_dir={root / DISK}"]
    run = submit(directory, "train.max_restarts=1", f"train.checkpoint_async={fault.background}".lower(), *more)
    node, hit_at, under_way, repair = hit(fault, run)
    if fault.kind == "node killed":
        until(lambda: _state_of(node).startswith("down"), f"Slurm's notice that {node} is down")
    elif fault.kind != "slurmctld restarted":
        until(lambda: run.read_exits() or run.attempt > 1, "an end")
    repair()
    how = to_the_end(run)
    end = figures(run)
    first, second = steps_of(run, 1), steps_of(run, 2)
    resumed_from = second[0] - 1 if second else max(first)
    lost, allowed = max(first) - resumed_from, INTERVAL + max(0, max(first) - under_way if under_way else 0)
    problem = ""
    if end != whole:
        problem = f"other figures, first at step {min(s for s in whole if end.get(s) != whole[s])}"
    elif lost > allowed:
        problem = f"{lost} steps lost, {allowed} allowed"
    elif (run.attempt > 1) == (fault.kind == "slurmctld restarted"):
        problem = f"{run.attempt} attempts"
    return Outcome(fault, node, hit_at, resumed_from, lost, allowed, how, round(time.monotonic() - began, 1), problem)


def _state_of(node: str) -> str:
    return subprocess.run(["sinfo", "-h", "-n", node, "-o", "%T"], capture_output=True, text=True).stdout.strip()


def to_the_end(run: RunDirectory) -> str:
    """Wait for the run's end; a run that Slurm does not start again is resumed by hand. How it went on comes back."""

    def completed() -> str:
        now = run_status(run)
        return now.state if now.ended and (now.state == "completed" or not _queued(run)) else ""

    state = until(lambda: time.sleep(0.5) or completed(), "the run's end")  # type: ignore[func-returns-value]
    if state == "completed":
        return "requeued" if run.attempt > 1 else "went on"
    subprocess.run([HOLMES, "resume", str(run.path)], check=False, capture_output=True, timeout=LIMIT_S)
    return f"resumed by hand after {state}"


def _queued(run: RunDirectory) -> bool:
    """Whether Slurm still has the run's job to run."""
    job = str(run.read_run()["slurm"]["job_id"])
    shown = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True)
    return shown.returncode != 0 or bool(shown.stdout.split())


# -- all of them ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def site(root: Path) -> Iterator[None]:
    """A testbed of our own whose nodes see the small disk."""
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


def untouched(root: Path) -> dict[int, tuple[float, float]]:
    """The figures of a run that nobody interrupts."""
    run = RunDirectory(root / "whole")
    if not run.exists() or last_step(run) < STEPS:
        shutil.rmtree(run.path, ignore_errors=True)
        run = submit(run.path)
        to_the_end(run)
    found = figures(run)
    if sorted(found) != list(range(1, STEPS + 1)):
        raise RuntimeError(f"the untouched run did not complete: see {run.path}")
    return found


def line_of(outcome: Outcome) -> str:
    f = outcome.fault
    return (
        f"{f.number:3} {f.kind:21} rank {f.rank} on {outcome.node:6} step {outcome.hit_at:2}, saves in the "
        f"{'background' if f.background else 'foreground'}: {outcome.how}, {outcome.lost} steps lost "
        f"(allowed {outcome.allowed}), {outcome.seconds:.0f} s: {outcome.problem or 'equal bit by bit'}"
    )


def summary(outcomes: list[Outcome], wanted: int) -> list[str]:
    good = [o for o in outcomes if not o.problem]
    kinds = Counter(o.fault.kind for o in outcomes)
    most = max((o.lost for o in outcomes), default=0)
    beyond = sum(o.lost > INTERVAL for o in outcomes)
    return [
        f"injected {len(outcomes)} of {wanted}: " + ", ".join(f"{k} {kinds[k]}" for k in KINDS if kinds[k]),
        f"recovered {len(good)} of {len(outcomes)}, all losses and gradient norms equal bit by bit",
        f"steps lost: at most {most}, on average {sum(o.lost for o in outcomes) / max(1, len(outcomes)):.1f}; "
        f"the checkpoint interval is {INTERVAL}; {beyond} runs lost more, by steps made beside an unfinished save",
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=24)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    options.add_argument("--root", type=Path, default=Path("runs/faults"))
    options.add_argument("--testbed", default="/var/lib/holmes-faults", help="a testbed of its own is made here")
    given = options.parse_args()
    end, root = time.monotonic() + 60 * given.minutes, given.root.absolute() / f"seed-{given.seed}"
    os.environ["HOLMES_TESTBED"] = given.testbed
    faults, kept = drawn(given.seed, given.runs), root / "outcomes.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    outcomes = [
        Outcome(**{**data, "fault": Fault(**data["fault"])})
        for data in map(json.loads, kept.read_text().splitlines() if kept.exists() else [])
    ]
    outcomes = [o for o in outcomes if o.fault in faults]
    print(f"inputs: seed {given.seed}, {given.runs} runs, {' '.join(PLAN + TRAIN)}", flush=True)
    for outcome in outcomes:
        print(line_of(outcome))
    left = [f for f in faults if f not in {o.fault for o in outcomes}]
    if left and time.monotonic() < end:
        with site(root):
            whole = untouched(root)
            for fault in left:
                if time.monotonic() > end:
                    break
                began = time.monotonic()
                try:
                    outcomes.append(interrupted(fault, root, whole))
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
                            round(time.monotonic() - began, 1),
                            f"{type(e).__name__}: {e}",
                        )
                    )
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcomes[-1])) + "\n")
                print(line_of(outcomes[-1]), flush=True)
    for line in summary(outcomes, given.runs):
        print(line)
    return 0 if len(outcomes) == given.runs and not any(o.problem for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
