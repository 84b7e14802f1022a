"""The layout of a plan as text: nodes, stages, parallel sizes, optimizer; and the differences between two plans."""

from holmes_hpc.errors import counted
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import Plan


def placement_text(plan: Plan) -> str:
    """Return the nodes and the stages of each component."""
    return ", ".join(f"{counted(c.nodes, 'node')} of {c.pool} ({_stages_text(c.stages)})" for c in plan.components)


def _stages_text(numbers: tuple[int, ...]) -> str:
    is_range = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    listed = f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))
    return f"stage{'s' * (len(numbers) > 1)} {listed}"


def _layers_text(layers: list[int]) -> str:
    return f"{abbreviated(layers, '+')} layer{'s' * (layers != [1])}"


def placements(plan: Plan) -> list[str]:
    """Return a line for each component: its nodes, GPUs, stages and layers."""
    return [
        f"{c.pool}: {counted(c.nodes, 'node')} x {c.gpus_per_node} {plan.site.pool(c.pool).gpu.name},"
        f" {_stages_text(c.stages)}, {_layers_text([plan.stages[s].layers for s in c.stages])}"
        for c in plan.components
    ]


def layout_texts(plan: Plan) -> list[str]:
    """Return texts on the strategy, the parallel sizes, the micro-batches, the schedule and recomputation."""
    micro_batches = f"{counted(plan.micro_batches, 'micro-batch')} of {plan.batch.micro_size}"
    schedule, recompute = f"schedule {plan.order.schedule.label}", f"recompute {plan.recompute}"
    return [plan.strategy_label, str(plan.parallel), micro_batches, schedule, recompute]


def optimizer_text(plan: Plan) -> str:
    """Return whether the optimizer is sharded, and the size of gradient buckets, as text."""
    sharding = "sharded over" if plan.parallel.distributed_optimizer else "replicated on"
    return f"Optimizer: {sharding} the data-parallel ranks; gradient buckets of {plan.bucket_bytes / 1e6:g} MB"
