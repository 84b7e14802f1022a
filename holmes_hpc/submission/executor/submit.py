"""Submission of a batch script exactly once: if sbatch's answer is lost, the job is searched for before a retry."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedSubmissionError

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import interrupt_here, slurm
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.waiting import attempts

_BUSY = ("Slurm temporarily unable to accept job", "Resource temporarily unavailable")


class Refused(SubmissionError, FailedSubmissionError):
    """The error for a job that Slurm refused. It is a HolmesError (one line, exit code 2) and an error of submitit."""


class SubmissionUnknown(Refused):
    """The error for a submission that Slurm did not answer: the job may exist."""


@contextlib.contextmanager
def errors_as_refused(advice: str = "") -> Iterator[None]:
    """Convert a SubmissionError of the block to Refused. `advice`: text to add to its hint."""
    try:
        yield
    except Refused:
        raise
    except SubmissionError as e:
        raise Refused(e.what, where=e.where, hint="; ".join(filter(None, (e.hint, advice)))) from e


def submit_file(path: Path, token: str, *, patience_s: float = 120) -> str:
    """Submit the batch script at `path`, whose comment contains the unique `token`. Return the leader's job id.

    While the controller does not answer, retry for up to `patience_s`. If it may have accepted the job, search for the
    token before. Raise Refused if Slurm refuses the job or the last retry fails, SubmissionUnknown if it may exist."""
    for left_s in attempts(patience_s, 1, longest_pause_s=15):
        answer = slurm("sbatch", "--parsable", str(path), timeout_s=120)
        if answer.ok:
            match = re.search(r"^(\d+)(;.*)?$", answer.out.strip(), re.MULTILINE)  # ID or ID;CLUSTER
            if match is None:
                problem = f"sbatch printed {answer.out.strip()[:60]!r} instead of a job id"
                raise SubmissionUnknown(problem, where="sbatch", hint="look for the job: `squeue --me`")
            return match[1]
        may_be_accepted = answer.is_unreachable and "Connection refused" not in answer.err
        if may_be_accepted and (job_id := find_job(token, left_s)):
            return job_id
        if not answer.is_unreachable and not any(message in answer.err for message in _BUSY):
            raise Refused(answer.reason, where="sbatch", hint="change the job's options")
        interrupt_here()
    hint = "wait until the controller answers (`scontrol ping`), then submit again"
    raise Refused(f"{answer.reason} (retried for {patience_s:.0f} s)", where="sbatch", hint=hint)


def find_job(token: str, timeout_s: float) -> str | None:
    """Return the id of the job whose comment contains `token`; None if there is none.
    Raise SubmissionUnknown if the controller does not answer for `timeout_s`."""
    for _ in attempts(timeout_s, 1, longest_pause_s=15):
        answer = slurm("squeue", "--me", "--noheader", "--states=all", f"--format=%i{SEPARATOR}%k")
        if answer.ok:
            lines = [line for line in answer.out.splitlines() if token in line]
            return lines[0].split(SEPARATOR)[0].partition("+")[0].strip() if lines else None
    problem = "the controller stopped answering during the submission, so the job may exist"
    raise SubmissionUnknown(problem, where="sbatch", hint=f"look for the job: squeue --me -o '%i %k' | grep {token}")


@contextlib.contextmanager
def on_error(undo: Callable[..., object], *arguments: Any, **options: Any) -> Iterator[None]:
    """Call ``undo(*arguments, **options)`` if the block fails."""
    try:
        yield
    except BaseException:
        undo(*arguments, **options)
        raise


def cancel_on_error(job_id: str) -> contextlib.AbstractContextManager[None]:
    """Cancel the job if the block, which should record it, fails. Otherwise nobody would know of the job."""
    return on_error(slurm, "scancel", job_id)
