"""What a task knows about itself inside a (heterogeneous) job: for submitit, and for whoever runs under plain srun.

Inside a step that spans components Slurm's plain variables lie about a task's own component (SLURM_JOB_PARTITION and
SLURM_NTASKS_PER_NODE hold the last one's). What is true: SLURM_PROCID, SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES of the
whole, SLURMD_NODENAME, and the node list of every component. So a task finds its component by its node's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from submitit.core import job_environment, logger, utils

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL

LEADER = "HOLMES_LEADER_JOB_ID"  # exported by the batch script
MAX_REQUEUES = "HOLMES_MAX_REQUEUES"
PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"  # what tasks listen for, where it is not USER_SIGNAL


def preempt_signal() -> str:
    """What the tasks of a job that is submitted now will listen for: submitit reads it from their environment."""
    return os.environ.get(PREEMPT_SIGNAL) or USER_SIGNAL


def component_nodes(environ: Mapping[str, str] = os.environ) -> list[list[str]]:
    """Node names of every component, in component order; of a plain job the one list."""
    size = int(environ.get("SLURM_HET_SIZE", 0))
    if size:
        try:
            return [expand(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"]) for i in range(size)]
        except KeyError as e:
            raise SubmissionError(
                f"no {e.args[0]} in the environment",
                where="task",
                hint="start the step with srun from the job's batch script",
            ) from e
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    return [expand(nodes)] if nodes else []


def own_component(environ: Mapping[str, str] = os.environ) -> int:
    """The component that this task runs in, by its node's name."""
    groups = component_nodes(environ)
    if len(groups) <= 1:
        return 0
    node = environ.get("SLURMD_NODENAME", "")
    found = [i for i, names in enumerate(groups) if node in names]
    if not found:
        raise SubmissionError(
            f"node {node!r} is in no component ({groups})",
            where="task",
            hint="start the step with srun from the job's batch script",
        )
    if len(found) > 1:  # two components share the node: ranks run over components in order
        rank = int(environ.get("SLURM_PROCID", 0))
        end = 0
        for index, names in enumerate(groups):
            end += len(names) * int(environ.get(f"HOLMES_TASKS_PER_NODE_{index}", 1))
            if rank < end:
                return index
    return found[0]


def leader_id(environ: Mapping[str, str] = os.environ) -> str:
    """The job id that users see: the first component's."""
    for key in (LEADER, "SLURM_HET_JOB_ID", "SLURM_JOB_ID"):
        if environ.get(key):
            return environ[key]
    raise SubmissionError("no job id in the environment", where="task", hint="run inside a Slurm job")


class TaskCount(int):
    """The number of a job's tasks. submitit takes ``num_tasks // num_nodes`` for the tasks of a node
    (TorchDistributedEnvironment's LOCAL_WORLD_SIZE); where components differ, only this node's own number is right."""

    def __floordiv__(self, nodes: int) -> int:
        groups = component_nodes()
        own = os.environ.get(f"HOLMES_TASKS_PER_NODE_{own_component()}") if nodes == sum(map(len, groups)) else None
        return int(own) if own else int(self) // nodes


class SlurmHetJobEnvironment(job_environment.JobEnvironment):
    """submitit's view of a task of a (heterogeneous) job: ranks, nodes and ids are those of the whole job."""

    _env = {
        "job_id": LEADER,
        "num_tasks": "SLURM_NTASKS",
        "num_nodes": "SLURM_NNODES",
        "node": "SLURM_NODEID",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }

    @property
    def raw_job_id(self) -> str:
        return leader_id()

    @property
    def hostnames(self) -> Sequence[str]:
        names = [name for group in component_nodes() for name in group]
        return names or [self.hostname]

    @property
    def num_tasks(self) -> int:
        return TaskCount(super().num_tasks)

    @property
    def component(self) -> int:
        """Index of this task's component."""
        return own_component()

    @property
    def num_components(self) -> int:
        return max(1, len(component_nodes()))

    def _requeue(self, countdown: int) -> None:
        """Requeue the whole job at its leader, at most as often as the executor allowed."""
        restarts, most = int(os.environ.get("SLURM_RESTART_COUNT") or 0), int(os.environ.get(MAX_REQUEUES) or 0)
        if most and restarts >= most:
            refusal = f"it was requeued {restarts} times already"
        else:
            answer = patient(["scontrol", "requeue", self.job_id], patience_s=60, timeout_s=30)
            is_queued = answer.ok or answer.terminated or "pending execution" in answer.err
            refusal = "" if is_queued else f"scontrol requeue: {answer.reason}"
        if refusal:
            message = f"Job not requeued because: {refusal}"
            logger.get_logger().warning(message)
            raise utils.UncompletedJobError(message)
        logger.get_logger().info(f"Requeued job {self.job_id} ({countdown} remaining timeouts)")


def exit_record_path(folder: str | Path, job_id: str) -> Path:
    """The file where the batch script leaves the step's exit status: ``STATUS EPOCH SIGNAL``."""
    return Path(utils.JobPaths(folder, job_id=job_id).folder) / f"{job_id}_exit"
