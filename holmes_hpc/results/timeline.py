"""The timeline of the pipeline that a run with `train.trace=true` records in trace/rank-*.jsonl.

It can be written in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing read."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.planning.cost.predict import chrome_trace
from holmes_hpc.planning.schedule.kinds import COMPUTING
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.rates import warmup_steps
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import MAX_LINES_BYTES, from_json, read_file
from holmes_hpc.results.plans import integer

TYPES = {"rank": "int64", "step": "int64", "stage": "int64", "kind": "object", "micro_batch": "float64"}
TYPES |= {"chunk": "int64", "start_s": "float64", "end_s": "float64", "held": "float64"}


def read_trace(run: RunDirectory) -> pd.DataFrame:
    """Return one row per event of every rank, in order of rank and start; no rows without a trace.

    Columns: TYPES, with `start_s`, `end_s` in Unix seconds and `held`, the number of forward passes whose activations
    the stage held. Skip broken lines and steps repeated by a later attempt. Raise RecordError for unreadable files."""
    rows: list[dict[str, Any]] = []
    for path in sorted(run.trace.glob("rank-*.jsonl")):
        rank = integer(path.stem.removeprefix("rank-"))
        if rank is None:
            continue
        with RecordError.instead_of(OSError, where=path, hint="restore the file, or remove it"):
            lines = read_file(path, MAX_LINES_BYTES).split(b"\n")
        rank_events: list[dict[str, Any]] = []
        seen_passes: set[tuple[Any, ...]] = set()
        for line in lines:
            if (event := _event(line, rank)) is None:
                continue
            pass_key = tuple(event[key] for key in ("step", "kind", "micro_batch", "chunk"))
            if pass_key in seen_passes or (rank_events and event["step"] < rank_events[-1]["step"]):  # a later attempt
                rank_events = [e for e in rank_events if e["step"] < event["step"]]
                seen_passes = {key for key in seen_passes if key[0] < event["step"]}
            rank_events.append(event)
            if event["kind"] in COMPUTING:
                seen_passes.add(pass_key)
        rows += rank_events
    frame = pd.DataFrame(rows, columns=list(TYPES)).astype(TYPES)
    return frame.sort_values(["rank", "start_s"], ignore_index=True)


def _event(line: bytes, rank: int) -> dict[str, Any] | None:
    """Return the event in a line of a rank's trace as {column: value}; None for a broken line."""
    try:
        fields = from_json(line)
        event: dict[str, Any] = {"rank": rank, "kind": str(fields["kind"]), "chunk": integer(fields.get("chunk", 0))}
        event |= {key: integer(fields[key]) for key in ("step", "stage")}
        event |= {key: integer(fields.get(key)) for key in ("micro_batch", "held")}
        event |= {key: float(fields[key]) for key in ("start_s", "end_s")}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    required = (event["step"], event["stage"], event["chunk"])
    return event if None not in required and math.isfinite(event["start_s"] + event["end_s"]) else None


def typical_step(trace: pd.DataFrame) -> pd.DataFrame:
    """Return the events of the step whose length is the median over the steps after warm-up. `trace`: from
    :func:`read_trace`. Only the first rank of each stage is included. Times are in seconds since the first event."""
    if trace.empty:
        return trace
    spans = trace.groupby("step").agg(start=("start_s", "min"), end=("end_s", "max"))
    lengths_s = (spans["end"] - spans["start"]).iloc[warmup_steps(len(spans)) :].sort_values()
    events = trace[trace["step"] == lengths_s.index[(len(lengths_s) - 1) // 2]]
    events = events[events["rank"] == events.groupby("stage")["rank"].transform("min")]
    start = events["start_s"].min()
    return events.assign(start_s=events["start_s"] - start, end_s=events["end_s"] - start).reset_index(drop=True)


def write_perfetto(run: RunDirectory, path: str | os.PathLike[str]) -> int:
    """Write the measured timeline of a run to `path` as a Chrome trace with one process per rank. Times start at the
    first event. Return the number of its events. Raise RecordError if no trace was recorded."""
    trace = read_trace(run)
    if trace.empty:
        raise RecordError("no trace was recorded", where=str(run.path), hint="repeat the run with train.trace=true")
    trace = trace.sort_values(["stage", "rank", "start_s"])
    start = trace["start_s"].min()
    names = [f"measured: stage {s}, rank {r}" for s, r in zip(trace["stage"], trace["rank"], strict=True)]
    trace = trace.assign(process=names, start_s=trace["start_s"] - start, end_s=trace["end_s"] - start)
    events: list[dict[Any, Any]] = trace.to_dict("records")
    write_whole(Path(path), json.dumps(chrome_trace(events)))
    return len(events)
