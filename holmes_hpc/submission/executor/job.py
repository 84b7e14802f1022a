"""A submitted job: submitit's object, with states that are true for heterogeneous jobs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import core

from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.files import write_whole
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL
from holmes_hpc.submission.executor.environment import exit_record_path
from holmes_hpc.submission.executor.watcher import WATCHER, Expected


def ticket_path(folder: Path, job_id: str) -> Path:
    """Where the executor notes what tells this job from another one of the same id."""
    return folder / f"{job_id}_job.json"


class SlurmHetJob(core.Job[Any]):
    """A job of one or more components. Its id is the leader's; its tasks are the ranks over all components."""

    _cancel_command = "scancel"
    _results_timeout_s = 15
    watcher = WATCHER

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)
        if not self._tasks[0]:
            self.expected()

    def expected(self) -> bool:
        """Tell the watcher which job of this id is meant; whether it thought of another one."""
        ticket: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # without one, states are told by the id alone
            ticket = json.loads(ticket_path(self.paths.folder, self.job_id).read_text(encoding="utf-8"))
        record = exit_record_path(self.paths._folder, self.job_id)
        return self.watcher.expect(self.job_id, Expected(
            ticket.get("name"), ticket.get("submitted"), record, int(ticket.get("components") or 1)))

    def write_ticket(self, name: str, submitted: float, **more: Any) -> None:
        """Note name and time (and `more`), for this process and for whoever looks at the folder later."""
        ticket = {"job_id": self.job_id, "name": name, "submitted": submitted, "tasks": self.num_tasks, **more}
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
            raise SubmissionError(answer.reason, where=f"scancel {self.job_id}",
                                  hint="see that slurmctld runs (`scontrol ping`), then cancel again")

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """As submitit's, but the time for results to appear runs once for the job, not once per missing task."""
        ended = self.watcher.ended_at(self.job_id)
        if ended is not None and not self.paths.result_pickle.exists():
            self._results_timeout_s = max(0, int(ended + type(self)._results_timeout_s - time.monotonic()))
        return super()._get_outcome_and_result()

    def exception(self) -> Any:
        """As submitit's; among several tasks, an error that was raised comes before tasks that were only killed."""
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        raised = [job for job in self._sub_jobs if job.paths.result_pickle.exists()]
        for job in [*raised, *(j for j in self._sub_jobs if j not in raised)]:
            found = job.exception()
            if found is not None:
                return found
        return None

    def _interrupt(self, timeout: bool = False) -> None:
        """Send what preemption or a time-out sends (for tests), to all components."""
        for name in ([] if timeout else ["TERM"]) + [USER_SIGNAL]:
            answer = patient([self._cancel_command, self.job_id, "--signal", name], patience_s=0)
            if not answer.ok:
                raise SubmissionError(answer.reason, where=f"scancel {self.job_id} --signal {name}",
                                      hint="see that the job runs")
