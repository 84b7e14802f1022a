"""Asking Slurm about jobs: the questions to sacct, squeue and scontrol, and their answers as rows, one a component."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from holmes_hpc.slurm.commands import slurm
from holmes_hpc.slurm.job_states import UNKNOWN, JobState, Row, join

SEPARATOR = "\x1f"
SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Reason", "NodeList", "JobName")


def sacct_command(ids: Iterable[str]) -> list[str]:
    return ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
            "--format=" + ",".join(SACCT_FIELDS), "--jobs=" + ",".join(sorted(ids))]


def parse_sacct(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = line.split(SEPARATOR)
        identity = _identity(cells[0])
        if identity is None or len(cells) < len(SACCT_FIELDS):
            continue
        exited = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", cells[2])
        code, signal = (int(exited[1]), int(exited[2] or 0)) if exited else (0, 0)
        status = (code or 128 * bool(signal) + signal) if exited else None
        rows.append(Row(*identity, _word(cells[1]), cells[6], _number(cells[3]), _none(cells[5]), _none(cells[4]),
                        status))
    return rows


SQUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%V", "%r", "%N", "%j"))


def squeue_command(ids: Iterable[str] = ()) -> list[str]:
    return ["squeue", "--me", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}"]


def parse_squeue(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = line.split(SEPARATOR)
        identity = _identity(cells[0])
        if identity is not None and len(cells) >= 6:
            rows.append(Row(*identity, _word(cells[1]), cells[5], _number(cells[2]), _none(cells[4]), _none(cells[3])))
    return rows


def scontrol_command(ids: Iterable[str] = ()) -> list[str]:
    return ["scontrol", "--oneliner", "show", "job"]


def parse_scontrol(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        job = re.search(r"\bJobId=(\d+)", line)
        state = re.search(r"\bJobState=(\S+)", line)
        if job is None or state is None:
            continue
        leader, offset = re.search(r"\bHetJobId=(\d+)", line), re.search(r"\bHetJobOffset=(\d+)", line)
        name = re.search(r"\bJobName=(.*?)(?:\s+HetJobIdSet=\S*)?\s+UserId=", line)
        exit_code = re.search(r"\bExitCode=(\d+):(\d+)", line)
        reason, restarts = re.search(r"\bReason=(.*?)\s+Dependency=", line), re.search(r"\bRestarts=(\d+)", line)
        nodes, submitted = re.search(r"\sNodeList=(\S+)", line), re.search(r"\bSubmitTime=(\S+)", line)
        rows.append(Row(
            leader.group(1) if leader else job.group(1), int(offset.group(1)) if offset else 0, _word(state.group(1)),
            name.group(1) if name else "", _number(submitted.group(1)) if submitted else None,
            _none(nodes.group(1)) if nodes else "", _none(reason.group(1)) if reason else "",
            int(exit_code.group(1)) or int(exit_code.group(2)) if exit_code else None,
            int(restarts.group(1)) if restarts else 0))
    return rows


def _word(state: str) -> str:
    """``CANCELLED by 0`` and ``RUNNING+`` without their tails."""
    return (state.split() or [UNKNOWN])[0].rstrip("+").upper()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _identity(job_id: str) -> tuple[str, int] | None:
    """``12+1`` -> ("12", 1); steps, arrays' sub-jobs and the like: None."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", job_id.strip())
    return (match.group(1), int(match.group(2) or 0)) if match else None


def _none(text: str) -> str:
    return "" if text in ("None", "(null)", "None assigned", "N/A") else text


def ending_state(job_id: str) -> JobState | None:
    """How the controller says that the job ends in which this process runs, if it answers soon; the leader's row
    counts, which ends first."""
    if not job_id:
        return None
    answer = slurm("scontrol", "--oneliner", "show", "job", job_id, timeout_s=10)
    rows = [replace(row, state="TIMEOUT") if row.reason == "TimeLimit" else row
            for row in (parse_scontrol(answer.out) if answer.ok else []) if row.offset == 0]
    return join(rows, "scontrol") if rows else None
