"""Compare the speed of two checkouts: the demo's main job, or experiments of the evaluation.

    holmes testbed up evaluation; eval "$(holmes testbed env)"
    python benchmarks/two_checkouts.py OLD/.venv/bin/holmes NEW/.venv/bin/holmes [--pairs 5] [--steps 8] \\
        [--jobs light,paper-like:RoCE] [--add KEY=VALUE] [--without] [--out FILE]

A job is a regime of the evaluation, with its environment (hybrid without one). Runs alternate: old, new, new, old, … A
run's figure is the median of its step times without the first. Prints each pair, the median ratio old/new with its 95%
interval (results.statistics.repeats_interval; above 1 the new checkout is faster), and of emulated compute the share of
the limit: the step time if every layer took its pace and no rank waited, over the step time. `--add`: overrides for the
new checkout; with `--without`, it also runs without them. `--out`: appends a line of JSON for each run. The job `demo`
needs the testbed's default topology, the regimes need `evaluation`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from evaluation_experiments import LAYERS, REGIMES, Experiment

from holmes_hpc.planning.plan.plan_file import flatten
from holmes_hpc.results.statistics import repeats_interval

DEMO = ("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.schedule=1f1b", "train.pace_layer_ms=10")


def experiment(job: str) -> Experiment:
    """Return the experiment of a job: REGIME, REGIME:ENVIRONMENT or REGIME:ENVIRONMENT:NODES."""
    parts = job.split(":")
    regime, environment, nodes = [*parts, *("hybrid", "4")[len(parts) - 1 :]]
    return Experiment(regime, environment, int(nodes), "holmes")


def limit_s(job: str) -> float | None:
    """Return the seconds of a step of paced layers in which no rank waits; None without emulated compute."""
    regime = REGIMES.get(experiment(job).regime)
    if regime is None or regime.pace_ms is None:
        return None
    return regime.micro_batches * LAYERS * 3 * regime.pace_ms / 1000 / experiment(job).stages


def run(holmes: str, job: str, added: Sequence[str], run_dir: Path, skipped: int = 1) -> dict[str, Any]:
    """Run a job; return its figures: the median step time without the first `skipped` steps, losses, layers, and
    predictions."""
    path = f"{Path(holmes).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOLMES_RUNS": str(run_dir.parent), "PATH": path, "OMP_NUM_THREADS": "1"}
    overrides = DEMO if job == "demo" else experiment(job).overrides
    process = subprocess.run(
        [holmes, "run", f"run_dir={run_dir}", *overrides, *added],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(holmes).parents[2],
    )
    if process.returncode:
        raise SystemExit(f"{holmes}: {job} failed:\n{process.stdout[-2000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plan = flatten(yaml.safe_load((run_dir / "plan.yaml").read_text()))
    step_s = statistics.median(line["step_time_s"] for line in lines[skipped:])
    return {
        "job": job,
        "holmes": holmes,
        "added": list(added),
        "step_s": step_s,
        "of_limit": limit / step_s if (limit := limit_s(job)) else None,
        "predicted_s": plan["predicted"]["step_time_s"],
        "layers": [stage["layers"] for stage in plan["stages"]],
        "schedule": plan["schedule"],
        "sharded": plan["parallel"].get("distributed_optimizer", True),
        "losses": [line["loss"] for line in lines],
        "compute_s": [stage["compute_s"] for stage in lines[-1]["breakdown"]],
        "peak_memory_bytes": lines[-1]["peak_memory_bytes"],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("old")
    options.add_argument("new")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--jobs", default=",".join(REGIMES))
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--add", action="append", default=[])
    options.add_argument("--without", action="store_true")
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    print(
        f"inputs: old {arguments.old}, new {arguments.new} {' '.join(arguments.add)}, {arguments.pairs} pairs, "
        f"{arguments.steps} steps; 4 nodes; shaped NICs, emulated compute except in unpaced",
        flush=True,
    )
    systems = {"old": (arguments.old, ()), "new": (arguments.new, arguments.add)}
    if arguments.without:
        systems["new without"] = (arguments.new, ())
    for job in arguments.jobs.split(","):
        pairs = []
        for pair in range(arguments.pairs):
            figures = {}
            for name in list(systems)[:: 1 if pair % 2 == 0 else -1]:
                holmes, added = systems[name]
                with tempfile.TemporaryDirectory(prefix="holmes-pair-") as folder:
                    overrides = [f"train.steps={arguments.steps}", *added]
                    figures[name] = run(str(Path(holmes).absolute()), job, overrides, Path(folder) / "run")
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps({"checkout": name, **figures[name]}) + "\n")
            pairs.append(figures)
            print(f"{job} pair {pair + 1}: {', '.join(map(_text, figures.items()))}", flush=True)
        for name in list(systems)[1:]:
            ratio = repeats_interval([pair["old"]["step_s"] / pair[name]["step_s"] for pair in pairs])
            print(f"{job}: old/{name} {ratio.median:.3f}, 95% interval {ratio.low:.3f} to {ratio.high:.3f}", flush=True)


def _text(item: tuple[str, dict[str, Any]]) -> str:
    name, figures = item
    share = f" ({figures['of_limit']:.1%} of the limit)" if figures["of_limit"] else ""
    return f"{name} {figures['step_s']:.4f} s{share}"


if __name__ == "__main__":
    if shutil.which("squeue") is None:
        raise SystemExit('squeue not found; start the testbed and run: eval "$(holmes testbed env)"')
    main()
