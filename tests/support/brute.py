"""Exhaustive search for the best step of a small site, with code of its own: no estimate, bound or pruning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import fits
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, PIPELINE_ORDER, Parallel
from holmes_hpc.planning.plan.plan import Component, Schedule

BUCKETS = (160_000_000, 40_000_000, 10_000_000, 2_500_000, 625_000)
DEEPER = 2  # extra passes in flight per transfer, beyond one more than the next stage; equal extras are unlimited


def best_step_s(model: ModelSpec, batch: Batch, site: Site, costs: Costs) -> float:
    """Return the seconds of the shortest step of any plan; infinite if no plan fits."""
    best = float("inf")
    for components, parallel in layouts(model, batch, site):
        p, m = parallel, batch.micro_batches(parallel.dp)
        splits = _splits(model.layers, p.pp, p.virtual_stages)
        for recompute, schedule, bucket in product(("none", "selective", "full"), _schedules(p, m), BUCKETS):
            try:
                layout = Layout(model, batch, p, recompute, schedule, components, site, costs, bucket_bytes=bucket)
                fitting = splits[fits(layout, splits)]
                if len(fitting):
                    best = min(best, float(step_s(layout, fitting).min()))
            except PlanError:  # the schedule deadlocks
                continue
    return best


def layouts(model: ModelSpec, batch: Batch, site: Site) -> Iterator[tuple[tuple[Component, ...], Parallel]]:
    """Yield every placement of every layout."""
    max_tp = max(f.gpus_per_node for f in site.pools)
    gpu_count = sum(f.gpus for f in site.pools)
    for tp in range(1, max_tp + 1):
        if model.heads % tp or model.kv_heads % tp or model.ffn % tp:
            continue
        for dp in range(1, gpu_count + 1):
            if batch.global_size % (batch.micro_size * dp):
                continue
            for placement in _choices(site, tp):
                yield from _pipelines(model, batch, placement, tp, dp)
                yield from _hierarchies(model, batch, placement, tp, dp)


def _choices(site: Site, tp: int) -> Iterator[list[tuple[Pool, int]]]:
    """Yield (fabric, nodes used) of every non-empty choice of nodes, in every order."""
    for size in range(1, len(site.pools) + 1):
        for fabrics in permutations([f for f in site.pools if f.gpus_per_node % tp == 0], size):
            for nodes in product(*(range(1, f.nodes + 1) for f in fabrics)):
                yield list(zip(fabrics, nodes, strict=True))


def _parallels(model: ModelSpec, batch: Batch, tp: int, pp: int, dp: int, **options: object) -> Iterator[Parallel]:
    m = batch.micro_batches(dp)
    for chunks in range(1, model.layers // pp + 1):
        if chunks == 1 or (pp > 1 and m % pp == 0):
            yield Parallel.uniform(tp, pp, dp, virtual_stages=chunks, sequence_parallel=tp > 1, **options)  # type: ignore[arg-type]


def _pipelines(
    model: ModelSpec, batch: Batch, placement: list[tuple[Pool, int]], tp: int, dp: int
) -> Iterator[tuple[tuple[Component, ...], Parallel]]:
    components, stage_count = [], 0
    for fabric, nodes in placement:
        ranks = nodes * fabric.gpus_per_node
        if ranks % (tp * dp):
            return
        stages = ranks // (tp * dp)
        components.append(
            Component(
                fabric.partition,
                "",
                fabric.name,
                nodes,
                fabric.gpus_per_node,
                tuple(range(stage_count, stage_count + stages)),
            )
        )
        stage_count += stages
    if stage_count <= model.layers:
        for parallel in _parallels(model, batch, tp, stage_count, dp, order=PIPELINE_ORDER):
            yield tuple(components), parallel


def _hierarchies(
    model: ModelSpec, batch: Batch, placement: list[tuple[Pool, int]], tp: int, dp: int
) -> Iterator[tuple[tuple[Component, ...], Parallel]]:
    ranks = sum(n * f.gpus_per_node for f, n in placement)
    if len(placement) < 2 or ranks % (tp * dp) or ranks // (tp * dp) > model.layers:
        return
    pp = ranks // (tp * dp)
    pipeline_counts = [n * f.gpus_per_node / (tp * pp) for f, n in placement]
    for instance_dp in range(1, dp + 1):
        if dp % instance_dp == 0 and all(count % instance_dp == 0 for count in pipeline_counts):
            components = tuple(
                Component(f.partition, "", f.name, n, f.gpus_per_node, tuple(range(pp))) for f, n in placement
            )
            for parallel in _parallels(
                model, batch, tp, pp, dp, order=HIERARCHICAL_ORDER, optimizer_instances=dp // instance_dp
            ):
                yield components, parallel


def _schedules(p: Parallel, micro_batches: int) -> list[Schedule]:
    """Return Megatron-Core's schedule and the eager one, up to DEEPER per transfer, and deeper equal ones."""
    if p.virtual_stages == 1:
        base = [min(micro_batches, p.pp - s) for s in range(p.pp)]
        standard = Schedule("1f1b", tuple(base))
    else:
        base = [
            min(micro_batches * p.virtual_stages, 2 * (p.pp - s - 1) + (p.virtual_stages - 1) * p.pp + 1)
            for s in range(p.pp)
        ]
        standard = Schedule("interleaved", tuple(base))
    if p.pp == 1:
        return [standard]
    deeper = []
    for equal_extra, *stage_extras in product(
        range(micro_batches if p.virtual_stages == 1 else 1), *[range(DEEPER + 1)] * (p.pp - 1)
    ):
        in_flight = tuple(
            min(b + sum(stage_extras[s:]) + equal_extra * (p.pp - 1 - s), micro_batches * p.virtual_stages)
            for s, b in enumerate(base)
        )
        deeper.append(Schedule("ahead", in_flight))
    return [standard, *dict.fromkeys(deeper)]


def _splits(layers: int, stages: int, chunks: int) -> np.ndarray:
    """Return every split of layers into chunks of at least one layer: (splits, S, C)."""
    parts = stages * chunks
    cut_tuples = list(combinations(range(1, layers), parts - 1))
    cuts = np.array(cut_tuples, dtype=int).reshape(len(cut_tuples), parts - 1)
    edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), layers)], axis=1)
    return np.diff(edges, axis=1).reshape(-1, stages, chunks)
