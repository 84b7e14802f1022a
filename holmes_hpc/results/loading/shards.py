"""Runs read into shards: two Parquet files of some hundred runs, `runs-ID.parquet` and `steps-ID.parquet`. They are
what crosses from the processes that parse to the loader, and they stay as its cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import pyarrow as pa
import pyarrow.parquet as pq

from holmes_hpc.errors import RecordError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results.columns import RUN_COLUMNS, arrow_schema
from holmes_hpc.results.loading.run_reader import read_one

FILES = ("run.yaml", "plan.yaml", "metrics.jsonl", "result.json")  # what a run's row and steps are made from
RUNS_PER_SHARD = 200
SMALL = 32 << 20  # metrics of fewer bytes are parsed here and now: starting processes would take longer
# glibc's malloc keeps what is freed, a run's metrics above all: giving it back and asking anew is 0.4 ms a run.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
READER = 5  # raise it when this release reads the same files differently: older shards are then made again


def fingerprint(directory: str) -> str:
    """Changes when the run does: size and time of its files, and the version of this reader."""
    found = [str(READER)]
    for name in FILES:
        try:
            status = os.stat(os.path.join(directory, name))
        except OSError:
            found.append("-")
        else:
            found.append(f"{status.st_size}:{status.st_mtime_ns}")
    return " ".join(found)


def write_shard(folder: Path, runs: Sequence[tuple[str, str]]) -> str:
    """Read `runs` (key, directory) and write their shard; its id comes back. Readers see all of it or nothing."""
    shard = uuid.uuid4().hex[:16]
    rows, tables = [], []
    for index, (key, directory) in enumerate(runs):
        seen = fingerprint(directory)  # before reading: what is written meanwhile is read again next time
        row, steps = read_one(RunDirectory(directory), key)
        rows.append({**row, "fingerprint": seen})
        if len(steps):
            tables.append(steps.table(index))
    schema = arrow_schema(RUN_COLUMNS).append(pa.field("fingerprint", pa.string()))
    if tables:
        _write(folder / f"steps-{shard}.parquet", pa.concat_tables(tables, promote_options="default"))
    _write(folder / f"runs-{shard}.parquet", pa.Table.from_pylist(rows, schema=schema))
    return shard


def _write(path: Path, table: pa.Table) -> None:
    """Uncompressed and plain: measured figures hardly compress, and reading them again is what this is for."""
    temporary = path.with_name(f".{path.name}")
    pq.write_table(table, temporary, compression="none", use_dictionary=False, write_statistics=False)
    os.replace(temporary, path)


def make_shards(folder: Path, runs: Sequence[tuple[str, str]]) -> list[str]:
    """Shards of all `runs`, on all CPUs when there is much to read; their ids come back in order."""
    tasks = [list(runs[i:i + RUNS_PER_SHARD]) for i in range(0, len(runs), RUNS_PER_SHARD)]
    workers = min(len(os.sched_getaffinity(0)), len(tasks), 16)
    if workers < 2 or _metrics_bytes(runs) < SMALL:
        return [write_shard(folder, task) for task in tasks]
    queue: SimpleQueue[tuple[int, list[tuple[str, str]]]] = SimpleQueue()
    for item in enumerate(tasks):
        queue.put(item)
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(lambda _: dict(_drain(folder, queue)), range(workers)))
    done = {index: shard for part in parts for index, shard in part.items()}
    return [done[index] for index in range(len(tasks))]


def _metrics_bytes(runs: Sequence[tuple[str, str]]) -> int:
    total = 0
    for _, directory in runs:
        try:
            total += os.stat(os.path.join(directory, "metrics.jsonl")).st_size
        except OSError:
            continue
        if total >= SMALL:
            break
    return total


def _drain(folder: Path, queue: SimpleQueue[tuple[int, list[tuple[str, str]]]]) -> Iterator[tuple[int, str]]:
    """Give tasks to one process until none is left. (A process of our own and not multiprocessing's: that one would
    run a caller's script or notebook again, or fork its threads.)"""
    command = [sys.executable, "-c", "from holmes_hpc.results.loading.shards import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=environment) as process:
        assert process.stdin and process.stdout
        while True:
            try:
                index, task = queue.get_nowait()
            except Empty:
                break
            try:
                process.stdin.write(json.dumps({"folder": str(folder), "runs": task}) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                raise RecordError("a process that reads runs ended early", where=str(folder),
                                  hint="see its message above; is memory or disk full?")
            yield index, answer.strip()
        process.stdin.close()


def main() -> None:
    """A parsing process: tasks on stdin, one JSON line each; their shards' ids on stdout."""
    pa.set_cpu_count(1)
    for line in sys.stdin:
        task = json.loads(line)
        shard = write_shard(Path(task["folder"]), [(key, directory) for key, directory in task["runs"]])
        print(shard, flush=True)
