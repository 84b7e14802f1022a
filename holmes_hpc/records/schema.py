"""The files of a run directory and their content, and the parser of run.yaml. docs/records.md has examples.

`run.yaml`: the run's settings, attempts and hardware (:data:`RUN_FIELDS`).
`plan.yaml`: the Plan, as `holmes plan` writes it (schema: holmes_hpc/planning/plan/plan.py).
`metrics.jsonl`: a line per step (schema: holmes_hpc/records/metrics.py).
`ranks.jsonl`: a line every 100 steps: `step, attempt`, and lists with one entry per rank: `compute_s[],
peak_memory_bytes[]`.
`nics/NODE.jsonl`: a line per step with the bytes of a node's NICs: `step, attempt, node, nics{NIC: {tx, rx}}`. A NIC is
named by its interface, or as device:port.
`logs/rank-N.txt`, `trace/rank-N.jsonl`, `checkpoints/`: the output of each rank, its timeline, and the checkpoints.
`exits/NODE.jsonl`: how each rank of a node ended: `rank, state (completed|failed|preempted), error, host, attempt,
time`; if a signal ended the rank, `signal` is the name of that signal.
`result.json`: how the run ended: `version, state, exit_code, error, failed_rank, failed_node, log_tail[], final{},
writer, attempt, time`. It is written last, by the batch script, or by a command that follows the job (a follower).

Readers accept files of this and earlier versions, missing keys, and runs that were killed. They refuse later versions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from holmes_hpc.errors import RecordError
from holmes_hpc.records.untrusted import from_yaml
from holmes_hpc.tables import read_table

VERSION = 1
SKIPPED = {"checkpoints", "logs", "trace", "exits", ".hydra", ".submitit"}  # contain no runs, and possibly many files
_FOLDERS = ("checkpoints", "logs", "trace", "exits", "nics", "submission", "data")
# The names that a run directory may contain before the run's first step.
OWN_FILES = {"run.yaml", "plan.yaml", "metrics.jsonl", "ranks.jsonl", "result.json", ".lock", ".training", *_FOLDERS}
RunState = Literal["completed", "failed", "cancelled", "timeout", "preempted"]  # of result.json
STATES: tuple[RunState, ...] = get_args(RunState)
BLANK_RESULT: dict[str, Any] = {"error": None, "failed_rank": None, "failed_node": None, "log_tail": [], "final": {}}

RUN_FIELDS: dict[str, str] = read_table(__file__)  # of run.yaml: field -> meaning


def parse_run(text: str, where: str = "run.yaml") -> dict[str, Any]:
    """Parse the text of run.yaml into plain data; missing keys get empty values. `where`: the file's path, for errors.
    Raise RecordError if the text is not a run record, or has a newer version than this release can read."""
    with RecordError.instead_of(yaml.YAMLError, where=where, hint="restore the file", what="not YAML:"):
        data = from_yaml(text)
    if not isinstance(data, dict):
        raise RecordError("not a run record: no keys with values", where=where, hint="restore the file")
    check_version(data, where)
    empty: dict[str, Any] = {"version": VERSION, "name": Path(where).resolve().parent.name, "created": None}
    empty |= {"config": {}, "overrides": [], "slurm": {}, "attempts": []}
    for key in ("attempts", "overrides"):
        if not isinstance(data.get(key), (list, type(None))):
            raise RecordError(f"{key} is {data[key]!r}, not a list", where=where, hint="restore the file")
    return {**empty, **{key: value for key, value in data.items() if value is not None or key not in empty}}


def missing_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the fields of run.yaml that `record` (from :func:`parse_run`) lacks because an older release wrote it.
    A run that has made a step should have every field. `cpus` is not checked, because only ranks on GPUs write it."""
    empty = [name for name in ("created", "config", "attempts") if not record.get(name)]
    return [name for name in RUN_FIELDS if name in empty or name not in (*record, "cpus")]


def check_version(data: Mapping[str, Any], where: str) -> None:
    """Raise RecordError if this release is too old to read the record in `data`. `where`: its path, for the error."""
    version = data.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        problem = f"the record has version {version!r}, and this release reads versions up to {VERSION}"
        raise RecordError(problem, where=where, hint="use the holmes_hpc release that wrote it, or a newer one")
