"""How much slower the same job is over one transport for all groups (plain Megatron-LM's way), on the testbed.

    eval "$(holmes testbed env)"; python benchmarks/transport.py

Alternating runs of one layout, 2 InfiniBand + 2 RoCE nodes, that differ only in `plan.transport`. Printed: the inputs,
each pair, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from holmes_hpc.records.run import RunDirectory

LAYOUT = [
    "plan.nodes={ib-a: 2, roce-a: 2}",
    "plan.strategy=pipeline",
    "plan.pp=2",
    "plan.tp=1",
    "plan.layers_per_stage=[4,4]",
    "plan.schedule=1f1b",
    "train.pace_layer_ms=10",
]
WARM_UP = 2  # steps


def step_s(transport: str, steps: int) -> float:
    """The median step time of one run, in seconds, after warm-up."""
    name = f"transport-{transport}-{time.time_ns()}"
    root = Path(os.environ.get("HOLMES_RUNS", "runs"))
    subprocess.run(
        [
            str(Path(sys.executable).with_name("holmes")),
            "run",
            f"name={name}",
            f"train.steps={steps}",
            f"plan.transport={transport}",
            *LAYOUT,
        ],
        check=True,
        capture_output=True,
    )
    return statistics.median(line["step_time_s"] for line in RunDirectory(root / name).metrics()[WARM_UP:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    print(f"inputs: {' '.join(LAYOUT)}, {given.steps} steps of which {WARM_UP} are warm-up, {given.pairs} pairs")
    times: dict[str, list[float]] = {"holmes": [], "single": []}
    for pair in range(given.pairs):
        for transport in times if pair % 2 == 0 else reversed(list(times)):
            times[transport].append(step_s(transport, given.steps))
        print(f"pair {pair + 1}: holmes {times['holmes'][-1]:.3f} s, single {times['single'][-1]:.3f} s", flush=True)
    holmes, single = (statistics.median(times[t]) for t in ("holmes", "single"))
    print(f"medians: holmes {holmes:.3f} s, single {single:.3f} s; one transport is {single / holmes:.2f} times slower")


if __name__ == "__main__":
    main()
