"""The timeline of the pipeline that a run with `train.trace=true` records in trace/rank-*.jsonl.

It can be written in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing read."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.planning.schedule.kinds import COMPUTING
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.rates import warmup_steps
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import MAX_LINES_BYTES, from_json, read_file
from holmes_hpc.results.plans import integer

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
    """Return one row per event of every rank, in order of rank and start; no rows without a trace.

    Columns: `rank, step, stage, kind, micro_batch, chunk, start_s, end_s` (Unix seconds), `held` (number of forward
    passes whose activations the stage held). Broken lines are skipped, and so are steps that a later attempt repeated.
    Raise RecordError if a file cannot be read."""
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
            if pass_key in seen_passes or (rank_events and event["step"] < rank_events[-1]["step"]):  # another attempt
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
        event: dict[str, Any] = {
            "rank": rank,
            **{key: integer(fields[key]) for key in ("step", "stage")},
            "kind": str(fields["kind"]),
            "micro_batch": integer(fields.get("micro_batch")),
            "chunk": integer(fields.get("chunk", 0)),
            **{key: float(fields[key]) for key in ("start_s", "end_s")},
            "held": integer(fields.get("held")),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    required = (event["step"], event["stage"], event["chunk"])
    return event if None not in required and math.isfinite(event["start_s"] + event["end_s"]) else None


def typical_step(trace: pd.DataFrame) -> pd.DataFrame:
    """Return the events of the step of median length after warm-up, of the first rank of each stage, with times in
    seconds from the first event. `trace`: of :func:`read_trace`."""
    if trace.empty:
        return trace
    spans = trace.groupby("step").agg(start=("start_s", "min"), end=("end_s", "max"))
    lengths_s = (spans["end"] - spans["start"]).iloc[warmup_steps(len(spans)) :].sort_values()
    events = trace[trace["step"] == lengths_s.index[(len(lengths_s) - 1) // 2]]
    events = events[events["rank"] == events.groupby("stage")["rank"].transform("min")]
    start = events["start_s"].min()
    return events.assign(start_s=events["start_s"] - start, end_s=events["end_s"] - start).reset_index(drop=True)


def chrome_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return events (`stage, kind, micro_batch, start_s, end_s`; `rank` if measured) as a Chrome trace.

    A process of the trace is a rank, or a stage if simulated; its threads are computing, waiting and each kind of
    transfer. Times are in microseconds since the first event."""
    rows = sorted((dict(e) for e in events), key=lambda e: (e["stage"], e.get("rank", 0), e["start_s"]))
    first_s = min((e["start_s"] for e in rows), default=0.0)
    trace_events: list[dict[str, Any]] = []
    pids: dict[tuple[int, int], int] = {}
    threads: dict[tuple[int, str], int] = {}
    for event in rows:
        stage_rank = (int(event["stage"]), int(event.get("rank", 0)))
        if stage_rank not in pids:
            pids[stage_rank] = len(pids)
            rank_note = f", rank {stage_rank[1]}" if "rank" in event else ""
            stage_name = f"measured: stage {stage_rank[0]}{rank_note}"
            trace_events.append(_naming_event("process_name", pids[stage_rank], 0, stage_name))
        pid, kind = pids[stage_rank], event["kind"]
        thread = "compute" if kind in COMPUTING else "wait" if kind.startswith("wait") else kind
        if (pid, thread) not in threads:
            threads[pid, thread] = len([t for t in threads if t[0] == pid])
            trace_events.append(_naming_event("thread_name", pid, threads[pid, thread], thread))
        micro_batch = event.get("micro_batch")
        label = kind if micro_batch is None or pd.isna(micro_batch) else f"{kind} {int(micro_batch)}"
        trace_events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": threads[pid, thread],
                "name": label,
                "cat": kind,
                "ts": round((event["start_s"] - first_s) * 1e6, 3),
                "dur": round((event["end_s"] - event["start_s"]) * 1e6, 3),
            }
        )
    return {"traceEvents": trace_events, "displayTimeUnit": "ms"}


def _naming_event(key: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Return the event of a Chrome trace that names a process or a thread (`key`: process_name or thread_name)."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": key, "args": {"name": name}}


def write_perfetto(run: RunDirectory, path: str | os.PathLike[str]) -> int:
    """Write the measured timeline of a run to `path` as a Chrome trace. Return the number of its events.
    Raise RecordError if no trace was recorded."""
    trace = read_trace(run)
    if trace.empty:
        raise RecordError("no trace was recorded", where=str(run.path), hint="repeat the run with train.trace=true")
    rows: list[dict[Any, Any]] = trace.to_dict("records")
    write_whole(Path(path), json.dumps(chrome_trace(rows)))
    return len(rows)
