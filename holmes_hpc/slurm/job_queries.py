"""Queries of jobs with sacct, squeue and scontrol, parsed into one row per component."""

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from holmes_hpc.slurm.commands import slurm, slurm_with_retries
from holmes_hpc.slurm.hostlist import numbers
from holmes_hpc.slurm.job_states import UNKNOWN, JobState, Row, SlurmState, join
from holmes_hpc.tables import read_table

SEPARATOR = "\x1f"
_SACCT, _SQUEUE, _SCONTROL = read_table(__file__).values()  # field of a row -> its source in the output
SQUEUE = ["squeue", "--me", "--array", "--noheader", "--states=all", f"--format={SEPARATOR.join(_SQUEUE.values())}"]
SCONTROL = ["scontrol", "--oneliner", "show", "job"]  # all jobs
_TOKEN = r"submission_file_([0-9a-f]{32})"  # in the path of the executor's batch scripts


def sacct_command(ids: Iterable[str]) -> list[str]:
    fields, jobs = ",".join(_SACCT.values()), ",".join(sorted({i.partition("_")[0] for i in ids}))
    options = ["--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}"]
    return ["sacct", *options, f"--format={fields}", f"--jobs={jobs}"]


def _parse(text: str, fields: Iterable[str]) -> list[Row]:
    """Return the rows in lines of one cell per field. Cells after the name may be missing, but not the name."""
    lines = (dict(zip(fields, line.split(SEPARATOR), strict=False)) for line in text.splitlines())
    return [row for cells in lines if "name" in cells for row in _rows(cells)]


parse_sacct: Callable[[str], list[Row]] = partial(_parse, fields=_SACCT)  # the output of sacct_command
parse_squeue: Callable[[str], list[Row]] = partial(_parse, fields=_SQUEUE)  # the output of SQUEUE


def _rows(cells: Mapping[str, str]) -> list[Row]:
    """Return a row for each job that the id in `cells` names."""
    return [
        Row(
            *identity,
            # ``CANCELLED by 0`` becomes CANCELLED, ``RUNNING+`` becomes RUNNING.
            state=cast(SlurmState, (cells["state"].split() or [UNKNOWN])[0].rstrip("+").upper()),
            name=cells["name"],
            submitted=_number(cells["submitted"]),
            nodes=_or_empty(cells["nodes"]),
            reason=_or_empty(cells["reason"]),
            exit_code=_exit_status(cells.get("exit_code", "")),
            start=_number(cells.get("start", "")),
            token=_value(_TOKEN, cells.get("command", "")),
        )
        for identity in _identities(cells["id"])
    ]


def _exit_status(text: str) -> int | None:
    """Convert ``CODE:SIGNAL`` to a shell's exit status, CODE or else 128 + SIGNAL; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    code, signal_number = (int(match[1]), int(match[2] or 0)) if match else (0, 0)
    return (code or 128 * bool(signal_number) + signal_number) if match else None


def job_field(job_id: str, field: str) -> str | None:
    """Return the value of a field of squeue's format (``%U``) for a job; None if Slurm does not know the job."""
    answer = slurm("squeue", "--noheader", f"--jobs={job_id}", "--states=all", f"--format=%i {field}")
    line = answer.out.strip().partition("\n")[0] if answer.ok else ""
    return line.partition(" ")[2].strip() if line else None


def parse_scontrol(text: str) -> list[Row]:
    """Return the rows in the output of `SCONTROL`. Lines without a job and a state are skipped."""
    rows = []
    for line in text.splitlines():
        cells = {field: _value(pattern, line) for field, pattern in _SCONTROL.items()}
        if cells["id"] and cells["state"]:
            leader, array = cells["leader"] or cells["id"], f"{cells['array']}_[{cells['tasks']}]"
            rows += _rows({**cells, "id": array if cells["array"] else f"{leader}+{cells['offset'] or 0}"})
    return rows


def _value(pattern: str, line: str) -> str:
    """Return the group of `pattern` in `line`, empty if there is no match."""
    match = re.search(pattern, line)
    return match[1] if match else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _identities(job_id: str) -> list[tuple[str, int]]:
    """Return (leader's job id, index of the component) of each job that `job_id` names. ``12+1`` is ("12", 1);
    ``12_[3-4%2]`` is ("12_3", 0) and ("12_4", 0). Steps (``12.0``) name none."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+)|_\[?([\d,-]+)(?:%\d+)?\]?)?", job_id.strip())
    if match is None:
        return []
    if match[3] is None:
        return [(match[1], int(match[2] or 0))]
    return [(f"{match[1]}_{number}", 0) for number in numbers(match[3])]


def _or_empty(text: str) -> str:
    return "" if text in ("None", "(null)", "None assigned", "N/A") else text


def ending_state(job_id: str) -> JobState | None:
    """Return the state with which this process's job ends; None if slurmctld does not answer in 10 s. Of the
    components, only the leader counts, because it ends first."""
    rows = _leader_rows(job_id)
    return join(rows, "scontrol") if rows else None


def has_script_failed(job_id: str) -> bool:
    """Return whether this process's job is ending because its batch script failed or was killed."""
    return any(row.exit_code and row.state in ("COMPLETING", "FAILED") for row in _leader_rows(job_id))


def _leader_rows(job_id: str) -> list[Row]:
    answer = slurm(*SCONTROL, job_id, timeout_s=10) if job_id else None
    rows = parse_scontrol(answer.out) if answer is not None and answer.ok else []
    return [replace(row, state="TIMEOUT") if row.reason == "TimeLimit" else row for row in rows if row.offset == 0]


def requeue(job_id: str) -> tuple[str | None, bool]:
    """Requeue the job that this process runs in.
    Return (why Slurm refused, or None; whether Slurm had already requeued the job by itself)."""
    answer = slurm_with_retries(["scontrol", "requeue", job_id], patience_s=60, timeout_s=30)
    is_terminated = answer.code == -signal.SIGTERM  # a requeue ends everything in the job, including scontrol
    was_requeued = "pending execution" in answer.err
    return None if answer.ok or is_terminated or was_requeued else f"scontrol requeue: {answer.reason}", was_requeued


def disable_requeue(job_id: str) -> None:
    """Keep Slurm from restarting a job that is about to fail.
    From 25.11 on, Slurm would requeue and hold a failed job that has ``--requeue=expedite``."""
    if "ExpeditedRequeue=Yes" in slurm(*SCONTROL, job_id, timeout_s=10).out:
        slurm("scontrol", "update", f"JobId={job_id}", "Requeue=0", timeout_s=30)
