"""A pipeline schedule that runs ahead: 1F1B with a deeper warm-up, in which no stage waits for the wire.

Megatron-Core's 1F1B waits for every send and every receive, twice for each micro-batch, so with a slow edge every stage
idles through it. Time runs to the right; ``0`` is the forward pass of micro-batch 0, ``aa`` its backward pass, ``.`` is
idle; a stage transfer takes as long as a forward pass, a third of a stage's time for a micro-batch:

    1F1B        stage 0   0.1...aa2.bb3.cc4.dd
                stage 1   ..0aa.1bb.2cc.3dd.4e
    run ahead,  stage 0   012...aa3bb4cc5dd6ee
    depth 3, 1  stage 1   ..0aa1bb2cc3dd4ee5ff

Three things make the difference. Receives are posted ahead of need, so that data crosses as soon as it exists (when,
and why no GPU can lock up in it: planning/schedule/launches.py). Sends
complete in the background. And stage s holds `in_flight[s]` micro-batches: where 1F1B holds one more than the stage
below it, a transfer of h stage times one way wants 2h more than that (planning decides how many there is memory for).
With 1F1B's pp - s in flight the order of computing is exactly 1F1B's.

The order of computing in a stage is fixed beforehand, for all ranks of a tensor-parallel group must take the same one,
and goes through the micro-batches forward and backward in Megatron's order. So every gradient is summed up in the same
order as under Megatron's schedules and results are equal bit for bit. Model chunks (virtual stages) take turns as in
Megatron's interleaved schedule; in_flight then counts passes of a chunk.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules as megatron
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.kinds import Pass, StageTransfer
from holmes_hpc.planning.schedule.launches import Post, launches
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.schema import refuse
from holmes_hpc.training.model.megatron_versions import backward_step
from holmes_hpc.training.pipeline import per_stage_transfers, point_to_point
from holmes_hpc.training.pipeline.point_to_point import Edges, NewGroup, is_nccl


class TraceEvent(NamedTuple):
    """What a tracer is told. `kind`: forward, backward (computing), wait_forward, wait_backward (blocked by an edge),
    send_forward, receive_forward, send_backward, receive_backward (posted at `start`, left or arrived at `end`). Times:
    seconds since the epoch. `held`: micro-batches (passes of a chunk) whose activations the stage held meanwhile."""

    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float
    held: int


Tracer = Callable[[TraceEvent], None]


def run_ahead(
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
    kind: str,
    in_flight: Sequence[int],
    routed: Order | None = None,
    tracer: Tracer | None = None,
) -> list[Any]:
    """Run one step in place of Megatron-Core's ``forward_backward_func``; return the losses on the last stage, else [].

    Bind `kind` and `in_flight` (the plan's schedule, and one number per stage), `routed` (the plan's order, where
    stages have unequal widths) and `tracer` with ``functools.partial``. With `routed`, `num_microbatches` are those of
    the whole step, by which a loss is divided, and gradients are to be summed over a stage's replicas.
    """
    models = model if isinstance(model, list) else [model]
    data = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(models)
    config, edges = get_model_config(models[0]), p2p_communicator
    stage, stages = edges.pp_group.rank(), edges.pp_group.size()
    _refuse_unsupported(config, edges, in_flight)
    order = routed or Order(kind, stages, num_microbatches, len(models), tuple(in_flight))
    own, depth = order.own(edges.row), order.depths[edges.row]
    recomputed_from = config.num_microbatches_with_partial_activation_checkpoints
    losses: list[Any] = []
    reduction = GradientReduction(config, models, first_stage=stage == 0)

    def forward(step: Pass, input_tensor: torch.Tensor | None) -> tuple[Any, Any]:
        return megatron.forward_step(
            forward_step_func,
            data_iterator=data[step.chunk],
            model=models[step.chunk],
            num_microbatches=num_microbatches,
            input_tensor=input_tensor,
            forward_data_store=losses,
            config=config,
            cp_group_size=pg_collection.cp.size(),
            # Megatron-Core's rule for a window of `depth`: the last ones of it are recomputed
            checkpoint_activations_microbatch=(
                None if recomputed_from is None else step.micro_batch % depth >= recomputed_from
            ),
            is_first_microbatch=step.micro_batch == own[0],
            current_microbatch=step.micro_batch,
            vp_stage=step.chunk if len(models) > 1 else None,
            is_last_stage=stage == stages - 1 and step.chunk == len(models) - 1,
        )

    def backward(step: Pass, *tensors: Any) -> Any:
        is_last = step.micro_batch == own[-1]
        with reduction.around_last(step.chunk) if is_last else contextlib.nullcontext():
            return backward_step(*tensors, model_type=get_model_type(models[0]), config=config)

    if not forward_only:
        embedding = megatron.clear_embedding_activation_buffer(config, models, stage == stages - 1)
        reduction.hold()
    new = _empty_tensors(config, pg_collection, edges.device, seq_length, micro_batch_size)
    tokens = _run_passes(order, edges, forward, None if forward_only else backward, new, config, tracer=tracer)
    if not forward_only:
        reduction.release()
        if config.finalize_model_grads_func is not None:
            megatron.finish_embedding_wgrad_compute(config, embedding, stage == stages - 1, pg_collection.tp)
            counted = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(models, counted, pg_collection=pg_collection, force_all_reduce=False)
    return losses


def _empty_tensors(
    config: Any, pg_collection: Any, device: torch.device, seq_length: int, micro_batch_size: int
) -> Callable[[], torch.Tensor]:
    """Return what makes a tensor to receive into, of the shape that crosses an edge."""
    shape = megatron.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=pg_collection.tp,
        cp_group=pg_collection.cp,
    )[0]
    return partial(torch.empty, shape, dtype=config.pipeline_dtype, device=device, requires_grad=True)


def _run_passes(
    order: Order,
    edges: Any,
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., Any] | None,
    new: Callable[[], torch.Tensor],
    config: Any,
    *,
    tracer: Tracer | None,
) -> torch.Tensor:
    """Run a stage's passes and transfers in order; return the number of tokens. `backward`: None in a validation."""
    row = edges.row
    program = launches(order, row, backward is None, edges.on_device)
    needs = {order.transfer_to(row, p): p for p in program if isinstance(p, Pass)}
    report = TraceReporter(tracer, edges)
    arriving: dict[Pass, Any] = {}  # what a pass works on, on its way
    held: dict[tuple[int, int], tuple[Any, Any]] = {}  # (micro-batch, chunk) -> input, output: what backward needs
    leaving: Any = None  # the result of the last pass
    tokens = torch.zeros([], dtype=torch.int, device=edges.device)
    for step in program:
        if isinstance(step, Post):
            transfer = step.transfer
            if not step.sends:
                stream, needed = edges.stream(_role(transfer, "in"), transfer.source), needs[transfer]
                arriving[needed] = stream.receive(new(), needed)
                continue
            _send(edges.stream(_role(transfer, "out"), transfer.target), leaving, transfer, order)
            if transfer.made.forward:
                megatron.deallocate_output_tensor(leaving, config.deallocate_pipeline_outputs)
            continue
        way, key = "forward" if step.forward else "backward", (step.micro_batch, step.chunk)
        with report.span(f"wait_{way}", step, held):
            arrived = arriving.pop(step).wait() if step in arriving else None
        if step.forward:
            held[key] = arrived, None
            with report.span("forward", step, held):
                leaving, count = forward(step, arrived)
            tokens += count
            held[key] = arrived, leaving
            if backward is None:
                del held[key]
        elif backward is not None:
            with report.span("backward", step, held):
                leaving = backward(step, *held.pop(key), arrived)
    return tokens


def _role(transfer: StageTransfer, end: str) -> str:
    """Return the role of the stream that a transfer goes over, at its `end`: "in" or "out"."""
    return f"{'forward' if transfer.made.forward else 'backward'}_{end}"


def _send(stream: Any, tensor: torch.Tensor, transfer: StageTransfer, order: Order) -> None:
    """Send in the background. The other end is at most a window behind, so a tensor older than that has arrived: to
    wait for it takes no time, and bounds the memory. Sends under way when a step ends complete during the next one."""
    stream.send(tensor, transfer.made)
    stream.settle(keep=order.window(transfer))


class TraceReporter:
    """Tells a tracer, if there is one, what happened when."""

    def __init__(self, tracer: Tracer | None, edges: Edges) -> None:
        self._tracer, self._held, self._cuda = tracer, 0, edges.device.type == "cuda"
        for channel in edges.channels.values():
            channel.watch = None if tracer is None else self._tell

    @contextlib.contextmanager
    def span(self, kind: str, step: Pass, held: Sized) -> Iterator[None]:
        """Time one thing that the stage does."""
        start, self._held = time.time(), len(held)
        yield
        if self._tracer is not None and self._cuda:
            torch.cuda.current_stream().synchronize()  # so that the times are the device's, at the cost of some overlap
        self._tell(kind, step, start, time.time())

    def _tell(self, kind: str, step: Any, start: float, end: float) -> None:
        if self._tracer is not None and isinstance(step, Pass):
            self._tracer(TraceEvent(kind, step.micro_batch, step.chunk, start, end, self._held))


def _refuse_unsupported(config: Any, edges: Any, in_flight: Sequence[int]) -> None:
    stages, instead = edges.pp_group.size(), "unset it, or use plan.schedule=1f1b"
    counts = f"in_flight is given for {len(in_flight)} stages of {stages}"
    refuse("plan.schedule", (len(in_flight) != stages, counts, "give one number per stage"), error=PlanError)
    refuse(
        "model",
        *(
            (getattr(config, name, False), f"{name} does not go with the schedule that runs ahead", instead)
            for name in (
                "overlap_moe_expert_parallel_comm",
                "hybrid_context_parallel",
                "fine_grained_activation_offloading",
            )
        ),
    )
    refuse(
        "environment",
        (
            edges.device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 a send that waits holds up all computing",
            instead,
        ),
    )


class GradientReduction:
    """When gradients are reduced across data-parallel ranks: Megatron's rules, for one chunk or several.

    They are held back (``no_sync``) but for each chunk's last backward pass, in which every bucket is reduced as soon
    as it is complete, beside the transfers still under way. With a ``grad_sync_func`` (aligned reductions) only the
    first stage does so; the others reduce after that pass.
    """

    def __init__(self, config: Any, models: Sequence[torch.nn.Module], first_stage: bool) -> None:
        self._models = models
        functions = config.no_sync_func if isinstance(config.no_sync_func, list) else [config.no_sync_func]
        self._no_sync = [f for f in functions if f is not None]
        self._after = config.grad_sync_func
        self._early = self._after is None or (first_stage and len(models) == 1)
        self._held = contextlib.ExitStack()

    def hold(self) -> None:
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())

    def release(self) -> None:
        self._held.close()

    @contextlib.contextmanager
    def around_last(self, chunk: int) -> Iterator[None]:
        """Around the last backward pass of a `chunk`."""
        if self._early:
            self.release()
        yield
        self.release()
        if not self._early:
            functions = self._after if isinstance(self._after, list) else [self._after] * len(self._models)
            functions[chunk](self._models[chunk].parameters())
        self.hold()


# -- which schedule a plan trains with, and what carries tensors between its stages ------------------------------------


def forward_backward(plan: Plan, tracer: Tracer | None) -> Callable[..., Any]:
    """The plan's schedule: Megatron-Core's own for its model chunks and stages, or this project's executor, which tells
    `tracer` what it does."""
    if in_background(plan):
        routed = plan.order if plan.order.routes else None
        return partial(
            run_ahead, kind=plan.schedule.kind, in_flight=plan.schedule.in_flight, routed=routed, tracer=tracer
        )
    return megatron.get_forward_backward_func()


def in_background(plan: Plan) -> bool:
    """Does this project's executor run it? A pipeline of one stage is run by Megatron-Core's, unless its replicas have
    unequal shares."""
    return plan.order.schedule.megatron is None and (plan.parallel.pp > 1 or plan.is_per_stage)


def communicator(
    plan: Plan, new_group: NewGroup, rank: int, groups: ProcessGroupCollection, config: Any, device: torch.device
) -> Any:
    """Point-to-point traffic over a group per edge; plain Megatron-LM's (``transport=single``) over the pipeline's
    where that is NCCL's, which carries both directions at once; None without a pipeline.

    Gloo's group of two ranks is one connection, on which the two directions wait for each other
    (benchmarks/one_connection.py): over it plain Megatron-LM gets a connection a direction as well, so that it is not
    slower than it would be on GPUs."""
    if plan.is_per_stage:
        return per_stage_transfers.build_routed(
            plan, new_group, rank=rank, place=groups.pp, config=config, device=device
        )
    if plan.parallel.pp == 1:
        return None
    if plan.transport_mode == "single" and plan.order.schedule.megatron and is_nccl(groups.pp):
        return P2PCommunicator(groups.pp, config)
    return point_to_point.build(plan, new_group, rank=rank, pp_group=groups.pp, config=config, device=device)
