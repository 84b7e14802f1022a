"""A submitted job: submitit's object, with states that are true for heterogeneous jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.logs import tail
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.job_states import JobState, out_of_memory
from holmes_hpc.submission.executor.environment import preempt_signal
from holmes_hpc.submission.executor.watcher import WATCHER, Expected


def ticket_path(folder: Path, job_id: str) -> Path:
    """Where the executor notes what tells this job from another one of the same id."""
    return folder / f"{job_id}_job.json"


def batch_log(folder: Path) -> Path | None:
    """Where the batch script's own output lies (``%j``: the job's id); None: in the files of task 0. Those of a folder
    with ``%j`` will not do, for Slurm opens the file before anything in the job could make the directory."""
    static = utils.JobPaths.get_first_id_independent_folder(folder)
    return None if static == folder else static / "%j_batch.out"


def read_ticket(folder: Path, job_id: str) -> dict[str, Any]:
    """What the executor noted of a job; nothing where there is no ticket."""
    return read_object(ticket_path(folder, job_id)) or {}


class SlurmHetJob(core.Job[Any]):
    """A job of one or more components. Its id is the leader's; its tasks are the ranks over all components, as many as
    its ticket says unless `tasks` does."""

    _cancel_command = "scancel"
    _results_timeout_s = 15
    watcher = WATCHER

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] | None = None) -> None:
        if tasks is None:
            tasks = range(int(read_ticket(utils.JobPaths(folder, job_id=job_id).folder, job_id).get("tasks") or 1))
        super().__init__(folder=folder, job_id=job_id, tasks=tuple(tasks))
        if not self._tasks[0]:
            self.expected()

    def expected(self) -> bool:
        """Tell the watcher which job of this id is meant; whether it thought of another one."""
        folder = self.paths.folder
        ticket = read_ticket(folder, self.job_id)  # without one, states are told by the id alone
        return self.watcher.expect(
            self.job_id,
            Expected(
                ticket.get("name"),
                ticket.get("submitted"),
                folder / f"{self.job_id}_exit",
                int(ticket.get("components") or 1),
                ticket.get("token"),
            ),
        )

    def write_ticket(self, name: str, submitted: float, **more: Any) -> None:
        """Note name and time (and `more`), for this process and for whoever looks at the folder later."""
        ticket = {"job_id": self.job_id, "name": name, "submitted": submitted, "tasks": self.num_tasks, **more}
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        write_whole(ticket_path(self.paths.folder, self.job_id), json.dumps(ticket))
        self.expected()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._tasks[0]:
            self.expected()

    def slurm_state(self, mode: str = "force") -> JobState:
        """State with reason, nodes and source."""
        return self.watcher.state_of(self.job_id, mode)

    def cancel(self, check: bool = True) -> None:
        """Cancel all components: the id is the leader's. SubmissionError where Slurm does not, and `check` is set."""
        answer = patient([self._cancel_command, self.job_id], patience_s=60 if check else 0)
        if check and not answer.ok and "Invalid job id" not in answer.err:
            raise SubmissionError(
                answer.reason,
                where=f"scancel {self.job_id}",
                hint="see that slurmctld runs (`scontrol ping`), then cancel again",
            )

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """As submitit's, but the time for results to appear runs once for the job, not once per missing task, and where
        there is none the batch script's own output is in the error."""
        ended = self.watcher.ended_at(self.job_id)
        if ended is not None and not self.paths.result_pickle.exists():
            self._results_timeout_s = max(0, int(ended + type(self)._results_timeout_s - time.monotonic()))
        try:
            return super()._get_outcome_and_result()
        except utils.UncompletedJobError as e:
            texts = {path: text for path in self._batch_logs() if (text := "\n".join(tail(path, 40)).strip())}
            memory = out_of_memory("\n".join([str(e), *texts.values()]))
            lines = [f"out of memory: {memory}"] * bool(memory) + [str(e)]
            for path, text in texts.items():
                if text not in str(e):
                    lines += [f"The batch script, srun and slurmstepd said ({path}):", "-" * 40, text]
            raise utils.UncompletedJobError("\n".join(lines)) from None

    def _batch_logs(self) -> list[Path]:
        """The files of the batch script's own output that are not this task's own."""
        noted = read_ticket(self.paths.folder, self.job_id).get("batch_logs") or ()
        own = (self.paths.stdout, self.paths.stderr)
        return [path for path in map(Path, noted) if path not in own and path.exists()]

    def _get_logs_string(self, name: str) -> str | None:
        """As submitit's; task 0's error stream has the batch script's own output, wherever that lies."""
        found: str | None = super()._get_logs_string(name)
        paths = self._batch_logs() if name == "stderr" and not self._tasks[0] else []
        more = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        return "\n".join(text for text in [found, *more] if text) if any(more) else found

    def results(self) -> list[Any]:
        """As submitit's; of several tasks the error is that which :meth:`exception` returns. What the tasks returned
        that had ended before is had with ``job.task(i).result()``."""
        error = self.exception() if self._sub_jobs else None
        if error is not None:
            raise error
        return super().results()

    def exception(self) -> Any:
        """As submitit's; among several tasks, an error that was raised comes before tasks that were only killed."""
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        ordered = sorted(self._sub_jobs, key=lambda job: not job.paths.result_pickle.exists())
        return next((error for job in ordered if (error := job.exception()) is not None), None)

    def _interrupt(self, timeout: bool = False) -> None:
        """Send what preemption or a time-out sends (for tests), to all components."""
        for name in ([] if timeout else ["TERM"]) + [preempt_signal()]:
            answer = patient([self._cancel_command, self.job_id, "--signal", name], patience_s=0)
            if not answer.ok:
                raise SubmissionError(
                    answer.reason, where=f"scancel {self.job_id} --signal {name}", hint="see that the job runs"
                )
