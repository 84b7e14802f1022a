"""The coordinator's planner: it keeps plans for fewer nodes at hand, made in a process of low priority (replan.py)."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from holmes_hpc.interpreter import module_arguments
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import read_text, write_whole
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.elastic.decision import Plans, Sizes


class Planner:
    """Makes plans of `run` for fewer nodes, one at a time, and keeps them in the folder of submissions.

    `job_id`: of the leader; `job_plan`: the plan that the job was submitted with, whatever the run's plan is now."""

    def __init__(self, run: RunDirectory, job_id: str) -> None:
        self._run, self._job_id, self._sizes, self._pid = run, job_id, Sizes(), 0
        if not self._path(()).exists():
            write_whole(self._path(()), read_text(run.plan_path))
        self.job_plan = Plan.read(self._path(()))

    def _path(self, sizes: Sizes) -> Path:
        return self._run.path / "submission" / "-".join([f"{self._job_id}_plan", *map(str, sizes)])

    def _read(self, sizes: Sizes) -> Plan | None:
        return Plan.read(self._path(sizes)) if self._path(sizes).exists() else None

    def poll(self, missing: Iterable[Sizes], plans: Plans) -> None:
        """Add the finished plan to `plans` (None if there is no plan). Then begin the next missing plan.
        `missing`: numbers of nodes, the most urgent first."""
        if self._pid:
            if not os.waitpid(self._pid, os.WNOHANG)[0]:
                return
            self._pid, plans[self._sizes] = 0, self._read(self._sizes)
        for self._sizes in [sizes for sizes in missing if sizes not in plans][:1]:
            if plan := self._read(self._sizes):  # made by a coordinator that is lost
                plans[self._sizes] = plan
                return
            command = ["nice", "-n", "19", sys.executable, *module_arguments("holmes_hpc.submission.elastic.replan")]
            arguments = [str(path) for path in (self._run.path, self._path(()), self._path(self._sizes), *self._sizes)]
            self._pid = os.posix_spawnp(command[0], [*command, *arguments], os.environ)
