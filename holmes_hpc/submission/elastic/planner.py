"""The coordinator's planner: it keeps plans for fewer nodes at hand, made in a process of low priority (replan.py)."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from holmes_hpc.errors import HolmesError
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import read_text, write_whole
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.elastic.decision import Plans, Sizes

LOW_PRIORITY = ("nice", "-n", "19")


class Planner:
    """Makes plans of `run` for fewer nodes, one at a time, and keeps them in the folder of submissions.

    `job_id`: of the leader; `job_plan`: the plan that the job was submitted with, whatever the run's plan is now."""

    def __init__(self, run: RunDirectory, job_id: str) -> None:
        self._run, self._folder, self._job_id = run, run.path / "submission", job_id
        self._process: subprocess.Popen[str] | None = None
        self._sizes: Sizes = ()
        if not self._path(()).exists():
            write_whole(self._path(()), read_text(run.plan_path))
        self.job_plan = Plan.read(self._path(()))

    def _path(self, sizes: Sizes) -> Path:
        return self._folder / "-".join([f"{self._job_id}_plan", *map(str, sizes)])

    def poll(self, missing: Iterable[Sizes], plans: Plans) -> None:
        """Add the plan that has been made, or why there is none, to `plans`. Begin the next of those that are missing.
        `missing`: numbers of nodes, the most urgent first."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            plans[self._sizes] = self._result(self._process)
            self._process = None
        for self._sizes in [sizes for sizes in missing if sizes not in plans][:1]:
            if self._path(self._sizes).exists():  # made by a coordinator that is lost
                plans[self._sizes] = Plan.read(self._path(self._sizes))
                return
            arguments = [str(path) for path in (self._run.path, self._path(()), self._path(self._sizes), *self._sizes)]
            command = [*LOW_PRIORITY, sys.executable, *module_arguments("holmes_hpc.submission.elastic.replan")]
            self._process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)

    def _result(self, process: subprocess.Popen[str]) -> Plan | str:
        """Return the plan that the process has made, or its error."""
        assert process.stderr is not None
        with process.stderr:
            lines = process.stderr.read().splitlines()
        try:
            return Plan.read(self._path(self._sizes)) if not process.returncode else (lines or ["planning failed"])[-1]
        except HolmesError as e:
            return str(e)
