"""Predictions for a plan: step time and its parts, throughput, memory, bytes per network, timeline, 90% interval."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holmes_hpc.errors import rounded
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import Timing, compute_times, recomputed, row_durations, step_s, timing
from holmes_hpc.planning.cost.uncertainty import interval_s
from holmes_hpc.planning.plan.plan import Plan, Predicted
from holmes_hpc.planning.schedule.graph import NodeNumbers, graph
from holmes_hpc.planning.schedule.kinds import COMPUTING
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.planning.schedule.simulation import ACCURATE, TimedPass, rounds, row_end_times, step_seconds
from holmes_hpc.records.metrics import PART_NAMES


def layer_array(plan: Plan) -> np.ndarray:
    """Return the number of layers of each stage and chunk, (1, stages, chunks)."""
    return np.array([[s.chunks for s in plan.stages]])


def predict(plan: Plan, costs: Costs) -> Predicted:
    """Predict the step time, memory and traffic of a plan."""
    return predict_layout(Layout.of(plan, costs), layer_array(plan))


def step_time_s(plan: Plan, costs: Costs) -> float:
    """Return the predicted seconds of a step of `plan`."""
    return float(step_s(Layout.of(plan, costs), layer_array(plan))[0])


def predict_layout(layout: Layout, layers: np.ndarray) -> Predicted:
    """Predict the step time, memory and traffic of a layout with one layer split, (1, stages, chunks)."""
    seconds = float(step_s(layout, layers)[0])
    stages = stage_breakdown(layout, layers, seconds)
    least_s = limit_s([stage["compute_s"] for stage in stages], stage_speeds(layout))
    model, batch, p = layout.model, layout.batch, layout.parallel
    parts, recomputed_layers = layout.costs.software.recompute_parts, int(recomputed(layout, layers).sum())
    sizes = model, batch, p.vocabulary_parts
    per_gpu = seconds * p.world_size * 1e12
    return Predicted(
        step_time_s=seconds,
        samples_per_s=batch.tokens / batch.context / seconds,
        model_tflops_per_gpu=model_flops_per_step(*sizes) / per_gpu,
        hardware_tflops_per_gpu=hardware_flops_per_step(*sizes, layout.recompute, parts, recomputed_layers) / per_gpu,
        memory_bytes_per_gpu=tuple(int(x) for x in memory(layout, layers).total()[0]),
        nic_bytes_per_step=nic_bytes(layout, layers),
        breakdown=max(stages, key=lambda stage: stage["compute_s"]),
        interval_s=interval_s(layout, seconds),
        share_of_limit=least_s / seconds,
    )


def stage_speeds(layout: Layout) -> list[float]:
    """Return the speed of each stage: passes of one micro-batch through one layer per second, over all replicas."""
    p, stages = layout.parallel, range(layout.parallel.pp)
    if layout.is_per_stage:
        layer_s = [compute_times(view)[0].layer[:, s].sum() for view, s in layout.views]
        return [float(p.stages[s].dp / layer_s[s]) for s in stages]
    pipelines = [layout.pipelines(replica[0]) for replica in layout.replicas]
    replica_speeds = [count / c.layer.sum(axis=0) for count, c in zip(pipelines, compute_times(layout), strict=True)]
    return [float(speed) for speed in np.sum(replica_speeds, axis=0)]


def limit_s(compute_s: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the seconds of a step in which no rank waits, and layers are divided exactly by stage speed
    (:func:`stage_speeds`). `compute_s`: for each stage, the mean seconds that its ranks compute in a step."""
    return float(np.average(compute_s, weights=speeds))


def kind_tflops(plan: Plan, seconds: float) -> dict[Gpu, float]:
    """Return the model TFLOP/s of one GPU of each kind in a step of `seconds`. The FLOPs of a kind are those of the
    layers on its stages and, if it has the last stage, of the head. They are divided by the number of its GPUs."""
    p = plan.parallel
    flops_of, ranks_of = defaultdict[Gpu, float](float), defaultdict[Gpu, int](int)
    total = plan.parts.micro_batches(1)
    shares = p.pipeline_shares([c.ranks for c in plan.components], total)
    for component, counts in zip(plan.components, shares, strict=True):
        gpu, share = plan.site.pool(component.pool).gpu, sum(counts) / total
        for stage in component.stages:
            part = plan.stages[stage].layers, stage == 0, stage == p.pp - 1
            flops_of[gpu] += share * model_flops_per_step(plan.model, plan.batch, p.vocabulary_parts, *part)
        ranks_of[gpu] += component.ranks
    return {gpu: flops / ranks_of[gpu] / seconds / 1e12 for gpu, flops in flops_of.items()}


def stage_breakdown_of(plan: Plan, costs: Costs) -> list[dict[str, float]]:
    """Return :func:`stage_breakdown` of a plan with a prediction."""
    assert plan.predicted is not None
    return stage_breakdown(Layout.of(plan, costs), layer_array(plan), plan.predicted.step_time_s)


def stage_breakdown(layout: Layout, layers: np.ndarray, seconds: float) -> list[dict[str, float]]:
    """Return the seconds of each part of a step (records.metrics.PARTS), for each stage of the slowest pipeline. They
    add up to `seconds`, the length of the step. If only its first micro-batches are simulated, their compute time is
    scaled to all micro-batches, and pipeline wait is the remainder."""
    times, orders = timing(layout, layers), layout.orders
    end_s = seconds - float(times.after_reduction_s()[0])
    if layout.is_per_stage:
        simulated, scale = events(layout, layers), 1.0
    else:
        ends = [step_seconds(*replica)[0] for replica in zip(orders, times.replicas, times.one_nic, strict=True)]
        replica = int(np.argmax(ends))
        order = orders[replica]
        short = min(order.micro_batches, sum(rounds(order, ACCURATE)))
        simulated = _replica_events(layout, times, replica, replace(order, micro_batches=short))
        scale = order.micro_batches / short
    after = {"grad_sync_s": times.tied + times.norm, "param_sync_s": float(times.gather[0].max())}
    after["optimizer_s"] = float(times.optimizer[0]) + times.overhead
    simulated_end_s = max(e["end_s"] for e in simulated if e["kind"] != "send")
    rows = grouped((e["stage"], e) for e in simulated)
    parts_of_row = {row: _row_parts(row_events, simulated_end_s, end_s, scale) for row, row_events in rows}
    stages = grouped((layout.order.stage_of(row), parts_of_row[row]) for row in sorted(parts_of_row))
    longest = (max(parts, key=lambda p: p["compute_s"]) for _, parts in stages)  # of the replica that computes longest
    return [{part: s + after.get(part, 0.0) for part, s in parts.items()} for parts in longest]


def _row_parts(row: list[dict[str, Any]], simulated_end_s: float, end_s: float, scale: float) -> dict[str, float]:
    """Return the parts of a step on one stage, until all gradients are reduced, which is at `end_s`. `row`: the stage's
    events in a simulation that ends at `simulated_end_s`. `scale`: micro-batches of the step over those simulated."""

    def total(*kinds: str) -> float:
        return float(sum(e["end_s"] - e["start_s"] for e in row if e["kind"] in kinds))

    passes = [e for e in row if e["kind"] in COMPUTING]
    first, last = min(e["start_s"] for e in passes), max(e["end_s"] for e in passes)
    gather_s = sum(e["end_s"] - e["start_s"] for e in row if e["kind"] == "param_sync" and e["end_s"] <= first + 1e-9)
    sync_s = max([e["end_s"] - last for e in row if e["kind"] == "grad_sync"], default=0.0)
    parts = {
        "compute_s": scale * total(*COMPUTING),
        "fill_drain_s": first - gather_s + simulated_end_s - last - sync_s,
        "grad_sync_s": sync_s,
        "param_sync_s": total("param_sync"),
        "optimizer_s": 0.0,
    }
    parts["fill_drain_s"] = max(0.0, parts["fill_drain_s"] - max(0.0, sum(parts.values()) - end_s))  # early steps
    return {**parts, "pipeline_wait_s": max(0.0, end_s - sum(parts.values()))}


def nic_bytes(layout: Layout, layers: np.ndarray) -> dict[str, float]:
    """Return the payload bytes that all nodes send in a step, by fabric (RDMA) or ``ethernet`` (TCP)."""
    total = defaultdict[str, float](float)
    for group, _, amount in sent_bytes(layout, layers):
        if amount:
            total[group.transport.fabric or "ethernet"] += amount
    return dict(sorted(total.items()))


def timeline(plan: Plan, costs: Costs) -> list[dict[str, Any]]:
    """Return the simulated step as events {stage, kind, micro_batch, chunk, start_s, end_s}, sorted by stage and start.
    `kind`: forward, backward, weight, send (a stage transfer, listed at its sender), grad_sync, param_sync. With
    per-stage TP/DP, `stage` is the number of a replica, counted stage by stage."""
    layout, layers = Layout.of(plan, costs), layer_array(plan)
    if layout.is_per_stage:
        return sorted((e for e in events(layout, layers) if e["end_s"] > e["start_s"]), key=_event_order)
    times = timing(layout, layers)
    return [e for replica, order in enumerate(layout.orders) for e in _replica_events(layout, times, replica, order)]


def _replica_events(layout: Layout, times: Timing, replica: int, order: Order) -> list[dict[str, Any]]:
    step_graph, numbers = graph(order, times.one_nic[replica]), NodeNumbers(order)
    table = times.replicas[replica].table()
    ends, durations = step_graph.end_times(table)[0], table[0, step_graph.column]
    rows = [
        {
            **(labels := numbers.describe(int(step_graph.node[i]))),
            "stage": labels["stage"] + replica * layout.parallel.pp,
            "start_s": float(ends[i] - durations[i]),
            "end_s": float(ends[i]),
        }
        for i in np.flatnonzero(durations > 0).tolist()
    ]
    return sorted(rows, key=_event_order)


def events(layout: Layout, layers: np.ndarray) -> list[dict[str, Any]]:
    """Return the simulated step of one layer split with per-stage TP/DP, as events of :func:`timeline`."""
    order, durations = layout.order, row_durations(layout, times := timing(layout, layers), 0)
    tails = times.replicas[0].tail[0, :, 0].tolist()
    passes, simulated = list[TimedPass](), list[dict[str, Any]]()

    def add(row: int, kind: str, start: float, end: float, micro_batch: int | None = None) -> None:
        simulated.append(dict(stage=row, kind=kind, chunk=0, micro_batch=micro_batch, start_s=start, end_s=end))

    last_ends = row_end_times(order, durations, passes)
    for p in passes:
        if p.kind == "forward" and p.micro_batch == order.micro_batches_of(p.row)[0]:
            add(p.row, "param_sync", p.start - durations.ready[order.stage_of(p.row)], p.start)
        add(p.row, p.kind, p.start, p.end, p.micro_batch)
        if p.sent is not None:
            add(p.row, "send", *p.sent, micro_batch=p.micro_batch)
    for row, end in enumerate(last_ends):
        add(row, "grad_sync", end, end + tails[order.stage_of(row)])
    return simulated


def _event_order(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["stage"], event["start_s"], event["end_s"], event["kind"]


def chrome_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return events of :func:`timeline` as a Chrome trace, which Perfetto reads. Its times are in microseconds. The
    events of a `process` (by default: of a stage) are one process of the trace. Its threads are computing, waiting,
    synchronizing, and one for each kind of transfer."""
    pids, tids, entries = dict[str, int](), dict[tuple[int, str], int](), list[dict[str, Any]]()

    def add_name(key: str, pid: int, tid: int, name: str) -> None:
        entries.append({"ph": "M", "pid": pid, "tid": tid, "name": key, "args": {"name": name}})

    for e in events:
        kind, micro_batch, process = e["kind"], e["micro_batch"], e.get("process", f"stage {e['stage']}")
        if process not in pids:
            pids[process] = len(pids)
            add_name("process_name", pids[process], 0, process)
        other = "synchronize" if kind.endswith("_sync") else kind
        thread = "compute" if kind in COMPUTING else "wait" if kind.startswith("wait") else other
        pid = pids[process]
        if (pid, thread) not in tids:
            tids[pid, thread] = len(tids)
            add_name("thread_name", pid, tids[pid, thread], thread)
        name = kind if micro_batch is None or math.isnan(micro_batch) else f"{kind} {micro_batch:.0f}"
        times = {"ts": round(e["start_s"] * 1e6, 3), "dur": round((e["end_s"] - e["start_s"]) * 1e6, 3)}
        span = {"ph": "X", "pid": pid, "tid": tids[pid, thread], "name": name, "cat": kind, **times}
        entries.append({**span, "args": {"chunk": e["chunk"]}})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def slowest_parts(extra_s: Mapping[str, float]) -> str:
    """Return a text on the part with the most extra time, and on the next one if it has at least a third of that.
    `extra_s`: the seconds by which each part of the step is longer than in the best plan."""
    first, second = sorted(extra_s, key=lambda name: -extra_s[name])[:2]
    text = f"{PART_NAMES[first]} takes {rounded(extra_s[first])} s longer"
    is_long = extra_s[second] >= extra_s[first] / 3 > 0
    return f"{text}, {PART_NAMES[second]} {rounded(extra_s[second])} s" if is_long else text
