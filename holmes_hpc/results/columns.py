"""The columns of the tables of runs, steps and stages: name -> (type, what it is). Types are pandas' names.

Texts may be missing (None), figures NaN. Which keys a configuration, a run's labels or its NIC counters have differs
from run to run: each such group of keys gives a family of columns, named by a prefix and the key (`config.train.lr`,
`tx_bytes_ib-a`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
from pandas.api.types import infer_dtype

from holmes_hpc.config.plan_options import SCHEDULES
from holmes_hpc.records.metrics import BREAKDOWN, FIELDS, PARTS

RUN_COLUMNS: dict[str, tuple[str, str]] = {
    "run": ("string", "path of the run below the loaded directory (its name where that is the run itself)"),
    "path": ("string", "its directory"),
    "name": ("string", "its name"),
    "state": (
        "string",
        "completed, failed, cancelled, timeout, preempted; unfinished: steps or a start but no end; "
        "not-started; unreadable: `error` says why",
    ),
    "error": ("string", "the error, one line; also of a completed run whose files are damaged"),
    "exit_code": ("Int64", "of the job"),
    "failed_rank": ("Int64", "the rank that failed first"),
    "failed_node": ("string", "its node"),
    "version": ("Int64", "of the record's schema"),
    "created": ("datetime64[ns, UTC]", "when the run directory was made"),
    "submitted": ("datetime64[ns, UTC]", "when Slurm took the job"),
    "started": ("datetime64[ns, UTC]", "start of the first attempt"),
    "ended": ("datetime64[ns, UTC]", "when its end was recorded"),
    "queue_s": ("float64", "from the latest submission to the start that followed"),
    "wall_s": ("float64", "from the first start to the end, waits between attempts included"),
    "attempts": ("Int64", "how often it was started"),
    "job_id": ("Int64", "Slurm's, of the leader"),
    "session": ("string", "runs of one session of the machine (`labels.session`) can be compared in pairs"),
    "git_commit": ("string", "of the code"),
    "device": ("string", "cpu, or the GPU's name"),
    "pace_layer_ms": ("float64", "paced compute: forward time of a layer by waiting; NaN: not paced"),
    "overrides": ("object", "Hydra's overrides, a list of texts"),
    "plan_id": ("string", "what the plan does, as 12 hex digits"),
    "strategy": ("string", "one-fabric, pipeline or hierarchical-dp"),
    "transport": ("string", "holmes: the best of each group; single: plain Megatron-LM's one for all"),
    "schedule": ("string", ", ".join(SCHEDULES)),
    "recompute": ("string", "none, selective or full"),
    "edge_dtype": ("string", "of activations on TCP edges"),
    "overlap": ("boolean", "gradient reduction and parameter gather overlapped with computing"),
    "partition": ("string", "how layers were divided: exact, proportional (the paper's rule), uniform"),
    "site": ("string", "the site's name"),
    "environment": ("string", "IB, RoCE, Ethernet, hybrid (IB and RoCE), a list with counts, or one node"),
    "placement": ("string", "nodes of each fabric, `ib-a:2 roce-a:2`"),
    "layers_per_stage": ("string", "`13,11`"),
    "nodes": ("Int64", "nodes used"),
    "ranks": ("Int64", "ranks, one per GPU"),
    "model": ("string", "the model's name"),
    "global_batch": ("Int64", "samples a step"),
    "micro_batch": ("Int64", "samples a micro-batch"),
    "sequence_length": ("Int64", "tokens a sample"),
    "tp": ("Int64", "tensor parallel"),
    "pp": ("Int64", "pipeline stages"),
    "dp": ("Int64", "data parallel"),
    "virtual_stages": ("Int64", "model chunks of one pipeline rank"),
    "predicted_step_time_s": ("float64", "by the plan"),
    "predicted_samples_per_s": ("float64", "by the plan"),
    "steps": ("Int64", "different steps recorded"),
    "earlier_steps": ("Int64", "of them, made under an earlier plan (`holmes resume --plan`)"),
    "warmup_steps": ("Int64", "of the others, warm-up; both are left out of all figures below but losses and peak"),
    "step_time_s": ("float64", "median"),
    "step_time_low_s": ("float64", "lower end of its 95% interval (order statistics); NaN below 6 steps"),
    "step_time_high_s": ("float64", "upper end"),
    "samples_per_s": ("float64", "harmonic mean"),
    "tokens_per_s": ("float64", "harmonic mean"),
    "model_tflops_per_gpu": ("float64", "harmonic mean, model FLOPs only"),
    "hardware_tflops_per_gpu": ("float64", "harmonic mean, with recomputation"),
    "first_loss": ("float64", "of the first step"),
    "loss": ("float64", "of the last step"),
    "validation_loss": ("float64", "the last that was taken"),
    "grad_norm": ("float64", "of the last step"),
    **{part: ("float64", "median over steps of the mean over stages") for part in PARTS},
    "header_factor": ("float64", "counted bytes over payload bytes, measured in the run, mean over NIC kinds"),
    "peak_memory_bytes": ("float64", "the most of any rank"),
    "missing": ("string", "what its files lack because an older release wrote them: they are read without it"),
}


class Family(NamedTuple):
    """Columns of the table of runs, one for each key that any run has: named `prefix` and the key."""

    prefix: str
    keys: str
    meaning: str
    kind: str | None = "float64"  # None: the type that holds all values of a column


FAMILIES = {  # by the key in `holmes report --json`
    "labels": Family("labels.", "NAME", "what the runs were labelled with", None),
    "config": Family("config.", "GROUP.KEY", "the resolved configuration", None),
    "model_spec": Family("model.", "KEY", "the model, its sizes too, as the plan has it", None),
    "planned_bytes_per_step": Family("planned_bytes_", "NIC", "planned payload bytes that all nodes send in a step"),
    "stage_breakdown": Family("stage_", "N.PART", "median seconds over steps of a part, mean over a stage's ranks"),
    "tx_bytes_per_step": Family("tx_bytes_", "NIC", "median bytes that all nodes' counters sent in a step"),
    "rx_bytes_per_step": Family("rx_bytes_", "NIC", "the same, received"),
    "setup_tx_bytes": Family("setup_tx_bytes_", "NIC", "bytes sent before the first step: rendezvous and control"),
    "header_factors": Family("header_factor_", "NIC", "`header_factor` of one fabric or ethernet"),
}
_TYPES = {
    "integer": "Int64",
    "floating": "float64",
    "mixed-integer-float": "float64",
    "boolean": "boolean",
    "string": "string",
}

STEP_COLUMNS: dict[str, tuple[str, str]] = {
    "run": ("category", "as in the table of runs"),
    "step": ("int32", FIELDS["step"].meaning),
    "attempt": ("int16", "the attempt that counts"),
    "warmup": ("bool", "left out of the run's figures"),
    **{
        name: ("float64", f"{FIELDS[name].unit}: {FIELDS[name].meaning}".removeprefix(": "))
        for name in (
            "time",
            "step_time_s",
            "loss",
            "validation_loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_s",
            "samples_per_s",
            "model_tflops_per_gpu",
            "hardware_tflops_per_gpu",
        )
    },
    **{part: ("float64", f"s: {what}, mean over stages") for part, what in BREAKDOWN.items()},
    # and for every fabric (or ethernet) NAME: tx_bytes_NAME, rx_bytes_NAME, float64, summed over all nodes
}

STAGE_COLUMNS: dict[str, tuple[str, str]] = {
    "run": ("category", "as in the table of runs"),
    "stage": ("int64", "from 0"),
    **{part: ("float64", "median over steps") for part in PARTS},
}

_ARROW = {
    "string": pa.string(),
    "Int64": pa.int64(),
    "int32": pa.int32(),
    "int16": pa.int16(),
    "float64": pa.float64(),
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "datetime64[ns, UTC]": pa.timestamp("ns", tz="UTC"),
    "object": pa.list_(pa.string()),
}


def arrow_type(kind: str) -> pa.DataType:
    """What a column of the pandas type `kind` is kept as on disk."""
    return _ARROW[kind]


def family_columns(name: str, entries: list[dict[str, Any]]) -> dict[str, pd.Series[Any]]:
    """Columns of the family `name`, from {key: value} of every run; missing where a run lacks the key."""
    family = FAMILIES[name]
    columns = {}
    for key in dict.fromkeys(key for entry in entries for key in entry):
        values = [entry.get(key) for entry in entries]
        kind = family.kind or _TYPES.get(infer_dtype(values, skipna=True), "object")
        columns[f"{family.prefix}{key}"] = pd.Series(values, dtype=kind)
    return columns


def family(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """{key: value} of the family `name` in a row of the table of runs, without what is missing there."""
    prefix = FAMILIES[name].prefix
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix) and known(value)}


def stage_breakdown(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """[{part: median seconds} for each stage] of a row of the table of runs."""
    parts = family(row, "stage_breakdown")
    stages = 1 + max((int(key.partition(".")[0]) for key in parts), default=-1)
    return [{part: parts.get(f"{stage}.{part}", math.nan) for part in PARTS} for stage in range(stages)]


def known(value: Any) -> bool:
    """Whether there is a value: not None, not pandas' missing ones, and a float is finite."""
    return (
        value is not None
        and value is not pd.NA
        and value is not pd.NaT
        and not (isinstance(value, float) and not math.isfinite(value))
    )


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """{"train.lr": 1} as {"train": {"lr": 1}}."""
    tree: dict[str, Any] = {}
    for name, value in entries.items():
        *groups, key = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[key] = value
    return tree
