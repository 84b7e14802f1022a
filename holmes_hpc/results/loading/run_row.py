"""Reads one run directory: its row in the table of runs, and its steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.files import to_json
from holmes_hpc.records.rates import RATES, first_attempt_of_plan, harmonic_mean
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import missing_fields
from holmes_hpc.records.untrusted import from_json, from_yaml, read_file
from holmes_hpc.results.columns import FAMILIES, PARTS, RUN_COLUMNS
from holmes_hpc.results.loading.steps import Floats, Steps, no_steps, read_steps
from holmes_hpc.results.plans import mapping, number, plan_columns, read_plan, text, whole
from holmes_hpc.results.statistics import median_interval

SECOND = timedelta(seconds=1)  # what starts are written to


def read_one(run: RunDirectory, key: str) -> tuple[dict[str, Any], Steps]:
    """Return the row of one run (RUN_COLUMNS, and FAMILIES as JSON texts) and its steps. What cannot be read is a row
    that says so."""
    row: dict[str, Any] = dict.fromkeys([*RUN_COLUMNS, *FAMILIES])
    row.update(run=key, path=plain_name(run.path), name=plain_name(run.name))
    try:
        record = run.read_run()
    except HolmesError as e:
        missing = not run.exists()
        row.update(state="not-started" if missing else "unreadable", error=str(e))
        if missing:
            row.update(error="no run.yaml: it ended before it was recorded", overrides=_hydra_overrides(run.path))
        return row, no_steps()
    plan, ending = read_plan(run), _ending(run)
    try:
        steps = read_steps(run, first_attempt_of_plan(record))
        row.update(_identity(record, steps, ending or {}), **_configuration(record), **plan_columns(plan))
        row.update(figures(steps))
    except (TypeError, ValueError, AttributeError, OverflowError, HolmesError) as e:
        said = str(e) if isinstance(e, HolmesError) else f"{row['path']}: {type(e).__name__}: {e}"
        row.update(state="unreadable", error=said)
        return row, no_steps()  # as many as its row says: none
    row["plan_id"] = text(record.get("plan_id"))
    row["missing"] = "; ".join(_missing(record, steps)) or None
    row["error"] = "; ".join(filter(None, [row["error"], *_damage(row, steps, plan, ending)])) or None
    if row["nodes"] is None and isinstance(record.get("hosts"), list):
        row["nodes"], row["ranks"] = len(set(map(str, record["hosts"]))), len(record["hosts"])
    traffic = mapping(record.get("traffic"))
    row["header_factor"] = number(traffic.get("header_factor"))
    row["header_factors"] = to_json(mapping(traffic.get("header_factors")))
    setup = mapping(traffic.get("setup"))
    row["setup_tx_bytes"] = to_json({name: mapping(pair).get("tx") for name, pair in setup.items()})
    row["planned_bytes_per_step"] = to_json(
        {
            kind: sent
            for kind, sent in mapping(mapping(plan.get("predicted")).get("nic_bytes_per_step")).items()
            if isinstance(sent, (int, float))
        }
    )
    return row, steps


def plain_name(path: str | Path) -> str:
    """A name that can be printed and stored, whatever bytes the file system has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _missing(record: dict[str, Any], steps: Steps) -> Iterator[str]:
    """What the files of a run that made steps lack, file by file."""
    for file, fields in (("run.yaml", missing_fields(record)), ("metrics.jsonl", steps.missing)):
        if fields and len(steps):
            yield f"{file}: {', '.join(fields)}"


def _damage(row: dict[str, Any], steps: Steps, plan: dict[str, Any], ending: dict[str, Any] | None) -> list[str]:
    """What of a recorded run cannot be read."""
    found = [f"metrics.jsonl: {steps.broken} lines cannot be read"] if steps.broken else []
    if row["attempts"] and not plan:
        found.append("plan.yaml cannot be read")
    if ending is not None and not isinstance(ending.get("state"), str):
        found.append("result.json cannot be read")
    return found


def _identity(record: dict[str, Any], steps: Steps, ending: dict[str, Any]) -> dict[str, Any]:
    attempts = [a for a in record["attempts"] if isinstance(a, dict)]
    result = ending if int(ending.get("attempt") or 0) >= len(attempts) else {}  # of the latest attempt
    slurm, labels = mapping(record["slurm"]), mapping(record.get("labels") or mapping(record["config"]).get("labels"))
    submitted, starts = _time(slurm.get("submitted")), [s for a in attempts if (s := _time(a.get("started")))]
    started = starts[0] if starts else None
    after = next((s for s in starts if submitted and s >= submitted - SECOND), None)  # resumed, it is submitted again
    queue_s = max(0.0, _between(submitted, after)) if after else math.nan
    ended = _time(result.get("time")) if result else None
    state = result.get("state") if result else "unfinished" if attempts or len(steps) else "not-started"
    return {
        "state": str(state),
        "error": text(result.get("error")),
        "exit_code": whole(result.get("exit_code")),
        "failed_rank": whole(result.get("failed_rank")),
        "failed_node": text(result.get("failed_node")),
        "version": whole(record["version"]),
        "created": _time(record["created"]),
        "submitted": submitted,
        "started": started,
        "ended": ended,
        "queue_s": queue_s,
        "wall_s": _between(started, ended),
        "attempts": len(attempts),
        "job_id": whole(slurm.get("job_id")),
        "session": text(record.get("session") or labels.get("session")),
        "labels": to_json(labels),
        "git_commit": text(record.get("git_commit")),
        "device": text(record.get("device")),
    }


def _configuration(record: dict[str, Any]) -> dict[str, Any]:
    config = mapping(record["config"])
    train, plan = mapping(config.get("train")), mapping(config.get("plan"))
    pace = record.get("pace_layer_ms", train.get("pace_layer_ms"))
    overlap = [train.get("overlap_grad_reduce"), train.get("overlap_param_gather")]
    return {
        "pace_layer_ms": number(pace),
        "overrides": [str(o) for o in record["overrides"] or []],
        "config": to_json(_two_levels(config)),
        "partition": text(plan.get("partition")),
        "overlap": None if None in overlap else all(overlap),
    }


def _two_levels(config: dict[str, Any]) -> dict[str, Any]:
    """{"name": …, "train": {"lr": …}} as {"name": …, "train.lr": …}."""
    groups = {group: keys if isinstance(keys, dict) else {"": keys} for group, keys in config.items()}
    return {f"{group}.{key}".rstrip("."): value for group, keys in groups.items() for key, value in keys.items()}


def figures(steps: Steps) -> dict[str, Any]:
    """A run's figures over its steps after the warm-up."""
    count, kept = len(steps), slice(steps.left_out, None)
    if count == steps.earlier:
        return {"steps": count, "earlier_steps": steps.earlier, "warmup_steps": 0}
    times = median_interval(steps.scalars["step_time_s"][kept])
    stages, kinds = steps.breakdown.shape[1], list(steps.tx)
    many = np.concatenate(
        [
            steps.means,
            steps.breakdown.reshape(len(PARTS) * stages, count),
            *(v[None] for v in steps.tx.values()),
            *(v[None] for v in steps.rx.values()),
        ]
    )[:, kept]
    parts, of_stages, tx, rx = np.split(_medians(many), np.cumsum([len(PARTS), len(PARTS) * stages, len(kinds)]))
    by_stage = of_stages.reshape(len(PARTS), stages).T
    while len(by_stage) and np.isnan(by_stage[-1]).all():
        by_stage = by_stage[:-1]  # a stage that only an earlier plan had
    return {
        "steps": count,
        "earlier_steps": steps.earlier,
        "warmup_steps": steps.warmup,
        "step_time_s": times.median,
        "step_time_low_s": times.low,
        "step_time_high_s": times.high,
        **{name: harmonic_mean(steps.scalars[name][kept]) for name in RATES},
        "first_loss": float(steps.scalars["loss"][0]),
        "loss": float(steps.scalars["loss"][-1]),
        "validation_loss": _last(steps.scalars["validation_loss"]),
        "grad_norm": float(steps.scalars["grad_norm"][-1]),
        **{part: float(parts[i]) for i, part in enumerate(PARTS)},
        "stage_breakdown": to_json(
            {f"{n}.{part}": float(v) for n, row in enumerate(by_stage) for part, v in zip(PARTS, row, strict=True)}
        ),
        "tx_bytes_per_step": to_json(dict(zip(kinds, tx.tolist(), strict=True))),
        "rx_bytes_per_step": to_json(dict(zip(kinds, rx.tolist(), strict=True))),
        "peak_memory_bytes": steps.peak,
    }


def _last(values: Floats) -> float:
    """The last number among the values; NaN where there is none."""
    kept = values[~np.isnan(values)]
    return float(kept[-1]) if len(kept) else math.nan


def _medians(values: Floats) -> Floats:
    """Medians of the rows, of the numbers among their values; NaN where there are none."""
    ordered, count = np.sort(values, axis=1), (~np.isnan(values)).sum(axis=1, keepdims=True)  # NaN comes last
    middle = np.take_along_axis(ordered, np.concatenate([(count - 1) // 2, count // 2], axis=1), axis=1)
    return np.asarray(middle.mean(axis=1))


def _ending(run: RunDirectory) -> dict[str, Any] | None:
    """What result.json says; empty when it cannot be read, None when there is none."""
    try:
        return mapping(from_json(read_file(run.result_path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _hydra_overrides(directory: Path) -> list[str]:
    try:
        found = from_yaml(read_file(directory / ".hydra" / "overrides.yaml").decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = None
    return [str(o) for o in found] if isinstance(found, list) else []


def _time(value: Any) -> datetime | None:
    """Unix seconds, ISO 8601 text or a datetime, as a datetime in UTC."""
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, timezone.utc)
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError):
        return None
    return found.astimezone(timezone.utc) if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _between(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else math.nan
