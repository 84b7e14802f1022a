"""A submitted job: submitit's Job class with the right states for heterogeneous jobs."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.logs import tail
from holmes_hpc.records.ownership import refuse_other_writers
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.commands import slurm_with_retries
from holmes_hpc.slurm.job_states import JobState, out_of_memory
from holmes_hpc.submission.executor.environment import preempt_signal
from holmes_hpc.submission.executor.watcher import WATCHER, JobIdentity

_TICKET_TYPES: dict[str, Any] = {"name": str, "submitted": (int, float), "components": int, "tasks": int}
_TICKET_TYPES |= {"token": str, "batch_logs": list}


def ticket_path(folder: Path, job_id: str) -> Path:
    """Return the path of a job's ticket: the executor's record, which distinguishes the job from others with its id."""
    return folder / f"{job_id}_job.json"


def batch_log(folder: Path) -> Path | None:
    """Return the path of the batch script's own output; None if it goes into the files of task 0. If `folder` has
    ``%j`` (the job id), it is outside of `folder`, because Slurm opens the file before the job could create that."""
    fixed_folder = utils.JobPaths.get_first_id_independent_folder(folder)
    return None if fixed_folder == folder else fixed_folder / "%j_batch.out"


def read_ticket(folder: Path, job_id: str) -> dict[str, Any]:
    """Return the content of a job's ticket (see :meth:`SlurmHetJob.write_ticket`); empty if there is none. Values of a
    wrong type, as in a damaged ticket, are left out."""
    ticket = read_object(ticket_path(folder, job_id)) or {}
    return {key: value for key, value in ticket.items() if isinstance(value, _TICKET_TYPES.get(key, object))}


class SlurmHetJob(core.Job[Any]):
    """A job of one or more components. Its id is that of the first component, its leader. Its tasks are the ranks of
    all components. `tasks`: indices of the tasks; None: as many as the job's ticket states."""

    _cancel_command = "scancel"
    _results_timeout_s = 15
    watcher = WATCHER

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] | None = None) -> None:
        if tasks is None:
            tasks = range(int(read_ticket(utils.JobPaths(folder, job_id=job_id).folder, job_id).get("tasks") or 1))
        super().__init__(folder=folder, job_id=job_id, tasks=tuple(tasks))
        if not self._tasks[0]:
            self.register_identity()

    def register_identity(self) -> bool:
        """Tell the watcher which job has this id. Return True if the watcher forgot an earlier job with the same id."""
        folder = self.paths.folder
        ticket = read_ticket(folder, self.job_id)  # without a ticket, only the id identifies the job
        record, components = folder / f"{self.job_id}_exit", int(ticket.get("components") or 1)
        identity = JobIdentity(ticket.get("name"), ticket.get("submitted"), record, components, ticket.get("token"))
        return self.watcher.set_identity(self.job_id, identity)

    def write_ticket(self, name: str, submitted: float, **fields: Any) -> None:
        """Write the job's ticket, for this process and for later readers of the folder. `submitted`: Unix seconds;
        `fields`: more keys, such as components, token and batch_logs."""
        ticket = {"job_id": self.job_id, "name": name, "submitted": submitted, "tasks": self.num_tasks, **fields}
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        write_whole(ticket_path(self.paths.folder, self.job_id), json.dumps(ticket))
        self.register_identity()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._tasks[0]:
            self.register_identity()

    def slurm_state(self, mode: str = "force") -> JobState:
        """Return the job's state. `mode`: as in submitit's watchers (``force``, ``standard``, ``cache``)."""
        return self.watcher.state_of(self.job_id, mode)

    def cancel(self, check: bool = True) -> None:
        """Cancel all components by the leader's id. With `check`, raise SubmissionError if Slurm refuses."""
        answer = slurm_with_retries([self._cancel_command, self.job_id], patience_s=60 if check else 0)
        if check and not answer.ok and "Invalid job id" not in answer.err:
            hint = "check that slurmctld runs (`scontrol ping`), then cancel again"
            raise SubmissionError(answer.reason, where=f"scancel {self.job_id}", hint=hint)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """Return (outcome, result) of this task, as submitit does, with three differences.

        After the job's end, all of its tasks together wait at most _results_timeout_s for missing files. If there is no
        result, the error contains the batch script's own output. If other users may write the result, raise
        RecordError, because unpickling it would run their code."""
        refuse_other_writers(self.paths.result_pickle)
        ended = self.watcher.ended_at(self.job_id)
        if ended is not None and not self.paths.result_pickle.exists():
            self._results_timeout_s = max(0, int(ended + type(self)._results_timeout_s - time.monotonic()))
        try:
            return super()._get_outcome_and_result()
        except utils.UncompletedJobError as e:
            texts = {path: text for path in self._batch_logs() if (text := "\n".join(tail(path, 40)).strip())}
            memory_error = out_of_memory("\n".join([str(e), *texts.values()]))
            lines = [f"out of memory: {memory_error}"] * bool(memory_error) + [str(e)]
            for path, text in texts.items():
                if text not in str(e):
                    lines += [f"Output of the batch script, srun and slurmstepd ({path}):", "-" * 40, text]
            raise utils.UncompletedJobError("\n".join(lines)) from None

    def _batch_logs(self) -> list[Path]:
        """Return the paths of the batch script's own output, unless they are this task's logs."""
        batch_logs = read_ticket(self.paths.folder, self.job_id).get("batch_logs") or ()
        task_logs = (self.paths.stdout, self.paths.stderr)
        return [path for path in map(Path, batch_logs) if path not in task_logs and path.exists()]

    def _get_logs_string(self, name: str) -> str | None:
        """Return a log, as submitit does; append the batch script's own output to task 0's stderr."""
        task_log: str | None = super()._get_logs_string(name)
        paths = self._batch_logs() if name == "stderr" and not self._tasks[0] else []
        batch_logs = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        return "\n".join(text for text in [task_log, *batch_logs] if text) if any(batch_logs) else task_log

    def results(self) -> list[Any]:
        """Return the results of all tasks, as submitit does. If a task failed, raise the error of :meth:`exception`;
        ``job.task(i).result()`` then returns the result of a task that succeeded."""
        error = self.exception() if self._sub_jobs else None
        if error is not None:
            raise error
        return super().results()

    def exception(self) -> Any:
        """Return the job's error, as submitit does; None if all tasks succeeded. If several tasks failed, an error that
        a task raised comes before the errors of tasks that were killed."""
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        results_first = sorted(self._sub_jobs, key=lambda job: not job.paths.result_pickle.exists())
        return next((error for job in results_first if (error := job.exception()) is not None), None)

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signals of a preemption or time-out to all components (for tests)."""
        for name in ([] if timeout else ["TERM"]) + [preempt_signal()]:
            answer = slurm_with_retries([self._cancel_command, self.job_id, "--signal", name], patience_s=0)
            if not answer.ok:
                where = f"scancel {self.job_id} --signal {name}"
                raise SubmissionError(answer.reason, where=where, hint="check that the job runs")
