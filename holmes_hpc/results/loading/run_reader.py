"""One run directory -> one row of the table of runs, and its steps."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from holmes_hpc.errors import HolmesError, RecordError
from holmes_hpc.records.files import to_json
from holmes_hpc.records.run import RunDirectory, check_run
from holmes_hpc.results.columns import PARTS, RUN_COLUMNS
from holmes_hpc.results.documents import read_blocks
from holmes_hpc.results.loading.steps import Floats, Steps, no_steps, read_steps
from holmes_hpc.results.statistics import harmonic_mean, median_interval

PLAN_KEYS = frozenset({"strategy", "model", "batch", "parallel", "recompute", "schedule", "components", "stages",
                       "site", "edge_dtype", "transport_mode", "predicted"})
SECOND = timedelta(seconds=1)  # what starts are written to
NIC_WORDS = {"ib": "IB", "roce": "RoCE", "ethernet": "Ethernet"}


def read_one(run: RunDirectory, key: str) -> tuple[dict[str, Any], Steps]:
    """The row (every documented column) and the steps of one run. What cannot be read is a row that says so."""
    row: dict[str, Any] = dict.fromkeys(RUN_COLUMNS)
    row.update(run=key, path=plain_name(run.path), name=plain_name(run.name))
    try:
        record = _read_record(run)
    except HolmesError as e:
        missing = not run.exists()
        row.update(state="not-started" if missing else "unreadable", error=str(e))
        if missing:
            row.update(error="no run.yaml: it ended before it was recorded", overrides=_hydra_overrides(run.path))
        return row, no_steps()
    plan, ending = read_plan(run), _ending(run)
    try:
        steps = read_steps(run)
        steps.count_from(_first_of_plan(record))
        row.update(_identity(record, steps, ending or {}), **_configuration(record), **_plan_columns(plan))
        row.update(figures(steps))
    except (TypeError, ValueError, AttributeError, OverflowError, HolmesError) as e:
        said = str(e) if isinstance(e, HolmesError) else f"{row['path']}: {type(e).__name__}: {e}"
        row.update(state="unreadable", error=said)
        return row, no_steps()  # as many as its row says: none
    row["plan_id"] = record.get("plan_id")
    row["error"] = "; ".join(filter(None, [row["error"], *_damage(row, steps, plan, ending)])) or None
    if row["nodes"] is None and isinstance(record.get("hosts"), list):
        row["nodes"], row["ranks"] = len(set(map(str, record["hosts"]))), len(record["hosts"])
    traffic = _map(record.get("traffic"))
    row["header_factor"] = _number(traffic.get("header_factor"))
    row["header_factors"] = to_json(_map(traffic.get("header_factors")))
    setup = _map(traffic.get("setup"))
    row["setup_tx_bytes"] = to_json({name: _map(pair).get("tx") for name, pair in setup.items()})
    row["planned_bytes_per_step"] = to_json(_map(_map(plan.get("predicted")).get("nic_bytes_per_step")))
    return row, steps


def plain_name(path: str | Path) -> str:
    """A name that can be printed and stored, whatever bytes the file system has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _first_of_plan(record: dict[str, Any]) -> int:
    """The number of the attempt since when all have had the plan that the run has now."""
    plans = [_map(a).get("plan_id") or record.get("plan_id") for a in record["attempts"]]
    return max((i + 2 for i, plan in enumerate(plans) if plan != record.get("plan_id")), default=1)


def _damage(row: dict[str, Any], steps: Steps, plan: dict[str, Any], ending: dict[str, Any] | None) -> list[str]:
    """What of a recorded run cannot be read."""
    found = [f"metrics.jsonl: {steps.broken} lines cannot be read"] if steps.broken else []
    if row["attempts"] and not plan:
        found.append("plan.yaml cannot be read")
    if ending is not None and not isinstance(ending.get("state"), str):
        found.append("result.json cannot be read")
    return found


def _read_record(run: RunDirectory) -> dict[str, Any]:
    where = str(run.run_path)
    try:
        return check_run(read_blocks(run.run_path.read_text(encoding="utf-8")), where)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RecordError(" ".join(str(e).split()), where=where, hint="restore the file") from e


def read_plan(run: RunDirectory) -> dict[str, Any]:
    """plan.yaml as plain data (PLAN_KEYS of it); empty where there is none."""
    try:
        return _plan(run.plan_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


@lru_cache(maxsize=1000)
def _plan(text: str) -> dict[str, Any]:
    """Repeats share a plan, byte for byte."""
    return _map(read_blocks(text, PLAN_KEYS))


def _identity(record: dict[str, Any], steps: Steps, ending: dict[str, Any]) -> dict[str, Any]:
    attempts = [a for a in record["attempts"] if isinstance(a, dict)]
    result = ending if int(ending.get("attempt") or 0) >= len(attempts) else {}  # of the latest attempt
    slurm, labels = _map(record["slurm"]), _map(record.get("labels") or _map(record["config"]).get("labels"))
    submitted, starts = _time(slurm.get("submitted")), [s for a in attempts if (s := _time(a.get("started")))]
    started = starts[0] if starts else None
    after = next((s for s in starts if submitted and s >= submitted - SECOND), None)  # resumed, it is submitted again
    queue_s = max(0.0, _between(submitted, after)) if after else math.nan
    ended = _time(result.get("time")) if result else None
    state = result.get("state") if result else "unfinished" if attempts or len(steps) else "not-started"
    return {
        "state": str(state), "error": _text(result.get("error")), "exit_code": _whole(result.get("exit_code")),
        "failed_rank": _whole(result.get("failed_rank")), "failed_node": _text(result.get("failed_node")),
        "version": _whole(record["version"]), "created": _time(record["created"]), "submitted": submitted,
        "started": started, "ended": ended, "queue_s": queue_s, "wall_s": _between(started, ended),
        "attempts": len(attempts), "job_id": _whole(slurm.get("job_id")),
        "session": _text(record.get("session") or labels.get("session")), "labels": to_json(labels),
        "git_commit": _text(record.get("git_commit")), "device": _text(record.get("device"))}


def _configuration(record: dict[str, Any]) -> dict[str, Any]:
    config = _map(record["config"])
    train, plan = _map(config.get("train")), _map(config.get("plan"))
    pace = record.get("pace_layer_ms", train.get("pace_layer_ms"))
    overlap = [train.get("overlap_grad_reduce"), train.get("overlap_param_gather")]
    return {"pace_layer_ms": _number(pace), "overrides": to_json([str(o) for o in record["overrides"] or []]),
            "config": to_json(config), "partition": _text(plan.get("partition")),
            "overlap": None if None in overlap else all(overlap)}


def _plan_columns(plan: dict[str, Any]) -> dict[str, Any]:
    model, batch, parallel = _map(plan.get("model")), _map(plan.get("batch")), _map(plan.get("parallel"))
    predicted, site = _map(plan.get("predicted")), _map(plan.get("site"))
    components = [c for c in plan.get("components") or [] if isinstance(c, dict)]
    nodes: dict[str, int] = {}
    for c in components:
        nodes[str(c.get("fabric"))] = nodes.get(str(c.get("fabric")), 0) + int(c.get("nodes") or 0)
    stages = [s.get("layers") for s in plan.get("stages") or [] if isinstance(s, dict)]
    return {
        "strategy": _text(plan.get("strategy")), "transport": _text(plan.get("transport_mode")),
        "schedule": _text(_map(plan.get("schedule")).get("kind")), "recompute": _text(plan.get("recompute")),
        "edge_dtype": _text(plan.get("edge_dtype")), "site": _text(site.get("name")),
        "environment": environment(nodes, nic_types(plan)) if nodes else None,
        "placement": " ".join(f"{name}:{count}" for name, count in nodes.items()) or None,
        "layers_per_stage": ",".join(map(str, stages)) or None, "nodes": sum(nodes.values()) if nodes else None,
        "ranks": sum(int(c.get("nodes") or 0) * int(c.get("gpus_per_node") or 0) for c in components) or None,
        "model": _text(model.get("name")), "model_spec": to_json(model) if model else None,
        "global_batch": _whole(batch.get("global_size")), "micro_batch": _whole(batch.get("micro_size")),
        "sequence_length": _whole(batch.get("sequence_length")),
        "virtual_stages": _whole(parallel.get("virtual_stages")),
        **{name: _whole(parallel.get(name)) for name in ("tp", "pp", "dp")},
        "predicted_step_time_s": _number(predicted.get("step_time_s")),
        "predicted_samples_per_s": _number(predicted.get("samples_per_s"))}


def nic_types(plan: Mapping[str, Any]) -> dict[str, str]:
    """Fabric name -> its NIC type, of the plan's site."""
    fabrics = _map(plan.get("site")).get("fabrics") or []
    return {str(f.get("name")): str(f.get("nic")) for f in fabrics if isinstance(f, dict)}


def environment(nodes: Mapping[str, int], types: Mapping[str, str]) -> str:
    """What the NIC environment of a placement (fabric -> nodes) is called: IB, RoCE, Ethernet; hybrid for IB with RoCE;
    otherwise a list, `2 x IB`, `IB + RoCE + Ethernet`; one node: no NIC."""
    if sum(nodes.values()) == 1:
        return "one node"
    kinds = [types.get(name, name) for name in nodes]
    if sorted(kinds) == ["ib", "roce"]:
        return "hybrid"
    words = []
    for kind in sorted(set(kinds), key=lambda k: (list(NIC_WORDS).index(k) if k in NIC_WORDS else 9, k)):
        count = kinds.count(kind)
        words.append(f"{count} x {NIC_WORDS.get(kind, kind)}" if count > 1 else NIC_WORDS.get(kind, kind))
    return " + ".join(words)


def figures(steps: Steps) -> dict[str, Any]:
    """A run's figures over its steps after the warm-up."""
    count, kept = len(steps), slice(steps.left_out, None)
    if count == steps.earlier:
        return {"steps": count, "earlier_steps": steps.earlier, "warmup_steps": 0}
    times = median_interval(steps.scalars["step_time_s"][kept])
    stages, kinds = steps.breakdown.shape[1], list(steps.tx)
    many = np.concatenate([steps.means, steps.breakdown.reshape(len(PARTS) * stages, count),
                           *(v[None] for v in steps.tx.values()), *(v[None] for v in steps.rx.values())])[:, kept]
    parts, of_stages, tx, rx = np.split(_medians(many), np.cumsum([len(PARTS), len(PARTS) * stages, len(kinds)]))
    by_stage = of_stages.reshape(len(PARTS), stages).T
    while len(by_stage) and np.isnan(by_stage[-1]).all():
        by_stage = by_stage[:-1]  # a stage that only an earlier plan had
    return {
        "steps": count, "earlier_steps": steps.earlier, "warmup_steps": steps.warmup,
        "step_time_s": times.median, "step_time_low_s": times.low, "step_time_high_s": times.high,
        **{name: harmonic_mean(steps.scalars[name][kept])
           for name in ("samples_per_s", "tokens_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu")},
        "first_loss": float(steps.scalars["loss"][0]), "loss": float(steps.scalars["loss"][-1]),
        "grad_norm": float(steps.scalars["grad_norm"][-1]),
        **{part: float(parts[i]) for i, part in enumerate(PARTS)},
        "stage_breakdown": to_json([dict(zip(PARTS, stage, strict=True)) for stage in by_stage.tolist()]),
        "tx_bytes_per_step": to_json(dict(zip(kinds, tx.tolist(), strict=True))),
        "rx_bytes_per_step": to_json(dict(zip(kinds, rx.tolist(), strict=True))),
        "peak_memory_bytes": steps.peak}


def _medians(values: Floats) -> Floats:
    """Medians of the rows, of the numbers among their values."""
    if not np.isnan(values).any():
        return np.median(values, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN: the median is NaN, as it should be
        return np.asarray(np.nanmedian(values, axis=1))


def _ending(run: RunDirectory) -> dict[str, Any] | None:
    """What result.json says; empty when it cannot be read, None when there is none."""
    try:
        return _map(json.loads(run.result_path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _hydra_overrides(directory: Path) -> str:
    try:
        found = yaml.safe_load((directory / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = None
    return to_json([str(o) for o in found] if isinstance(found, list) else [])


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


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
