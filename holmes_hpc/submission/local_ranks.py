"""The ranks of a local job without GPUs: what takes long to load is loaded once, and every rank is forked from there.

Submitit's local controller starts this as the job's one task; each fork then is a task of submitit's, with the logs and
the result of its own rank. A fork after CUDA was asked for devices cannot use them, so ranks with GPUs are processes of
their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from submitit.core.submission import process_job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, LocalJobEnvironment

from holmes_hpc.lifetime import end_with
from holmes_hpc.submission.lifecycle.failed_rank import note_ends

F = TypeVar("F", bound=Callable[..., Any])
PICKLE_WAIT_S = 60  # as submitit: the job's number, and so its pickle's name, is known only after its start


def loads_first(load: Callable[[dict[str, Any]], object]) -> Callable[[F], F]:
    """A rank's function whose `load(config)` imports what takes long, so that the ranks of a machine share it."""

    def mark(function: F) -> F:
        function.load = load  # type: ignore[attr-defined]
        return function

    return mark


def _load(pickle: Path) -> None:
    """What the job's ranks need, as far as it can be had: what is missing each of them says itself."""
    end = time.monotonic() + PICKLE_WAIT_S
    while not pickle.exists() and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(Exception):
        task = DelayedSubmission.load(pickle).function
        getattr(task.function, "load", lambda _: None)(task.config)


def _forked(ranks: int, folder: Path) -> int | None:
    """None in a rank; here the exit code of the job, when all have ended. What this process is told, they are told."""
    own, both = JobPaths(folder, os.environ["SUBMITIT_LOCAL_JOB_ID"]), bool(os.environ["SUBMITIT_STDERR_TO_STDOUT"])
    signals, parent = {signal.SIGTERM, LocalJobEnvironment._usr_sig()}, os.getpid()
    living, told = dict[int, int](), set[int]()  # process: rank; what they were told

    def tell(number: int, _: FrameType | None) -> None:
        told.add(number)
        for pid in living:
            os.kill(pid, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # those that come meanwhile arrive afterwards
    try:
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                _be(rank, ranks, JobPaths(own.folder, own.job_id, rank), both, parent)
                return None
            living[pid] = rank
        for number in signals:
            signal.signal(number, tell)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    ends = []
    while living:
        pid, status = os.wait()
        ends.append((living.pop(pid), os.waitstatus_to_exitcode(status)))
    note_ends(own.folder, own.job_id, signal.SIGTERM in told, ends)
    codes = [code for _, code in ends]
    return LOCAL_REQUEUE_RETURN_CODE if LOCAL_REQUEUE_RETURN_CODE in codes else int(any(codes))


def _be(rank: int, ranks: int, paths: JobPaths, both: bool, parent: int) -> None:
    """Make this fork the task `rank`; it ends with its parent, however that ends."""
    end_with(parent)
    os.environ.update(
        SUBMITIT_LOCAL_NTASKS=str(ranks), SUBMITIT_LOCAL_LOCALID=str(rank), SUBMITIT_LOCAL_GLOBALID=str(rank)
    )
    for number, path in ((1, paths.stdout), (2, paths.stdout if both else paths.stderr)):
        to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(to, number)
        os.close(to)


def main(folder: Path, ranks: int) -> None:
    _load(JobPaths(folder, os.environ["SUBMITIT_LOCAL_JOB_ID"]).submitted_pickle)
    sys.stdout.flush()
    sys.stderr.flush()
    ended = _forked(ranks, folder)
    if ended is not None:
        sys.exit(ended)
    process_job(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
