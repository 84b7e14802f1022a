"""The best step of stages of unequal widths on a small site by going through everything, with code of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.cost.unequal import Unequal
from holmes_hpc.planning.schedule.routed import least_in_flight
from holmes_hpc.planning.spec.plan import Component
from holmes_hpc.planning.spec.widths import Width, Widths

BUCKETS = (160_000_000, 10_000_000)
DEEPER = 3  # passes in flight beyond the least, of each stage above the last


def best_step_s(model: ModelSpec, batch: Batch, site: Site, costs: Costs, most_stages: int = 4) -> float:
    """Seconds of the shortest step; infinite where nothing fits."""
    best = float("inf")
    for fabrics, nodes in _stages(site, most_stages):
        names = list(dict.fromkeys(f.name for f in fabrics))
        components = tuple(
            Component(f.partition, "", f.name, sum(n for g, n in zip(fabrics, nodes, strict=True) if g is f),
                      f.gpus_per_node, tuple(s for s, g in enumerate(fabrics) if g is f))
            for f in (site.fabric(name) for name in names))
        for tps in product(*(_tps(model, f) for f in fabrics)):
            widths = tuple(Width(n, tp, n * f.gpus_per_node // tp)
                           for f, n, tp in zip(fabrics, nodes, tps, strict=True))
            if max(w.dp for w in widths) > batch.micro_batches(1):
                continue
            for layers, recompute, bucket in product(_splits(model.layers, len(widths)), ("none", "full"), BUCKETS):
                of = Unequal(model, batch, Widths(widths, sequence_parallel=max(tps) > 1), layers, (1,) * len(widths),
                             recompute, components, site, costs, bucket_bytes=bucket)
                for more in range(DEEPER + 1):
                    best = min(best, _seconds(of, more, costs))
    return best


def _seconds(of: Unequal, more: int, costs: Costs) -> float:
    dps = tuple(w.dp for w in of.widths.stages)
    depths = least_in_flight(dps, (*(more for _ in dps[1:]), 0))
    shares = [len(of.order.own(of.order.row(s, 0))) for s in range(len(dps))]
    tried = of.varied(of.layers, tuple(min(d, m) for d, m in zip(depths, shares, strict=True)))
    gpus = [view.fabric(view.replicas[0][s]).gpu for s, view in enumerate(tried.views)]
    try:
        if all(need <= capacity(gpu) for need, gpu in zip(tried.memory_bytes, gpus, strict=True)):
            return tried.step_s
    except PlanError:
        pass
    return float("inf")


def _stages(site: Site, most: int) -> Iterator[tuple[list[Fabric], list[int]]]:
    """The fabric and the nodes of each stage: every choice of fabrics, in every order, every way to share out nodes."""
    for count in range(1, len(site.fabrics) + 1):
        for chosen in permutations(site.fabrics, count):
            for parts in product(*(list(_parts(f.nodes)) for f in chosen)):
                if sum(map(len, parts)) <= most:
                    fabrics = [f for f, part in zip(chosen, parts, strict=True) for _ in part]
                    yield fabrics, [n for part in parts for n in part]


def _parts(nodes: int) -> Iterator[tuple[int, ...]]:
    for used in range(1, nodes + 1):
        for count in range(1, used + 1):
            yield from _splits(used, count)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def _tps(model: ModelSpec, fabric: Fabric) -> list[int]:
    return [t for t in range(1, fabric.gpus_per_node + 1)
            if not (fabric.gpus_per_node % t or model.heads % t or model.kv_heads % t or model.ffn % t)]
