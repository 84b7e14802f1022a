"""How well the planner foretells real runs on the testbed, and how good its choice is.

    eval "$(holmes testbed env)"; python benchmarks/prediction.py

Four NIC environments, four layouts in each, fixed in CELLS below. First one `holmes calibrate` of other layouts than
these; with its file every cell's plan is made, and its prediction written into the plan, before any of them is run.
Then the runs. Printed: the inputs; for each cell the step predicted and measured, the error, and what part of the step
is not computing; by schedule the mean absolute error; by environment the regret: how much slower the cell that was
predicted fastest is than the one that was. Started again, finished runs are not run again; what came out so far is in
prediction.json under HOLMES_RUNS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory

HOLMES = str(Path(sys.executable).with_name("holmes"))
WARM_UP, STEPS = 3, 10
PACE_MS = 40.0
COMMON = (
    f"train.pace_layer_ms={PACE_MS}",
    "plan.strategy=auto",
    "plan.recompute=none",
    "plan.tp=1",
    "plan.virtual_stages=1",
    "model=gpt_tiny",
)
# Of other layouts than the cells: its own default, a stage on two nodes of each fabric, and six layers.
CALIBRATION = ("model=gpt_tiny", "model.layers=6", "batch.micro_size=2", f"train.pace_layer_ms={PACE_MS}")
COMMUNICATING = 0.25  # share of the step that makes a cell one with much communication


@dataclass(frozen=True)
class Cell:
    """A run. `environment`: cells that may be compared for the best, each of 16 sequences and 8 layers."""

    environment: str
    layout: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"prediction-{self.environment}-{self.layout}"


ENVIRONMENTS = {
    "ib": "plan.nodes={ib-a: 4}",
    "ib-roce": "plan.nodes={ib-a: 2, roce-a: 2}",
    "ib-ethernet": "plan.nodes={ib-a: 2, eth-a: 2}",
    "roce": "plan.nodes={roce-a: 4}",
}
_PIPELINE = "plan.strategy=pipeline"
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    # one fabric: stages and data parallelism are free
    **{
        environment: {
            "pp2-1f1b": ("plan.pp=2", "plan.dp=2", "plan.schedule=1f1b"),
            "pp2-ahead": ("plan.pp=2", "plan.dp=2", "plan.schedule=ahead", "plan.layers_per_stage=[5,3]"),
            "pp1-dp4": ("plan.pp=1", "plan.dp=4", "plan.schedule=1f1b"),
            "pp4-ahead-micro1": ("plan.pp=4", "plan.dp=1", "plan.schedule=ahead", "batch.micro_size=1"),
        }
        for environment in ("ib", "roce")
    },
    # two fabrics: the transfer between them is Ethernet's
    **{
        environment: {
            "4-4-1f1b": (_PIPELINE, "plan.pp=2", "plan.schedule=1f1b", "plan.layers_per_stage=[4,4]"),
            "5-3-ahead": (_PIPELINE, "plan.pp=2", "plan.schedule=ahead", "plan.layers_per_stage=[5,3]"),
            "4-4-1f1b-micro4": (
                _PIPELINE,
                "plan.pp=2",
                "plan.schedule=1f1b",
                "plan.layers_per_stage=[4,4]",
                "batch.micro_size=4",
            ),
            "pp4-ahead": (
                _PIPELINE,
                "plan.pp=4",
                "plan.dp=1",
                "plan.schedule=ahead",
                "plan.layers_per_stage=[2,2,2,2]",
            ),
        }
        for environment in ("ib-roce", "ib-ethernet")
    },
}
CELLS = tuple(
    Cell(e, name, (nodes, *layout)) for e, nodes in ENVIRONMENTS.items() for name, layout in LAYOUTS[e].items()
)


def root() -> Path:
    return Path(os.environ.get("HOLMES_RUNS", "runs"))


def holmes(*arguments: str) -> None:
    done = subprocess.run([HOLMES, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"holmes {' '.join(arguments)}: {done.stderr[-2000:]}")


def calibration() -> Path:
    """The one calibration; made when it is not there."""
    root().mkdir(parents=True, exist_ok=True)
    path = root() / "prediction.cal.yaml"
    if not path.exists():
        holmes("calibrate", "name=prediction-calibration", *CALIBRATION, "-o", str(path))
    return path


def plan(cell: Cell, measured: Path) -> Path:
    """The cell's plan with its prediction; one that is there stays as it is."""
    path = root() / f"{cell.name}.yaml"
    if not path.exists():
        holmes("plan", *COMMON, *cell.overrides, f"calibration={measured}", "-o", str(path))
    return path


def run(cell: Cell, path: Path) -> RunDirectory | None:
    """The cell's run, complete; None where it did not complete."""
    directory = RunDirectory(root() / cell.name)
    if not directory.exists():
        subprocess.run(
            [HOLMES, "run", f"name={cell.name}", f"plan_file={path}", f"train.steps={STEPS}"],
            capture_output=True,
            check=False,
        )
    result = directory.read_result() if directory.exists() else None
    return directory if result and result["state"] == "completed" else None


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step, predicted and measured; the share of the measured one in which the busiest stage did not
    compute."""

    cell: Cell
    schedule: str
    predicted_s: float
    measured_s: float
    waiting: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def outcome(cell: Cell, directory: RunDirectory) -> Outcome:
    made = Plan.read(directory.plan_path)
    assert made.predicted is not None
    steps = directory.metrics()[WARM_UP:]
    measured = statistics.median(s["step_time_s"] for s in steps)
    computing = statistics.median(max(stage["compute_s"] for stage in s["breakdown"]) for s in steps)
    return Outcome(cell, made.schedule.kind, made.predicted.step_time_s, measured, 1 - computing / measured)


def summary(done: list[Outcome]) -> list[str]:
    """Mean absolute errors and regrets."""
    lines = []
    for kind in sorted({o.schedule for o in done}):
        errors = [abs(o.error) for o in done if o.schedule == kind]
        lines.append(f"{kind}: mean absolute error {statistics.mean(errors):.1%} over {len(errors)} cells")
    lines.append(
        f"all: mean absolute error {statistics.mean(abs(o.error) for o in done):.1%}; "
        f"{sum(o.waiting >= COMMUNICATING for o in done)} of {len(done)} cells spend at least "
        f"{COMMUNICATING:.0%} of the step on other things than computing"
    )
    for environment in ENVIRONMENTS:
        own = [o for o in done if o.cell.environment == environment]
        if len(own) == len(LAYOUTS[environment]):
            chosen, best = min(own, key=lambda o: o.predicted_s), min(own, key=lambda o: o.measured_s)
            lines.append(
                f"{environment}: predicted best {chosen.cell.layout}, best {best.cell.layout}: "
                f"regret {chosen.measured_s / best.measured_s - 1:.1%}"
            )
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", type=int, default=len(CELLS), help="run only the first that are not run yet")
    given = options.parse_args()
    print(f"inputs: {' '.join(COMMON)}; {STEPS} steps of which {WARM_UP} are warm-up")
    print(f"calibrated on: {' '.join(CALIBRATION)}")
    measured = calibration()
    plans = {cell: plan(cell, measured) for cell in CELLS}
    done: list[Outcome] = []
    left = given.cells
    for cell in CELLS:
        there = RunDirectory(root() / cell.name).exists()
        if not there and left == 0:
            continue
        left -= not there
        directory = run(cell, plans[cell])
        if directory is None:
            print(
                f"{cell.environment:12} {cell.layout:18} not complete: see {root() / cell.name}, "
                "remove it to run it again",
                flush=True,
            )
            continue
        done.append(outcome(cell, directory))
        o = done[-1]
        print(
            f"{cell.environment:12} {cell.layout:18} predicted {o.predicted_s:.3f} s, measured {o.measured_s:.3f} s,"
            f" error {o.error:+.1%}, not computing {o.waiting:.0%}",
            flush=True,
        )
    (root() / "prediction.json").write_text(
        json.dumps(
            [
                {
                    "environment": o.cell.environment,
                    "layout": o.cell.layout,
                    "schedule": o.schedule,
                    "predicted_s": o.predicted_s,
                    "measured_s": o.measured_s,
                    "not_computing": o.waiting,
                }
                for o in done
            ],
            indent=1,
        )
    )
    for line in summary(done) if done else []:
        print(line)


if __name__ == "__main__":
    main()
