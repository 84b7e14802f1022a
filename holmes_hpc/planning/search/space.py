"""The placements worth a look: TP, DP, stages of each fabric, with a quick estimate of each one's step time.

By these a global batch near the one asked for is found that can be shared out better: 511 sequences leave few ways to,
512 many.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, gcd, inf

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.estimate import SMALL, Limit
from holmes_hpc.planning.search.hierarchies import hierarchies
from holmes_hpc.planning.search.pipelines import pipelines
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.problem import Question, divisors, micro_sizes, offers, tensor_sizes
from holmes_hpc.planning.search.uniform import OneSize

EVEN = 16  # micro-batches of all ranks that are a multiple of this are shared out well as they are
APART = 0.03  # a batch so much larger or smaller is near
LOOKED_AT = 3
WORTH = 0.05  # more samples a second than that are worth a remark

MARGIN = 1.3  # placements estimated slower than the best on the same fabrics by more than this wait


class Space:
    """All placements of one model and batch on one site under given options."""

    def __init__(self, model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> None:
        self.model, self.batch, self.site, self.options, self.costs = model, batch, site, options, costs
        given, self.offers = options.layers_per_stage or (model.layers,), offers(site, options)
        PlanError.refuse(
            (
                sum(given) != model.layers,
                f"layers_per_stage {list(given)} are {sum(given)} layers, {model.name} has {model.layers}",
                "plan.layers_per_stage",
                f"give numbers that sum up to {model.layers}",
            ),
            (
                options.strategy == "pipeline" and len(self.offers) == 1,
                f"a pipeline goes across fabrics, and there is {self.offers[0].fabric.name} alone",
                "plan.strategy",
                "use one-fabric (or auto), or nodes of two fabrics",
            ),
        )
        self.small = True  # after placements(): none was left out for its estimate
        self._sizes: list[OneSize] = []
        for micro in micro_sizes(batch, options):
            for tp in tensor_sizes(model, options, self.offers) if batch.global_size % micro == 0 else ():
                usable = [o for o in self.offers if o.per_node % tp == 0]
                if usable and (len(usable) == len(self.offers) or not any(o.fixed for o in self.offers)):
                    question = Question(model, batch, site, options, costs)
                    self._sizes.append(OneSize(question, micro, tp, usable))

    def placements(self, margin: float = MARGIN) -> list[Placement]:
        """Those estimated to take `margin` times as long as the best on the same fabrics at most. Sorted by estimate;
        equal ones by fewer GPUs, smaller TP and names."""
        limit = Limit(len(self.offers), margin)
        found = list[Placement]()
        for _, at, dp in sorted(
            (size.least_s(dp), at, dp)
            for at, size in enumerate(self._sizes)
            for dp in divisors(size.shares)
            if self.options.dp in (None, dp)
        ):
            if self.options.strategy != "hierarchical-dp":
                found += pipelines(self._sizes[at], dp, limit)
            if self.options.strategy in ("auto", "hierarchical-dp"):
                found += hierarchies(self._sizes[at], dp, limit)
        self.small = limit.count <= SMALL
        return sorted((p for p in found if p.least_s <= limit.most(p.fabrics)), key=Placement.key)


def near_batch(question: Question, best: Placement, seconds: float) -> Batch | None:
    """Return the batch near the one asked for that may give the most samples a second, in micro-batches as those of
    `best`, where a step takes `seconds`; None where none can give so many more that it is worth a remark."""
    batch, options = question.batch, question.options
    if options.dp is not None or batch.global_size // best.micro % EVEN == 0:
        return None
    told = replace(options, search_micro_size=False)

    def rate(size: int) -> float:
        near = replace(batch, global_size=size, micro_size=best.micro)
        found = Space(*question._replace(batch=near, options=told)).placements()
        return size / min((p.least_s for p in found), default=inf)

    unit = EVEN * best.micro
    size = batch.global_size
    others = [n * unit for n in range(max(1, ceil(size * (1 - APART) / unit)), floor(size * (1 + APART) / unit) + 1)]
    others.sort(key=lambda n: (-gcd(n // best.micro, best.gpus), -len(divisors(n // best.micro)), abs(n - size)))
    rates = {n: rate(n) for n in others[:LOOKED_AT]}
    own = size / seconds
    worth = [n for n in rates if rates[n] > (1 + WORTH) * own]
    if not worth:
        return None
    most = max(rates.values())
    return replace(batch, global_size=next(n for n in worth if rates[n] > most / (1 + WORTH)))
