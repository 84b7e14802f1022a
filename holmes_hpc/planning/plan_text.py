"""The text that `holmes plan` prints: the placement, the predicted step, its longest part, and what would help."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError, counted
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import kind_tflops, predict
from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import Plan, Predicted
from holmes_hpc.planning.schedule.kinds import megatron_kind, schedule_kind
from holmes_hpc.planning.search.best import PREDICTED, best_plan
from holmes_hpc.records.metrics import PART_NAMES

WIDTH = 100
REDUCED_RATE = 0.8  # of a declared rate: a network that is assumed to be slower is listed
_SOURCE = "NCCL over RoCE, published runs"
BELOW_ONE_PERCENT = 0.005  # of a step: a shorter part would round to 0%
ROUNDING_ERROR = 1e-6  # of a step: a shorter part is not listed
_REMEDIES = {  # by part of the step
    "compute_s": "more or faster GPUs help",
    "pipeline_wait_s": "more micro-batches or a faster transfer help",
    "grad_sync_s": "a faster data-parallel network helps",
    "param_sync_s": "a faster data-parallel network helps",
}
LONG_WAIT = 0.25  # of a step: a longer pipeline wait is reported beside the longest part
TOO_CLOSE = 0.03  # layouts further apart are in the right order in 93% of pairs (docs/planner.md)


def explain(plan: Plan, costs: Costs, steps: int | None = None, width: int = WIDTH) -> list[str]:
    """Return the description of a plan in lines of at most `width` columns, folded between words.

    It has the placement, the predicted step and its parts, what would help, the runners-up and the assumptions.
    `steps`: add the duration of so many steps.
    """
    predicted, unused = plan.predicted, ", ".join(f"{counted(n, 'node')} of {f}" for f, n in plan.unused.items())
    assumptions = [f"- {a}" for a in all_assumptions(plan, costs)]
    lines = [_headline(plan), "", *_drawing(plan)]
    if predicted is not None:
        lines += ["", *_step(plan, predicted), *_per_stage_gain(plan, predicted), _budget(plan, steps)]
        lines += [*_stage_transfers(plan, costs), "", *_improvements(plan, predicted, costs)]
    lines += ["", "Runners-up:", *map(_runner_up, plan.alternatives), *_too_close(plan)] if plan.alternatives else []
    lines += [f"Unused: {unused}"] if unused else []
    lines += ["", "Assumptions:", *assumptions] if assumptions else []
    return [folded for line in lines for folded in _folded(line, width)]


def _folded(line: str, width: int) -> list[str]:
    """Fold a line between words. A line of the drawing continues beside its rule, a list item under its text."""
    hang = "|     " if line.startswith(("|", "+")) else "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False) or [""]


def throughput(plan: Plan, steps: int | None = None) -> dict[str, Any]:
    """Return the tokens of a step and the predicted tokens per second; with `steps`, also their tokens and days.
    Predicted figures are None without a prediction."""
    tokens, seconds = plan.batch.tokens, plan.predicted.step_time_s if plan.predicted else None
    budget = (
        {}
        if steps is None
        else {"steps": steps, "tokens": steps * tokens, "days": steps * seconds / 86400 if seconds else None}
    )
    return {"tokens_per_step": tokens, "tokens_per_s": tokens / seconds if seconds else None, **budget}


def _budget(plan: Plan, steps: int | None) -> str:
    """Return the sentences on tokens per step and per second, and on the duration of `steps`."""
    rates = throughput(plan, steps)
    text = f"Tokens: {rates['tokens_per_step']:,} per step, {rates['tokens_per_s']:,.0f} per second"
    if steps is not None:
        text += f". {steps:,} steps ({rates['tokens']:.3g} tokens) take {duration(rates['days'])}"
        if plan.predicted is not None and plan.predicted.interval_s is not None:
            low, high = (duration(rates["days"] * s / plan.predicted.step_time_s) for s in plan.predicted.interval_s)
            text += f" (90% interval: {low} to {high})"
    return f"{text}."


def duration(days: float) -> str:
    """Return a duration as text, in the largest unit of which it is at least two."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= 2 * size:
            return f"{days / size:,.1f} {unit}"
    return f"{days * 86400:.3g} s"


def _headline(plan: Plan) -> str:
    p, batch = plan.parallel, plan.batch
    return (
        f"Plan {plan.id}: {plan.model.name}, {batch.global_size} sequences of {batch.sequence_length} "
        f"tokens per step, {counted(p.world_size, 'rank')}, {plan.strategy_label}; {p}; "
        f"{counted(plan.micro_batches, 'micro-batch')} of {batch.micro_size}; schedule "
        f"{plan.order.schedule.label}; recompute {plan.recompute}"
    )


def _drawing(plan: Plan) -> list[str]:
    """Draw the components from first to last stage, and the transfers between them."""
    edges = {g.stages: g.transport for g in plan.transports() if g.kind == "edge"}
    inside = {g.stages[0]: g.transport for g in plan.transports() if g.kind == "dp"}
    lines, shares = list[str](), _shares(plan)
    for part in plan.components:
        pool = plan.site.pool(part.pool)
        lines.append(
            f"+-- {part.pool}: {counted(part.nodes, 'node')} x {part.gpus_per_node} {pool.gpu.name}, {pool.nic}"
            f" {pool.data_gbps:g} Gb/s, partition {part.partition}"
        )
        if part.pool in shares:
            lines.append(f"|   {shares[part.pool]}")
        rows = [([s], f"stage {s}: {_stage(plan, s, part.gpus_per_node)}") for s in part.stages]
        if len(part.stages) > 8:
            layers = ", ".join(str(plan.stages[s].layers) for s in part.stages)
            rows = [([*part.stages], f"stages {part.stages[0]} to {part.stages[-1]}: {layers} layers")]
        for stages, text in rows:
            transport = " and ".join(dict.fromkeys(str(inside[s]) for s in stages if s in inside))
            lines.append(f"|   {text}{transport and f', data parallel by {transport}'}")
        following = (part.stages[-1], part.stages[-1] + 1)
        if following in edges and plan.strategy != "hierarchical-dp":
            lines.append(f"|     |  activations by {edges[following]}")
    return lines


def _shares(plan: Plan) -> dict[str, str]:
    """Return pool -> its pipelines and their share of a step, if pools share a step by their speed."""
    p, first, texts = plan.parallel, 0, dict[str, str]()
    if not plan.is_per_stage or plan.strategy != "hierarchical-dp":
        return {}
    counts = Counter(p.routes(plan.micro_batches)[0])
    for part in plan.components:
        end = first + part.ranks // (p.tp * p.pp)
        some = sorted({counts[pipeline] for pipeline in range(first, end)})
        number = " or ".join(map(str, some))
        texts[part.pool] = f"{counted(end - first, 'pipeline')}, {number} of {plan.micro_batches} micro-batches each"
        first = end
    return texts


def _stage(plan: Plan, stage: int, per_node: int) -> str:
    layers, in_flight, p = plan.stages[stage].layers, plan.schedule.in_flight[stage], plan.parallel
    nodes = counted(p.stages[stage].ranks // per_node, "node")
    sizes = f"{nodes}, TP {p.tp_of(stage)} x DP {p.stages[stage].dp}, " if not p.is_even else ""
    return f"{sizes}{counted(layers, 'layer')}, {counted(in_flight, 'micro-batch')} in flight"


def _step(plan: Plan, predicted: Predicted) -> list[str]:
    total = predicted.step_time_s
    parts = sorted(((s, n) for n, s in predicted.breakdown.items() if n in PREDICTED), reverse=True)
    tokens = predicted.samples_per_s * plan.batch.sequence_length
    lines = [
        f"Predicted step time: {total:.3g} s ({predicted.samples_per_s:.4g} samples/s, {tokens:,.0f} "
        f"tokens/s). {_tflops(plan, predicted)}"
    ]
    lines += [
        f"  {PART_NAMES[name]:<16} {s:9.3g} s  "
        + (f"{s / total:4.0%}" if s >= BELOW_ONE_PERCENT * total else f"{'<1%':>4}")
        for s, name in parts
        if s > ROUNDING_ERROR * total
    ]
    if predicted.interval_s is not None:
        low, high = predicted.interval_s
        lines.append(
            f"90% interval of the step time: {low:.3g} to {high:.3g} s, {low / total:.0%} to {high / total:.0%} of the "
            "prediction. It comes from published runs of this kind; `holmes calibrate` measures your site."
        )
    return [*lines, f"{_peak_memory(plan, predicted)} {_longest_part(predicted)}"]


def _peak_memory(plan: Plan, predicted: Predicted) -> str:
    """Return the sentence on the fullest GPU. It names the pool if GPUs differ in memory."""
    gib_of = {c.pool: plan.site.pool(c.pool).gpu.memory_gib for c in plan.components}
    used_gib, gib, stage, pool = max(
        (
            (used / 2**30, gib_of[c.pool], stage, c.pool)
            for stage, used in enumerate(predicted.memory_bytes_per_gpu)
            for c in plan.components
            if stage in c.stages
        ),
        key=lambda part: part[0] / part[1],
    )
    suffix = f" of pool {pool}" if len(set(gib_of.values())) > 1 else ""
    return f"Peak memory: {used_gib:.3g} of {gib:g} GiB, on stage {stage}{suffix}."


def _per_stage_gain(plan: Plan, predicted: Predicted) -> list[str]:
    """Return the line on the gain of per-stage TP/DP or unequal shares over the best layout without; else no line."""
    if not plan.is_per_stage or not plan.alternatives:
        return []
    best = plan.alternatives[0]
    reason, other = "Per-stage TP/DP makes", "uniform layout"
    if plan.parallel.is_even:
        reason, other = "Shares by speed make", "layout with equal shares"
    gain, p = 1 - predicted.step_time_s / best["predicted"]["step_time_s"], best["parallel"]
    return [f"{reason} the step {gain:.1%} shorter than the best {other} (TP {p['tp']}, PP {p['pp']}, DP {p['dp']})."]


def _tflops(plan: Plan, predicted: Predicted) -> str:
    """Return the sentence on model TFLOP/s per GPU and share of the peak; with several GPU kinds, of each."""
    by_kind = kind_tflops(plan, predicted.step_time_s)
    figures = ", ".join(
        f"{tflops:.3g}{f' on {gpu.name}' * (len(by_kind) > 1)} ({tflops / gpu.peak_tflops:.0%} of peak)"
        for gpu, tflops in by_kind.items()
    )
    mean = f"{predicted.model_tflops_per_gpu:.3g} on average; " if len(by_kind) > 1 else ""
    return f"Model TFLOP/s per GPU: {mean}{figures}."


def _stage_transfers(plan: Plan, costs: Costs) -> list[str]:
    """Return the line on the slowest stage transfer and on the share of transfer time that is hidden."""
    cost = stage_transfer_cost(plan, costs)
    if cost is None:
        return []
    text = (
        f"Stage transfers: the slowest, from stage {cost.stages[0]} to {cost.stages[1]} by {cost.transport}, takes "
        f"{cost.one_way_s:.3g} s one way, {cost.ratio:.2g} times a stage's compute time per micro-batch. The transfers "
        f"of a step take {cost.wire_s:.3g} s, both directions added. {cost.hidden:.0%} of that overlaps with compute "
        f"or other transfers: the step is {max(0.0, cost.exposed_s):.3g} s longer than without transfers"
    )
    if plan.order.schedule.megatron is None:
        text += f" ({cost.waiting_s:.3g} s with Megatron's {megatron_kind(plan.parallel.virtual_stages).label})"
    return [f"{text}."]


def _longest_part(predicted: Predicted) -> str:
    """Return the sentences on the longest part of the step, on a long pipeline wait, and on what helps."""
    seconds = {n: s for n, s in predicted.breakdown.items() if n in PREDICTED}
    longest = max(seconds, key=lambda n: seconds[n])
    wait_share = seconds.get("pipeline_wait_s", 0.0) / predicted.step_time_s
    text = f"Longest part of the step: {_with_remedy(longest)}."
    is_short = longest == "pipeline_wait_s" or wait_share < LONG_WAIT
    return text if is_short else f"{text} Another {wait_share:.0%} is {_with_remedy('pipeline_wait_s')}."


def _with_remedy(part: str) -> str:
    return f"{PART_NAMES[part]} ({_REMEDIES[part]})" if part in _REMEDIES else PART_NAMES[part]


def _improvements(plan: Plan, predicted: Predicted, costs: Costs) -> list[str]:
    """Return the lines on what a faster network, more nodes or a larger batch would gain, each alone.
    The layout stays; with more nodes, only TP and PP stay."""

    def gain_of_faster(rate: str, *names: str) -> float:
        pools = (replace(f, **{rate: 2 * getattr(f, rate)}) if f.name in names else f for f in plan.site.pools)
        site = replace(plan.site, pools=tuple(pools))
        return predicted.step_time_s / predict(replace(plan, site=site), costs).step_time_s - 1

    larger = replace(plan, batch=replace(plan.batch, global_size=2 * plan.batch.global_size))
    gains = [
        (gain_of_faster("ethernet_gbps", *(f.name for f in plan.site.pools)), "Ethernet twice as fast"),
        *(
            (gain_of_faster("rdma_gbps", c.pool), f"RDMA of {c.pool} twice as fast")
            for c in plan.components
            if plan.site.pool(c.pool).rdma_gbps is not None
        ),
        (predict(larger, costs).samples_per_s / predicted.samples_per_s - 1, "a global batch twice as large"),
        *_more_nodes(plan, predicted, costs),
    ]
    gains = sorted((g for g in gains if g[0] >= 0.001), reverse=True)
    if not gains:
        return ["Faster networks, more nodes or a larger batch would not help this plan."]
    return [
        "What would help, each change alone and with this layout (a new plan may gain more):",
        *(f"  {gain:+7.1%} samples/s  {change}" for gain, change in gains),
    ]


def _more_nodes(plan: Plan, predicted: Predicted, costs: Costs) -> Iterable[tuple[float, str]]:
    p = plan.parallel
    if plan.is_per_stage and not p.is_even:  # would need another search
        return
    pools = tuple(replace(f, nodes=2 * f.nodes, node_names=()) for f in plan.site.pools)
    nodes = {c.pool: 2 * c.nodes for c in plan.components}
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
        larger = best_plan(plan.model, plan.batch, replace(plan.site, pools=pools), options, costs)
    except HolmesError:
        return
    if larger.predicted is not None:
        yield larger.predicted.samples_per_s / predicted.samples_per_s - 1, "twice the nodes of every pool in use"


def _runner_up(alternative: dict[str, Any]) -> str:
    p = alternative["parallel"]
    nodes = ", ".join(f"{n} x {f}" for f, n in alternative["nodes"].items())
    return (
        f"- {alternative['strategy']}, {nodes}: TP {p['tp']} PP {p['pp']} DP {p['dp']}, layers "
        f"{abbreviated(alternative['layers_per_stage'], '+')}, {schedule_kind(alternative['schedule']).label}: "
        f"{alternative['why_not']}"
    )


def _too_close(plan: Plan) -> list[str]:
    """Return the commands that compare the plan with a runner-up within TOO_CLOSE, if these GPUs were not measured."""
    predicted = plan.predicted
    if predicted is None or predicted.interval_s is None:
        return []
    near = [a for a in plan.alternatives if a["predicted"]["step_time_s"] < (1 + TOO_CLOSE) * predicted.step_time_s]
    if not near:
        return []
    p, nodes = near[0]["parallel"], ", ".join(f"{f}: {n}" for f, n in near[0]["nodes"].items())
    return [
        f"A runner-up less than {TOO_CLOSE:.0%} slower is too close to call. Measure 20 steps of each:"
        f" `holmes run … train.steps=20`, and again with plan.tp={p['tp']} plan.pp={p['pp']}"
        f" plan.dp={p['dp']} 'plan.nodes={{{nodes}}}' plan.virtual_stages={p['virtual_stages']}."
    ]


def placement_text(plan: Plan) -> str:
    """Return the nodes and the stages of each component."""

    def stages(numbers: tuple[int, ...]) -> str:
        is_range = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))
        return f"stage{'s' * (len(numbers) > 1)} {listed}"

    return ", ".join(f"{counted(c.nodes, 'node')} of {c.pool} ({stages(c.stages)})" for c in plan.components)


def all_assumptions(plan: Plan, costs: Costs) -> tuple[str, ...]:
    """Return the assumptions that the plan has stored, and those about the rates of its networks."""
    return tuple(dict.fromkeys((*plan.assumptions, *_reduced_rates(plan, costs))))


def _reduced_rates(plan: Plan, costs: Costs) -> Iterable[str]:
    """Yield a line for each pool in use whose RDMA, unmeasured, is assumed slower than REDUCED_RATE of its rate."""
    used = {g.transport.fabric: g.transport for g in plan.transports() if g.transport.kind == "rdma"}
    for pool in (plan.site.pool(c.pool) for c in plan.components if c.fabric in used):
        transport = used[pool.fabric_name]
        assert pool.rdma_gbps is not None
        is_measured = costs.calibration is not None and costs.calibration.link(pool, str(transport.nic)) is not None
        if is_measured or pool.rdma_efficiency is not None:
            continue
        share = costs.link(transport, pool, "reduce_scatter").efficiency
        if share < REDUCED_RATE:
            source = "learned from your runs" if str(transport.nic) in costs.corrections.rates else _SOURCE
            yield (
                f"{pool.name}: {share * pool.rdma_gbps:.3g} of its {pool.rdma_gbps:g} Gb/s are assumed usable"
                f" ({source}); `holmes calibrate` measures it"
            )
