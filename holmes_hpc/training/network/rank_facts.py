"""The facts that ranks exchange before the first process group: the transports of their nodes, and their GPUs."""

from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.network.exchange import Nodes, combine_by_node
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.rank import cuda_check
from holmes_hpc.training.rank.launch import Launch

_Message = dict[str, str] | None  # the arguments of an error
_Transports = tuple[list[list[NodeTransports]], str]  # those of each node; why the ranks cannot train together


def exchange_transports(
    launch: Launch, store: dist.Store, node: NodeTransports, on_gpu: bool, nodes: Nodes
) -> list[NodeTransports]:
    """Return the transports of every rank's node. What is the same for all ranks of a node is exchanged once.
    Raise ConfigError on all ranks if some would train on GPUs and others on CPUs."""

    def of_node(rows: list[Any]) -> list[Any]:
        return rows if any(row[1:] != rows[0][1:] for row in rows) else rows[:1]

    def of_all(of_nodes: list[Any]) -> _Transports:
        ranks = [(rank, device, transports["node"]) for rows in of_nodes for rank, device, transports in rows]
        texts = (f"rank {rank} has {device} (node {name})" for rank, device, name in ranks if device != ranks[0][1])
        problem = next((f"rank 0 has {ranks[0][1]} (node {ranks[0][2]}), {text}" for text in texts), "")
        return [[transports for *_, transports in rows] for rows in of_nodes], problem

    value = launch.rank, "a GPU" if on_gpu else "a CPU", node
    found, problem = combine_by_node(store, "node", launch.rank, nodes, value, of_node, of_all, _Transports)
    hint = "see `nvidia-smi` on both nodes, or use train.device=cpu"
    ConfigError.refuse("train.device", (problem, problem, hint))
    node_of_rank: list[Any] = [None] * launch.world_size
    for ranks, of_ranks in zip(nodes.values(), found, strict=True):
        for i, rank in enumerate(ranks):
            node_of_rank[rank] = of_ranks[i if len(of_ranks) > 1 else 0]
    return node_of_rank


def check_gpus(plan: Plan, launch: Launch, device: torch.device, store: dist.Store, nodes: Nodes) -> None:
    """Raise PlanError on every rank if two ranks have the same GPU, which NCCL reports without naming the ranks, or if
    a GPU has too little free memory for the plan. The error names the first such GPU."""
    if device.type != "cuda":
        return
    problem = None
    if plan.predicted is not None:
        stage, *_ = plan.parallel.coordinates(launch.rank)
        free, total = torch.cuda.mem_get_info(device)
        needed = plan.predicted.memory_bytes_per_gpu[stage]
        problem = cuda_check.memory_problem(free, total, needed, f"GPU {device.index} of node {launch.node}")
    message = problem and {"what": problem.what, "where": problem.where, "hint": problem.hint}
    value = [launch.rank, str(torch.cuda.get_device_properties(device).uuid), message]

    def of_node(rows: list[Any]) -> _Message:
        owners: dict[str, int] = {}
        shared = ((owners.setdefault(uuid, rank), rank) for rank, uuid, _ in rows)
        messages = [cuda_check.shared_gpu(owner, rank, launch.node) for owner, rank in shared if owner != rank]
        return first([*messages, *(message for *_, message in rows)])

    def first(messages: list[Any]) -> _Message:
        return next(filter(None, messages), None)

    if message := combine_by_node(store, "gpu", launch.rank, nodes, value, of_node, first, _Message):
        raise PlanError(**message)
