"""The program of every task of a job: it runs the function that submitit pickled, and no code of other users.

`python … -m holmes_hpc.submission.executor.task FOLDER [IMPORT_PATH]`
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from submitit.core.job_environment import JobEnvironment
from submitit.core.submission import process_job

from holmes_hpc import console
from holmes_hpc.errors import HolmesError
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.records.ownership import open_own_file, other_writers

_PICKLE_WAIT_S = 60  # as submitit: the pickle's name has the job id, which is known only after submission


def task_arguments(folder: Path, *, any_version: bool = False) -> list[str]:
    """Return the arguments of `python` that run a task of the job submitted in `folder`, with unbuffered output.

    The task finds the modules beside the program that submits it, unless other users could write there.
    `any_version`: the nodes' Python may have another version than this one."""
    import_path = os.path.abspath(sys.path[0]) if sys.path else ""
    is_safe = os.path.isdir(import_path) and other_writers(import_path) is None
    arguments = module_arguments(__name__, any_version=any_version)
    return ["-u", *arguments, str(folder), *([import_path] if is_safe else [])]


def main(folder: Path, import_path: str | None = None) -> None:
    """Run this task. Refuse a pickle that other users could have written."""
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    pickle_path = JobEnvironment().paths.submitted_pickle
    deadline = time.monotonic() + _PICKLE_WAIT_S
    while not pickle_path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        open_own_file(pickle_path).close()  # nobody else can replace it now: the folders above it are checked too
    except (HolmesError, OSError) as e:
        console.problem(e)
        sys.exit(2)
    if import_path is not None:
        sys.path.insert(0, import_path)
    process_job(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
