"""Whether a rank trains on CUDA, and what CUDA is told before it starts."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.training.rank import cuda_check

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FEWEST, MOST = 8, 32  # CUDA's default, and all that it has


def wanted(device: str, plan: Plan) -> bool:
    """Whether to train on CUDA. `device`: ``train.device``; ``auto`` is the CPU where a fabric of the plan is of CPUs,
    for all ranks meet in groups of one kind, else CUDA where there is a device. ConfigError for ``cuda`` without one.
    Nothing else in training asks torch whether there is one."""
    if device == "cpu" or (device == "auto" and any(plan.site.fabric(c.fabric).gpu.is_cpu for c in plan.components)):
        return False
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        no_device = ConfigError("no CUDA device", where="train.device", hint="use train.device=cpu or auto")
        raise next(cuda_check.problems(cuda_check.gather()), no_device)
    return found


def streams(plan: Plan, rank: int) -> int:
    """CUDA streams of `rank`: computing; one for each communicator of each direction of its edges; tensor parallel;
    data parallel, and with several optimizer instances Megatron-Core's own and that between the instances; and those
    of what comes after the passes: the gradient norm, the tied embedding, all ranks."""
    p, stage = plan.parallel, plan.parallel.coordinates(rank)[0]
    edges = [edge for edge in plan.transports() if edge.kind == "edge" and rank in edge.ranks]
    ring = 2 if p.pp == 2 and p.virtual_stages > 1 else 1  # the last stage's edge to the first: the same two ranks
    return (
        1
        + ring * sum(2 * (plan.edge_connections if e.transport.kind == "tcp" else 1) for e in edges)
        + (p.tp_of(stage) > 1)
        + (p.dp_of(stage) > 1)
        + (2 if p.optimizer_instances > 1 else 0)
        + 3
    )


def connect_queues(plan: Plan, rank: int, environ: MutableMapping[str, str]) -> str | None:
    """Give every stream of `rank` a hardware queue of its own: two that share one run in the order of their launches,
    so that a transfer that waits would hold up what has nothing to do with it. Where `environ` has another number, it
    stays, and what is to be said about it comes back. CUDA reads it when it makes its context: call this before."""
    needed = min(MOST, max(FEWEST, streams(plan, rank)))
    given = environ.setdefault(CONNECTIONS, str(needed))
    if given == str(needed):
        return None
    return f"{CONNECTIONS} is {given} in the environment and stays so; the streams of rank {rank} need {needed}"
