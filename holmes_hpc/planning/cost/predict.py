"""What a plan will do: step time and its parts, throughput, memory, bytes per NIC kind, and its timeline."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.cost.layout import Setting
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import Timing, activation_bytes, parameters, step_s, timing
from holmes_hpc.planning.schedule.graph import Numbers, graph
from holmes_hpc.planning.schedule.simulation import step_seconds
from holmes_hpc.planning.spec.plan import Component, Plan, Predicted
from holmes_hpc.planning.spec.transport import Transport


def layer_array(plan: Plan) -> np.ndarray:
    """Layers of each stage and chunk, (1, S, C)."""
    return np.array([[s.chunks for s in plan.stages]])


def predict(plan: Plan, costs: Costs) -> Predicted:
    """Predict one plan as it is."""
    return predict_setting(Setting.of(plan, costs), layer_array(plan))


def predict_setting(setting: Setting, layers: np.ndarray) -> Predicted:
    """Predict one layer split, (1, S, C), of a setting."""
    seconds = float(step_s(setting, layers)[0])
    model, batch, p = setting.model, setting.batch, setting.parallel
    per_gpu = seconds * p.world_size * 1e12
    return Predicted(
        step_time_s=seconds, samples_per_s=batch.global_size / seconds,
        model_tflops_per_gpu=model_flops_per_step(model, batch, p.tp) / per_gpu,
        hardware_tflops_per_gpu=hardware_flops_per_step(model, batch, p.tp, setting.recompute) / per_gpu,
        memory_bytes_per_gpu=tuple(int(x) for x in memory(setting, layers).total()[0]),
        nic_bytes_per_step=nic_bytes(setting, layers), breakdown=breakdown(setting, layers, seconds))


def breakdown(setting: Setting, layers: np.ndarray, seconds: float) -> dict[str, float]:
    """Seconds of the step of the stage that computes longest: computing, waiting for other stages and hops, gradients'
    and parameters' traffic that nothing hides, the optimizer and what else follows. They sum up to the step."""
    times = timing(setting, layers)
    ends = [float(step_seconds(setting.order, d, nic)[0]) for d, nic in zip(times.lanes, times.shared, strict=True)]
    lane = int(np.argmax(ends))
    d = times.lanes[lane]
    work = (d.forward + d.backward)[0].sum(axis=1) * setting.order.micro_batches
    stage = int(np.argmax(work))
    after = float(times.after()[0])
    sync = float(d.tail[0, stage].max())
    gather = float(d.ready[0, stage, 0])
    waits = max(0.0, seconds - after - float(work[stage]) - sync - gather)
    sync = seconds - after - float(work[stage]) - gather - waits
    return {"compute_s": float(work[stage]), "pipeline_wait_s": waits, "grad_sync_s": sync + times.tied + times.norm,
            "param_sync_s": gather, "optimizer_s": float(times.optimizer[0]) + times.other}


def nic_bytes(setting: Setting, layers: np.ndarray) -> dict[str, float]:
    """Payload bytes that all nodes together send in a step, by fabric (RDMA) or ``ethernet`` (TCP)."""
    p, model = setting.parallel, setting.model
    sent: defaultdict[str, float] = defaultdict(float)
    count = parameters(setting, layers)[0].sum(axis=1)

    def add(transport: Transport, amount: float) -> None:
        if transport.kind != "local" and amount:
            sent[transport.fabric if transport.kind == "rdma" and transport.fabric else "ethernet"] += amount

    for lane, stages in enumerate(setting.lanes):
        pipelines = setting.pipelines(stages[0])
        runs = pipelines // setting.run
        for s, component in enumerate(stages):
            _add_synchronisation(setting, lane, s, component, float(count[s]), runs, add)
            if p.pp > 1 and (s < p.pp - 1 or p.virtual_stages > 1):
                transport = setting.edge(lane, s)
                hops = setting.order.micro_batches * (p.virtual_stages if s < p.pp - 1 else p.virtual_stages - 1)
                add(transport, 2 * hops * pipelines * p.tp * activation_bytes(setting, transport, component))
        if model.tied and p.pp > 1:
            gpu = setting.fabric(stages[0]).gpu
            whole = model.padded_vocab(p.tp) / p.tp * model.hidden * setting.costs.gradient_size(gpu)
            how = setting.costs.collectives(gpu)
            add(setting.ends(lane), how.all_reduce / 2 * whole * 2 * pipelines * p.tp)
    return dict(sorted(sent.items()))


def _add_synchronisation(setting: Setting, lane: int, stage: int, component: Component, count: float, runs: int,
                         add: Any) -> None:
    """Gradients and parameters of one stage: a ring leaves each of its nodes once."""
    p, gpu = setting.parallel, setting.fabric(component).gpu
    how, n = setting.costs.collectives(gpu), setting.run
    gradients, weights = count * setting.costs.gradient_size(gpu), count * setting.costs.weight_bytes(gpu)
    amount = how.reduce_scatter * gradients + how.all_gather * weights if p.distributed_optimizer else (
        how.all_reduce * gradients)
    nodes = setting.nodes_of_run(lane, stage)
    add(setting.reduction(lane, stage), runs * p.tp * nodes * amount * (n - 1) / n)
    k = p.optimizer_instances
    if k > 1:  # every rank of this lane sends as one member of its ring across instances
        add(setting.across(), runs * n * p.tp * how.all_reduce * (k - 1) / k * gradients / n)


def timeline(plan: Plan, costs: Costs) -> list[dict[str, Any]]:
    """The simulated step as events: {stage, name, kind, micro_batch, chunk, start_s, end_s}, sorted by stage and start.

    `kind`: forward, backward, send (a hop, listed at its sender), grad_sync, param_sync.
    """
    setting, layers = Setting.of(plan, costs), layer_array(plan)
    times = timing(setting, layers)
    return [event for lane in range(len(times.lanes)) for event in _events(setting, times, lane)]


def _events(setting: Setting, times: Timing, lane: int) -> list[dict[str, Any]]:
    made, numbers = graph(setting.order, times.shared[lane]), Numbers(setting.order)
    table = times.lanes[lane].table()
    ends, lasts = made.ends(table)[0], table[0, made.column]
    events = []
    for index in np.flatnonzero(lasts > 0).tolist():
        event = {**numbers.describe(int(made.node[index])), "start_s": float(ends[index] - lasts[index]),
                 "end_s": float(ends[index])}
        event["stage"] += lane * setting.parallel.pp
        events.append(event)
    return sorted(events, key=lambda e: (e["stage"], e["start_s"], e["end_s"], e["kind"]))


def chrome_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events as a Chrome/Perfetto trace: one process a stage, computing and traffic as its threads."""
    lines: list[dict[str, Any]] = []
    for stage in sorted({e["stage"] for e in events}):
        lines.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}})
        for tid, name in ((0, "compute"), (1, "send"), (2, "synchronise")):
            lines.append({"ph": "M", "pid": stage, "tid": tid, "name": "thread_name", "args": {"name": name}})
    for e in events:
        tid = {"forward": 0, "backward": 0, "send": 1}.get(e["kind"], 2)
        label = e["kind"] if e["micro_batch"] is None else f"{e['kind']} {e['micro_batch']}"
        lines.append({"ph": "X", "pid": e["stage"], "tid": tid, "name": label, "ts": e["start_s"] * 1e6,
                      "dur": (e["end_s"] - e["start_s"]) * 1e6, "args": {"chunk": e["chunk"]}})
    return {"traceEvents": lines, "displayTimeUnit": "ms"}
