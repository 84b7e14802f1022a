"""What `holmes plan` says of a plan, in lines as wide as asked: a drawing, its step, what binds, what helps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import kind_tflops, predict
from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost
from holmes_hpc.planning.plan.parallel import abridged
from holmes_hpc.planning.plan.plan import Plan, Predicted
from holmes_hpc.planning.schedule.kinds import megatrons_own
from holmes_hpc.planning.search.best import PREDICTED, best_plan
from holmes_hpc.records.metrics import PART_NAMES

WIDTH = 100
MUCH = 0.8  # of a declared rate: a network that counts for less is told
_SOURCE = "NCCL over RoCE, published runs"
TINY = 0.005  # of a step: what would be told as 0%
NOTHING = 1e-6  # of a step: what rounding leaves
_HELPS = {  # against a part of the step
    "compute_s": "more or faster GPUs help",
    "pipeline_wait_s": "more micro-batches or a faster transfer help",
    "grad_sync_s": "a faster data-parallel network helps",
    "param_sync_s": "a faster data-parallel network helps",
}
IDLE = 0.25  # of a step: more waiting than that is told beside what takes longest
CLOSE = 0.03  # of two layouts further apart, 93% of the pairs are in the right order (docs/planner.md)


def explain(plan: Plan, costs: Costs, steps: int | None = None, width: int = WIDTH) -> list[str]:
    """The placement drawn, the predicted step and where it goes, the runners-up, what would help, assumptions; `steps`:
    how long that many take. Lines of `width` columns at most, folded between words."""
    predicted, unused = plan.predicted, ", ".join(f"{_nodes(n)} of {f}" for f, n in plan.unused.items())
    supposed = [f"- {a}" for a in (*plan.assumptions, *counted_less(plan, costs))]
    lines = [_headline(plan), "", *_drawing(plan)]
    if predicted is not None:
        lines += ["", *_step(plan, predicted), *_gain(plan, predicted), _budget(plan, steps)]
        lines += [*_stage_transfers(plan, costs), "", *_helps(plan, predicted, costs)]
    lines += ["", "Runners-up:", *map(_runner_up, plan.alternatives), *_too_close(plan)] if plan.alternatives else []
    lines += [f"Unused: {unused}"] if unused else []
    lines += ["", "Supposed:", *supposed] if supposed else []
    return [folded for line in lines for folded in _folded(line, width)]


def _folded(line: str, width: int) -> list[str]:
    """A line folded between words: a drawing's goes on beside its rule, a list's under its text."""
    hang = "|     " if line.startswith(("|", "+")) else "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False) or [""]


def throughput(plan: Plan, steps: int | None = None) -> dict[str, Any]:
    """Tokens of a step, tokens a second as predicted (None without a prediction), and of `steps`: how many tokens they
    see and how many days they take."""
    tokens, seconds = plan.batch.tokens, plan.predicted.step_time_s if plan.predicted else None
    budget = (
        {}
        if steps is None
        else {"steps": steps, "tokens": steps * tokens, "days": steps * seconds / 86400 if seconds else None}
    )
    return {"tokens_per_step": tokens, "tokens_per_s": tokens / seconds if seconds else None, **budget}


def _budget(plan: Plan, steps: int | None) -> str:
    """How many tokens a step and a second are, and how long a budget takes."""
    of = throughput(plan, steps)
    text = f"Tokens: {of['tokens_per_step']:,} a step, {of['tokens_per_s']:,.0f} a second"
    if steps is not None:
        text += f"; {steps:,} steps, {of['tokens']:.3g} tokens, take {duration(of['days'])}"
        if plan.predicted is not None and plan.predicted.interval_s is not None:
            low, high = (duration(of["days"] * s / plan.predicted.step_time_s) for s in plan.predicted.interval_s)
            text += f" ({low} to {high} by that interval)"
    return f"{text}."


def duration(days: float) -> str:
    """In the largest unit of which it is two or more."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= 2 * size:
            return f"{days / size:,.1f} {unit}"
    return f"{days * 86400:.3g} s"


def _headline(plan: Plan) -> str:
    p, batch = plan.parallel, plan.batch
    return (
        f"Plan {plan.id}: {plan.model.name}, {batch.global_size} sequences of {batch.sequence_length} "
        f"tokens a step, on {p.world_size} ranks, {plan.spread}; {p}, "
        f"{plan.micro_batches} micro-batches of {batch.micro_size}, schedule "
        f"{plan.schedule.kind}, recompute {plan.recompute}"
    )


def _drawing(plan: Plan) -> list[str]:
    """Components from first to last stage, and the transfers between them."""
    edges = {g.stages: g.transport for g in plan.transports() if g.kind == "edge"}
    inside = {g.stages[0]: g.transport for g in plan.transports() if g.kind == "dp"}
    lines: list[str] = []
    for part in plan.components:
        fabric = plan.site.fabric(part.fabric)
        lines.append(
            f"+-- {part.fabric}: {part.nodes} nodes x {part.gpus_per_node} {fabric.gpu.name}, {fabric.nic}"
            f" {fabric.data_gbps:g} Gb/s, partition {part.partition}"
        )
        rows = [([s], f"stage {s}: {_stage(plan, s, part.gpus_per_node)}") for s in part.stages]
        if len(part.stages) > 8:
            layers = ", ".join(str(plan.stages[s].layers) for s in part.stages)
            rows = [([*part.stages], f"stages {part.stages[0]} to {part.stages[-1]}: {layers} layers")]
        for held, text in rows:
            by = " and ".join(dict.fromkeys(str(inside[s]) for s in held if s in inside))
            lines.append(f"|   {text}{by and f', data parallel by {by}'}")
        following = (part.stages[-1], part.stages[-1] + 1)
        if following in edges and plan.strategy != "hierarchical-dp":
            lines.append(f"|     |  activations by {edges[following]}")
    return lines


def _stage(plan: Plan, stage: int, per_node: int) -> str:
    layers, held, p = plan.stages[stage].layers, plan.schedule.in_flight[stage], plan.parallel
    nodes = p.stages[stage].ranks // per_node
    sizes = f"{nodes} nodes, TP {p.tp_of(stage)} x DP {p.stages[stage].dp}, " if plan.is_per_stage else ""
    return f"{sizes}{layers} layer{'s' * (layers != 1)}, {held} micro-batch{'es' * (held != 1)} in flight"


def _step(plan: Plan, predicted: Predicted) -> list[str]:
    total = predicted.step_time_s
    parts = sorted(((s, n) for n, s in predicted.breakdown.items() if n in PREDICTED), reverse=True)
    tokens = predicted.samples_per_s * plan.batch.sequence_length
    lines = [
        f"Predicted: a step of {total:.3g} s, {predicted.samples_per_s:.4g} samples/s, {tokens:,.0f} "
        f"tokens/s, {_per_kind(plan, predicted)}"
    ]
    lines += [
        f"  {PART_NAMES[name]:<16} {s:9.3g} s  " + (f"{s / total:4.0%}" if s >= TINY * total else f"{'<1%':>4}")
        for s, name in parts
        if s > NOTHING * total
    ]
    if predicted.interval_s is not None:
        low, high = predicted.interval_s
        lines.append(
            f"Of published runs like it, nine in ten took {low / total:.0%} to {high / total:.0%} of what was "
            f"predicted: here {low:.3g} to {high:.3g} s. `holmes calibrate` tells more."
        )
    worst = max(range(len(predicted.memory_bytes_per_gpu)), key=lambda i: predicted.memory_bytes_per_gpu[i])
    room = plan.site.fabric(plan.stages[worst].fabric).gpu.memory_gib
    used = predicted.memory_bytes_per_gpu[worst] / 2**30
    lines.append(
        f"Peak memory: stage {worst} needs most, {used:.3g} of {room:g} GiB. "
        f"What takes longest is {_binding(predicted)}."
    )
    return lines


def _gain(plan: Plan, predicted: Predicted) -> list[str]:
    """Return how much a plan with TP and DP by stage gains; its runners-up are uniform."""
    if not plan.is_per_stage or not plan.alternatives:
        return []
    best = plan.alternatives[0]
    gain, p = 1 - predicted.step_time_s / best["predicted"]["step_time_s"], best["parallel"]
    return [
        f"TP and DP by stage make the step {gain:.1%} shorter than the best uniform layout's (TP {p['tp']}, PP"
        f" {p['pp']}, DP {p['dp']})."
    ]


def _per_kind(plan: Plan, predicted: Predicted) -> str:
    """Model TFLOP/s of a GPU: of each kind, where there are several, and what share of its peak that is."""
    found = kind_tflops(plan, predicted.step_time_s)
    each = ", ".join(
        f"{tflops:.3g}{f' of {gpu.name}' * (len(found) > 1)} ({tflops / gpu.peak_tflops:.0%} of the peak)"
        for gpu, tflops in found.items()
    )
    mean = f"{predicted.model_tflops_per_gpu:.3g} " if len(found) > 1 else ""
    return f"{mean}model TFLOP/s per GPU: {each}"


def _stage_transfers(plan: Plan, costs: Costs) -> list[str]:
    """What the slowest transfer costs, and how much of it is hidden."""
    cost = stage_transfer_cost(plan, costs)
    if cost is None:
        return []
    own = megatrons_own(plan.parallel.virtual_stages).words
    text = (
        f"Stage transfers: the slowest, from stage {cost.stages[0]} to {cost.stages[1]} by {cost.transport}, takes "
        f"{cost.one_way_s:.3g} s one way, {cost.ratio:.2g} of a stage's time for a micro-batch. Those of a step, "
        f"both ways added up though they go at once, are {cost.wire_s:.3g} s; {cost.hidden:.0%} of that is hidden "
        f"beside computing and each other: the step is {max(0.0, cost.exposed_s):.3g} s longer than without "
        "transfers"
    )
    if plan.order.schedule.megatron is None:
        text += f" (Megatron's {own}: {cost.waiting_s:.3g} s)"
    return [f"{text}."]


def _binding(predicted: Predicted) -> str:
    named = {n: s for n, s in predicted.breakdown.items() if n in PREDICTED}
    name = max(named, key=lambda n: named[n])
    waits = named.get("pipeline_wait_s", 0.0) / predicted.step_time_s
    if name == "pipeline_wait_s" or waits < IDLE:
        return _with_help(name)
    return f"{_with_help(name)}; {waits:.0%} is {_with_help('pipeline_wait_s')}"


def _with_help(part: str) -> str:
    return f"{PART_NAMES[part]}: {_HELPS[part]}" if part in _HELPS else PART_NAMES[part]


def _helps(plan: Plan, predicted: Predicted, costs: Costs) -> list[str]:
    """What a change of site or batch would gain: each tried alone, with this plan's layout; more nodes, with its TP and
    PP."""

    def faster(rate: str, *names: str) -> float:
        fabrics = (replace(f, **{rate: 2 * getattr(f, rate)}) if f.name in names else f for f in plan.site.fabrics)
        site = replace(plan.site, fabrics=tuple(fabrics))
        return predicted.step_time_s / predict(replace(plan, site=site), costs).step_time_s - 1

    larger = replace(plan, batch=replace(plan.batch, global_size=2 * plan.batch.global_size))
    gains = [
        (faster("ethernet_gbps", *(f.name for f in plan.site.fabrics)), "Ethernet twice as fast"),
        *(
            (faster("rdma_gbps", c.fabric), f"RDMA of {c.fabric} twice as fast")
            for c in plan.components
            if plan.site.fabric(c.fabric).rdma_gbps is not None
        ),
        (predict(larger, costs).samples_per_s / predicted.samples_per_s - 1, "a global batch twice as large"),
        *_more_nodes(plan, predicted, costs),
    ]
    gains = sorted((g for g in gains if g[0] >= 0.001), reverse=True)
    if not gains:
        return ["Neither faster networks nor more nodes nor a larger batch would help this plan."]
    return [
        "What would help, each alone and with this layout (planned anew it may be more):",
        *(f"  {gain:+7.1%} samples/s  {what}" for gain, what in gains),
    ]


def _more_nodes(plan: Plan, predicted: Predicted, costs: Costs) -> Iterable[tuple[float, str]]:
    p = plan.parallel
    if plan.is_per_stage:  # a search of its own
        return
    fabrics = tuple(replace(f, nodes=2 * f.nodes, node_names=()) for f in plan.site.fabrics)
    nodes = {c.fabric: 2 * c.nodes for c in plan.components}
    options = PlanOptions(
        strategy=plan.strategy,
        nodes=nodes,
        tp=p.tp,
        pp=p.pp,
        dp=2 * p.dp,
        transport=plan.transport_mode,
        gpus_per_node=plan.components[0].gpus_per_node,
    )
    try:
        twice = best_plan(plan.model, plan.batch, replace(plan.site, fabrics=fabrics), options, costs)
    except HolmesError:
        return
    if twice.predicted is not None:
        yield twice.predicted.samples_per_s / predicted.samples_per_s - 1, "twice the nodes of every fabric in use"


def _runner_up(other: dict[str, Any]) -> str:
    p = other["parallel"]
    nodes = ", ".join(f"{n} x {f}" for f, n in other["nodes"].items())
    return (
        f"- {other['strategy']}, {nodes}: TP {p['tp']} PP {p['pp']} DP {p['dp']}, layers "
        f"{abridged(other['layers_per_stage'], '+')}, {other['schedule']}: {other['why_not']}"
    )


def _too_close(plan: Plan) -> list[str]:
    """What would tell the plan from a runner-up that is hardly slower, where nobody measured these GPUs."""
    predicted = plan.predicted
    if predicted is None or predicted.interval_s is None:
        return []
    near = [a for a in plan.alternatives if a["predicted"]["step_time_s"] < (1 + CLOSE) * predicted.step_time_s]
    if not near:
        return []
    p, nodes = near[0]["parallel"], ", ".join(f"{f}: {n}" for f, n in near[0]["nodes"].items())
    return [
        f"Less than {CLOSE:.0%} slower is too close for a prediction to tell. 20 steps of each would:"
        f" `holmes run … train.steps=20`, and the same with plan.tp={p['tp']} plan.pp={p['pp']}"
        f" plan.dp={p['dp']} 'plan.nodes={{{nodes}}}' plan.virtual_stages={p['virtual_stages']}."
    ]


def where_stages_lie(plan: Plan) -> str:
    """The nodes of each component, and its stages."""

    def stages(found: tuple[int, ...]) -> str:
        whole = len(found) > 2 and found == tuple(range(found[0], found[-1] + 1))
        named = f"{found[0]} to {found[-1]}" if whole else ", ".join(map(str, found))
        return f"stage{'s' * (len(found) > 1)} {named}"

    return ", ".join(f"{_nodes(c.nodes)} of {c.fabric} ({stages(c.stages)})" for c in plan.components)


def _nodes(number: int) -> str:
    return f"{number} node{'s' * (number != 1)}"


def counted_less(plan: Plan, costs: Costs) -> Iterable[str]:
    """Of each fabric in use whose RDMA counts for less than MUCH of its rate, where nobody measured it: what it counts
    for."""
    used = {g.transport for g in plan.transports() if g.transport.kind == "rdma"}
    for transport in sorted(used, key=lambda t: [c.fabric for c in plan.components].index(str(t.fabric))):
        fabric = plan.site.fabric(str(transport.fabric))
        assert fabric.rdma_gbps is not None
        if costs.calibration is not None and costs.calibration.link(fabric, str(transport.nic)) is not None:
            continue
        share = costs.link(transport, fabric, "reduce_scatter").efficiency
        if share < MUCH:
            by = "as the runs learned from have it" if str(transport.nic) in costs.corrections.rates else _SOURCE
            yield (
                f"{fabric.name}: its {fabric.rdma_gbps:g} Gb/s are counted as {share * fabric.rdma_gbps:.3g} ({by});"
                " `holmes calibrate` measures yours"
            )
