"""The columns of the tables of runs, steps and stages: name -> (type, meaning). Types are pandas' names.

Their values come from results/loading: of a run from run_row.py, of its steps from steps.py, of stages from loader.py.

Missing texts are None, missing numbers NaN. The keys of a configuration, of a run's labels and of its NIC counters
differ from run to run. Each such group of keys becomes a family of columns, whose names are a prefix and a key
(`config.train.lr`, `tx_bytes_ib-a`)."""

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
    "run": ("string", "path relative to the loaded directory; the run's name if that directory is the run"),
    "path": ("string", "run directory"),
    "name": ("string", "run name"),
    "state": (
        "string",
        "completed, failed, cancelled, timeout, preempted; unfinished: started, no recorded end; "
        "not-started; unreadable: see `error`",
    ),
    "error": ("string", "one line; completed runs with damaged files have one too"),
    "exit_code": ("Int64", "exit code of the job"),
    "failed_rank": ("Int64", "the rank that failed first"),
    "failed_node": ("string", "the node of that rank"),
    "version": ("Int64", "version of the record's schema"),
    "created": ("datetime64[ns, UTC]", "when the run directory was created"),
    "submitted": ("datetime64[ns, UTC]", "when Slurm accepted the job"),
    "started": ("datetime64[ns, UTC]", "start of the first attempt"),
    "ended": ("datetime64[ns, UTC]", "when the end was recorded"),
    "queue_s": ("float64", "seconds between the latest submission and the start after it"),
    "wall_s": ("float64", "seconds from the first start to the end, including waits between attempts"),
    "attempts": ("Int64", "number of starts"),
    "job_id": ("Int64", "Slurm job id of the leader"),
    "session": ("string", "`labels.session`; runs of one session are compared in pairs"),
    "git_commit": ("string", "git commit of the code"),
    "device": ("string", "cpu, or the GPU's name"),
    "pace_layer_ms": ("float64", "emulated compute: forward time of a layer; NaN: real compute"),
    "overrides": ("object", "list of Hydra overrides"),
    "plan_id": ("string", "hash of the plan's content, 12 hex digits"),
    "strategy": ("string", "one-fabric, pipeline or hierarchical-dp"),
    "transport": (
        "string",
        "holmes: the best transport of each group; single: one for all groups, as plain Megatron-LM",
    ),
    "schedule": ("string", ", ".join(SCHEDULES)),
    "recompute": ("string", "none, selective or full"),
    "edge_dtype": ("string", "data type of activations on TCP edges"),
    "overlap": ("boolean", "whether gradient reduction and parameter gather overlap with compute"),
    "partition": ("string", "how layers are divided: exact, proportional (the paper's rule), uniform"),
    "site": ("string", "name of the site"),
    "environment": ("string", "IB, RoCE, Ethernet, hybrid (IB and RoCE), a list with counts, or one node"),
    "placement": ("string", "nodes of each pool, `ib-a:2 roce-a:2`"),
    "layers_per_stage": ("string", "`13,11`"),
    "nodes": ("Int64", "number of nodes"),
    "ranks": ("Int64", "number of ranks, one per GPU"),
    "model": ("string", "name of the model"),
    "global_batch": ("Int64", "samples per step"),
    "micro_batch": ("Int64", "samples per micro-batch"),
    "sequence_length": ("Int64", "tokens per sample"),
    "tp": ("Int64", "tensor-parallel size"),
    "pp": ("Int64", "number of pipeline stages"),
    "dp": ("Int64", "data-parallel size"),
    "virtual_stages": ("Int64", "model chunks per pipeline rank"),
    "predicted_step_time_s": ("float64", "by the plan"),
    "predicted_samples_per_s": ("float64", "by the plan"),
    "steps": ("Int64", "number of distinct steps recorded"),
    "earlier_steps": ("Int64", "steps run under an earlier plan (`holmes resume --plan`)"),
    "warmup_steps": (
        "Int64",
        "warm-up steps under this plan; figures below exclude them and earlier steps, except losses and peak memory",
    ),
    "step_time_s": ("float64", "median"),
    "step_time_low_s": ("float64", "lower end of the median's 95% interval; NaN for fewer than 6 steps"),
    "step_time_high_s": ("float64", "upper end of this interval"),
    "samples_per_s": ("float64", "harmonic mean"),
    "tokens_per_s": ("float64", "harmonic mean"),
    "model_tflops_per_gpu": ("float64", "harmonic mean, model FLOPs only"),
    "hardware_tflops_per_gpu": ("float64", "harmonic mean, with recomputation"),
    "share_of_limit": ("float64", "harmonic mean"),
    "first_loss": ("float64", "of the first step"),
    "loss": ("float64", "of the last step"),
    "validation_loss": ("float64", "the last validation loss"),
    "grad_norm": ("float64", "of the last step"),
    **{part: ("float64", "median over steps, mean over stages") for part in PARTS},
    "header_factor": (
        "float64",
        "bytes counted on NICs per byte of payload, measured in the run, mean over fabrics and ethernet",
    ),
    "peak_memory_bytes": ("float64", "maximum over ranks"),
    "missing": ("string", "fields that the run's files lack because an older release wrote them"),
}


class Family(NamedTuple):
    """A family of columns of the table of runs: one column, named `prefix` and a key, for each key that any run has.
    `keys`: what the keys are, for the documentation; `kind`: pandas' type of the columns."""

    prefix: str
    keys: str
    meaning: str
    kind: str | None = "float64"  # None: for each column the type that holds its values


FAMILIES = {  # by the key in `holmes report --json`
    "labels": Family("labels.", "NAME", "the runs' labels", None),
    "config": Family("config.", "GROUP.KEY", "the resolved configuration", None),
    "model_spec": Family("model.", "KEY", "the model and its sizes, from the plan", None),
    "planned_bytes_per_step": Family("planned_bytes_", "NIC", "planned payload bytes per step, sent by all nodes"),
    "stage_breakdown": Family("stage_", "N.PART", "seconds of a part: median over steps, mean over the stage's ranks"),
    "tx_bytes_per_step": Family("tx_bytes_", "NIC", "median bytes per step sent by all nodes, as counted"),
    "rx_bytes_per_step": Family("rx_bytes_", "NIC", "median bytes per step received by all nodes, as counted"),
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
    "attempt": ("int16", "the latest attempt that ran this step"),
    "warmup": ("bool", "whether the step is excluded from the run's figures"),
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
            "share_of_limit",
        )
    },
    **{part: ("float64", f"s: {meaning}, mean over stages") for part, meaning in BREAKDOWN.items()},
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
    """Return the Arrow type that stores a column of the pandas type `kind`."""
    return _ARROW[kind]


def family_columns(name: str, entries: list[dict[str, Any]]) -> dict[str, pd.Series[Any]]:
    """Return {name: column} of the family `name`. `entries`: {key: value} of each run; missing keys are NaN or None."""
    family = FAMILIES[name]
    columns = {}
    for key in dict.fromkeys(key for entry in entries for key in entry):
        values = [None if _is_too_large(value := entry.get(key)) else value for entry in entries]
        kind = family.kind or _TYPES.get(infer_dtype(values, skipna=True), "object")
        columns[f"{family.prefix}{key}"] = pd.Series(values, dtype=kind)
    return columns


def _is_too_large(value: Any) -> bool:
    """Return whether `value` is an integer that does not fit into 64 bits, which no column can hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def family_values(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return {key: value} of the family `name` in a row of the table of runs, without missing values."""
    prefix = FAMILIES[name].prefix
    return {
        key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix) and has_value(value)
    }


def stage_breakdown(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return a list with {part of a step: median seconds} of each pipeline stage, from a row of the table of runs."""
    parts = family_values(row, "stage_breakdown")
    stages = 1 + max((int(key.partition(".")[0]) for key in parts), default=-1)
    return [{part: parts.get(f"{stage}.{part}", math.nan) for part in PARTS} for stage in range(stages)]


def has_value(value: Any) -> bool:
    """Return whether `value` is known: not None, not pandas' NA or NaT, and not a NaN or infinite float."""
    return (
        value is not None
        and value is not pd.NA
        and value is not pd.NaT
        and not (isinstance(value, float) and not math.isfinite(value))
    )
