"""The columns of the tables of runs, steps and stages: name -> (type, what it is). Types are pandas' names.

Texts may be missing (None), figures NaN. Maps and lists have no type that pandas and Arrow share, so they are JSON
texts (`config`, `labels`, `tx_bytes_per_step`, …): :func:`unpack` turns such a column into columns.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pyarrow as pa

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
    "labels": ("string", "JSON: whatever the runs were labelled with"),
    "git_commit": ("string", "of the code"),
    "device": ("string", "cpu, or the GPU's name"),
    "pace_layer_ms": ("float64", "paced compute: forward time of a layer by waiting; NaN: not paced"),
    "overrides": ("string", "JSON: the list of Hydra's overrides"),
    "config": ("string", "JSON: the resolved configuration"),
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
    "model_spec": ("string", "JSON: all of the model, its sizes too, as the plan has it"),
    "global_batch": ("Int64", "samples a step"),
    "micro_batch": ("Int64", "samples a micro-batch"),
    "sequence_length": ("Int64", "tokens a sample"),
    "tp": ("Int64", "tensor parallel"),
    "pp": ("Int64", "pipeline stages"),
    "dp": ("Int64", "data parallel"),
    "virtual_stages": ("Int64", "model chunks of one pipeline rank"),
    "predicted_step_time_s": ("float64", "by the plan"),
    "predicted_samples_per_s": ("float64", "by the plan"),
    "planned_bytes_per_step": ("string", "JSON: {fabric or ethernet: payload bytes that all nodes send in a step}"),
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
    "stage_breakdown": ("string", "JSON: [{part: median seconds} for each stage]"),
    "tx_bytes_per_step": ("string", "JSON: {fabric or ethernet: median bytes that all nodes' counters sent in a step}"),
    "rx_bytes_per_step": ("string", "JSON: the same, received"),
    "setup_tx_bytes": ("string", "JSON: sent before the first step: rendezvous and control"),
    "header_factor": ("float64", "counted bytes over payload bytes, measured in the run, mean over NIC kinds"),
    "header_factors": ("string", "JSON: the same for each fabric or ethernet"),
    "peak_memory_bytes": ("float64", "the most of any rank"),
    "missing": ("string", "what its files lack because an older release wrote them: they are read without it"),
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
}


def arrow_type(kind: str) -> pa.DataType:
    """What a column of the pandas type `kind` is kept as on disk."""
    return _ARROW[kind]


def unpack(frame: pd.DataFrame, column: str, *keys: str) -> pd.DataFrame:
    """`frame` with columns `COLUMN.KEY` from a JSON column: all keys at its top level, or the dotted `keys` wanted
    (``unpack(runs, "config", "train.lr", "plan.pp")``)."""
    parsed = [json.loads(text) if isinstance(text, str) else {} for text in frame[column]]
    wanted = list(keys) or sorted({key for entry in parsed for key in entry})
    new = {f"{column}.{key}": [_dig(entry, key) for entry in parsed] for key in wanted}
    return pd.concat([frame, pd.DataFrame(new, index=frame.index)], axis=1)


def _dig(value: Any, dotted: str) -> Any:
    if isinstance(value, dict) and dotted in value:
        return value[dotted]
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
