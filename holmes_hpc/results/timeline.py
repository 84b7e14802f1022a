"""The pipeline's timeline: measured (trace/rank-*.jsonl of a run with `train.trace=true`), beside the simulated one,
and as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.rates import warmup_steps
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import from_json, read_file
from holmes_hpc.results.plans import whole

COMPUTING = ("forward", "backward")
TYPES = {
    "rank": "int64",
    "step": "int64",
    "stage": "int64",
    "kind": "object",
    "micro_batch": "float64",
    "chunk": "int64",
    "start_s": "float64",
    "end_s": "float64",
    "held": "float64",
}


def read_trace(run: RunDirectory) -> pd.DataFrame:
    """One row per event of every rank: `rank, step, stage, kind, micro_batch, chunk, start_s, end_s` (Unix seconds),
    `held` (passes whose activations the stage held). Empty without a trace; half-written lines are left out, and so is
    what an attempt did beyond the step from which a later one went on."""
    rows: list[dict[str, Any]] = []
    for path in sorted(run.trace.glob("rank-*.jsonl")):
        rank = whole(path.stem.removeprefix("rank-"))
        if rank is None:
            continue
        try:
            lines = read_file(path).split(b"\n")
        except OSError as e:
            raise RecordError(e.strerror or str(e), where=str(path), hint="restore the file, or remove it") from e
        mine: list[dict[str, Any]] = []
        seen: set[tuple[Any, ...]] = set()
        for line in lines:
            if (event := _event(line, rank)) is None:
                continue
            computed = tuple(event[key] for key in ("step", "kind", "micro_batch", "chunk"))
            if computed in seen or (mine and event["step"] < mine[-1]["step"]):  # another attempt
                mine = [e for e in mine if e["step"] < event["step"]]
                seen = {key for key in seen if key[0] < event["step"]}
            mine.append(event)
            if event["kind"] in COMPUTING:
                seen.add(computed)
        rows += mine
    frame = pd.DataFrame(rows, columns=list(TYPES)).astype(TYPES)
    return frame.sort_values(["rank", "start_s"], ignore_index=True)


def _event(line: bytes, rank: int) -> dict[str, Any] | None:
    """A line of a rank's trace; None for one that is half-written, or no event."""
    try:
        said = from_json(line)
        event: dict[str, Any] = {
            "rank": rank,
            **{key: whole(said[key]) for key in ("step", "stage")},
            "kind": str(said["kind"]),
            "micro_batch": whole(said.get("micro_batch")),
            "chunk": whole(said.get("chunk", 0)),
            **{key: float(said[key]) for key in ("start_s", "end_s")},
            "held": whole(said.get("held")),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    certain = (event["step"], event["stage"], event["chunk"])
    return event if None not in certain and math.isfinite(event["start_s"] + event["end_s"]) else None


def typical_step(trace: pd.DataFrame, step: int | None = None) -> pd.DataFrame:
    """The events of one step (default: the one of median length after warm-up), of the first rank of each stage, in
    seconds from the step's first event."""
    if trace.empty:
        return trace
    if step is None:
        spans = trace.groupby("step").agg(start=("start_s", "min"), end=("end_s", "max"))
        lengths = (spans["end"] - spans["start"]).iloc[warmup_steps(len(spans)) :].sort_values()
        step = int(lengths.index[(len(lengths) - 1) // 2])
    one = trace[trace["step"] == step]
    one = one[one["rank"] == one.groupby("stage")["rank"].transform("min")]
    start = one["start_s"].min()
    return one.assign(start_s=one["start_s"] - start, end_s=one["end_s"] - start).reset_index(drop=True)


def perfetto(events: Iterable[Mapping[str, Any]], name: str = "measured") -> dict[str, Any]:
    """Events (with `stage, kind, micro_batch, start_s, end_s`; `rank` where measured) as a Chrome trace: one process a
    stage and rank; computing, waiting and each kind of transfer are its threads. Times from the first event on, in
    microseconds."""
    rows = sorted((dict(e) for e in events), key=lambda e: (e["stage"], e.get("rank", 0), e["start_s"]))
    first = min((e["start_s"] for e in rows), default=0.0)
    lines: list[dict[str, Any]] = []
    places: dict[tuple[int, int], int] = {}
    threads: dict[tuple[int, str], int] = {}
    for event in rows:
        place = (int(event["stage"]), int(event.get("rank", 0)))
        if place not in places:
            places[place] = len(places)
            of_rank = f", rank {place[1]}" if "rank" in event else ""
            lines.append(_name("process_name", places[place], 0, f"{name}: stage {place[0]}{of_rank}"))
        pid = places[place]
        kind = event["kind"]
        thread = "compute" if kind in COMPUTING else "wait" if kind.startswith("wait") else kind
        if (pid, thread) not in threads:
            threads[pid, thread] = len([t for t in threads if t[0] == pid])
            lines.append(_name("thread_name", pid, threads[pid, thread], thread))
        number = event.get("micro_batch")
        label = event["kind"] if number is None or pd.isna(number) else f"{event['kind']} {int(number)}"
        lines.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": threads[pid, thread],
                "name": label,
                "cat": event["kind"],
                "ts": round((event["start_s"] - first) * 1e6, 3),
                "dur": round((event["end_s"] - event["start_s"]) * 1e6, 3),
            }
        )
    return {"traceEvents": lines, "displayTimeUnit": "ms"}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def write_perfetto(run: RunDirectory, path: str | os.PathLike[str]) -> int:
    """Write a run's measured timeline for Perfetto; the number of its events comes back. RecordError without a
    trace."""
    trace = read_trace(run)
    if trace.empty:
        raise RecordError("no trace was recorded", where=str(run.path), hint="run it again with train.trace=true")
    rows: list[dict[Any, Any]] = trace.to_dict("records")
    write_whole(Path(path), json.dumps(perfetto(rows)))
    return len(rows)
