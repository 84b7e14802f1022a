"""The ranks of a local job: one process imports the slow modules, forks every rank, and records how each exits.

Submitit's local controller starts this module as the job's only task. Each fork then acts as one of submitit's tasks,
with the logs and the result of its rank. Ranks with GPUs import the modules: a fork cannot use its parent's GPUs.
"""

import atexit
import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.submission import process_job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, LocalJobEnvironment

from holmes_hpc.lifetime import end_with
from holmes_hpc.submission.executor.task import prepare
from holmes_hpc.submission.lifecycle.failed_rank import record_local_exits


def preload(pickle: Path) -> dict[str, Any]:
    """Call ``load(config)``, an attribute of the ranks' function, so that all ranks of this machine share its slow
    imports. Return the configuration. Ignore errors of the imports, because each rank reports them."""
    task = DelayedSubmission.load(pickle).function
    with contextlib.suppress(Exception):
        getattr(task.function, "load", lambda _: None)(task.config)
    return dict(task.config)


def _fork_ranks(ranks: int, folder: Path) -> int | None:
    """Fork the ranks and pass signals on to them. Return None in a rank; in the parent, the job's exit code."""
    paths = JobPaths(folder, os.environ["SUBMITIT_LOCAL_JOB_ID"])
    signals, parent = {signal.SIGTERM, LocalJobEnvironment._usr_sig()}, os.getpid()
    ranks_by_pid, received = dict[int, int](), set[int]()

    def forward(number: int, _: FrameType | None) -> None:
        received.add(number)
        for pid in ranks_by_pid:
            os.kill(pid, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # delivered after the forks
    try:
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                _become_rank(rank, ranks, JobPaths(paths.folder, paths.job_id, rank), parent)
                return None
            ranks_by_pid[pid] = rank
        for number in signals:
            signal.signal(number, forward)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    exits = []
    while ranks_by_pid:
        pid, status = os.wait()
        exits.append((ranks_by_pid.pop(pid), os.waitstatus_to_exitcode(status)))
    record_local_exits(paths.folder, paths.job_id, signal.SIGTERM in received, exits)
    codes = [code for _, code in exits]
    return LOCAL_REQUEUE_RETURN_CODE if LOCAL_REQUEUE_RETURN_CODE in codes else int(any(codes))


def _become_rank(rank: int, ranks: int, paths: JobPaths, parent: int) -> None:
    """Give this fork the variables and output files of submitit's task `rank`. Make it end when `parent` ends."""
    end_with(parent)
    ids = dict.fromkeys(("SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_GLOBALID"), str(rank))
    os.environ.update(ids, SUBMITIT_LOCAL_NTASKS=str(ranks))
    redirect_output(paths.stdout, paths.stdout if os.environ["SUBMITIT_STDERR_TO_STDOUT"] else paths.stderr)


def redirect_output(stdout: Path, stderr: Path) -> None:
    """Append the standard output and error of this process to files."""
    for number, path in ((1, stdout), (2, stderr)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(handle, number)
        os.close(handle)


def _end_without_destructors(completed: list[bool]) -> None:
    """End this rank if it has completed. Freeing its modules would first copy them from the parent, for a second."""
    if completed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(folder: Path, import_path: str, working_directory: str, ranks: int, has_gpus: bool) -> None:
    end_with(os.getppid())
    completed: list[bool] = []
    atexit.register(_end_without_destructors, completed)  # registered first, so called last
    pickle = prepare(folder, import_path, working_directory)
    if not has_gpus:
        preload(pickle)
    sys.stdout.flush()
    sys.stderr.flush()
    exit_code = _fork_ranks(ranks, folder)
    if exit_code is not None:
        sys.exit(exit_code)
    process_job(folder)
    completed.append(True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "True")
