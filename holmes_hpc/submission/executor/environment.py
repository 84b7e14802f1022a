"""The environment of a task in a (heterogeneous) job, for submitit and for programs under plain srun.

In a step over several components, some of Slurm's variables are wrong for a task: SLURM_JOB_PARTITION and
SLURM_NTASKS_PER_NODE describe the last component. Others are correct: SLURM_PROCID, SLURM_NTASKS, SLURM_NODEID,
SLURM_NNODES (of the whole job), SLURMD_NODENAME, and each component's node list, in which a task looks for its node.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from submitit.core import job_environment, logger, utils

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.job_queries import requeue
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL
from holmes_hpc.submission.executor.component import ComponentRequest

LEADER = "HOLMES_LEADER_JOB_ID"  # exported by the batch script
MEMBER = "HOLMES_MEMBER"  # index of this job's component, if each component is a separate job (elastic.members)
TASKS_PER_NODE = "HOLMES_TASKS_PER_NODE_{}"  # the number of tasks per node of the component with this index
MAX_REQUEUES = "HOLMES_MAX_REQUEUES"
PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"  # the signal that tasks handle, if not USER_SIGNAL
_HINT = "start the step with srun from the job's batch script"


def preempt_signal() -> str:
    """Return the name, without SIG, of the warning signal that tasks handle: the environment's, else submitit's."""
    return os.environ.get(PREEMPT_SIGNAL) or USER_SIGNAL


@dataclass(frozen=True)
class ComponentRanks:
    """The nodes of a component, the global rank of its first task, and its number of tasks per node."""

    nodes: tuple[str, ...]
    first_rank: int
    tasks_per_node: int


def own_member(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the index of this job's component if each component is a separate job; otherwise None."""
    return int(environ[MEMBER]) if MEMBER in environ else None


def tasks_per_node(parts: Iterable[ComponentRequest]) -> list[tuple[str, str]]:
    """Return (variable, value) pairs that export the number of tasks per node of each component."""
    return [(TASKS_PER_NODE.format(index), str(part.tasks_per_node)) for index, part in enumerate(parts)]


def component_ranks(host_lists: Sequence[str], tasks: Sequence[int]) -> list[ComponentRanks]:
    """Return each component's nodes and ranks. `host_lists`: each one's nodes; `tasks`: each one's tasks per node."""
    nodes = [tuple(expand(text)) for text in host_lists]
    first_ranks = accumulate((len(n) * t for n, t in zip(nodes, tasks, strict=False)), initial=0)
    return list(map(ComponentRanks, nodes, first_ranks, tasks))


def ranks_of_job(environ: Mapping[str, str] = os.environ) -> list[ComponentRanks]:
    """Return the components, in order, of the job whose environment variables are `environ`. A plain job has one
    component, a process outside of jobs none. Raise SubmissionError if a component's node list is missing."""
    size = int(environ.get("SLURM_HET_SIZE") or 0)
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(size)] or ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    lists = [environ[name] for name in names if environ.get(name)][: size or 1]
    if len(lists) < size:
        missing = next(name for name in names if not environ.get(name))
        raise SubmissionError(f"no {missing} in the environment", where="task", hint=_HINT)
    return component_ranks(lists, [int(environ.get(TASKS_PER_NODE.format(i)) or 1) for i in range(len(lists))])


def current_component(environ: Mapping[str, str] = os.environ) -> int:
    """Return the index of the component that this task runs in, found by its node name.
    Raise SubmissionError if the node is in no component."""
    parts, node = ranks_of_job(environ), environ.get("SLURMD_NODENAME", "")
    if len(parts) <= 1:
        return 0
    candidates = [i for i, part in enumerate(parts) if node in part.nodes]
    if not candidates:
        groups = [list(part.nodes) for part in parts]
        raise SubmissionError(f"node {node!r} is in no component ({groups})", where="task", hint=_HINT)
    if len(candidates) == 1:
        return candidates[0]
    rank = int(environ.get("SLURM_PROCID", 0))  # components share the node; ranks follow component order
    return max(i for i, part in enumerate(parts) if part.first_rank <= rank)


class TaskCount(int):
    """The number of a job's tasks. If it is divided by the job's number of nodes, it gives the number of tasks on this
    node. submitit computes LOCAL_WORLD_SIZE by this division, whose plain quotient is wrong if components differ."""

    def __floordiv__(self, nodes: int) -> int:
        counts_job_nodes = nodes == sum(len(part.nodes) for part in ranks_of_job())
        node_tasks = os.environ.get(TASKS_PER_NODE.format(current_component())) if counts_job_nodes else None
        return int(node_tasks) if node_tasks else int(self) // nodes


class SlurmHetJobEnvironment(job_environment.JobEnvironment):
    """submitit's environment of a task of a (heterogeneous) job. Ranks, nodes and ids are those of the whole job."""

    _env = {
        "job_id": LEADER,
        "num_tasks": "SLURM_NTASKS",
        "num_nodes": "SLURM_NNODES",
        "node": "SLURM_NODEID",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }

    @property
    def hostnames(self) -> Sequence[str]:
        return [name for part in ranks_of_job() for name in part.nodes] or [self.hostname]

    @property
    def num_tasks(self) -> int:
        return TaskCount(super().num_tasks)

    @property
    def component(self) -> int:
        """The index of this task's component."""
        return current_component()

    @property
    def num_components(self) -> int:
        return max(1, len(ranks_of_job()))

    def _requeue(self, countdown: int) -> None:
        """Requeue the whole job. Raise UncompletedJobError if Slurm refuses, or if the job was requeued MAX_REQUEUES
        times. `countdown`: number of further time-outs after which submitit may requeue it."""
        restarts, limit = int(os.environ.get("SLURM_RESTART_COUNT") or 0), int(os.environ.get(MAX_REQUEUES) or 0)
        is_limit_reached = limit and restarts >= limit
        refusal = f"it was already requeued {restarts} times" if is_limit_reached else requeue(self.job_id)[0]
        if refusal:
            message = f"Job not requeued because: {refusal}"
            logger.get_logger().warning(message)
            raise utils.UncompletedJobError(message)
        logger.get_logger().info(f"Requeued job {self.job_id} ({countdown} remaining timeouts)")
