"""The layout of a plan as text: nodes, stages, parallel sizes, optimizer; and the differences between two plans."""

from collections.abc import Iterator

from holmes_hpc.errors import counted
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import Component, Plan


def placements(plan: Plan) -> list[str]:
    """Return a line for each component: its nodes, GPUs, stages and layers."""
    gpus = {c.pool: f"{c.gpus_per_node} {plan.site.pool(c.pool).gpu.name}" for c in plan.components}
    return [f"{c.pool}: {counted(c.nodes, 'node')} x {gpus[c.pool]}, {_stages(plan, c)}" for c in plan.components]


def _stages(plan: Plan, component: Component) -> str:
    numbers, layers = component.stages, [plan.stages[s].layers for s in component.stages]
    is_range = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    listed = f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))
    return f"stage{'s' * (len(numbers) > 1)} {listed}, {abbreviated(layers, '+')} layer{'s' * (layers != [1])}"


def layout_texts(plan: Plan) -> list[str]:
    """Return texts on the strategy, the parallel sizes, the micro-batches, the schedule and recomputation."""
    number = counted(plan.micro_batches, "micro-batch")  # with per-stage TP/DP: of all replicas
    micro_batches = f"{number} of {plan.batch.micro_size}{' in all' if plan.is_per_stage else ''}"
    schedule, recompute = f"schedule {plan.order.schedule.label}", f"recompute {plan.recompute}"
    return [plan.strategy_label, str(plan.parallel), micro_batches, schedule, recompute]


def optimizer_text(plan: Plan) -> str:
    """Return whether the optimizer is sharded, whether its steps are early, and the size of gradient buckets."""
    sharding = "sharded over" if plan.parallel.distributed_optimizer else "replicated on"
    count = plan.parallel.optimizer_instances
    blocks = (f" in {count} blocks" if count > 1 else "") + (", early steps" if plan.early_step == "stage" else "")
    return f"optimizer {sharding} the data-parallel ranks{blocks}, gradient buckets of {plan.bucket_bytes / 1e6:g} MB"


def sharing_texts(plan: Plan) -> Iterator[str]:
    """Yield which ranks share a layer's experts, and which a sequence, as text."""
    for kind, shared in (("ep", "a layer's experts"), ("cp", "a sequence")):
        groups = [group.ranks for group in plan.transports() if group.kind == kind]
        if groups:
            nodes = max(len({plan.places[rank].node for rank in ranks}) for ranks in groups)
            yield f"ranks {abbreviated(groups[0])} (and so on) share {shared}, on {counted(nodes, 'node')}"


def plan_changes(old: Plan, new: Plan) -> str:
    """Return the differences between the layouts of two plans as text, with the former values; empty without any."""
    old_texts, texts = ([" and ".join(placements(p)), *layout_texts(p), optimizer_text(p)] for p in (old, new))
    return "; ".join(f"{text} (was {before})" for before, text in zip(old_texts, texts, strict=True) if text != before)
