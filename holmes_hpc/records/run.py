"""Reader and writer of a run directory: run.yaml, metrics.jsonl, the ranks' exit records and result.json.

holmes_hpc/records/schema.py describes these files.
"""

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from holmes_hpc.errors import RecordError
from holmes_hpc.records.files import append_line, locked, map_leaves, to_json, write_whole
from holmes_hpc.records.line_file import LineFile
from holmes_hpc.records.metrics import rounded
from holmes_hpc.records.schema import BLANK_RESULT, STATES, VERSION, check_version, parse_run
from holmes_hpc.records.untrusted import (
    BLOCK_BYTES,
    MAX_LINES_BYTES,
    from_json,
    objects_of_lines,
    open_file,
    read_file,
    read_object,
)

# The writers of result.json, the one with the least authority first. Only the batch script sees the exit codes.
Writer = Literal["follower", "batch"]
WRITERS: tuple[Writer, ...] = get_args(Writer)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:  # aliases are hard to read for people
        return True


def now() -> str:
    """Return the time in UTC as ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class RunDirectory:
    """The records of one run under `path`. The constructor touches no file; see :meth:`create` and :func:`find_run`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.run_path = self.path / "run.yaml"
        self.plan_path = self.path / "plan.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.result_path = self.path / "result.json"
        self.logs = self.path / "logs"
        self.trace = self.path / "trace"
        self.checkpoints = self.path / "checkpoints"
        self.nics = self.path / "nics"
        self.exits = self.path / "exits"
        self.metrics_file, self.ranks_file = LineFile(self.metrics_path), LineFile(self.path / "ranks.jsonl")

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def log_path(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.txt"

    def trace_path(self, rank: int) -> Path:
        return self.trace / f"rank-{rank}.jsonl"

    def exists(self) -> bool:
        """Return whether the directory has a run's record."""
        return self.run_path.is_file()

    # -- run.yaml ---------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan_text: str | None = None,
        config: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **ids: Any,
    ) -> "RunDirectory":
        """Create a run directory. run.yaml is written last, so a directory that has a run.yaml is complete.

        `plan_text`: the text of plan.yaml; `config`: the resolved configuration; `overrides`: the user's; `ids`: more
        keys of run.yaml. Raise RecordError if the directory already holds a run or cannot be created."""
        run = cls(path)
        if run.exists():
            hint = "continue it with `holmes resume`, or give another directory"
            raise RecordError("it already holds a run", where=str(run.path), hint=hint)
        hint = "give a directory that you can create, on a file system all nodes share"
        with RecordError.instead_of(OSError, where=run.path, hint=hint):
            for directory in (run.path, run.logs, run.trace, run.checkpoints, run.exits):
                if directory.is_symlink() and not directory.exists():
                    problem = f"it is a link to {os.readlink(directory)}, which does not exist"
                    raise RecordError(problem, where=str(directory), hint="remove it, or mount that file system")
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if plan_text is not None:
            write_whole(run.plan_path, plan_text)
        settings = {"config": dict(config or {}), "overrides": list(overrides), "attempts": []}
        run._write_run({"version": VERSION, "name": run.name, "created": now(), **ids, **settings})
        return run

    def read_run(self) -> dict[str, Any]:
        """Return run.yaml, with at least the keys `version, name, created, config, overrides, slurm, attempts`."""
        what, hint = "not a run directory (no run.yaml)", "give a directory under runs/ (or HOLMES_RUNS)"
        unreadable = RecordError.instead_of(OSError, UnicodeDecodeError, where=self.run_path, hint="restore the file")
        with unreadable, RecordError.instead_of(FileNotFoundError, where=self.path, hint=hint, what=what):
            return parse_run(read_file(self.run_path).decode("utf-8"), str(self.run_path))

    @property
    def config(self) -> dict[str, Any]:
        """The run's resolved configuration."""
        config = self.read_run().get("config")
        if not isinstance(config, dict):
            raise RecordError("it has no configuration", where=str(self.run_path), hint="start a new run")
        return config

    @property
    def is_elastic(self) -> bool:
        """Whether the run was submitted with ``--elastic``."""
        return bool((self.config.get("elastic") or {}).get("enabled"))

    def update_run(self, **values: Any) -> None:
        """Set top-level keys of run.yaml. A lock keeps other writers out meanwhile."""
        with locked(self.path / ".lock"):
            self._write_run({**self.read_run(), **values})

    def start_attempt(self, values: Mapping[str, Any] | None = None) -> int:
        """Record a new attempt in run.yaml and return its number. The first attempt has the number 1.
        :meth:`read_result` then ignores results of earlier attempts. `values`: more keys of the attempt."""
        with locked(self.path / ".lock"):
            data = self.read_run()
            number = len(data["attempts"]) + 1
            data["attempts"].append({"attempt": number, "started": now(), **(values or {})})
            self._write_run(data)
        return number

    def update_attempt(self, attempt: int, **values: Any) -> None:
        """Set keys of a recorded attempt. Other writers wait meanwhile."""
        with locked(self.path / ".lock"):
            data = self.read_run()
            data["attempts"][attempt - 1] |= values
            self._write_run(data)

    @property
    def attempt(self) -> int:
        """The number of the latest attempt; 0 before the first."""
        return len(self.read_run()["attempts"])

    def _write_run(self, data: dict[str, Any]) -> None:
        style: Any = {"sort_keys": False, "default_flow_style": None, "width": 110, "allow_unicode": True}
        hint = "record strings, numbers, lists"
        with RecordError.instead_of(yaml.YAMLError, where=self.run_path, hint=hint, what="not plain data:"):
            text = yaml.dump(map_leaves(data, _plain), Dumper=_Dumper, **style)
        write_whole(self.run_path, text)

    # -- metrics.jsonl ----------------------------------------------------------------------------------------------

    def append_metrics(self, line: Mapping[str, Any], warn: Callable[[str], object] = str) -> None:
        """Append the metrics of one step to metrics.jsonl, rounded by :func:`rounded`. On a full disk the line waits;
        see :meth:`LineFile.append`. Raise RunFailed if it cannot be written."""
        if not isinstance(line.get("step"), int):
            problem = f"the step's number is {line.get('step')!r}"
            raise RecordError(problem, where=str(self.metrics_path), hint="use a whole number")
        self.metrics_file.append(to_json(rounded(line)), warn=warn)

    def append_ranks(self, line: Mapping[str, Any]) -> None:
        """Append one step's measurements of all ranks to ranks.jsonl, as :meth:`append_metrics` does."""
        self.ranks_file.append(to_json(line))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step as a mapping, in order of steps. Steps that a restart undid are left out.

        An attempt undoes all steps that earlier attempts made at or after its own first step. If an attempt wrote two
        lines for a step, the second line adds keys, such as the validation loss. Broken lines are skipped."""
        steps: dict[int, tuple[int, dict[str, Any]]] = {}  # step -> (latest attempt that made it, its metrics)
        for step, attempt, entry in self.metrics_lines():
            latest, previous = steps.get(step, (1, {}))
            if attempt >= latest:
                steps[step] = attempt, {**previous, **entry} if attempt == latest else entry
        in_order = [steps[step] for step in sorted(steps)]
        latest_attempts = accumulate((attempt for attempt, _ in in_order), max)
        return [entry for (attempt, entry), latest in zip(in_order, latest_attempts, strict=True) if attempt == latest]

    def metrics_lines(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield the step, attempt and content of each line of metrics.jsonl. Broken lines are skipped."""
        for raw in io.BytesIO(self.metrics_bytes()):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
                entry = from_json(raw)
                yield int(entry["step"]), int(entry.get("attempt") or 1), entry

    def metrics_bytes(self) -> bytes:
        """Return the bytes of metrics.jsonl; empty if there is none."""
        unreadable = RecordError.instead_of(OSError, where=self.metrics_path, hint="restore the file")
        with unreadable, contextlib.suppress(FileNotFoundError):
            return read_file(self.metrics_path, MAX_LINES_BYTES)
        return b""

    def metrics_blocks(self) -> Iterator[bytes]:
        """Yield the complete lines of metrics.jsonl in blocks of about BLOCK_BYTES."""
        unreadable = RecordError.instead_of(OSError, where=self.metrics_path, hint="restore the file")
        with unreadable, contextlib.suppress(FileNotFoundError), open_file(self.metrics_path) as file:
            while lines := file.readlines(BLOCK_BYTES):
                yield b"".join(lines if lines[-1].endswith(b"\n") else lines[:-1])

    # -- exits and results ------------------------------------------------------------------------------------------

    def write_exit(
        self, rank: int, state: str, error: str | None = None, host: str | None = None, **extra: Any
    ) -> None:
        """Append the exit record of a rank to its node's file in exits/. Ranks never write result.json.

        `rank`: the global rank; `state`: one of STATES; `error`: the cause in one line; `host`: the rank's node, by
        default this node; `extra`: more keys. If `extra` includes `attempt`, run.yaml is not read."""
        self.exits.mkdir(mode=0o755, parents=True, exist_ok=True)
        host = host or os.uname().nodename
        data = {"rank": rank, "state": state, "error": error, "host": host}
        data |= {"attempt": extra.get("attempt") or self.attempt, "time": time.time(), **extra}
        append_line(self._exits_of(host), to_json(data))

    def _exits_of(self, host: str) -> Path:
        return self.exits / f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.jsonl"

    def read_exits(self, host: str = "") -> list[dict[str, Any]]:
        """Return the exit record of each rank in the latest attempt; only of ranks on `host`, if it is given. The
        earliest record comes first, because it usually is the cause."""
        attempt = self.attempt
        exits = [
            (order, data)
            for path in ([self._exits_of(host)] if host else self.exits.glob("*.json*"))  # of old runs, a file per rank
            for data in objects_of_lines(path)
            if (order := _exit_order(data)) and order[0] >= attempt
        ]
        last_of_rank = {order[2]: (order, data) for order, data in sorted(exits, key=itemgetter(0))}
        return [data for _, data in sorted(last_of_rank.values(), key=lambda exit_record: exit_record[0][1:])]

    def write_result(self, result: Mapping[str, Any], writer: Writer = "batch") -> bool:
        """Write the result of the latest attempt to result.json. Return False if the existing result is kept instead.

        Within an attempt, a result of the batch script replaces a result of a follower, which is a process that only
        watches the job. Of two results by the same writer, the one with more steps is kept; if both have equally many,
        the first one. `result`: the keys of result.json, at least `state` (one of STATES)."""
        with locked(self.path / ".lock"):
            defaults = {**BLANK_RESULT, "exit_code": 0 if result["state"] == "completed" else 1}
            defaults |= {"attempt": self.attempt, "time": time.time()}
            data = {"version": VERSION, **defaults, **result, "writer": writer}
            previous = read_object(self.result_path)
            if previous is not None and _authority(previous) >= _authority(data):
                return False
            write_whole(self.result_path, json.dumps(json.loads(to_json(data)), indent=1, ensure_ascii=False) + "\n")
        for rendezvous in self.path.glob("rendezvous-*.json"):  # left by killed ranks
            with contextlib.suppress(OSError):
                rendezvous.unlink()
        return True

    def reopen(self, plan_text: str | None = None) -> dict[Path, Path]:
        """Prepare an ended run for another attempt. Return {old path: new path} of the files that were renamed.
        result.json gets a name with the number of the ended attempt, such as result-1.json. If `plan_text` is given,
        plan.yaml is renamed in the same way, and a new plan.yaml is written."""
        with locked(self.path / ".lock"):
            files = [self.plan_path] * (plan_text is not None) + [self.result_path] * self.result_path.exists()
            number = self.attempt
            renamed = {path: self.path / f"{path.stem}-{number}{path.suffix}" for path in files}
            for path, new_path in renamed.items():
                os.replace(path, new_path)
            if plan_text is not None:
                write_whole(self.plan_path, plan_text)
        return renamed

    def close_again(self, renamed: Mapping[Path, Path], record: Mapping[str, Any]) -> None:
        """Undo :meth:`reopen`. `renamed`: what it returned; `record`: the content of run.yaml before the call."""
        with locked(self.path / ".lock"):
            for path, new_path in renamed.items():
                os.replace(new_path, path)
            self._write_run(dict(record))

    def read_result(self, latest_attempt: int | None = None) -> dict[str, Any] | None:
        """Return the result of the latest attempt, with all keys of result.json; None if it has no readable result.
        `latest_attempt`: the number of that attempt, if the caller knows it; None: read it from run.yaml."""
        data = read_object(self.result_path)
        if data is None:
            return None
        attempt = data.get("attempt")
        if isinstance(data.get("version"), int):
            check_version(data, str(self.result_path))
        if data.get("state") not in STATES or not isinstance(attempt, int):
            return None
        if attempt < (self.attempt if latest_attempt is None else latest_attempt):
            return None
        return {**BLANK_RESULT, "exit_code": 0 if data["state"] == "completed" else 1, "writer": WRITERS[0], **data}


def _authority(result: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the sort key of a result: (attempt, index of its writer in WRITERS, last step).
    The result with the higher key is kept. A broken result has the lowest key."""
    writer, final = result.get("writer"), result.get("final") or {}
    with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):
        rank = WRITERS.index(writer) if writer in WRITERS else -1
        return int(result.get("attempt") or 0), rank, int(final.get("step") or 0)
    return (-1, -1, -1)


def _exit_order(exit_record: Mapping[str, Any]) -> tuple[int, float, int] | None:
    """Return (attempt, time, rank) of an exit record; None if it has no rank or state, or if one is no number."""
    if exit_record.get("state") not in STATES:
        return None
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        attempt, end_time = int(exit_record.get("attempt") or 0), float(exit_record.get("time") or 0)
        return attempt, end_time, int(exit_record["rank"])
    return None


def _plain(value: Any) -> Any:
    """Return a path, or an instance of a subclass of str, as a plain str for PyYAML; other values unchanged."""
    return str(value) if isinstance(value, (str, os.PathLike)) else value
