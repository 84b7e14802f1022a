"""Why there is no plan: one line that says what cannot be divided, or how much memory is short and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.memory import USABLE_SHARE, Shortage, shortage
from holmes_hpc.planning.plan.parallel import abridged, not_inside_a_node, undivided
from holmes_hpc.planning.schedule.kinds import in_question
from holmes_hpc.planning.search import layers as split
from holmes_hpc.planning.search.candidate import Evaluator
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.problem import divisors, offers
from holmes_hpc.planning.search.space import Space

TRIED = 100  # placements whose memory is looked at


def nothing_divides(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> NoReturn:
    """Raise PlanError for the first thing that does not divide."""
    size, micro, found = batch.global_size, batch.micro_size, offers(site, options)
    tp, dp, pp = (n or 1 for n in (options.tp, options.dp, options.stages))
    shares, ranks, is_fixed = size // micro, sum(o.nodes * o.per_node for o in found), not options.search_micro_size
    fixed = ", ".join(
        f"{name} {value}"
        for name, value in (
            ("TP", options.tp),
            ("PP", options.stages),
            ("DP", options.dp),
            ("strategy", options.strategy),
        )
        if value not in (None, "auto")
    )
    nodes = ", ".join(f"{o.nodes} {o.fabric.name}" for o in found)
    PlanError.refuse(
        (
            is_fixed and size % micro,
            f"global_size {size} is not a multiple of micro_size {micro}",
            "batch",
            "choose a multiple, or plan.search_micro_size=true",
        ),
        *undivided(model, tp),
        *(not_inside_a_node(tp, o.per_node, f"fabric {o.fabric.name}") for o in found),
        (
            is_fixed and shares % dp,
            f"global_size {size} is not a multiple of micro_size {micro} x DP {dp}",
            "batch",
            f"use a DP that divides {shares}: {abridged(divisors(shares))}",
        ),
        (
            pp > model.layers,
            f"{model.layers} layers cannot fill PP {pp}",
            f"model {model.name}",
            f"use at most {model.layers} stages",
        ),
        (
            tp * dp * pp > ranks,
            f"TP {tp} x PP {pp} x DP {dp} needs {tp * dp * pp} GPUs, there are {ranks}",
            "plan",
            "use smaller sizes or more nodes",
        ),
    )
    raise PlanError(
        f"no placement of {model.layers} layers and {shares} micro-batches on {nodes} nodes with equal"
        f" stages{fixed and ' and ' + fixed}",
        where="plan",
        hint="change nodes, tp, pp, dp, or the batch so that stages of TP x DP GPUs fill whole nodes, or gpus_per_node",
    )


class Short(NamedTuple):
    """A placement, and the memory that it lacks."""

    memory: Shortage
    placement: Placement

    @property
    def fits(self) -> bool:
        return self.memory.bytes <= 0

    def __str__(self) -> str:
        p = self.placement
        return f"TP {p.tp}, PP {p.pp}, DP {p.dp}"


def nothing_fits(evaluator: Evaluator, placements: list[Placement]) -> NoReturn:
    """Raise PlanError with the least memory that any placement is short of: of the keys that were given where leaving
    them out helps, else of the site."""
    o, model, batch = evaluator.options, evaluator.model, evaluator.batch
    found, said = _shortest(evaluator, placements)
    if found is None and said is not None:
        raise said
    if found is None or found.fits:
        said_so = o.layers_per_stage or o.virtual_stages or (o.schedule if o.partition == "exact" else o.partition)
        raise PlanError(
            f"no placement can have {said_so}",
            where="plan",
            hint="virtual stages need as many layers in each stage and a multiple of PP micro-batches",
        )
    what = f"{model.name} fits nowhere here: at best ({found}, recompute {_recompute(o)}) {found.memory} than there is"
    where, hint = "memory", ""
    for left_out in _left_out(o):
        freed = replace(o, **{name: FREE[name] for name in left_out})
        other = _searched(evaluator, batch, evaluator.site, freed)
        if other is not None and other.fits:
            where = ", ".join(f"plan.{name}" for name in left_out)
            hint = f"leave {where} out: {other}, recompute {_recompute(freed)} fits"
            break
    else:
        o = replace(o, **{name: FREE[name] for name in FREE})
        free = _searched(evaluator, batch, evaluator.site, o) or found
        hint = f"use GPUs of {free.memory.need / 2**30 / USABLE_SHARE:.0f} GiB" + "".join(
            f", or {other}" for other in _what_fits(evaluator, o, free.memory)
        )
    raise PlanError(what, where=where, hint=hint)


# Keys of `plan` that can keep a model from fitting, and what leaves the choice to the planner.
FREE: dict[str, Any] = {
    "max_memory_gib": None,
    "recompute": "auto",
    "layers_per_stage": None,
    "virtual_stages": None,
    "pp": None,
    "tp": None,
    "dp": None,
    "strategy": "auto",
    "nodes": None,
    "gpus_per_node": None,
}


def _left_out(o: PlanOptions) -> Iterator[tuple[str, ...]]:
    """Keys that were given: each by itself, then all."""
    given = tuple(name for name, free in FREE.items() if getattr(o, name) != free)
    yield from ((name,) for name in given)
    if len(given) > 1:
        yield given


def _what_fits(evaluator: Evaluator, o: PlanOptions, short: Shortage) -> Iterator[str]:
    """Changes of the batch and of the site under which the model fits: tried, not guessed."""
    batch, site = evaluator.batch, evaluator.site
    if batch.micro_size > 1:
        found = _searched(evaluator, replace(batch, micro_size=1), site, o)
        if found is not None and found.fits:
            yield "batch.micro_size=1"
    first = int(-(-short.need // (short.need - short.bytes)))
    for factor in (first, 2 * first):
        more = replace(site, fabrics=tuple(replace(f, nodes=factor * f.nodes, node_names=()) for f in site.fabrics))
        found = _searched(evaluator, batch, more, o)
        if found is not None and found.fits:
            yield f"{factor} times as many nodes"
            return


def _searched(evaluator: Evaluator, batch: Batch, site: Site, o: PlanOptions) -> Short | None:
    """The least that any placement under `o` is short of; None where there is none."""
    unlimited = replace(o, max_memory_gib=float("inf"), search_micro_size=False)
    try:
        placements = Space(evaluator.model, batch, site, unlimited, evaluator.costs).placements()
        return _shortest(Evaluator(evaluator.model, batch, site, o, evaluator.costs), placements)[0]
    except PlanError:
        return None


def _shortest(evaluator: Evaluator, placements: list[Placement]) -> tuple[Short | None, PlanError | None]:
    """(what any placement is short of least; why another could not be tried)."""
    o = evaluator.options
    found, said = list[Short](), None
    for placement in sorted(placements, key=lambda p: (-p.tp * p.pp, p.key()))[:TRIED]:
        kind = in_question(o.schedule, o.virtual_stages or 1, background=False)[-1]
        try:
            layout = evaluator.layout(placement, _recompute(o), kind, o.virtual_stages or 1)
            given, chunks = o.layers_per_stage, layout.parallel.virtual_stages
            layers = split.chunked(given, chunks) if given else split.uniform(layout)
            if layers.shape[1] == placement.pp:
                found.append(Short(shortage(layout, layers, o.max_memory_gib), placement))
        except PlanError as e:
            said = e
    return min(found, key=lambda short: short.memory.bytes, default=None), said


def _recompute(o: PlanOptions) -> str:
    """What keeps least."""
    return "full" if o.recompute == "auto" else o.recompute
