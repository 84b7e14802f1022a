"""The text that `holmes plan` prints: the placement, the predicted step, its longest part, and what would help."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError, counted, rounded
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import kind_tflops, predict, stage_breakdown_of, step_time_s
from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost
from holmes_hpc.planning.layout_text import layout_texts, optimizer_text, placements, sharing_texts
from holmes_hpc.planning.plan.parallel import Parallel, abbreviated
from holmes_hpc.planning.plan.plan import Plan, Predicted
from holmes_hpc.planning.schedule.kinds import megatron_kind, schedule_kind
from holmes_hpc.planning.search.best import PREDICTED, best_plan
from holmes_hpc.records.metrics import PART_NAMES
from holmes_hpc.schema import keys

WIDTH = 100
BELOW_ONE_PERCENT = 0.005  # share of a step; a part with a smaller share would round to 0%
ROUNDING_ERROR = 1e-6  # share of a step; a part with a smaller share is not listed
_REMEDIES = {  # by part of the step
    "compute_s": "more or faster GPUs help",
    "pipeline_wait_s": "more micro-batches or a faster transfer help",
    "fill_drain_s": "more micro-batches help",
    "grad_sync_s": "a faster data-parallel network helps",
    "param_sync_s": "a faster data-parallel network helps",
}
LONG_WAIT = 0.25  # share of a step; a longer pipeline wait is reported in addition to the longest part
MORE_NODES = "twice the nodes of every pool in use"
_NO_HELP = "Networks twice as fast, twice the nodes or twice the batch would not help this plan."
_GAINS = "What would help, each change alone and with this layout (a new plan may gain more):"
MAX_STAGES_LISTED = 8  # stages whose parts are listed
MAX_PLACEMENTS = 4  # the most lines on pools in a summary
# Assumptions that a summary shows.
_NOTED = re.compile(r"the 90%|the search was|\S+ has no (bf16|Flash)|a global batch|train\.overlap_|.* data sheet has")
_NIC_ASSUMED = re.compile(r"Ethernet only is assumed|assumed by `holmes site`: .*\bnic\b")
TOO_CLOSE = 0.03  # share of a step; 91% of pairs that differ by more are in the right order (docs/planner.md)


def summary(plan: Plan, costs: Costs, steps: int | None = None, width: int = WIDTH) -> list[str]:
    """Return about ten lines of at most `width` columns on placement, step time, duration, memory and best improvement.
    The duration is that of `steps` steps, or of a billion tokens if `steps` is None."""
    return [folded for line in _summary(plan, costs, steps) for folded in _folded(line, width)]


def explain(plan: Plan, costs: Costs, steps: int | None = None, width: int = WIDTH) -> list[str]:
    """Return the :func:`summary` of a plan, followed by all details, in lines of at most `width` columns.
    Details are a drawing of the components, the parts of the step, what would help, runners-up and assumptions."""
    predicted = plan.predicted
    assumptions = [f"- {a}" for a in plan.assumptions]
    lines = [*_summary(plan, costs, steps)[:-1], "", *_drawing(plan)]
    if predicted is not None:
        lines += ["", *_step(plan, predicted, costs), *_per_stage_gain(plan, predicted), *_stage_transfers(plan, costs)]
        gains = [f"  {gain:+7.1%} samples/s  {change}" for gain, change in _improvements(plan, predicted, costs)]
        lines += ["", *([_GAINS, *gains] if gains else [_NO_HELP])]
    lines += ["", "Runners-up:", *map(_runner_up, plan.alternatives), *_too_close(plan)] if plan.alternatives else []
    lines += ["", "Assumptions:", *assumptions] if assumptions else []
    return [folded for line in lines for folded in _folded(line, width)]


def _summary(plan: Plan, costs: Costs, steps: int | None) -> list[str]:
    batch, notes, pool_lines = plan.batch, plan.assumptions, placements(plan)
    unused = ", ".join(f"{counted(n, 'node')} of {pool}" for pool, n in plan.unused.items())
    runners_up = len(plan.alternatives)
    details = f"{runners_up} runner{'s' * (runners_up != 1)}-up, {counted(len(notes), 'assumption')}"
    if len(pool_lines) > MAX_PLACEMENTS:
        rest = plan.components[MAX_PLACEMENTS - 1 :]
        layers = sum(plan.stages[s].layers for s in {s for c in rest for s in c.stages})
        pool_lines[MAX_PLACEMENTS - 1 :] = [f"and {len(rest)} more pools, {counted(layers, 'layer')}"]
    lines = [
        f"Plan {plan.id}: {plan.model.name}, {batch.global_size} sequences of {batch.sequence_length} tokens per step",
        *(f"  {text}" for text in pool_lines),
        *([f"  unused: {unused}"] if unused else []),
        f"Layout: {'; '.join(layout_texts(plan))}",
    ]
    if plan.predicted is not None:
        lines += [*_times(plan, plan.predicted, steps), _memory(plan, plan.predicted)]
        if not plan.misfit:
            lines += [_best_improvement(plan, _improvements(plan, plan.predicted, costs))]
    lines += [f"Note: {note}" for note in notes if _NOTED.match(note)]
    lines += [f"Note: {note}" for note in dict.fromkeys(note for _, note in plan.other_architectures.values())]
    if any("assumed" in note for note in plan.site.assumptions):
        lines.append("Note: NICs, rates or GPUs are assumed (see --explain); `holmes site` can ask the nodes")
    return [*lines, f"--explain shows the parts of the step, {details}."]


def _times(plan: Plan, predicted: Predicted, steps: int | None) -> list[str]:
    """Return the lines on step time and duration. Without `steps`, the duration is that of a billion tokens."""
    seconds, rates = predicted.step_time_s, throughput(plan, steps)
    low, high = predicted.interval_s or (seconds, seconds)
    interval = f" (90% interval: {rounded(low)} to {rounded(high)} s)" if predicted.interval_s else ""
    days = rates["days"] if steps is not None else 1e9 / rates["tokens_per_s"] / 86400
    length = f"{steps:,} steps ({rates['tokens']:.3g} tokens)" if steps is not None else "1e+09 tokens"
    spread = f" ({duration(days * low / seconds)} to {duration(days * high / seconds)})" if predicted.interval_s else ""
    speed = f"{predicted.samples_per_s:.4g} samples/s, {rates['tokens_per_s']:,.0f} tokens/s"
    return [f"Step time: {rounded(seconds)} s{interval}, {speed}", f"Duration: {length} take {duration(days)}{spread}"]


def _memory(plan: Plan, predicted: Predicted) -> str:
    """Return the line on the memory of the fullest GPU. It names the pool if GPUs differ in memory."""
    gib_of = {c.pool: plan.site.pool(c.pool).gpu.memory_gib for c in plan.components}
    used_gib = [used / 2**30 for used in predicted.memory_bytes_per_gpu]
    stages = [(used_gib[stage], gib_of[c.pool], stage, c.pool) for c in plan.components for stage in c.stages]
    used, gib, stage, pool = max(stages, key=lambda row: (row[0] / row[1], -row[2]))
    suffix = f" of pool {pool}" if len(set(gib_of.values())) > 1 else ""
    misfit = f"; {plan.misfit}" if plan.misfit else ""
    return f"Memory: {used:.3g} of {gib:g} GiB per GPU, on stage {stage}{suffix}{misfit}"


def _best_improvement(plan: Plan, gains: Sequence[tuple[float, str]]) -> str:
    """Return the line on the change that gains most. If that is more nodes, the line adds the next best change.
    If the site's NICs are assumed, the line first asks the user to settle them."""
    texts = [f"{change}, {gain:+.1%} samples/s" for gain, change in gains]
    other = f" (without more nodes: {texts[1]})" if gains and gains[0][1] == MORE_NODES and len(gains) > 1 else ""
    if not any(map(_NIC_ASSUMED.search, plan.site.assumptions)):
        return f"What would help most: {texts[0]}{other}" if gains else _NO_HELP
    idle = ", ".join(f"{counted(n, 'node')} of {pool}" for pool, n in plan.unused.items())
    first = f"settle the NICs by `holmes site`: Ethernet is assumed{idle and f', and {idle} stay idle'}"
    return f"What would help most: first {first}{f'. Then: {texts[0]}{other}' if gains else ''}"


def _folded(line: str, width: int) -> list[str]:
    """Fold a line between words. A line of the drawing continues right of its `|`, a list item under its text."""
    hang = "|     " if line.startswith(("|", "+")) else "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False) or [""]


def throughput(plan: Plan, steps: int | None = None) -> dict[str, Any]:
    """Return the tokens per step and the predicted tokens per second. With `steps`, add the tokens and days of a run
    of that many steps. Predicted figures are None if the plan has no prediction."""
    tokens, seconds = plan.batch.tokens, plan.predicted.step_time_s if plan.predicted else None
    rates: dict[str, Any] = {"tokens_per_step": tokens, "tokens_per_s": tokens / seconds if seconds else None}
    if steps is not None:
        rates |= {"steps": steps, "tokens": steps * tokens, "days": steps * seconds / 86400 if seconds else None}
    return rates


def duration(days: float) -> str:
    """Return a duration as text, in the largest unit (days to seconds) in which its value is at least 2."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= 2 * size:
            return f"{days / size:,.1f} {unit}"
    return f"{days * 86400:.3g} s"


def _drawing(plan: Plan) -> list[str]:
    """Draw the components from first to last stage, and the transfers between them."""
    transports = list(plan.transports())
    edges = {g.stages: g.transport for g in transports if g.kind == "edge"}
    across = {g.stages[0]: str(g.transport) for g in transports if g.kind == "dp"}
    inside = {(plan.component_of(g.ranks[0]), g.stages[0]): g.transport for g in transports if g.kind == "intra_dp"}
    lines, shares = list[str](), _shares(plan)
    for index, part in enumerate(plan.components):
        pool = plan.site.pool(part.pool)
        nodes = f"{counted(part.nodes, 'node')} x {part.gpus_per_node} {pool.gpu.name}"
        lines.append(f"+-- {part.pool}: {nodes}, {pool.nic} {pool.data_gbps:g} Gb/s, partition {part.partition}")
        if part.pool in shares:
            lines.append(f"|   {shares[part.pool]}")
        rows = [([s], f"stage {s}: {_stage(plan, s, part.gpus_per_node)}") for s in part.stages]
        if len(part.stages) > 8:
            layers = ", ".join(str(plan.stages[s].layers) for s in part.stages)
            rows = [([*part.stages], f"stages {part.stages[0]} to {part.stages[-1]}: {layers} layers")]
        for stages, text in rows:
            blocks = {s: f"{inside[index, s]} inside the pool and " for s in stages if (index, s) in inside}
            transport = " and ".join(dict.fromkeys(blocks.get(s, "") + across[s] for s in stages if s in across))
            lines.append(f"|   {text}{transport and f', data parallel by {transport}'}")
        following = (part.stages[-1], part.stages[-1] + 1)
        if following in edges and plan.strategy != "hierarchical-dp":
            lines.append(f"|     |  activations by {edges[following]}")
    return lines


def _shares(plan: Plan) -> dict[str, str]:
    """Return, by pool, a text on its pipelines and their micro-batches. Empty unless pools share a step by speed."""
    if not plan.is_per_stage or plan.strategy != "hierarchical-dp":
        return {}
    shares = plan.parallel.pipeline_shares([c.ranks for c in plan.components], plan.micro_batches)
    return {
        c.pool: f"{counted(len(counts), 'pipeline')}, {' or '.join(map(str, sorted({*counts})))} of"
        f" {plan.micro_batches} micro-batches each"
        for c, counts in zip(plan.components, shares, strict=True)
    }


def _stage(plan: Plan, stage: int, per_node: int) -> str:
    layers, in_flight, p = plan.stages[stage].layers, plan.schedule.in_flight[stage], plan.parallel
    nodes = counted(p.stages[stage].ranks // per_node, "node")
    sizes = f"{nodes}, {p.stages[stage].sizes()}, " if not p.is_even else ""
    return f"{sizes}{counted(layers, 'layer')}, {counted(in_flight, 'micro-batch')} in flight"


def _step(plan: Plan, predicted: Predicted, costs: Costs) -> list[str]:
    total = predicted.step_time_s
    parts = sorted(((s, n) for n, s in predicted.breakdown.items() if n in PREDICTED), reverse=True)
    traffic = ", ".join(f"{size / 1e9:.3g} GB over {nic}" for nic, size in predicted.nic_bytes_per_step.items())
    memory = abbreviated(f"{size / 2**30:.3g}" for size in predicted.memory_bytes_per_gpu)
    share = predicted.share_of_limit  # None in older plans
    limit = f" It reaches {share:.0%} of the limit, a step in which no GPU ever waits." if share else ""
    return [
        f"Parts of the step of {rounded(total)} s and {plan.batch.tokens:,} tokens:",
        *(
            f"  {PART_NAMES[name]:<16} {rounded(s):>9} s  "
            + (f"{s / total:4.0%}" if s >= BELOW_ONE_PERCENT * total else f"{'<1%':>4}")
            for s, name in parts
            if s > ROUNDING_ERROR * total
        ),
        *_stage_parts(plan, predicted, costs),
        f"{_longest_part(predicted)} {_tflops(plan, predicted)}{limit}",
        *_exchange(plan, predicted, costs),
        f"GiB per GPU of each stage: {memory}." + (f" Bytes per step: {traffic}." if traffic else ""),
        f"Other settings: {'; '.join((*sharing_texts(plan), optimizer_text(plan)))}.",
    ]


def _stage_parts(plan: Plan, predicted: Predicted, costs: Costs) -> list[str]:
    """Return one line per stage with its parts of the step. Empty unless the plan has 2 to MAX_STAGES_LISTED stages."""
    if not 1 < plan.parallel.pp <= MAX_STAGES_LISTED:
        return []
    lines, total = list[str](), predicted.step_time_s
    for number, seconds in enumerate(stage_breakdown_of(plan, costs)):
        shares = (f"{PART_NAMES[n]} {s / total:.1%}" for n, s in seconds.items() if s > ROUNDING_ERROR * total)
        lines.append(f"  stage {number}: {', '.join(shares)}")
    return lines


def _per_stage_gain(plan: Plan, predicted: Predicted) -> list[str]:
    """Return the line on what per-stage TP/DP or unequal shares gain over the best layout without them."""
    if not plan.is_per_stage or not plan.alternatives:
        return []
    best = plan.alternatives[0]
    even, uneven = ("Shares by speed make", "layout with equal shares"), ("Per-stage TP/DP makes", "uniform layout")
    reason, other = even if plan.parallel.is_even else uneven
    gain, p = 1 - predicted.step_time_s / best["predicted"]["step_time_s"], best["parallel"]
    return [f"{reason} the step {gain:.1%} shorter than the best {other} (TP {p['tp']}, PP {p['pp']}, DP {p['dp']})."]


def _tflops(plan: Plan, predicted: Predicted) -> str:
    """Return the sentence on model TFLOP/s per GPU and their share of the peak, for each GPU kind in use."""
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
    one_way, wire, exposed = map(rounded, (cost.one_way_s, cost.wire_s, max(0.0, cost.exposed_s)))
    text = (
        f"Stage transfers: the slowest, from stage {cost.stages[0]} to {cost.stages[1]} by {cost.transport}, takes "
        f"{one_way} s one way, {cost.ratio:.2g} times a stage's compute time per micro-batch. The transfers of a step "
        f"take {wire} s, both directions added. {cost.hidden:.0%} of that overlaps with compute or other transfers: "
        f"the step is {exposed} s longer than without transfers"
    )
    if not plan.order.schedule.megatron:
        text += f" ({rounded(cost.waiting_s)} s with Megatron's {megatron_kind(plan.parallel.virtual_stages).label})"
    return [f"{text}."]


def _longest_part(predicted: Predicted) -> str:
    """Return the sentences on the longest part of the step, on a long pipeline wait, and on what helps."""
    seconds = {n: s for n, s in predicted.breakdown.items() if n in PREDICTED}
    longest = max(seconds, key=lambda n: seconds[n])
    wait = max(("pipeline_wait_s", "fill_drain_s"), key=lambda n: seconds.get(n, 0.0))
    wait_share = seconds.get(wait, 0.0) / predicted.step_time_s
    text = f"Longest part of the step: {_with_remedy(longest)}."
    is_short = longest == wait or wait_share < LONG_WAIT
    return text if is_short else f"{text} Another {wait_share:.0%} is {_with_remedy(wait)}."


def _exchange(plan: Plan, predicted: Predicted, costs: Costs) -> list[str]:
    """Return the line on exchanges over NICs, which are part of computing. Empty if they take under 1%."""
    p = plan.parallel
    sizes = {"EP": p.ep, "ETP": p.etp, "CP": max(map(p.cp_of, range(p.pp)))}
    sizes["FSDP"] = p.replicas if costs.software.sharding in ("gradients", "full") else 1
    names = " and ".join(name for name, size in sizes.items() if size > 1)
    if not names:
        return []
    pools = (replace(f, rdma_gbps=f.rdma_gbps and 1e6, ethernet_gbps=1e6) for f in plan.site.pools)
    unlimited = predict(replace(plan, site=replace(plan.site, pools=tuple(pools), links=())), costs)
    seconds = predicted.breakdown["compute_s"] - unlimited.breakdown["compute_s"]
    advice = "faster RDMA or groups on fewer nodes help"
    text = f"Of the compute, {rounded(seconds)} s is waiting for exchanges of {names} over NICs ({advice})."
    return [text] if seconds >= 0.01 * predicted.step_time_s else []


def _with_remedy(part: str) -> str:
    return f"{PART_NAMES[part]} ({_REMEDIES[part]})" if part in _REMEDIES else PART_NAMES[part]


def _improvements(plan: Plan, predicted: Predicted, costs: Costs) -> list[tuple[float, str]]:
    """Return (relative gain in samples/s, change) for each single change of this layout, the largest gain first."""

    def gain_of_faster(rate: str, *names: str) -> float:
        pools = (replace(f, **{rate: 2 * getattr(f, rate)}) if f.name in names else f for f in plan.site.pools)
        site = replace(plan.site, pools=tuple(pools))
        return predicted.step_time_s / step_time_s(replace(plan, site=site), costs) - 1

    larger = replace(plan, batch=replace(plan.batch, global_size=2 * plan.batch.global_size))
    rdma = [c.pool for c in plan.components if plan.site.pool(c.pool).rdma_gbps is not None]
    gains = [
        (gain_of_faster("ethernet_gbps", *(f.name for f in plan.site.pools)), "Ethernet twice as fast"),
        *((gain_of_faster("rdma_gbps", pool), f"RDMA of {pool} twice as fast") for pool in rdma),
        *([(gain_of_faster("rdma_gbps", *rdma), "all RDMA twice as fast")] if len(rdma) > 1 else []),
        (2 * predicted.step_time_s / step_time_s(larger, costs) - 1, "a global batch twice as large"),
        *_more_nodes(plan, predicted, costs),
    ]
    return sorted((g for g in gains if g[0] >= 0.001), reverse=True)


def _more_nodes(plan: Plan, predicted: Predicted, costs: Costs) -> Iterable[tuple[float, str]]:
    p = plan.parallel
    if plan.is_per_stage and not p.is_even:  # more nodes would need another search
        return
    pools = tuple(replace(f, nodes=2 * f.nodes, node_names=()) for f in plan.site.pools)
    kept = ("tp", "pp", *(keys(Parallel).keys() & keys(PlanOptions).keys()))
    options = PlanOptions(
        strategy=plan.strategy,
        nodes={c.pool: 2 * c.nodes for c in plan.components},
        dp=2 * p.replicas,
        layers_per_stage=tuple(stage.layers for stage in plan.stages),
        recompute=plan.recompute,
        schedule=plan.schedule.kind,
        transport=plan.transport_mode,
        gpus_per_node=plan.components[0].gpus_per_node,
        unequal="false",
        **{name: getattr(p, name) for name in kept},
    )
    try:
        larger = best_plan(plan.model, plan.batch, replace(plan.site, pools=pools), options, costs)
    except HolmesError:
        return
    if larger.predicted is not None:
        yield larger.predicted.samples_per_s / predicted.samples_per_s - 1, MORE_NODES


def _runner_up(alternative: dict[str, Any]) -> str:
    sizes = " ".join(f"{k.upper()} {n}" for k, n in alternative["parallel"].items() if k != "virtual_stages")
    nodes = ", ".join(f"{n} x {f}" for f, n in alternative["nodes"].items())
    layers, schedule = abbreviated(alternative["layers_per_stage"], "+"), schedule_kind(alternative["schedule"]).label
    return f"- {alternative['strategy']}, {nodes}: {sizes}, layers {layers}, {schedule}: {alternative['why_not']}"


def _too_close(plan: Plan) -> list[str]:
    """Return the advice to measure a runner-up whose predicted step is less than TOO_CLOSE slower.
    Empty if there is no such runner-up, or if the plan's compute times are measured or emulated."""
    predicted = plan.predicted
    if predicted is None or predicted.interval_s is None:
        return []
    near = [a for a in plan.alternatives if a["predicted"]["step_time_s"] < (1 + TOO_CLOSE) * predicted.step_time_s]
    if not near:
        return []
    p, nodes = near[0]["parallel"], ", ".join(f"{f}: {n}" for f, n in near[0]["nodes"].items())
    sizes = " ".join(f"plan.{name}={p[name]}" for name in ("tp", "pp", "dp", "ep", "etp") if name in p)
    return [
        f"A runner-up less than {TOO_CLOSE:.0%} slower is too close to call. Measure 20 steps of each:"
        f" `holmes run … train.steps=20`, and again with {sizes}"
        f" 'plan.nodes={{{nodes}}}' plan.virtual_stages={p['virtual_stages']} plan.strategy={near[0]['strategy']}"
        f" plan.schedule={schedule_kind(near[0]['schedule']).option_name}."
    ]
