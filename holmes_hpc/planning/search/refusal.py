"""Why there is no plan: one line that says what cannot be divided, or how much memory is short and what would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.memory import SLACK, memory, room
from holmes_hpc.planning.search import layers as split
from holmes_hpc.planning.search.candidate import Evaluator
from holmes_hpc.planning.search.offers import divisors, offers
from holmes_hpc.planning.search.placement import Placement


def nothing_divides(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> NoReturn:
    """Raise PlanError for the first thing that does not divide."""
    if not options.search_micro_size and batch.global_size % batch.micro_size:
        raise PlanError(f"global_size {batch.global_size} is not a multiple of micro_size {batch.micro_size}",
                        where="batch", hint="choose a multiple, or set search_micro_size")
    found = offers(site, options)
    tp, dp, pp = options.tp, options.dp, options.pp
    if tp:
        for name, value in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
            if value % tp:
                raise PlanError(f"{value} {name} cannot be divided by TP {tp}", where=f"model {model.name}",
                                hint=f"use a TP that divides {value}")
        for offer in found:
            if offer.per_node % tp:
                raise PlanError(f"TP {tp} does not divide {offer.per_node} GPUs of a node",
                                where=f"fabric {offer.fabric.name}", hint="keep tensor parallel inside a node")
    shares = batch.global_size // batch.micro_size
    if dp and shares % dp and not options.search_micro_size:
        raise PlanError(f"global_size {batch.global_size} is not a multiple of micro_size {batch.micro_size} x DP {dp}",
                        where="batch", hint=f"use a DP that divides {shares}: {_some(divisors(shares))}")
    stages = pp or (len(options.layers_per_stage) if options.layers_per_stage else None)
    if stages and stages > model.layers:
        raise PlanError(f"{model.layers} layers cannot fill PP {stages}", where=f"model {model.name}",
                        hint=f"use at most {model.layers} stages")
    ranks = sum(o.nodes * o.per_node for o in found)
    wanted = (tp or 1) * (dp or 1) * (stages or 1)
    if wanted > ranks:
        raise PlanError(f"TP {tp or 1} x PP {stages or 1} x DP {dp or 1} needs {wanted} GPUs, there are {ranks}",
                        where="plan", hint="use smaller sizes or more nodes")
    nodes = ", ".join(f"{o.nodes} {o.fabric.name}" for o in found)
    fixed = [s for s in (tp and f"TP {tp}", stages and f"PP {stages}", dp and f"DP {dp}",
                         options.strategy != "auto" and f"strategy {options.strategy}") if s]
    raise PlanError(f"no placement of {model.layers} layers and {shares} micro-batches on {nodes} nodes with equal"
                    f" stages{' and ' + ', '.join(fixed) if fixed else ''}", where="plan",
                    hint="change nodes, tp, pp, dp, or the batch so that stages of TP x DP GPUs fill whole nodes, or"
                         " gpus_per_node")


def nothing_fits(evaluator: Evaluator, placements: list[Placement]) -> NoReturn:
    """Raise PlanError with the least memory that any placement is short of."""
    o = evaluator.options
    recompute = "full" if o.recompute == "auto" else o.recompute
    best: tuple[float, float, int, Placement] | None = None
    said: PlanError | None = None
    for placement in sorted(placements, key=lambda p: (-p.tp * p.pp, p.key()))[:100]:
        kind = "interleaved" if (o.virtual_stages or 1) > 1 else "1f1b"
        try:
            layout = evaluator.layout(placement, recompute, kind, o.virtual_stages or 1)
            given, chunks = o.layers_per_stage, layout.parallel.virtual_stages
            layers = split.chunked(given, chunks) if given else split.uniform(layout)
            if layers.shape[1] != placement.pp:
                continue
            need = memory(layout, layers).total()[0]
        except PlanError as e:
            said = e
            continue
        short = need - room(layout, o.max_memory_gib)
        stage = int(short.argmax())
        if best is None or short[stage] < best[0]:
            best = float(short[stage]), float(need[stage]), stage, placement
    if best is None and said is not None:
        raise said
    if best is None or best[0] <= 0:
        said_so = o.layers_per_stage or o.virtual_stages or (o.schedule if o.partition == "exact" else o.partition)
        raise PlanError(f"no placement can have {said_so}", where="plan",
                        hint="layers_per_stage must sum up to the model's layers, and virtual stages need as many"
                             " layers in each stage and a multiple of PP micro-batches")
    short_bytes, need_bytes, stage, p = best
    factor = -(-need_bytes // (need_bytes - short_bytes))
    raise PlanError(f"{evaluator.model.name} fits nowhere here: at best (TP {p.tp}, PP {p.pp}, DP {p.dp}, recompute"
                    f" {recompute}) stage {stage} needs {need_bytes / 2**30:.1f} GiB a GPU,"
                    f" {short_bytes / 2**30:.1f} GiB more than there is", where="memory",
                    hint=f"use GPUs of {need_bytes / 2**30 / SLACK:.0f} GiB, or about {factor:.0f} times as many nodes,"
                         " or a smaller micro-batch")


def _some(values: Sequence[int]) -> str:
    text = [str(v) for v in values]
    return ", ".join(text if len(text) <= 8 else [*text[:7], "…", text[-1]])
