"""Which pipeline schedule a plan trains with, and what carries tensors between its stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.training.pipeline import point_to_point, routed_edges
from holmes_hpc.training.pipeline.run_ahead import Tracer, run_ahead


def forward_backward(plan: Plan, tracer: Tracer | None) -> Callable[..., Any]:
    """The plan's schedule: Megatron-Core's own for its model chunks and stages, or this project's executor, which tells
    `tracer` what it does."""
    if in_background(plan):
        routed = plan.order if plan.order.routes else None
        return partial(
            run_ahead, kind=plan.schedule.kind, in_flight=plan.schedule.in_flight, routed=routed, tracer=tracer
        )
    return get_forward_backward_func()


def in_background(plan: Plan) -> bool:
    """Does this project's executor run it? A pipeline of one stage is run by Megatron-Core's, unless its replicas have
    unequal shares."""
    return plan.order.schedule.megatron is None and (plan.parallel.pp > 1 or plan.is_per_stage)


def communicator(
    plan: Plan,
    new_group: point_to_point.NewGroup,
    rank: int,
    groups: ProcessGroupCollection,
    config: Any,
    device: torch.device,
) -> Any:
    """Point-to-point traffic over a group per edge; plain Megatron-LM's (``transport=single``) over the pipeline's
    where that is NCCL's, which carries both directions at once; None without a pipeline.

    Gloo's group of two ranks is one connection, on which the two directions wait for each other
    (benchmarks/one_connection.py): over it plain Megatron-LM gets a connection a direction as well, so that it is not
    slower than it would be on GPUs."""
    if plan.is_per_stage:
        return routed_edges.build_routed(plan, new_group, rank=rank, place=groups.pp, config=config, device=device)
    if plan.parallel.pp == 1:
        return None
    if plan.transport_mode == "single" and plan.order.schedule.megatron and point_to_point.is_nccl(groups.pp):
        return P2PCommunicator(groups.pp, config)
    return point_to_point.build(plan, new_group, rank=rank, pp_group=groups.pp, config=config, device=device)
