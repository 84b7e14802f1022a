"""Handing a batch script to Slurm, once: an answer that got lost is looked up, not asked for twice."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from submitit.core.utils import FailedSubmissionError

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import interrupt_here, slurm
from holmes_hpc.slurm.job_queries import SEPARATOR

_BUSY = ("Slurm temporarily unable to accept job", "Resource temporarily unavailable")


class Refused(SubmissionError, FailedSubmissionError):
    """Slurm refused a job: ours (one line, exit code 2) and submitit's error at once."""


class Unsure(Refused):
    """Nobody knows whether Slurm took the job."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Whatever refuses a job inside (preflight, the script's text) does it as Slurm's own refusals do."""
    try:
        yield
    except Refused:
        raise
    except SubmissionError as e:
        raise Refused(e.what, where=e.where, hint=e.hint) from e


def submit_file(path: Path, token: str, *, patience_s: float = 120) -> str:
    """Submit a batch script whose comment holds `token` (unique); the leader's job id comes back.

    Raises Refused with Slurm's reason, Unsure where the job may exist all the same. While the controller is away it
    waits up to `patience_s`; when it may have taken the job before it went away, the job is looked for by its token
    first.
    """
    end, pause = time.monotonic() + patience_s, 1.0
    while True:
        answer = slurm("sbatch", "--parsable", str(path), timeout_s=120)
        if answer.ok:
            match = re.search(r"^(\d+)(;.*)?$", answer.out.strip(), re.MULTILINE)  # ID or ID;CLUSTER
            if match is None:
                said = answer.out.strip()[:60]
                raise Unsure(f"sbatch answered {said!r}", where="sbatch", hint="look with `squeue --me`")
            return match[1]
        if answer.away and "Connection refused" not in answer.err:  # it may have taken the job
            if job_id := find_token(token, end):
                return job_id
        elif not answer.away and not any(word in answer.err for word in _BUSY):
            raise Refused(answer.reason, where="sbatch", hint="change what the job asks for")
        if time.monotonic() + pause > end:
            raise Refused(
                f"{answer.reason} (for {patience_s:.0f} s)",
                where="sbatch",
                hint="wait until the controller answers (`scontrol ping`), then submit again",
            )
        interrupt_here()
        time.sleep(pause)
        pause = min(2 * pause, 15)


def find_token(token: str, end: float) -> str | None:
    """The id of the job that carries `token` in its comment; None when the controller answers that there is none.
    Raises Unsure when it does not answer until `end`."""
    pause = 1.0
    while True:
        answer = slurm("squeue", "--me", "--noheader", "--states=all", f"--format=%i{SEPARATOR}%k")
        if answer.ok:
            held = [line for line in answer.out.splitlines() if token in line]
            return held[0].split(SEPARATOR)[0].partition("+")[0].strip() if held else None
        if time.monotonic() + pause > end:
            raise Unsure(
                "the controller went away during the submission, so whether the job exists is unknown",
                where="sbatch",
                hint=f"look for it: squeue --me -o '%i %k' | grep {token}",
            )
        time.sleep(pause)
        pause = min(2 * pause, 15)


@contextlib.contextmanager
def cancelled_on_error(job_id: str) -> Iterator[None]:
    """Inside, a job is recorded that Slurm has taken; one that cannot be is cancelled: nobody would know of it."""
    try:
        yield
    except BaseException:
        slurm("scancel", job_id)
        raise
