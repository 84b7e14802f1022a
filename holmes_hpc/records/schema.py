"""Which files a run directory has and what is in them; run.yaml's text as data (docs/records.md shows it by example).

`run.yaml`: what was run (:data:`RUN_FIELDS`).
`plan.yaml`: the Plan, as `holmes plan` writes it (schema: holmes_hpc/planning/spec/plan.py).
`metrics.jsonl`: a line per step (schema: holmes_hpc/records/metrics.py).
`nics/NODE.jsonl`: a line per step by each node: `step, attempt, node, nics{interface or device:port: {tx, rx}}`, bytes.
`logs/rank-N.txt`, `trace/rank-N.jsonl`, `checkpoints/`: what ranks print, their timeline, what a run goes on from.
`exits/rank-N.json`: how a rank ended: `rank, state (completed|failed|preempted), error, host, attempt, time`,
and of a rank that was told to end `signal`, its name.
`result.json`: how the run ended, written last, by the batch script or the follower only: `version, state, exit_code,
error, failed_rank, failed_node, log_tail[], final{}, writer, attempt, time`.

Readers take records of this version and older ones, with keys missing, and of runs that died; newer ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from holmes_hpc.errors import RecordError
from holmes_hpc.records.untrusted import from_yaml

VERSION = 1
SKIPPED = {"checkpoints", "logs", "trace", "exits", ".hydra", ".submitit"}  # never hold runs, may hold many files
OWN_FILES = {
    "run.yaml",
    "plan.yaml",
    "metrics.jsonl",
    "result.json",
    ".lock",
    ".training",
    "checkpoints",
    "logs",
    "trace",
    "exits",
    "nics",
    "submission",
    "data",
}  # of a run directory whose run has not made a step
RunState = Literal["completed", "failed", "cancelled", "timeout", "preempted"]  # of result.json
STATES: tuple[RunState, ...] = get_args(RunState)
BLANK_RESULT: dict[str, Any] = {"error": None, "failed_rank": None, "failed_node": None, "log_tail": [], "final": {}}

# run.yaml: field -> what it is.
RUN_FIELDS = {
    "version": "of this schema",
    "name": "the run's",
    "created": "when, UTC",
    "config": "the resolved configuration",
    "overrides": "Hydra's, a list",
    "slurm": "job_id, submitted (Unix s) and what else is known of the job",
    "attempts": "one entry per start: attempt, started, plan_id, host, by, ...",
    "plan_id": "what the plan does, as 12 hex digits",
    "components": "as planned: partition, constraint, fabric, nodes, gpus_per_node of each",
    "pace_layer_ms": "ms of waiting in place of a layer's forward pass; null: computing was not paced",
    "versions": "of holmes, python, torch and megatron-core",
    "git_commit": "of the code",
    "hosts": "by rank",
    "cpus": "by rank, on GPUs: the CPUs that it keeps to, how they lie to its GPU, and the HCAs beside it",
    "nics": "every process group: kind, ranks, transport, and its interface on each of its nodes",
    "device": "cpu, or the GPU's name",
    "traffic": "before the first step: setup {fabric or ethernet: {tx, rx}}, header_factor, header_factors",
}


def parse_run(text: str, where: str = "run.yaml") -> dict[str, Any]:
    """run.yaml's text as plain data; keys that older versions or half-made runs lack get their empty values.
    RecordError for what is no run record, or one of a newer version."""
    try:
        data = from_yaml(text)
    except yaml.YAMLError as e:
        raise RecordError(f"not YAML: {e}", where=where, hint="restore the file") from e
    if not isinstance(data, dict):
        raise RecordError("not a run record", where=where, hint="restore the file")
    check_version(data, where)
    empty: dict[str, Any] = {
        "version": VERSION,
        "name": Path(where).resolve().parent.name,
        "created": None,
        "config": {},
        "overrides": [],
        "slurm": {},
        "attempts": [],
    }
    if not isinstance(data.get("attempts"), (list, type(None))):
        raise RecordError(f"attempts is {data['attempts']!r}", where=where, hint="restore the file")
    return {**empty, **{key: value for key, value in data.items() if value is not None or key not in empty}}


def missing_fields(record: Mapping[str, Any]) -> list[str]:
    """What this release writes of every run that made a step, and `record` (of :func:`parse_run`) has not: an older
    release made it. The version, the name and no overrides are taken for granted where they are not there."""
    filled, some = ("created", "config", "attempts"), ("cpus",)  # `some`: only some runs have it
    return [
        name
        for name in RUN_FIELDS
        if (name not in record and name not in some) or (name in filled and not record[name])
    ]


def check_version(data: Mapping[str, Any], where: str) -> None:
    """RecordError where a record is of a newer version than this release reads."""
    version = data.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise RecordError(
            f"record version {version!r}, this release reads up to {VERSION}",
            where=where,
            hint="use the holmes_hpc release that wrote it, or a newer one",
        )
