"""What a plan will do: step time and its parts, throughput, memory, bytes per NIC kind, and its timeline; and how far a
prediction may be off: what it was off, nine times of ten, on published runs like it.

The table of that (uncertainty.yaml) is made by benchmarks/published_spread.py: measured over predicted step time, its
5th and 95th percentile, by what told most of the errors apart: width of tensor parallelism, and whether attention is
fused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, head_flops, layer_flops, model_flops_per_step
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.kernels import Kind, kind
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import Timing, parameters, recomputed, row_durations, step_s, timing
from holmes_hpc.planning.cost.traffic import activation_bytes, embedding_bytes
from holmes_hpc.planning.plan.parallel import PIPELINE_ORDER
from holmes_hpc.planning.plan.plan import Component, Plan, Predicted
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.planning.schedule.graph import Numbers, graph
from holmes_hpc.planning.schedule.simulation import Went, step_seconds
from holmes_hpc.planning.schedule.simulation import ends as row_ends
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import Checked, key, make

# A kind whose shares are supposed, or that has no table: known kinds' shares lie between 0.49 and 0.86.
SUPPOSED, UNKNOWN = 1.15, 1.35


def layer_array(plan: Plan) -> np.ndarray:
    """Layers of each stage and chunk, (1, S, C)."""
    return np.array([[s.chunks for s in plan.stages]])


def predict(plan: Plan, costs: Costs) -> Predicted:
    """Predict one plan as it is."""
    return predict_layout(Layout.of(plan, costs), layer_array(plan))


def predict_layout(layout: Layout, layers: np.ndarray) -> Predicted:
    """Predict one layer split, (1, S, C), of a layout."""
    seconds = float(step_s(layout, layers)[0])
    model, batch, p = layout.model, layout.batch, layout.parallel
    per_gpu = seconds * p.world_size * 1e12
    return Predicted(
        step_time_s=seconds,
        samples_per_s=batch.global_size / seconds,
        model_tflops_per_gpu=model_flops_per_step(model, batch, p.vocabulary_parts) / per_gpu,
        hardware_tflops_per_gpu=hardware_flops_per_step(
            model,
            batch,
            p.vocabulary_parts,
            layout.recompute,
            layout.costs.software.recompute_parts,
            int(recomputed(layout, layers).sum()),
        )
        / per_gpu,
        memory_bytes_per_gpu=tuple(int(x) for x in memory(layout, layers).total()[0]),
        nic_bytes_per_step=nic_bytes(layout, layers),
        breakdown=breakdown(layout, layers, seconds),
        interval_s=interval_s(layout, seconds),
    )


def kind_tflops(plan: Plan, seconds: float) -> dict[Gpu, float]:
    """Model TFLOP/s of one GPU of each kind: what its stages' layers, and on the last the head, need in a step of
    `seconds`, over all GPUs of that kind."""
    p, model, batch = plan.parallel, plan.model, plan.batch
    tokens = batch.global_size * batch.sequence_length
    layer, head = layer_flops(model, tokens, batch.sequence_length), head_flops(model, tokens, p.vocabulary_parts)
    done, ranks = defaultdict[Gpu, float](float), defaultdict[Gpu, int](int)
    for component in plan.components:
        gpu = plan.site.fabric(component.fabric).gpu
        share = component.ranks / p.world_size if p.order != PIPELINE_ORDER else 1.0  # of the pipelines
        for stage in component.stages:
            done[gpu] += 3 * share * (plan.stages[stage].layers * layer + head * (stage == p.pp - 1))
        ranks[gpu] += component.ranks
    return {gpu: flops / ranks[gpu] / seconds / 1e12 for gpu, flops in done.items()}


def breakdown(layout: Layout, layers: np.ndarray, seconds: float) -> dict[str, float]:
    """Seconds of the step of the stage that computes longest: computing, waiting for other stages and their transfers,
    gradients' and parameters' traffic that nothing hides, the optimizer and what else follows. They sum up to the
    step."""
    if layout.is_per_stage:
        return _breakdown_per_stage(layout, layers)
    times = timing(layout, layers)
    ends = [float(step_seconds(layout.order, d, nic)[0]) for d, nic in zip(times.replicas, times.shared, strict=True)]
    replica = int(np.argmax(ends))
    d = times.replicas[replica]
    work = (d.forward + d.backward)[0].sum(axis=1) * layout.order.micro_batches
    stage = int(np.argmax(work))
    after = float(times.after()[0])
    sync = float(d.tail[0, stage].max())
    ready = float(d.ready[0, stage, 0])
    waits = max(0.0, seconds - after - float(work[stage]) - sync - ready)
    sync = seconds - after - float(work[stage]) - ready - waits
    return {
        "compute_s": float(work[stage]),
        "pipeline_wait_s": waits,
        "grad_sync_s": sync + times.tied + times.norm,
        "param_sync_s": ready + float(times.gather[0].max()),
        "optimizer_s": float(times.optimizer[0]) + times.other,
    }


def nic_bytes(layout: Layout, layers: np.ndarray) -> dict[str, float]:
    """Payload bytes that all nodes together send in a step, by fabric (RDMA) or ``ethernet`` (TCP)."""
    p = layout.parallel
    total: defaultdict[str, float] = defaultdict(float)

    def add(transport: Transport, amount: float) -> None:
        if transport.kind != "local" and amount:
            total[transport.fabric if transport.kind == "rdma" and transport.fabric else "ethernet"] += amount

    if layout.is_per_stage:
        for group, _, amount in sent_bytes(layout, layers):
            add(group.transport, amount)
        return dict(sorted(total.items()))
    count = parameters(layout, layers)[0].sum(axis=1)
    for replica, stages in enumerate(layout.replicas):
        pipelines = layout.pipelines(stages[0])
        runs = pipelines // layout.run
        for s, component in enumerate(stages):
            _add_synchronisation(layout, replica, s, component=component, count=float(count[s]), runs=runs, add=add)
            if p.pp > 1 and (s < p.pp - 1 or p.virtual_stages > 1):
                transport = layout.edges[replica][s]
                transfers = layout.order.micro_batches * (p.virtual_stages if s < p.pp - 1 else p.virtual_stages - 1)
                add(transport, 2 * transfers * pipelines * p.tp * activation_bytes(layout, transport, component))
        if layout.model.tied and p.pp > 1:
            how, whole = layout.costs.collectives(layout.fabric(stages[0]).gpu), embedding_bytes(layout) / p.tp
            add(layout.ends(replica), how.all_reduce / 2 * whole * 2 * pipelines * p.tp)
    return dict(sorted(total.items()))


def _add_synchronisation(
    layout: Layout, replica: int, stage: int, component: Component, count: float, runs: int, add: Any
) -> None:
    """Gradients and parameters of one stage: a ring leaves each of its nodes once."""
    p, gpu = layout.parallel, layout.fabric(component).gpu
    how, n = layout.costs.collectives(gpu), layout.run
    gradients, weights = count * layout.costs.wire_size, count * layout.costs.weight_bytes(gpu)
    reduced = how.all_reduce if layout.costs.software.all_reduced else how.reduce_scatter
    amount = reduced * gradients + how.all_gather * weights if p.distributed_optimizer else how.all_reduce * gradients
    nodes = layout.nodes_of_run(replica, stage)
    add(layout.reduction(replica, stage), runs * p.tp * nodes * amount * (n - 1) / n)
    k = p.optimizer_instances
    if k > 1:  # every rank of this replica sends as one member of its ring across instances
        add(layout.across(), runs * n * p.tp * how.all_reduce * (k - 1) / k * gradients / n)


def timeline(plan: Plan, costs: Costs) -> list[dict[str, Any]]:
    """The simulated step as events: {stage, name, kind, micro_batch, chunk, start_s, end_s}, sorted by stage and start.

    `kind`: forward, backward, send (a stage transfer, listed at its sender), grad_sync, param_sync. Of a plan that is
    per stage `stage` counts replicas, stage by stage.
    """
    layout, layers = Layout.of(plan, costs), layer_array(plan)
    if layout.is_per_stage:
        return sorted((e for e in events(layout, layers) if e["end_s"] > e["start_s"]), key=_event_order)
    times = timing(layout, layers)
    return [event for replica in range(len(times.replicas)) for event in _events(layout, times, replica)]


def _events(layout: Layout, times: Timing, replica: int) -> list[dict[str, Any]]:
    made, numbers = graph(layout.order, times.shared[replica]), Numbers(layout.order)
    table = times.replicas[replica].table()
    ends, lasts = made.ends(table)[0], table[0, made.column]
    rows = [
        {
            **(what := numbers.describe(int(made.node[i]))),
            "stage": what["stage"] + replica * layout.parallel.pp,
            "start_s": float(ends[i] - lasts[i]),
            "end_s": float(ends[i]),
        }
        for i in np.flatnonzero(lasts > 0).tolist()
    ]
    return sorted(rows, key=_event_order)


def events(layout: Layout, layers: np.ndarray) -> list[dict[str, Any]]:
    """Return the simulated step of one layer split of a layout that is per stage: events as of :func:`timeline`."""
    order, durations = layout.order, row_durations(times := timing(layout, layers), 0)
    tail = times.replicas[0].tail[0, :, 0].tolist()
    passes, made = list[Went](), list[dict[str, Any]]()

    def add(row: int, kind: str, start: float, end: float, micro_batch: int | None = None) -> None:
        made.append(dict(stage=row, kind=kind, chunk=0, micro_batch=micro_batch, start_s=start, end_s=end))

    last_ends = row_ends(order, durations, passes)
    for w in passes:
        if w.forward and w.micro_batch == order.own(w.row)[0]:
            add(w.row, "param_sync", w.start - durations.ready[order.stage_of(w.row)], w.start)
        add(w.row, "forward" if w.forward else "backward", w.start, w.end, w.micro_batch)
        if w.sent is not None:
            add(w.row, "send", *w.sent, micro_batch=w.micro_batch)
    for row, end in enumerate(last_ends):
        add(row, "grad_sync", end, end + tail[order.stage_of(row)])
    return made


def _breakdown_per_stage(layout: Layout, layers: np.ndarray) -> dict[str, float]:
    """Return seconds of the step of the replica that computes longest, by part, as :func:`breakdown` has them."""
    times, simulated = timing(layout, layers), events(layout, layers)
    work: defaultdict[int, float] = defaultdict(float)
    for e in simulated:
        work[e["stage"]] += e["end_s"] - e["start_s"] if e["kind"] in ("forward", "backward") else 0.0
    row = max(work, key=lambda r: work[r])
    gather = next(e["end_s"] - e["start_s"] for e in simulated if e["stage"] == row and e["kind"] == "param_sync")
    end = max(e["end_s"] for e in simulated)
    sync = max(0.0, end - max(e["end_s"] for e in simulated if e["kind"] != "grad_sync"))
    return {
        "compute_s": work[row],
        "pipeline_wait_s": end - work[row] - gather - sync,
        "grad_sync_s": sync + times.tied + times.norm,
        "param_sync_s": gather + float(times.gather[0].max()),
        "optimizer_s": float(times.optimizer[0]) + times.other,
    }


def _event_order(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["stage"], event["start_s"], event["end_s"], event["kind"]


def chrome_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events as a Chrome/Perfetto trace: one process a stage, computing and traffic as its threads."""
    threads = {"forward": 0, "backward": 0, "send": 1}
    lines: list[dict[str, Any]] = []
    for stage in sorted({e["stage"] for e in events}):
        lines.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}})
        lines += [
            {"ph": "M", "pid": stage, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(("compute", "send", "synchronise"))
        ]
    lines += [
        {
            "ph": "X",
            "pid": e["stage"],
            "tid": threads.get(e["kind"], 2),
            "name": e["kind"] if e["micro_batch"] is None else f"{e['kind']} {e['micro_batch']}",
            "ts": e["start_s"] * 1e6,
            "dur": (e["end_s"] - e["start_s"]) * 1e6,
            "args": {"chunk": e["chunk"]},
        }
        for e in events
    ]
    return {"traceEvents": lines, "displayTimeUnit": "ms"}


@dataclass(frozen=True)
class Spread(Checked, where="uncertainty"):
    """Measured over predicted seconds of nine of ten runs of a class: TP up to `tp`, attention fused or not."""

    tp: Annotated[int, key("tensor parallel, at most", ge=1)]
    flash: bool
    low: Annotated[float, key("5th percentile", gt=0)]
    high: Annotated[float, key("95th percentile", gt=0)]
    rows: Annotated[int, key("runs that it was seen on", ge=1)]


@cache
def spreads() -> tuple[Spread, ...]:
    """The table's rows, narrowest TP first."""
    path = Path(__file__).with_name("uncertainty.yaml")
    return tuple(make(Spread, row, f"{path.name}: classes") for row in read_yaml(path)["classes"])


def spread(tp: int, flash: bool) -> Spread:
    """The class of a run; beyond the widest TP of the table, the last."""
    like = [s for s in spreads() if s.flash == flash]
    return next((s for s in like if tp <= s.tp), like[-1])


def widened(table: Kind) -> float:
    """How much wider an interval is for a GPU kind whose figures were not all measured."""
    return UNKNOWN if not table.known else SUPPOSED if "S" in table.source.split() else 1.0


def interval_s(layout: Layout, seconds: float) -> tuple[float, float] | None:
    """(low, high) seconds of a step predicted to take `seconds`; None where computing was measured or waits, since
    published runs say nothing of that."""
    if not all(layout.costs.modelled(layout.fabric(c)) for c in layout.components):
        return None
    gpus = {layout.fabric(c).gpu for c in layout.components}
    found = spread(layout.parallel.tp_of(0), all(layout.costs.software_on(gpu).flash for gpu in gpus))
    wider = max(widened(kind(gpu)) for gpu in gpus)
    return seconds * found.low / wider, seconds * found.high * wider
