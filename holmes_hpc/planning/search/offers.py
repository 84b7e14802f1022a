"""What a site offers to a plan: nodes and ranks of each fabric, and the sizes that divide a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from holmes_hpc.config.model import Batch
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, Site

LARGEST_MICRO = 32


@dataclass(frozen=True)
class Offer:
    """What one fabric offers: `nodes` at most (just as many if `fixed`), `per_node` ranks on each."""

    fabric: Fabric
    nodes: int
    per_node: int
    fixed: bool


def offers(site: Site, options: PlanOptions) -> list[Offer]:
    """The fabrics to plan with. Raises PlanError for a fabric, nodes or GPUs that the site does not have."""
    chosen = []
    wanted: Mapping[str, int | None] = options.nodes or {f.name: None for f in site.fabrics}
    for name in wanted:
        site.fabric(name)
    for name in options.fabric_order or ():
        if name not in wanted:
            raise PlanError(
                f"fabric_order names {name!r}", where="plan.fabric_order", hint=f"it is one of {', '.join(wanted)}"
            )
    for fabric in site.fabrics:
        if fabric.name not in wanted:
            continue
        nodes = wanted[fabric.name]
        if nodes is not None and nodes > fabric.nodes:
            raise PlanError(
                f"{nodes} nodes wanted, the site has {fabric.nodes}",
                where=f"plan.nodes.{fabric.name}",
                hint=f"use at most {fabric.nodes}",
            )
        per_node = options.gpus_per_node or fabric.gpus_per_node
        if per_node > fabric.gpus_per_node:
            raise PlanError(
                f"{per_node} GPUs a node wanted, a node has {fabric.gpus_per_node}",
                where=f"fabric {fabric.name}",
                hint=f"use at most {fabric.gpus_per_node}",
            )
        chosen.append(Offer(fabric, nodes or fabric.nodes, per_node, nodes is not None))
    return chosen


@lru_cache(maxsize=512)
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def micro_sizes(batch: Batch, options: PlanOptions) -> list[int]:
    if not options.search_micro_size:
        return [batch.micro_size]
    others = [m for m in divisors(batch.global_size) if m <= LARGEST_MICRO and m != batch.micro_size]
    return [*([] if batch.global_size % batch.micro_size else [batch.micro_size]), *others]
