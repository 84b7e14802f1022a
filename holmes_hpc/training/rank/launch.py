"""The launch of a rank: its rank, node and component, from the variables of srun or torchrun.

A rank is started by ``srun`` (plain or through submitit), by ``torchrun`` or a launcher that sets the same variables,
or as a single process. In a step that spans several components, SLURM_JOB_PARTITION and SLURM_NTASKS_PER_NODE hold the
last component's values. A task therefore finds its component by its node's name.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from holmes_hpc.errors import PlanError, RunFailed, counted
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.hostlist import expand


@dataclass(frozen=True)
class Launch:
    """The place of one rank in the job.

    `launcher`: what started it ("srun", "torchrun", "local" or "one process"); `key`: identifies this start of the run,
    equal on all ranks and new after a requeue; `one_host`: all ranks run on this machine; `components`: the job's
    components that contain this node, empty if the job has only one; `address`, `port`: of torchrun's store, or None.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    node: str
    key: str
    one_host: bool
    components: tuple[int, ...] = ()
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        is_impossible = not 0 <= self.rank < self.world_size or self.local_rank < 0
        problem = f"rank {self.rank} (local rank {self.local_rank}) of {self.world_size} ranks is impossible"
        hint = "leave RANK, WORLD_SIZE and SLURM_PROCID as srun or torchrun set them"
        PlanError.refuse(f"{self.launcher} on {self.node}", (is_impossible, problem, hint))


def read_launch(environ: Mapping[str, str] = os.environ, host: str = "") -> Launch:
    """Return this process's place in the job, from torchrun's or Slurm's variables. `host`: its name, "" to ask."""
    host = host or socket.gethostname()
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _torchrun(environ, host)
    if environ.get("SLURM_PROCID") and environ.get("SLURM_NTASKS"):
        return _slurm(environ, host)
    return Launch(0, 1, 0, launcher="one process", node=host, key=f"local-{os.getpid()}", one_host=True)


def _torchrun(environ: Mapping[str, str], host: str) -> Launch:
    size, address = _number(environ, "WORLD_SIZE"), environ.get("MASTER_ADDR")
    return Launch(
        _number(environ, "RANK"),
        size,
        _number(environ, "LOCAL_RANK", "RANK"),
        launcher="torchrun" if address else "local",
        node=host,
        key=f"torchrun-{environ.get('TORCHELASTIC_RUN_ID', 'none')}-{environ.get('MASTER_PORT', '0')}"
        f"-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        one_host=_number(environ, "LOCAL_WORLD_SIZE", "WORLD_SIZE") == size,
        address=address,
        port=_number(environ, "MASTER_PORT") if address else None,
    )


def _slurm(environ: Mapping[str, str], host: str) -> Launch:
    node = environ.get("SLURMD_NODENAME") or host
    job = environ.get("SLURM_HET_JOB_ID") or environ.get("HOLMES_LEADER_JOB_ID") or environ.get("SLURM_JOB_ID", "0")
    key = f"slurm-{job}-{environ.get('SLURM_STEP_ID', '0')}-{environ.get('SLURM_RESTART_COUNT', '0')}"
    key += f"-{environ['HOLMES_START']}" if "HOLMES_START" in environ else ""  # an elastic run starts ranks again
    return Launch(
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_NTASKS"),
        _number(environ, "SLURM_LOCALID"),
        launcher="srun",
        node=node,
        key=key,
        one_host=_number(environ, "SLURM_NNODES", default=1) == 1,
        components=components_of(environ, node),
    )


def components_of(environ: Mapping[str, str], node: str) -> tuple[int, ...]:
    """Return the indices of a heterogeneous Slurm job's components that contain `node`; several if they share it.

    The result is empty in a plain job. Raise PlanError if no component contains the node.
    """
    size = _number(environ, "SLURM_HET_SIZE", default=1)
    if size == 1:
        return ()
    components = tuple(i for i in range(size) if node in expand(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "")))
    if not components:
        hint = "start all components as one step: srun --het-group=0,1,… from the batch script"
        raise PlanError(f"node {node} is in none of the job's {size} components", where=f"task on {node}", hint=hint)
    return components


def job_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of all components of this Slurm job; empty if the environment does not list them."""
    groups = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(_number(environ, "SLURM_HET_SIZE", default=1))]
    lists = [environ.get(name, "") for name in ("SLURM_JOB_NODELIST", *groups)]
    return list(dict.fromkeys(node for text in lists for node in expand(text)))


def check_launch(launch: Launch, plan: Plan) -> int:
    """Return the index of this rank's component in the plan.

    Raise PlanError if the rank runs in another component, or if the number of ranks is not the plan's."""
    problem = f"{counted(launch.world_size, 'rank')} started, the plan has {plan.world_size}"
    hint = f"start {counted(plan.world_size, 'rank')}, or plan again"
    is_other_size = launch.world_size != plan.world_size
    PlanError.refuse(f"{launch.launcher} on {launch.node}", (is_other_size, problem, hint))
    component = plan.component_of(launch.rank)
    problem = (
        f"rank {launch.rank} runs on a node of component {' and '.join(map(str, launch.components))}, but the plan puts"
        f" it in component {component} (pool {plan.components[component].pool})"
    )
    hint = "submit the components in the plan's order, with its nodes and tasks per node"
    is_elsewhere = launch.components and len(plan.components) > 1 and component not in launch.components
    PlanError.refuse(f"node {launch.node}", (is_elsewhere, problem, hint))
    return component


def ranks_of_nodes(launch: Launch, plan: Plan, environ: Mapping[str, str] = os.environ) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each node by the node's name, in the order of first ranks. srun starts ranks in the order of
    the job's nodes. Under other launchers, node0, node1, … stand for the names."""
    ranks = [of_node for _, of_node in grouped((not launch.one_host and p, r) for r, p in enumerate(plan.places))]
    names = [launch.node] if launch.one_host else job_nodes(environ) if launch.launcher == "srun" else []
    names = names if len(names) == len(ranks) else [f"node{i}" for i in range(len(ranks))]
    return dict(zip(names, map(tuple, ranks), strict=True))


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Return the first of the variables `names` that is set, as an integer; `default` if none is.

    Raise RunFailed if the value is no integer, or if there is neither a value nor a default."""
    hint = "start the ranks with srun or torchrun, which set it"
    for name in filter(environ.get, names):
        what = f"{name} is {environ[name]!r}, which is no integer"
        with RunFailed.instead_of(ValueError, where="environment", hint=hint, what=what):
            return int(environ[name])
    if default is None:
        raise RunFailed(f"{names[0]} is not set", where="environment", hint=hint)
    return default
