"""Execution of a plan on this machine without Slurm, through submitit's local executor, for trials."""

import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import submitit

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import ignore_interrupts, uninterrupted
from holmes_hpc.slurm.scontrol import minutes
from holmes_hpc.submission import local_ranks
from holmes_hpc.submission.executor.task import LocalTaskExecutor, task_arguments
from holmes_hpc.submission.lifecycle.status import Job, LocalJob
from holmes_hpc.submission.plan_job import PlannedJob, RankTask


class LocalRankTask(RankTask):
    """A rank as a local process. It sets torchrun's variables except for the address, because local ranks rendezvous in
    the run directory. `launch_id`: the same for all ranks of one start of the run."""

    def __init__(self, function: Callable[[dict[str, Any]], Any], config: Mapping[str, Any], launch_id: str) -> None:
        super().__init__(function, config)
        self.launch_id = launch_id

    def __call__(self) -> Any:
        environment = submitit.JobEnvironment()
        ranks, size = (environment.global_rank, environment.local_rank), str(environment.num_tasks)
        os.environ.update(zip(("RANK", "LOCAL_RANK"), map(str, ranks), strict=True))
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, TORCHELASTIC_RUN_ID=self.launch_id)
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
            os.environ.pop(name, None)
        return super().__call__()


class _ForkingExecutor(LocalTaskExecutor):
    """An executor with a single task, which forks the ranks (:mod:`holmes_hpc.submission.local_ranks`)."""

    def __init__(self, folder: Path, ranks: int, has_gpus: bool) -> None:
        super().__init__(folder)
        self.ranks, self.has_gpus = ranks, has_gpus

    @property
    def _submitit_command_str(self) -> str:
        arguments = task_arguments(self.folder, local_ranks.__name__)
        return shlex.join([sys.executable, *arguments, os.getcwd(), str(self.ranks), str(self.has_gpus)])


def run_plan_locally(planned: PlannedJob, run_dir: Path) -> Job:
    """Start the ranks of a job as processes of this machine, which outlive this process. Return their job."""
    run, plan = RunDirectory(run_dir.absolute()), planned.plan
    ranks = plan.world_size
    gpus = sum(c.gpus_per_node for c in plan.components if plan.site.pool(c.pool).gres)
    folder, is_forked = run.path / "submission", sys.platform == "linux"
    executor = _ForkingExecutor(folder, ranks, gpus > 0) if is_forked else LocalTaskExecutor(folder)
    limits = {"timeout_min": int(minutes(planned.settings.timeout_min) or 60), "stderr_to_stdout": True}
    executor.update_parameters(tasks_per_node=1 if is_forked else ranks, gpus_per_node=gpus, **limits)
    started = time.time()
    config = {**planned.config, "plan_file": str(run.plan_path), "run_dir": str(run.path)}
    task = LocalRankTask(planned.function, config, secrets.token_hex(8))
    host = socket.gethostname()
    with uninterrupted():
        with ignore_interrupts():
            os.environ.setdefault("SUBMITIT_LOG_LEVEL", "ERROR")  # submitit logs nothing that the ranks do not
            job = executor.submit(task)
        pid = int(job.job_id)
        run.update_run(local={"pid": pid, "host": host, "started": started})
        for rank in range(ranks):  # links to submitit's logs, with the names of a run directory
            link = run.log_path(rank)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / "submission" / f"{pid}_{rank}_log.out")
    return LocalJob(run, pid, host, started, child=job)
