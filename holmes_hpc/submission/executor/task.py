"""The program of every task of a job. It runs the function that submitit pickled, but no code of other users.

`python … -m holmes_hpc.submission.executor.task FOLDER [IMPORT_PATH [WORKING_DIRECTORY]]`
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from submitit.core.job_environment import JobEnvironment
from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor

from holmes_hpc import console
from holmes_hpc.errors import HolmesError
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.records.ownership import open_own_file, other_writers
from holmes_hpc.waiting import wait_until

_PICKLE_WAIT_S = 60  # as submitit: the pickle exists only after submission, because its name has the job id


def task_arguments(folder: Path, module: str = __name__, *, any_version: bool = False) -> list[str]:
    """Return the arguments with which `python` runs `module` as a task of the job submitted in `folder`.

    The task can import modules from the folder of the submitting program, unless other users may write there.
    `any_version`: the nodes' Python may have another version than this one."""
    import_path = os.path.abspath(sys.path[0]) if sys.path else ""
    is_safe = os.path.isdir(import_path) and other_writers(import_path) is None
    return ["-u", *module_arguments(module, any_version=any_version), str(folder), import_path if is_safe else ""]


class LocalTaskExecutor(LocalExecutor):
    """Submitit's local executor, whose processes import no code from the working directory."""

    @classmethod
    def name(cls) -> str:
        return LocalExecutor.name()

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, *task_arguments(self.folder), os.getcwd()])

    def _submit_command(self, command: str) -> Any:
        working_directory = os.getcwd()  # tasks return to it; submitit's `python -m` would import code from it
        os.chdir(JobPaths.get_first_id_independent_folder(self.folder))
        try:
            return super()._submit_command(command)
        finally:
            os.chdir(working_directory)


def prepare(folder: Path, import_path: str = "", working_directory: str = "") -> Path:
    """Wait for the pickle of this task and return its path. Make the modules in `import_path` importable.
    Exit with code 2 if there is no pickle, or if other users could have written it."""
    if working_directory:
        os.chdir(working_directory)
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    pickle_path = JobEnvironment().paths.submitted_pickle
    wait_until(pickle_path.exists, _PICKLE_WAIT_S, 0.05)
    try:
        open_own_file(pickle_path).close()  # nobody else can replace it now: the folders above it are checked too
    except (HolmesError, OSError) as e:
        console.problem(e)
        sys.exit(2)
    if import_path:
        sys.path.insert(0, import_path)
    return pickle_path


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), *sys.argv[2:])
    process_job(sys.argv[1])
