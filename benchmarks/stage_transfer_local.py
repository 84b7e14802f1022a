"""How much of a slow stage transfer is hidden, without a testbed: local processes that wait for both.

    python benchmarks/stage_transfer_local.py [--ratio 0.05 0.23 0.45 0.9] [--stages 2] [--micro-batches 32] [--steps 5]

Every stage transfer takes `ratio` of a stage's time, one after the other in each direction
(tests/support/pipelines.py). `of no transfer`: the throughput against the same schedule without any stage transfer;
`bound` is what filling and draining leave of it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import pipelines

from holmes_hpc.console import table

STAGE_S = 0.045


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.05, 0.23, 0.45, 0.9])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    a = parser.parse_args()
    hop_bytes = 4 * pipelines.SEQUENCE * pipelines.MICRO * pipelines.HIDDEN
    common: dict[str, Any] = {
        "layers": [[1]] * a.stages,
        "micro_batches": [a.micro_batches],
        "steps": a.steps + 1,
        "pace_s": STAGE_S / 3,
        "trace": False,
    }
    cases = {}
    for ratio in (0.0, *a.ratio):
        per_edge = math.ceil(1 + 2 * ratio)
        depths = [1 + (a.stages - s - 1) * per_edge for s in range(a.stages)]
        rate = hop_bytes / (ratio * STAGE_S) if ratio else 0.0
        cases[ratio, "megatron"] = pipelines.Case(schedule="edges", rate=rate, **common)
        cases[ratio, "ahead"] = pipelines.Case(schedule="ahead", in_flight=depths, rate=rate, **common)
    times = {
        key: statistics.median(ranks[0]["times"][1:])
        for key, ranks in zip(cases, pipelines.play_apart(list(cases.values()), timeout_s=3600), strict=True)
    }
    rows, fill = [], a.micro_batches + a.stages - 1
    for ratio in (0.0, *a.ratio):
        waits, ahead, none = times[ratio, "megatron"], times[ratio, "ahead"], times[0.0, "ahead"]
        bound = fill / (fill + 2 * ratio * (a.stages - 1))
        rows.append(
            [
                ratio,
                cases[ratio, "ahead"].in_flight[0],
                f"{waits:.3f}",
                f"{ahead:.3f}",
                f"{100 * none / waits:.1f}%",
                f"{100 * none / ahead:.1f}%",
                f"{100 * bound:.1f}%",
            ]
        )
    table(
        f"{a.stages} stages of {1000 * STAGE_S:.0f} ms, {a.micro_batches} micro-batches: seconds of a step",
        ["transfer", "depth", "megatron", "ahead", "megatron of no transfer", "ahead of no transfer", "bound"],
        rows,
    )


if __name__ == "__main__":
    main()
