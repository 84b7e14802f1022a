"""Measure the share of the limit of schedules: eager 1F1B, and zero bubble with little or any memory or early steps.

    holmes testbed up evaluation; eval "$(holmes testbed env)"
    OMP_NUM_THREADS=1 python benchmarks/limit.py --out FILE [--repeats 5] [--jobs light,paper-like:hybrid:6] \\
        [--variants memory,exact]

In each repeat, the variants of a job run in turns, in the opposite order every second time. Runs that FILE already has
are not repeated. `memory` lets activations take at most 1.5 times those of 1F1B with the same layers.
Prints the median share of the limit (benchmarks/two_checkouts.py) of each variant, and the ratio of `eager` to it with
the 95% interval of the pairs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from evaluation_experiments import MICRO_BATCHES, REGIMES
from two_checkouts import run

from holmes_hpc.results.statistics import repeats_interval

ZERO_BUBBLE = "plan.schedule=zero_bubble"
JOBS = "paper-like,paper-like-12,paper-like-6,light,heavy,paper-like:RoCE,paper-like:Ethernet"
# Regime -> memory of a GPU (GiB) in which activations take at most 1.5 times those of 1F1B with the same layers: 3
# passes through the 9 (6 micro-batches: 11) layers of the first stage; plus its weights, gradients, optimizer and
# buffers; over the usable share of memory.
MEMORY_GIB = {"paper-like": 0.022312, "paper-like-12": 0.022312, "paper-like-6": 0.02711, "light": 0.005197}
MEMORY_GIB["heavy"] = 0.04367
EARLY_FROM = 6  # the first step that can be early


def variants(regime: str) -> dict[str, tuple[list[str], int]]:
    """Return variant -> (overrides, number of first steps that do not count)."""
    is_short = REGIMES[regime].micro_batches < MICRO_BATCHES  # the first early steps, which take longer, weigh more
    last = EARLY_FROM + (18 if is_short else 2)
    return {
        "eager": (["plan.schedule=eager_1f1b", "train.steps=3"], 1),
        "memory": ([ZERO_BUBBLE, f"plan.max_memory_gib={MEMORY_GIB[regime]}", "train.steps=3"], 1),
        "exact": ([ZERO_BUBBLE, "train.steps=3"], 1),
        "early": ([ZERO_BUBBLE, "train.early_step=stage", f"train.steps={last}"], EARLY_FROM),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--jobs", default=JOBS)
    options.add_argument("--variants", default="eager,memory,exact,early")
    arguments = options.parse_args()
    print(f"inputs: {vars(arguments)}; shaped NICs, emulated compute", flush=True)
    holmes, jobs, names = str(shutil.which("holmes")), arguments.jobs.split(","), arguments.variants.split(",")
    for repeat in range(arguments.repeats):
        for job in jobs:
            for name in names[:: -1 if repeat % 2 else 1]:
                if (job, name, repeat) not in read(arguments.out):
                    overrides, skipped = variants(job.partition(":")[0])[name]
                    with tempfile.TemporaryDirectory(prefix="holmes-limit-") as folder:
                        figures = run(holmes, job, overrides, Path(folder) / "run", skipped)
                    with arguments.out.open("a") as file:
                        file.write(json.dumps({"variant": name, "repeat": repeat, **figures}) + "\n")
                    print(f"{job} {name} {repeat + 1}: {figures['of_limit']:.1%}", flush=True)
    runs = read(arguments.out)
    for job in jobs:
        for name in names:
            print(summary(job, name, runs, arguments.repeats))


def read(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return (job, variant, repeat) -> the figures of a run."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(line["job"], line["variant"], line["repeat"]): line for line in lines}


def summary(job: str, name: str, runs: dict[tuple[str, str, int], dict[str, Any]], repeats: int) -> str:
    of_variant = [runs[job, name, repeat] for repeat in range(repeats)]
    shares = [figures["of_limit"] for figures in of_variant]
    last = of_variant[-1]
    predicted = statistics.median(f["of_limit"] * f["step_s"] / f["predicted_s"] for f in of_variant)
    text = f"{job} {name}: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
    text += f", predicted {predicted:.1%}, layers {last['layers']}, sharded {last['sharded']}, {last['schedule']}"
    if name != "eager" and (job, "eager", repeats - 1) in runs:
        eager = [runs[job, "eager", repeat]["step_s"] for repeat in range(repeats)]
        pairs = [e / figures["step_s"] for e, figures in zip(eager, of_variant, strict=True)]
        ratio = repeats_interval(pairs)
        text += f"; eager / {name} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    return text


if __name__ == "__main__":
    main()
