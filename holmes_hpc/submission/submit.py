"""Handing a batch script to Slurm, once: an answer that got lost is looked up, not asked for twice."""

from __future__ import annotations

import re
import time
from pathlib import Path

from submitit.core.utils import FailedSubmissionError

from holmes_hpc.errors import SubmissionError
from holmes_hpc.submission.commands import Answer, slurm
from holmes_hpc.submission.states import SEPARATOR

_BUSY = ("Slurm temporarily unable to accept job", "Resource temporarily unavailable", "try again later",
         "maximum number of jobs")


class Refused(SubmissionError, FailedSubmissionError):
    """Slurm refused a job: ours (one line, exit code 2) and submitit's error at once."""


def submit_file(path: Path, token: str, *, patience_s: float = 120) -> str:
    """Submit a batch script whose comment holds `token` (unique); the leader's job id comes back.

    Raises Refused with Slurm's reason. While the controller is away it waits up to `patience_s`; when it may have taken
    the job before it went away, the job is looked for by its token first.
    """
    end, pause = time.monotonic() + patience_s, 1.0
    while True:
        answer = slurm("sbatch", "--parsable", str(path), timeout_s=120)
        if answer.ok:
            return parse_id(answer)
        unsure = answer.away and "Connection refused" not in answer.err
        if unsure:
            job_id = find_token(token, end)
            if job_id:
                return job_id
        elif not answer.away and not any(word in answer.err for word in _BUSY[:2]):
            raise Refused(answer.reason, where="sbatch", cure="change what the job asks for")
        if time.monotonic() + pause > end:
            raise Refused(f"{answer.reason} (for {patience_s:.0f} s)", where="sbatch",
                          cure="wait until the controller answers (`scontrol ping`), then submit again")
        time.sleep(pause)
        pause = min(2 * pause, 15)


def parse_id(answer: Answer) -> str:
    """The job id in sbatch's answer (``--parsable``: ``ID`` or ``ID;CLUSTER``)."""
    match = re.search(r"^(\d+)(;.*)?$", answer.out.strip(), re.MULTILINE)
    if match is None:
        raise Refused(f"sbatch answered {answer.out.strip()[:60]!r}", where="sbatch", cure="look with `squeue --me`")
    return match.group(1)


def find_token(token: str, end: float) -> str | None:
    """The id of the job that carries `token` in its comment; None when the controller answers that there is none.
    Raises Refused when it does not answer until `end`."""
    pause = 1.0
    while True:
        answer = slurm("squeue", "--me", "--noheader", "--states=all", f"--format=%i{SEPARATOR}%k")
        if answer.ok:
            held = [line for line in answer.out.splitlines() if token in line]
            return held[0].split(SEPARATOR)[0].partition("+")[0].strip() if held else None
        if time.monotonic() + pause > end:
            raise Refused("the controller went away during the submission, so whether the job exists is unknown",
                          where="sbatch", cure=f"look for it: squeue --me -o '%i %k' | grep {token}")
        time.sleep(pause)
        pause = min(2 * pause, 15)
