"""Reader of one run directory: its row in the table of runs, and its steps.

A new column is declared in `results/columns.yaml`, and its value is set here."""

import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from holmes_hpc.errors import HolmesError, counted
from holmes_hpc.records.files import to_json
from holmes_hpc.records.rates import RATES, finite, first_attempt_of_plan, goodput, harmonic_mean
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import missing_fields
from holmes_hpc.records.untrusted import from_yaml, read_file, read_object
from holmes_hpc.results.columns import FAMILIES, PARTS, RUN_COLUMNS
from holmes_hpc.results.loading.steps import NO_STEPS, Steps, read_steps
from holmes_hpc.results.plans import integer, mapping, number, plan_columns, read_plan, text
from holmes_hpc.results.statistics import median_interval

START_RESOLUTION = timedelta(seconds=1)  # recorded start times are rounded down to this


def read_one(run: RunDirectory, key: str) -> tuple[dict[str, Any], Steps]:
    """Return the row of one run in the table of runs, and the run's steps. `key`: value of the column `run`. The row
    has RUN_COLUMNS and, as JSON texts, FAMILIES. An unreadable run has an error message in its row, and no steps."""
    row: dict[str, Any] = dict.fromkeys([*RUN_COLUMNS, *FAMILIES])
    row.update(run=key, path=plain_name(run.path), name=plain_name(run.name))
    try:
        record = run.read_run()
    except HolmesError as e:
        row.update(state="unreadable", error=str(e))
        if not run.exists():
            row.update(state="not-started", error="no run.yaml: the job ended before it recorded the run")
            row["overrides"] = _read_hydra_overrides(run.path)
        return row, NO_STEPS
    plan = read_plan(run)
    result = (read_object(run.result_path) or {}) if run.result_path.exists() else None  # empty: unreadable
    try:
        steps = read_steps(run, first_attempt_of_plan(record))
        row.update(_identity(record, steps, result or {}), **_configuration(record), **plan_columns(plan))
        row.update(figures(steps), goodput=_goodput(record, steps))
    except (TypeError, ValueError, AttributeError, OverflowError, HolmesError) as e:
        message = str(e) if isinstance(e, HolmesError) else f"{row['path']}: {type(e).__name__}: {e}"
        row.update(state="unreadable", error=message)
        return row, NO_STEPS  # the row has no number of steps, so no steps are returned
    row["plan_id"] = text(record.get("plan_id"))
    row["missing"] = "; ".join(_missing(record, steps)) or None
    row["error"] = "; ".join(filter(None, [row["error"], *_damage(row, steps, plan, result)])) or None
    if row["nodes"] is None and isinstance(record.get("hosts"), list):
        row["nodes"], row["ranks"] = len(set(map(str, record["hosts"]))), len(record["hosts"])
    traffic = mapping(record.get("traffic"))
    row["header_factor"] = number(traffic.get("header_factor"))
    row["header_factors"] = to_json(mapping(traffic.get("header_factors")))
    setup = mapping(traffic.get("setup"))
    row["setup_tx_bytes"] = to_json({name: mapping(pair).get("tx") for name, pair in setup.items()})
    planned = mapping(mapping(plan.get("predicted")).get("nic_bytes_per_step"))
    row["planned_bytes_per_step"] = to_json({k: n for k, n in planned.items() if isinstance(n, int | float)})
    return row, steps


def plain_name(path: str | Path) -> str:
    """Return the path of a file as printable text. Bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _missing(record: dict[str, Any], steps: Steps) -> Iterator[str]:
    """Yield a text such as ``run.yaml: hosts, nics`` for each file that lacks fields. Skip runs without steps."""
    for file, fields in (("run.yaml", missing_fields(record)), ("metrics.jsonl", steps.missing)):
        if fields and len(steps):
            yield f"{file}: {', '.join(fields)}"


def _damage(row: dict[str, Any], steps: Steps, plan: dict[str, Any], result: dict[str, Any] | None) -> Iterator[str]:
    """Yield an error message for each file of a run that is wholly or partly unreadable."""
    if steps.broken:
        yield f"metrics.jsonl: {counted(steps.broken, 'line')} cannot be read"
    if not len(steps) and mapping((result or {}).get("final")).get("step"):
        yield "metrics.jsonl has no readable step"
    if row["attempts"] and not plan:
        yield "plan.yaml cannot be read"
    if result is not None and not isinstance(result.get("state"), str):
        yield "result.json cannot be read"


def _identity(record: dict[str, Any], steps: Steps, result: dict[str, Any]) -> dict[str, Any]:
    """Return the columns on the run's state, times, job and code, from run.yaml and result.json."""
    attempts = [a for a in record["attempts"] if isinstance(a, dict)]
    # The result of an earlier attempt does not count.
    latest = result if int(result.get("attempt") or 0) >= len(attempts) else {}
    slurm, labels = mapping(record["slurm"]), mapping(record.get("labels") or mapping(record["config"]).get("labels"))
    submitted, starts = _time(slurm.get("submitted")), [s for a in attempts if (s := _time(a.get("started")))]
    started = starts[0] if starts else None
    # A resumed run is submitted again.
    next_start = next((s for s in starts if submitted and s >= submitted - START_RESOLUTION), None)
    queue_s = max(0.0, _between(submitted, next_start)) if next_start else math.nan
    ended = _time(latest.get("time")) if latest else None
    state = latest.get("state") if latest else "unfinished" if attempts or len(steps) else "not-started"
    columns: dict[str, Any] = {"state": str(state), "attempts": len(attempts), "job_id": integer(slurm.get("job_id"))}
    columns |= {name: text(latest.get(name)) for name in ("error", "failed_node")}
    columns |= {name: integer(latest.get(name)) for name in ("exit_code", "failed_rank")}
    columns |= {"created": _time(record["created"]), "submitted": submitted, "started": started, "ended": ended}
    columns |= {"queue_s": queue_s, "wall_s": _between(started, ended), "version": integer(record["version"])}
    columns |= {"session": text(record.get("session") or labels.get("session")), "labels": to_json(labels)}
    return columns | {name: text(record.get(name)) for name in ("git_commit", "device")}


def _configuration(record: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that come from the configuration in run.yaml."""
    config = mapping(record["config"])
    train, plan = mapping(config.get("train")), mapping(config.get("plan"))
    pace = record.get("pace_layer_ms", train.get("pace_layer_ms"))
    overlap = [train.get("overlap_grad_reduce"), train.get("overlap_param_gather")]
    groups = {group: keys if isinstance(keys, dict) else {"": keys} for group, keys in config.items()}
    dotted = {f"{group}.{key}".rstrip("."): value for group, keys in groups.items() for key, value in keys.items()}
    return {
        "pace_layer_ms": number(pace),
        "overrides": [str(o) for o in record["overrides"] or []],
        "config": to_json(dotted),
        "partition": text(plan.get("partition")),
        "overlap": None if None in overlap else all(overlap),
    }


def _goodput(record: dict[str, Any], steps: Steps) -> float:
    created, times = _time(record["created"]), finite(steps.scalars["time"])
    useful_s = float(np.nansum(steps.scalars["step_time_s"]))
    return goodput(useful_s, created.isoformat(), float(times[-1])) if created and len(times) and useful_s else math.nan


def figures(steps: Steps) -> dict[str, Any]:
    """Return the columns that are computed from a run's steps.

    Losses and peak memory cover all steps. All other figures exclude warm-up steps and steps under an earlier plan."""
    count, included = len(steps), slice(steps.left_out, None)
    if count == steps.earlier:
        return {"steps": count, "earlier_steps": steps.earlier, "warmup_steps": 0}
    times = median_interval(steps.scalars["step_time_s"][included])
    stages, kinds = steps.breakdown.shape[1], list(steps.tx)
    of_parts = *steps.means, *steps.breakdown.reshape(len(PARTS) * stages, count)
    rows = (row[included] for row in (*of_parts, *steps.tx.values(), *steps.rx.values()))
    medians = [float(np.median(row[~np.isnan(row)])) if not np.isnan(row).all() else math.nan for row in rows]
    parts, of_stages, tx, rx = np.split(medians, np.cumsum([len(PARTS), len(PARTS) * stages, len(kinds)]))
    by_stage = of_stages.reshape(len(PARTS), stages).T
    while len(by_stage) and np.isnan(by_stage[-1]).all():
        by_stage = by_stage[:-1]  # only an earlier plan had this stage
    stage_parts = {f"{n}.{part}": float(row[i]) for n, row in enumerate(by_stage) for i, part in enumerate(PARTS)}
    columns: dict[str, Any] = {"steps": count, "earlier_steps": steps.earlier, "warmup_steps": steps.warmup}
    columns |= {"step_time_s": times.median, "step_time_low_s": times.low, "step_time_high_s": times.high}
    columns |= {name: harmonic_mean(steps.scalars[name][included]) for name in RATES}
    columns |= {name: float(steps.scalars[name][-1]) for name in ("loss", "grad_norm")}
    columns |= {"first_loss": float(steps.scalars["loss"][0]), "peak_memory_bytes": steps.peak}
    losses = steps.scalars["validation_loss"]
    columns["validation_loss"] = next(reversed(losses[~np.isnan(losses)].tolist()), math.nan)  # may be infinite
    columns |= {part: float(parts[i]) for i, part in enumerate(PARTS)}
    columns["stage_breakdown"] = to_json(stage_parts)
    columns["tx_bytes_per_step"] = to_json(dict(zip(kinds, tx.tolist(), strict=True)))
    return columns | {"rx_bytes_per_step": to_json(dict(zip(kinds, rx.tolist(), strict=True)))}


def _read_hydra_overrides(directory: Path) -> list[str]:
    try:
        overrides = from_yaml(read_file(directory / ".hydra" / "overrides.yaml").decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        overrides = None
    return [str(o) for o in overrides] if isinstance(overrides, list) else []


def _time(value: Any) -> datetime | None:
    """Convert Unix seconds, an ISO 8601 text or a datetime to a datetime in UTC; None for another value."""
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, timezone.utc)
        time = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError):
        return None
    return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)


def _between(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else math.nan
