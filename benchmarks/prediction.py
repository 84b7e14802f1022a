"""Compare predicted and measured step times of runs on the testbed, and rate the planner's choice.

    eval "$(holmes testbed env)"; python benchmarks/prediction.py

Four NIC environments with four layouts each are fixed in EXPERIMENTS below. First, `holmes calibrate` runs once, with
other layouts. With its file all plans and their predictions are written before any run starts.

Prints the inputs; per experiment the predicted and measured step time, the error, and the share of the step without
computing; per schedule the mean absolute error; per environment the regret: the slowdown of the experiment predicted to
be fastest against the fastest one. A restart skips finished runs. Results so far are in prediction.json under
HOLMES_RUNS.
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
# Layouts other than the experiments': the default (a stage on two nodes of each fabric) and six layers.
CALIBRATION = ("model=gpt_tiny", "model.layers=6", "batch.micro_size=2", f"train.pace_layer_ms={PACE_MS}")
COMMUNICATING = 0.25  # least share of the step without computing in an experiment that counts as communicating


@dataclass(frozen=True)
class Experiment:
    """A run of 16 sequences and 8 layers; experiments of one `environment` compare with each other."""

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
    # one fabric: any PP and DP
    **{
        environment: {
            "pp2-1f1b": ("plan.pp=2", "plan.dp=2", "plan.schedule=1f1b"),
            "pp2-ahead": ("plan.pp=2", "plan.dp=2", "plan.schedule=ahead", "plan.layers_per_stage=[5,3]"),
            "pp1-dp4": ("plan.pp=1", "plan.dp=4", "plan.schedule=1f1b"),
            "pp4-ahead-micro1": ("plan.pp=4", "plan.dp=1", "plan.schedule=ahead", "batch.micro_size=1"),
        }
        for environment in ("ib", "roce")
    },
    # two fabrics: Ethernet between the stages
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
EXPERIMENTS = tuple(
    Experiment(e, name, (nodes, *layout)) for e, nodes in ENVIRONMENTS.items() for name, layout in LAYOUTS[e].items()
)


def runs_root() -> Path:
    return Path(os.environ.get("HOLMES_RUNS", "runs"))


def run_holmes(*arguments: str) -> None:
    process = subprocess.run([HOLMES, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"holmes {' '.join(arguments)}: {process.stderr[-2000:]}")


def calibrate() -> Path:
    """Return the path of the calibration file; calibrate if it does not exist."""
    runs_root().mkdir(parents=True, exist_ok=True)
    path = runs_root() / "prediction.cal.yaml"
    if not path.exists():
        run_holmes("calibrate", "name=prediction-calibration", *CALIBRATION, "-o", str(path))
    return path


def write_plan(experiment: Experiment, calibration_path: Path) -> Path:
    """Return the path of the experiment's plan with its prediction; plan if it does not exist."""
    path = runs_root() / f"{experiment.name}.yaml"
    if not path.exists():
        run_holmes("plan", *COMMON, *experiment.overrides, f"calibration={calibration_path}", "-o", str(path))
    return path


def run(experiment: Experiment, path: Path) -> RunDirectory | None:
    """Run the experiment unless its run exists; return the run if it completed, else None."""
    directory = RunDirectory(runs_root() / experiment.name)
    if not directory.exists():
        subprocess.run(
            [HOLMES, "run", f"name={experiment.name}", f"plan_file={path}", f"train.steps={STEPS}"],
            capture_output=True,
            check=False,
        )
    result = directory.read_result() if directory.exists() else None
    return directory if result and result["state"] == "completed" else None


@dataclass(frozen=True)
class Outcome:
    """The predicted and measured step time of an experiment.

    `waiting`: the share of the measured step in which the busiest stage did not compute."""

    experiment: Experiment
    schedule: str
    predicted_s: float
    measured_s: float
    waiting: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def read_outcome(experiment: Experiment, directory: RunDirectory) -> Outcome:
    plan = Plan.read(directory.plan_path)
    assert plan.predicted is not None
    steps = directory.metrics()[WARM_UP:]
    measured = statistics.median(s["step_time_s"] for s in steps)
    computing = statistics.median(max(stage["compute_s"] for stage in s["breakdown"]) for s in steps)
    return Outcome(experiment, plan.schedule.kind, plan.predicted.step_time_s, measured, 1 - computing / measured)


def summary(outcomes: list[Outcome]) -> list[str]:
    """Return the lines of mean absolute errors and regrets."""
    lines = []
    for kind in sorted({o.schedule for o in outcomes}):
        errors = [abs(o.error) for o in outcomes if o.schedule == kind]
        lines.append(f"{kind}: mean absolute error {statistics.mean(errors):.1%} over {len(errors)} experiments")
    lines.append(
        f"all: mean absolute error {statistics.mean(abs(o.error) for o in outcomes):.1%}; "
        f"{sum(o.waiting >= COMMUNICATING for o in outcomes)} of {len(outcomes)} experiments do not compute "
        f"for at least {COMMUNICATING:.0%} of the step"
    )
    for environment in ENVIRONMENTS:
        comparable = [o for o in outcomes if o.experiment.environment == environment]
        if len(comparable) == len(LAYOUTS[environment]):
            chosen, best = min(comparable, key=lambda o: o.predicted_s), min(comparable, key=lambda o: o.measured_s)
            lines.append(
                f"{environment}: predicted best {chosen.experiment.layout}, best {best.experiment.layout}: "
                f"regret {chosen.measured_s / best.measured_s - 1:.1%}"
            )
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", type=int, default=len(EXPERIMENTS), help="run at most this many new experiments")
    arguments = options.parse_args()
    print(f"inputs: {' '.join(COMMON)}; {STEPS} steps of which {WARM_UP} are warm-up")
    print(f"calibrated on: {' '.join(CALIBRATION)}")
    calibration_path = calibrate()
    plans = {experiment: write_plan(experiment, calibration_path) for experiment in EXPERIMENTS}
    outcomes: list[Outcome] = []
    remaining = arguments.cells
    for experiment in EXPERIMENTS:
        exists = RunDirectory(runs_root() / experiment.name).exists()
        if not exists and remaining == 0:
            continue
        remaining -= not exists
        directory = run(experiment, plans[experiment])
        if directory is None:
            print(
                f"{experiment.environment:12} {experiment.layout:18} not complete: "
                f"see {runs_root() / experiment.name}; remove it to repeat the run",
                flush=True,
            )
            continue
        outcomes.append(read_outcome(experiment, directory))
        o = outcomes[-1]
        print(
            f"{experiment.environment:12} {experiment.layout:18} predicted {o.predicted_s:.3f} s, "
            f"measured {o.measured_s:.3f} s, error {o.error:+.1%}, not computing {o.waiting:.0%}",
            flush=True,
        )
    (runs_root() / "prediction.json").write_text(
        json.dumps(
            [
                {
                    "environment": o.experiment.environment,
                    "layout": o.experiment.layout,
                    "schedule": o.schedule,
                    "predicted_s": o.predicted_s,
                    "measured_s": o.measured_s,
                    "not_computing": o.waiting,
                }
                for o in outcomes
            ],
            indent=1,
        )
    )
    for line in summary(outcomes) if outcomes else []:
        print(line)


if __name__ == "__main__":
    main()
