"""Eager 1F1B: a pipeline schedule with a deeper warm-up than 1F1B, in which no stage waits for a send.

Megatron-Core's 1F1B waits for every send and every receive, twice per micro-batch, so every stage idles during a slow
transfer. In the figure time runs to the right; ``0`` is the forward pass of micro-batch 0, ``aa`` its backward pass,
``.`` is idle. A stage transfer takes as long as a forward pass, a third of a stage's time per micro-batch:

    1F1B         stage 0   0.1...aa2.bb3.cc4.dd
                 stage 1   ..0aa.1bb.2cc.3dd.4e
    eager 1F1B,  stage 0   012...aa3bb4cc5dd6ee
    depth 3, 1   stage 1   ..0aa1bb2cc3dd4ee5ff

There are three differences:
- Receives are posted early, so that data is transferred as soon as it exists. planning/schedule/launches.py decides
  when to post them, such that no GPU deadlocks.
- Sends complete in the background.
- Stage s holds `in_flight[s]` micro-batches. In 1F1B, a stage holds one more than the next stage. If a transfer takes h
  times as long as a stage computes one micro-batch, a stage should hold 1 + 2h more than the next, if memory allows.
If `in_flight[s]` is pp - s, as in 1F1B, the order of passes is exactly that of 1F1B.

The order of passes in a stage is fixed in advance, because all ranks of a tensor-parallel group must use one order.
Forward and backward passes are in Megatron's order of micro-batches. So every gradient is summed in the same order as
under Megatron's schedules, and results are equal bit for bit. Model chunks (virtual stages) alternate as in Megatron's
interleaved schedule. `in_flight` then counts each chunk of a micro-batch.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules as megatron
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.kinds import Pass, WeightPass
from holmes_hpc.planning.schedule.launches import Post, launches
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.training.model import gpt
from holmes_hpc.training.model.megatron_versions import backward_step
from holmes_hpc.training.model.weight_gradients import WeightGradients
from holmes_hpc.training.pipeline import per_stage_transfers, point_to_point
from holmes_hpc.training.pipeline.point_to_point import Edges, is_nccl, role_of
from holmes_hpc.training.session import Session


class TraceEvent(NamedTuple):
    """An event for a tracer. Its fields are keys of a line of a trace (metrics/breakdown.py).
    `kind`: forward, backward or weight for computing; wait_forward or wait_backward for waiting for a transfer;
    send_forward, receive_forward, send_backward or receive_backward for a transfer, posted at `start_s` and complete at
    `end_s`. `held`: the number of micro-batches (of each chunk) whose activations the stage held."""

    kind: str
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float
    held: int


Tracer = Callable[[TraceEvent], None]


def run_eager_1f1b(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
    p2p_communicator: Any,
    pg_collection: Any,
    order: Order,
    tracer: Tracer | None = None,
    weights: WeightGradients | None = None,
) -> list[Any]:
    """Run one step in place of Megatron-Core's ``forward_backward_func``.

    Return the loss function's result for each micro-batch on the last stage, [] on other stages.

    Bind `order` (the plan's), `tracer` and `weights` (see :func:`weight_gradients`) with ``functools.partial``. With
    per-stage TP/DP, `num_microbatches` counts the micro-batches of all replicas. The loss is divided by this number,
    and gradients are summed over all ranks with the same parameters. Otherwise it replaces the number in `order`."""
    models = model if isinstance(model, list) else [model]
    data = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(models)
    config, edges = get_model_config(models[0]), p2p_communicator
    stage, stages = edges.pp_group.rank(), edges.pp_group.size()
    is_serial = edges.device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    problem = "with CUDA_DEVICE_MAX_CONNECTIONS=1 a waiting send blocks all computing"
    ConfigError.refuse("environment", (is_serial, problem, "unset it, or use plan.schedule=1f1b"))
    order = order if order.routes else replace(order, micro_batches=num_microbatches)
    micro_batches, losses = order.micro_batches_of(edges.row), list[Any]()
    reduction = GradientReduction(config)

    def forward(stage_pass: Pass, input_tensor: torch.Tensor | None) -> tuple[Any, Any]:
        return megatron.forward_step(
            forward_step_func,
            data_iterator=data[stage_pass.chunk],
            model=models[stage_pass.chunk],
            num_microbatches=num_microbatches,
            input_tensor=input_tensor,
            forward_data_store=losses,
            config=config,
            cp_group_size=1 if order.routes else pg_collection.cp.size(),  # the factor of the loss
            is_first_microbatch=stage_pass.micro_batch == micro_batches[0],
            current_microbatch=stage_pass.micro_batch,
            vp_stage=stage_pass.chunk if len(models) > 1 else None,
            is_last_stage=stage == stages - 1 and stage_pass.chunk == len(models) - 1,
        )

    def backward(stage_pass: Pass, *tensors: Any) -> Any:
        is_last = stage_pass.micro_batch == micro_batches[-1]
        if weights is not None:
            weights.start_backward(stage_pass.micro_batch, stage_pass.chunk)
        if is_last:
            reduction.allow()
        gradient = backward_step(*tensors, model_type=get_model_type(models[0]), config=config)
        if is_last and weights is None:  # with weight passes, the last of these complete the gradients
            reduction.suppress()
        return gradient

    if not forward_only:
        reduction.suppress()
    tokens_of_rank = seq_length // pg_collection.cp.size()
    new_buffer = partial(gpt.hidden_states, torch.empty, config, micro_batch_size, tokens_of_rank, edges.device)
    tokens = _run_passes(
        *(order, edges, forward, None if forward_only else backward, new_buffer, config),
        compute_weights=partial(weights.compute, models) if weights is not None else None,
        tracer=tracer,
    )
    if not forward_only:
        reduction.allow()
        if config.finalize_model_grads_func is not None:
            token_count = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(models, token_count, pg_collection=pg_collection, force_all_reduce=False)
    return losses


def _run_passes(
    order: Order,
    edges: Any,
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., Any] | None,
    new_buffer: Callable[[], torch.Tensor],
    config: Any,
    *,
    compute_weights: Any,
    tracer: Tracer | None,
) -> torch.Tensor:
    """Run a stage's passes and transfers in order; return the number of tokens. `backward`: None for validation.
    `compute_weights`: :meth:`WeightGradients.compute` for the stage's models; None without weight passes.
    Weight passes after the last backward pass are computed together, layer by layer, so that reductions start early.
    Over gloo, the receives at the start of the next step are posted before them: gloo sends only to posted receives,
    and a stage that starts its next step earlier need not wait for this one."""
    row = edges.row
    program = launches(order, row, backward is None, edges.on_device)
    consumers = {order.transfer_to(row, p): p for p in program if isinstance(p, Pass)}
    report = TraceReporter(tracer, edges)
    arriving: dict[Pass, Any] = {}  # pass -> the transfer of its input
    activations: dict[tuple[int, int], tuple[Any, Any]] = {}  # (micro-batch, chunk) -> input and output, for backward
    output: Any = None  # of the last pass
    tokens = torch.zeros([], dtype=torch.int, device=edges.device)
    last_weights: list[Any] = [*takewhile(lambda launch: isinstance(launch, WeightPass), reversed(program))][::-1]

    def end_of(post: Post) -> tuple[str, int]:
        """Return (the role of the channel, the row at its other end)."""
        return role_of(post.transfer.source_pass.forward, post.sends), post.peer

    def receive(post: Post) -> Any:
        return edges.channel(*end_of(post)).receive(new_buffer(), consumers[post.transfer])

    for launch in program[: len(program) - len(last_weights)]:
        if isinstance(launch, WeightPass):
            with report.span("weight", launch, activations):
                compute_weights([launch], last=False)
            continue
        if isinstance(launch, Post):
            transfer, is_forward = launch.transfer, launch.transfer.source_pass.forward
            if launch.sends:
                channel = edges.channel(*end_of(launch))
                channel.send(output, transfer.source_pass)
                # To bound the memory, wait for the send that is one window earlier. The other end is at most a window
                # behind, so this takes no time. Sends in progress at the end of a step are waited for in the next step.
                channel.settle(keep=order.window(transfer))
                if is_forward:
                    megatron.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
            else:
                early = edges.posted[end_of(launch)]
                arriving[consumers[transfer]] = early.popleft() if early else receive(launch)
            continue
        direction, key = "forward" if launch.forward else "backward", (launch.micro_batch, launch.chunk)
        with report.span(f"wait_{direction}", launch, activations):
            received = arriving.pop(launch).wait() if launch in arriving else None
        if launch.forward:
            activations[key] = received, None
            with report.span("forward", launch, activations):
                output, count = forward(launch, received)
            tokens += count
            activations[key] = received, output
            if backward is None:
                del activations[key]
        elif backward is not None:
            with report.span("backward", launch, activations):
                output = backward(launch, *activations.pop(key), received)
    if backward is not None and edges.has_next_step and not edges.on_device:
        for post in program:
            if not isinstance(post, Post) or post.sends:
                break
            edges.posted[end_of(post)].append(receive(post))
    if last_weights:
        with report.span("weight", last_weights[-1], activations):
            compute_weights(last_weights, last=True)
    return tokens


class TraceReporter:
    """Reports the events of a step to a tracer, if there is one."""

    def __init__(self, tracer: Tracer | None, edges: Edges) -> None:
        self._tracer, self._in_flight, self._cuda = tracer, 0, edges.device.type == "cuda"
        for channel in edges.channels.values():
            channel.on_transfer = None if tracer is None else self._report

    @contextlib.contextmanager
    def span(self, kind: str, stage_pass: Pass | WeightPass, activations: Sized) -> Iterator[None]:
        """Report the time of the ``with`` block as one event."""
        start, self._in_flight = time.time(), len(activations)
        yield
        if self._tracer is not None and self._cuda:
            torch.cuda.current_stream().synchronize()  # to time the device; this costs some overlap
        self._report(kind, stage_pass, start, time.time())

    def _report(self, kind: str, stage_pass: Any, start: float, end: float) -> None:
        if self._tracer is not None and isinstance(stage_pass, Pass | WeightPass):
            self._tracer(TraceEvent(kind, stage_pass.micro_batch, stage_pass.chunk, start, end, self._in_flight))


class GradientReduction:
    """The rules by which Megatron reduces gradients across data-parallel ranks, for one chunk or several.
    Reductions are suppressed (``no_sync``) except in each chunk's last backward pass. In this pass, every bucket is
    reduced as soon as it is complete, in parallel with transfers."""

    def __init__(self, config: Any) -> None:
        functions = config.no_sync_func if isinstance(config.no_sync_func, list) else [config.no_sync_func]
        self._no_sync = [f for f in functions if f is not None]
        self._suppressed = contextlib.ExitStack()

    def suppress(self) -> None:
        for no_sync in self._no_sync:
            self._suppressed.enter_context(no_sync())

    def allow(self) -> None:
        self._suppressed.close()


# -- the schedule of a plan, and the communicator between its stages ---------------------------------------------------


def forward_backward(plan: Plan, tracer: Tracer | None, weights: WeightGradients | None = None) -> Callable[..., Any]:
    """Return the function that runs the plan's schedule: Megatron-Core's, or ``run_eager_1f1b``, which reports its
    events to `tracer`. `weights`: from :func:`weight_gradients`."""
    if runs_in_background(plan):
        return partial(run_eager_1f1b, order=plan.order, tracer=tracer, weights=weights)
    return megatron.get_forward_backward_func()


def weight_gradients(plan: Plan, chunks: Sequence[Any], timers: Callable[[str], Any]) -> WeightGradients | None:
    """Split the chunks' layers and return their weight gradients; None if the plan's schedule has no weight passes."""
    return WeightGradients(chunks, timers) if plan.order.schedule.splits and runs_in_background(plan) else None


def runs_in_background(plan: Plan) -> bool:
    """Return whether ``run_eager_1f1b`` runs the plan's schedule, with transfers in the background.
    Megatron-Core runs a pipeline of one stage, unless its replicas have different numbers of micro-batches."""
    return not plan.order.schedule.megatron and (plan.parallel.pp > 1 or plan.is_per_stage)


def communicator(session: Session, groups: ProcessGroupCollection, config: Any) -> Any:
    """Return the point-to-point communicator of this rank; None without a pipeline.
    It uses a group per direction of each edge. Plain Megatron-LM (``transport=single``) uses the pipeline's group if
    this is an NCCL group, which carries both directions at the same time. A gloo group of two ranks has one connection,
    on which the two directions wait for each other (benchmarks/one_connection.py). So with gloo, plain Megatron-LM also
    gets a group per direction. Otherwise comparisons on CPUs would show it slower than it is on GPUs."""
    plan = session.plan
    if plan.parallel.pp == 1 and not plan.is_per_stage:
        return None
    if plan.transport_mode == "single" and plan.order.schedule.megatron and is_nccl(groups.pp):
        return P2PCommunicator(groups.pp, config)
    build = per_stage_transfers.build_per_stage_edges if plan.is_per_stage else point_to_point.build_communicator
    rank, new_group = session.launch.rank, session.groups.edge
    return build(plan, new_group, rank=rank, pp_group=groups.pp, config=config, device=session.device)
