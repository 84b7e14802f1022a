"""What overlapping data-parallel traffic with computing saves, on the testbed's Ethernet nodes.

    eval "$(holmes testbed env)"; python benchmarks/overlap.py [--pairs 3] [--steps 8]

Two Ethernet nodes, data parallel, one micro-batch a step, paced. Alternating runs that differ only in
`train.overlap_grad_reduce` and `train.overlap_param_gather`. Exposed: what a step waits for gradients and parameters
(its breakdown's grad_sync_s and param_sync_s). Printed: the inputs, each pair, the medians, the ratio.
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
    "plan.nodes={eth-a: 2}",
    "plan.pp=1",
    "plan.dp=2",
    "plan.bucket_bytes=800000",
    "model.layers=8",
    "model.hidden=128",
    "model.ffn=320",
    "batch.global_size=4",
    "batch.micro_size=2",
    "train.pace_layer_ms=80",
]
WARM_UP = 2  # steps


def measured(overlap: bool, steps: int) -> tuple[float, float]:
    """(exposed data-parallel seconds, seconds) of a step: medians of one run."""
    name = f"overlap-{'on' if overlap else 'off'}-{time.time_ns()}"
    words = [f"train.overlap_{what}={str(overlap).lower()}" for what in ("grad_reduce", "param_gather")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("holmes")), "run", f"name={name}", *LAYOUT, *words, f"train.steps={steps}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = RunDirectory(Path(os.environ.get("HOLMES_RUNS", "runs")) / name).metrics()[WARM_UP:]
    exposed = [line["breakdown"][0]["grad_sync_s"] + line["breakdown"][0]["param_sync_s"] for line in lines]
    return statistics.median(exposed), statistics.median(line["step_time_s"] for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    print(
        f"inputs: {' '.join(LAYOUT)}, {given.steps} steps of which {WARM_UP} are warm-up, {given.pairs} pairs, load "
        f"{os.getloadavg()[0]:.2f}"
    )
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(given.pairs):
        for overlap in (False, True) if pair % 2 == 0 else (True, False):
            found[overlap].append(measured(overlap, given.steps))
        print(
            f"pair {pair + 1}: "
            + "; ".join(
                f"{'on' if overlap else 'off'}: exposed {runs[-1][0]:.3f} s of {runs[-1][1]:.3f} s"
                for overlap, runs in found.items()
            ),
            flush=True,
        )
    (off, off_step), (on, on_step) = (tuple(map(statistics.median, zip(*found[o], strict=True))) for o in (False, True))
    print(
        f"medians: off: exposed {off:.3f} s, {off / off_step:.0%} of a step of {off_step:.3f} s; on: exposed "
        f"{on:.3f} s, {on / on_step:.0%} of a step of {on_step:.3f} s; what is exposed falls by {1 - on / off:.0%}"
    )


if __name__ == "__main__":
    main()
