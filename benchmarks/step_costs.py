"""Measure the cost of recording a step on rank 0: breakdown, gather of all ranks' figures, metrics line, log.

    python benchmarks/step_costs.py [--ranks 2] [--steps 200]

Steps vary by more than the cost of the record, so the record itself is timed in a run of local ranks: the seconds of
its call in every step. The cost of the breakdown is its number of parts per step times the cost of one part, timed
after the run. So is a write of the file of live metrics (train.openmetrics), at most one in five seconds: CPU time.
Prints the inputs, the medians, and the sum of record and breakdown as a share of a step of 100 ms.
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
LAYERS, MICRO_BATCHES, WARM_UP, REPEATS, WRITES = 8, 4, 10, 20_000, 200


class Empty:
    def called(self) -> None:
        pass


def run_rank(config: str, out: str) -> None:
    """Train as one rank; rank 0 writes its figures."""
    warnings.filterwarnings("ignore")
    from holmes_hpc.training import loop
    from holmes_hpc.training.metrics.breakdown import Breakdown
    from holmes_hpc.training.metrics.openmetrics import Exporter

    record, enter, write = loop.Trainer._record, Breakdown.enter, Exporter.write
    record_s: list[float] = []
    exporters: list[Exporter] = []
    parts = 0

    def timed_record(self: Any, *arguments: Any) -> None:
        start = time.perf_counter()
        record(self, *arguments)
        record_s.append(time.perf_counter() - start)

    def counted_enter(self: Breakdown, *arguments: Any) -> None:
        nonlocal parts
        parts += 1
        enter(self, *arguments)

    def kept_write(self: Exporter) -> None:
        exporters.append(self)
        write(self)

    loop.Trainer._record, Breakdown.enter, Exporter.write = timed_record, counted_enter, kept_write  # type: ignore
    loop.train(from_dict(json.loads(Path(config).read_text())))
    Breakdown.enter = enter  # type: ignore[method-assign]
    timed = Empty()
    Breakdown().wrap(timed, "called", "compute_s")
    call_s = [min(timeit.repeat(target.called, number=REPEATS, repeat=5)) / REPEATS for target in (timed, Empty())]
    if os.environ["RANK"] == "0":
        start = time.thread_time()
        for _ in range(WRITES):
            write(exporters[0])
        write_s = (time.thread_time() - start) / WRITES
        Path(out).write_text(json.dumps([record_s[WARM_UP:], parts / len(record_s), call_s[0] - call_s[1], write_s]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank:
        return run_rank(*arguments.rank)
    plan = spawn.plan(
        dp=arguments.ranks,
        model=replace(spawn.MODEL, layers=LAYERS),
        batch=replace(spawn.BATCH, global_size=MICRO_BATCHES * arguments.ranks),
    )
    print(
        f"inputs: {arguments.ranks} local ranks, {LAYERS} layers, {MICRO_BATCHES} micro-batches, "
        f"{arguments.steps} steps of which {WARM_UP} are warm-up, a log line every step, load {os.getloadavg()[0]:.2f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        train = {"steps": arguments.steps, "openmetrics": "live.prom"}
        values = spawn.configuration(Path(folder) / "run", None, {"train": train}).to_dict()
        RunDirectory.create(Path(folder) / "run", plan.to_yaml(), values)
        config, out = Path(folder) / "config.json", Path(folder) / "out.json"
        config.write_text(json.dumps(values))
        environment = {
            "WORLD_SIZE": str(arguments.ranks),
            "LOCAL_WORLD_SIZE": str(arguments.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(spawn.free_port()),
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(config), str(out)],
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(arguments.ranks)
        ]
        assert [r.wait() for r in ranks] == [0] * arguments.ranks
        record_times, parts, part_s, write_s = json.loads(out.read_text())
    record, breakdown = statistics.median(record_times), parts * part_s
    print(
        f"medians: the record {1000 * record:.3f} ms a step; the breakdown {parts:.0f} parts of {1e6 * part_s:.2f} us, "
        f"{1000 * breakdown:.3f} ms a step"
    )
    print(
        f"together {1000 * (record + breakdown):.3f} ms, {(record + breakdown) / STEP_S:.2%} of a step of "
        f"{1000 * STEP_S:.0f} ms (at most {LIMIT:.0%}); a write of live metrics: {1000 * write_s:.3f} ms of CPU time"
    )


if __name__ == "__main__":
    main()
