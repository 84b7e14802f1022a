"""What a plan is searched for, and what the site offers to it: nodes and ranks of each fabric, sizes that divide a
batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.parallel import undivided

LARGEST_MICRO = 32


class Question(NamedTuple):
    """A model and a batch to train on a site, what is fixed of the plan, and the costs it is judged by."""

    model: ModelSpec
    batch: Batch
    site: Site
    options: PlanOptions
    costs: Costs


@dataclass(frozen=True)
class Offer:
    """What one fabric offers: `nodes` at most (just as many if `fixed`), `per_node` ranks on each."""

    fabric: Fabric
    nodes: int
    per_node: int
    fixed: bool


def offers(site: Site, options: PlanOptions) -> list[Offer]:
    """The fabrics to plan with. Raises PlanError for a fabric, nodes or GPUs that the site does not have."""
    wanted: Mapping[str, int | None] = options.nodes or {f.name: None for f in site.fabrics}
    used = sorted((site.fabric(name) for name in wanted), key=site.fabrics.index)
    found = [
        Offer(f, wanted[f.name] or f.nodes, options.gpus_per_node or f.gpus_per_node, wanted[f.name] is not None)
        for f in used
    ]
    PlanError.refuse(
        *(
            (
                name not in wanted,
                f"fabric_order names {name!r}",
                "plan.fabric_order",
                f"it is one of {', '.join(wanted)}",
            )
            for name in options.fabric_order or ()
        ),
        *(
            case
            for o in found
            for f in [o.fabric]
            for case in (
                (
                    o.nodes > f.nodes,
                    f"{o.nodes} nodes wanted, the site has {f.nodes}",
                    f"plan.nodes.{f.name}",
                    f"use at most {f.nodes}",
                ),
                (
                    o.per_node > f.gpus_per_node,
                    f"{o.per_node} GPUs a node wanted, a node has {f.gpus_per_node}",
                    f"fabric {f.name}",
                    f"use at most {f.gpus_per_node}",
                ),
            )
        ),
    )
    return found


def tensor_sizes(model: ModelSpec, options: PlanOptions, usable: list[Offer]) -> list[int]:
    """Return every TP by which the model's layers can be divided inside a node."""
    sizes = [options.tp] if options.tp else range(1, max(o.per_node for o in usable) + 1)
    return [tp for tp in sizes if not undivided(model, tp)]


def allowed(options: PlanOptions, layers: int, stages: Any, fabrics: Any) -> Any:
    """Return whether a placement, or each of many, may have so many stages on so many fabrics."""
    kept = (stages >= 1) & (stages <= layers) & (stages == (options.stages or stages))
    return kept & {"one-fabric": fabrics == 1, "pipeline": fabrics > 1}.get(options.strategy, fabrics >= 1)


@lru_cache(maxsize=512)
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def micro_sizes(batch: Batch, options: PlanOptions) -> list[int]:
    if not options.search_micro_size:
        return [batch.micro_size]
    others = [m for m in divisors(batch.global_size) if m <= LARGEST_MICRO and m != batch.micro_size]
    return [*([] if batch.global_size % batch.micro_size else [batch.micro_size]), *others]
