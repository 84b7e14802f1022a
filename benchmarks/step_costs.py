"""What the record of a step costs on rank 0: the breakdown, the gathering of all ranks' figures, the line, the log.

    python benchmarks/step_costs.py [--ranks 2] [--steps 200]

Two runs of one step differ by more than the record takes, so it is timed itself, in a run of local ranks: the seconds
of its call in every step; and the breakdown as the number of its parts in a step times the cost of one, which is timed
after the run. Printed: the inputs, the medians, and their sum as a share of a step of 100 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import spawn

from holmes_hpc.config.configuration import from_dict
from holmes_hpc.records.run import RunDirectory

STEP_S, LIMIT = 0.1, 0.01
LAYERS, MICRO_BATCHES, WARM_UP, REPEATS = 8, 4, 10, 20_000


class Nothing:
    def called(self) -> None:
        pass


def rank(config: str, out: str) -> None:
    """One rank; rank 0 writes what it found."""
    warnings.filterwarnings("ignore")
    from holmes_hpc.training import loop
    from holmes_hpc.training.metrics.breakdown import Breakdown

    record, enter = loop.Trainer._record, Breakdown.enter
    records: list[float] = []
    parts = 0

    def timed_record(self: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        record(self, *arguments)
        records.append(time.perf_counter() - began)

    def counted_enter(self: Breakdown, part: str) -> None:
        nonlocal parts
        parts += 1
        enter(self, part)

    loop.Trainer._record, Breakdown.enter = timed_record, counted_enter  # type: ignore[method-assign]
    loop.train(from_dict(json.loads(Path(config).read_text())))
    Breakdown.enter = enter  # type: ignore[method-assign]
    wrapped = Nothing()
    Breakdown().wrap(wrapped, "called", "compute_s")
    one = [min(timeit.repeat(thing.called, number=REPEATS, repeat=5)) / REPEATS for thing in (wrapped, Nothing())]
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps([records[WARM_UP:], parts / len(records), one[0] - one[1]]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        return rank(*given.rank)
    plan = spawn.plan(
        dp=given.ranks,
        model=replace(spawn.MODEL, layers=LAYERS),
        batch=replace(spawn.BATCH, global_size=MICRO_BATCHES * given.ranks),
    )
    print(
        f"inputs: {given.ranks} local ranks, {LAYERS} layers, {MICRO_BATCHES} micro-batches, {given.steps} steps of "
        f"which {WARM_UP} are warm-up, a log line every step, load {os.getloadavg()[0]:.2f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        values = spawn.configuration(Path(folder) / "run", None, {"train": {"steps": given.steps}}).to_dict()
        RunDirectory.create(Path(folder) / "run", plan.to_yaml(), values)
        config, out = Path(folder) / "config.json", Path(folder) / "out.json"
        config.write_text(json.dumps(values))
        own = {
            "WORLD_SIZE": str(given.ranks),
            "LOCAL_WORLD_SIZE": str(given.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(spawn.free_port()),
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(config), str(out)],
                stdout=subprocess.DEVNULL,
                env={**os.environ, **own, "RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(given.ranks)
        ]
        assert [r.wait() for r in ranks] == [0] * given.ranks
        records, parts, one = json.loads(out.read_text())
    record, breakdown = statistics.median(records), parts * one
    print(
        f"medians: the record {1000 * record:.3f} ms a step; the breakdown {parts:.0f} parts of {1e6 * one:.2f} us, "
        f"{1000 * breakdown:.3f} ms a step"
    )
    print(
        f"together {1000 * (record + breakdown):.3f} ms, {(record + breakdown) / STEP_S:.2%} of a step of "
        f"{1000 * STEP_S:.0f} ms (at most {LIMIT:.0%})"
    )


if __name__ == "__main__":
    main()
