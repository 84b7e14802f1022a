"""Random scripts of losses in elastic runs on the testbed: every step is made once, or one line says why not.

    python tests/support/elastic_scripts.py [--seeds 1 2 3 4 5 6 7 8 9 10 11 12] [--minutes 60] [--root runs/elastic]

Each run trains a small GPT on 2 InfiniBand and 2 RoCE nodes with a spare node each, and has EVENTS events. The seed
determines each event (one node, two at once, a second one during the change, the coordinator's node), its nodes, and
whether a node is killed or its NICs fall silent. Silent nodes answer again after REPAIR_S. From seed FIRST_OF_MEMBERS,
the pools are jobs of their own, which leave and join: a job is requeued or cancelled, or loses a node. Outcomes are
kept in ROOT/outcomes.jsonl; a second start continues with the missing seeds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import interruptions
from faults import silent, until

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import cancel_run, run_status

STEPS, EVENTS, LIMIT_S, REPAIR_S = 240, 2, 400, 30.0
KINDS = ("one node", "two at once", "during a change", "the coordinator's node")
OPTIONS = ("elastic.enabled=true", "elastic.copy_every=10", f"train.steps={STEPS}", "train.checkpoint_interval=40")
PACE = "train.pace_layer_ms=20"  # 0.2 s a step
FIRST_OF_MEMBERS = 9
MEMBER_KINDS = (
    "a job requeued",
    "the coordinator's job requeued",
    "a job requeued twice",
    "a job cancelled",
    "one node",
)
MEMBER_OPTIONS = ("elastic.members=true", "elastic.spares=0")
MEMBER_MODEL = ("model.layers=4", "batch.global_size=16")  # faster on two pools than on one
EVENT_EVERY_S, LEAST_GOODPUT = 180.0, 0.75


@dataclass(frozen=True)
class Outcome:
    """The outcome of a script. `events`: what was done; `nodes_at_the_end`: of the last attempt; `lost_s`: seconds that
    were not spent in steps of the result, per event; `goodput`: that share at one event in EVENT_EVERY_S; `line`: why
    the run could not go on; `problem`: empty if all is as it must be."""

    seed: int
    events: list[str]
    state: str
    attempts: int
    nodes_at_the_end: int
    repeated: int
    lost_s: float
    goodput: float
    line: str
    problem: str


def coordinators_node(run: RunDirectory) -> str:
    paths = sorted((run.path / "submission").glob("*_coordinator.json"))
    return str(json.loads(paths[-1].read_text())[2])


class Script:
    """The events of one seed, applied to one run. `repairs`: bring the nodes back at the end."""

    def __init__(self, seed: int, run: RunDirectory) -> None:
        self._draw, self._run = random.Random(f"elastic {seed}"), run
        self.lost, self.events, self.repairs = set[str](), list[str](), contextlib.ExitStack()

    def lose(self, node: str) -> str:
        """Lose `node` in a random way. Return a text about that."""
        way = self._draw.choice(["killed", "silent"])
        self.lost.add(node)
        if way == "killed":
            beds.kill_node(node)
        else:
            repair = contextlib.ExitStack()
            repair.enter_context(silent(node))
            timer = threading.Timer(REPAIR_S, repair.close)
            timer.start()
            self.repairs.callback(repair.close)
            self.repairs.callback(timer.cancel)
        return f"{node} {way}"

    def strike_members(self) -> None:
        """Do one event to the pools' jobs."""
        kind, jobs = self._draw.choice(MEMBER_KINDS), [str(job) for job in self._run.read_run()["slurm"]["members"]]
        first = coordinators_node(self._run)
        job = jobs[first.startswith("roce")] if kind == MEMBER_KINDS[1] else self._draw.choice(jobs)
        text = f"job {jobs.index(job)}"
        if kind == MEMBER_KINDS[4]:
            text = self.lose(self._draw.choice(sorted({*self._run.read_run()["hosts"]} - self.lost)))
        elif kind == MEMBER_KINDS[3]:
            subprocess.run(["scancel", job], check=True)
        for number in range(("requeued" in kind) + ("twice" in kind)):
            time.sleep(self._draw.uniform(2, 8) if number else 0)
            subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True)
        self.events.append(f"{kind} after step {interruptions.last_step(self._run)}: {text}")

    def strike(self) -> None:
        """Do one event."""
        first, kind = coordinators_node(self._run), self._draw.choice(KINDS)
        others = sorted({*self._run.read_run()["hosts"]} - self.lost - {first})
        count = min(len(others), 1 if kind == KINDS[0] else 2)
        chosen = [first] if kind == KINDS[3] else self._draw.sample(others, count)
        texts = [self.lose(chosen[0])]
        for node in chosen[1:]:
            time.sleep(self._draw.uniform(0, 3) if kind == KINDS[2] else 0)
            texts.append(self.lose(node))
        self.events.append(f"{kind} after step {interruptions.last_step(self._run)}: {', '.join(texts)}")


def run_script(seed: int, root: Path) -> Outcome:
    """Run the script of `seed` to the run's end."""
    has_members = seed >= FIRST_OF_MEMBERS
    directory = root / "members" / f"seed-{seed}" if has_members else root / f"seed-{seed}"
    if directory.exists():  # left by an interrupted driver
        with contextlib.suppress(Exception):
            cancel_run(RunDirectory(directory))
        shutil.rmtree(directory)
    if has_members and not (plan := directory.with_name("plan.yaml")).exists():
        plan.parent.mkdir(exist_ok=True)
        interruptions.make_plan(plan, *MEMBER_MODEL, PACE)
    run = interruptions.submit(directory, *OPTIONS, PACE, *(MEMBER_OPTIONS if has_members else ()))
    script = Script(seed, run)
    with script.repairs:
        for number in range(EVENTS):
            wanted = (number + 1) * STEPS // (EVENTS + 1)
            until(lambda n=wanted: run_status(run).ended or interruptions.last_step(run) >= n, "its step", LIMIT_S)
            if run_status(run).ended:
                break
            script.strike_members() if has_members else script.strike()
        until(lambda: time.sleep(0.5) or run_status(run).ended, "the run's end", LIMIT_S)  # type: ignore[func-returns-value]
    return outcome_of(seed, run, script.events)


def outcome_of(seed: int, run: RunDirectory, events: list[str]) -> Outcome:
    """Return the outcome of an ended run."""
    lines, status = run.metrics(), run_status(run)
    steps, record = [line["step"] for line in lines], run.read_run()
    result = run.read_result() or {}
    useful_s, total_s = sum(line["step_time_s"] for line in lines[1:]), lines[-1]["time"] - lines[0]["time"]
    lost_s = max(0.0, total_s - useful_s) / max(1, len(events))
    share = EVENT_EVERY_S / (EVENT_EVERY_S + lost_s)
    line, problem = "", ""
    if status.state == "completed":
        if steps != list(range(1, STEPS + 1)):
            missing = sorted({*range(1, STEPS + 1)} - {*steps})
            problem = f"steps {missing[:5]} are missing"
        elif share < LEAST_GOODPUT:
            problem = f"goodput is {share:.0%}"
    else:
        line = str(result.get("error") or "")
        if not line or "\n" in line:
            problem = f"{status.state}, without one line why"
        elif any(b - a != 1 for a, b in pairwise(steps)):
            problem = "steps are missing before the end"
    repeated = sum(1 for _ in run.metrics_lines()) - len(lines)
    nodes, attempts = len({*record["hosts"]}), len(record["attempts"])
    return Outcome(
        seed, events, status.state, attempts, nodes, repeated, round(lost_s, 1), round(share, 3), line, problem
    )


def line_of(o: Outcome) -> str:
    end = f"{o.state} on {o.nodes_at_the_end} nodes, {o.attempts} attempts, {o.repeated} steps again"
    text = f"seed {o.seed}: {'; '.join(o.events)}: {end}, {o.lost_s} s lost an event, goodput {o.goodput:.0%}"
    return f"{text}{f': {o.line}' if o.line else ''}: {o.problem or 'all steps once'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 13)))
    parser.add_argument("--minutes", type=float, default=1e6, help="start no script after this time")
    parser.add_argument("--root", type=Path, default=Path("runs/elastic"))
    options = parser.parse_args()
    end, root = time.monotonic() + 60 * options.minutes, options.root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    path = root / "outcomes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    outcomes = {row["seed"]: Outcome(**row) for row in rows if row["seed"] in options.seeds}
    for outcome in outcomes.values():
        print(line_of(outcome), flush=True)
    for seed in [seed for seed in options.seeds if seed not in outcomes]:
        if time.monotonic() > end:
            break
        beds.up()
        os.environ.update(beds.env())
        outcomes[seed] = run_script(seed, root)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcomes[seed])) + "\n")
        print(line_of(outcomes[seed]), flush=True)
    good = [o for o in outcomes.values() if not o.problem]
    print(f"{len(good)} of {len(options.seeds)} scripts as they must be")
    return 0 if len(good) == len(options.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
