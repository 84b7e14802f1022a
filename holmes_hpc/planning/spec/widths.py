"""Stages of unequal widths: each has its own nodes, TP and DP, and a rule says which replica computes what.

Beside :class:`Parallel`, the grid of equal stages. What both know has the same name in both; what only a grid has (one
`tp`, one `dp`) is refused here with one line, so that nothing goes by a number that is another one in other stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any, NoReturn

import numpy as np

from holmes_hpc.config.model import Batch
from holmes_hpc.errors import PlanError
from holmes_hpc.planning.spec.parallel import PIPELINE_ORDER, Group, Parallel
from holmes_hpc.schema import check, key, make


@dataclass(frozen=True)
class Width:
    """Of one stage: `dp` replicas of `tp` ranks each, on whole nodes. `weights`: how many micro-batches a replica
    computes, in proportion to the other replicas' (empty: all the same)."""

    nodes: Annotated[int, key("of the stage alone", ge=1)]
    tp: Annotated[int, key("tensor parallel in the stage", ge=1)]
    dp: Annotated[int, key("replicas of the stage", ge=1)]
    weights: Annotated[tuple[float, ...], key("micro-batches of each replica, in proportion", gt=0)] = ()

    def __post_init__(self) -> None:
        check(self, "stages", PlanError)
        if len(set(self.weights)) == 1:
            object.__setattr__(self, "weights", ())
        if self.weights and len(self.weights) != self.dp:
            raise PlanError(
                f"{len(self.weights)} weights for DP {self.dp}",
                where="routing",
                hint="give one per replica of the stage",
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True)
class Widths:
    """The ranks of a plan whose stages are not equally wide: stage by stage, replica by replica, TP rank by TP rank.

    `sequence_parallel` holds for the stages of more than one TP rank. There are no virtual stages, no optimizer
    instances, and pipelines are no blocks of ranks; the optimizer's state is always shared out over a stage's replicas.
    """

    stages: tuple[Width, ...]
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check(self, "parallel", PlanError)
        if self.sequence_parallel and self.tps == (1,):
            raise PlanError("sequence parallel needs tp above 1", where="parallel", hint="unset sequence_parallel")
        if len(self.tps) > 1 and not self.sequence_parallel:
            raise PlanError(
                f"stages of TP {', '.join(map(str, self.tps))} without sequence_parallel",
                where="parallel",
                hint="set it: stages of unlike TP exchange pieces of sequences",
            )

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def order(self) -> str:
        return PIPELINE_ORDER

    @property
    def virtual_stages(self) -> int:
        return 1

    @property
    def optimizer_instances(self) -> int:
        return 1

    @property
    def distributed_optimizer(self) -> bool:
        return True

    @property
    def tp(self) -> int:
        return _refuse()

    @property
    def dp(self) -> int:
        return _refuse()

    @property
    def world_size(self) -> int:
        return self._first[-1]

    @cached_property
    def _first(self) -> list[int]:
        return [0, *accumulate(w.ranks for w in self.stages)]

    def grid(self) -> list[np.ndarray]:
        """Per stage its global ranks, shape (dp, tp)."""
        return [
            np.arange(first, end).reshape(w.dp, w.tp)
            for w, (first, end) in zip(self.stages, pairwise(self._first), strict=True)
        ]

    @property
    def stage_ranks(self) -> list[list[int]]:
        """The global ranks of every stage."""
        return [list(range(first, end)) for first, end in pairwise(self._first)]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, TP rank) of a global rank."""
        stage = next(s for s, end in enumerate(self._first[1:]) if rank < end)
        return stage, *divmod(rank - self._first[stage], self.stages[stage].tp)

    def tp_of(self, stage: int) -> int:
        return self.stages[stage].tp

    def dp_of(self, stage: int) -> int:
        return self.stages[stage].dp

    @property
    def in_turn(self) -> bool:
        """Whether the replicas of every stage take turns. Where they do not, those that have little to do are long
        done when others are not: no gradients are reduced, and no parameters gathered, beside computing."""
        return not any(w.weights for w in self.stages)

    @property
    def tps(self) -> tuple[int, ...]:
        """Every number of TP ranks that a stage has."""
        return tuple(sorted({w.tp for w in self.stages}))

    @property
    def vocabulary_parts(self) -> int:
        """Into how many equal parts the padded vocabulary can be cut."""
        return math.lcm(*self.tps)

    @property
    def words(self) -> str:
        return f"PP {self.pp} of " + " + ".join(f"TP {w.tp} x DP {w.dp}" for w in self.stages)

    @property
    def product(self) -> str:
        """What gives the number of ranks, in words."""
        return " + ".join(f"TP {w.tp} x DP {w.dp}" for w in self.stages)

    def routes(self, micro_batches: int) -> tuple[tuple[int, ...], ...]:
        """Per stage: the replica that computes each of a step's micro-batches. PlanError for a replica without any."""
        return tuple(_route(w, s, micro_batches) for s, w in enumerate(self.stages))

    def as_grid(self, micro_batches: int) -> Parallel | None:
        """The same as a grid, where all stages and all replicas' shares of a step are alike."""
        first = self.stages[0]
        if any(w.weights or (w.tp, w.dp) != (first.tp, first.dp) for w in self.stages) or micro_batches % first.dp:
            return None
        return Parallel(first.tp, self.pp, first.dp, sequence_parallel=self.sequence_parallel)


@lru_cache(maxsize=256)
def _route(width: Width, stage: int, micro_batches: int) -> tuple[int, ...]:
    """In turn, so that replicas are balanced within one micro-batch; by weight: as many to each as make the last one
    done earliest, each begun when the replica would have done its last one. So every replica has one of the first: in
    their first passes all replicas of a stage gather parameters together."""
    if width.dp > micro_batches:
        raise PlanError(
            f"stage {stage} has {width.dp} replicas for {micro_batches} micro-batches a step",
            where="routing",
            hint="use fewer replicas, or a larger batch",
        )
    if not width.weights:
        return tuple(k % width.dp for k in range(micro_batches))
    counts = [0] * width.dp
    for _ in range(micro_batches):
        counts[min(range(width.dp), key=lambda r: ((counts[r] + 1) / width.weights[r], r))] += 1
    if 0 in counts:
        raise PlanError(
            f"stage {stage}: replica {counts.index(0)} gets none of {micro_batches} micro-batches",
            where="routing",
            hint="raise its weight, or leave it out",
        )
    begun = sorted((n / width.weights[r], r) for r, count in enumerate(counts) for n in range(count))
    return tuple(r for _, r in begun)


def pieces(source_tp: int, target_tp: int) -> list[tuple[int, int]]:
    """Between two neighbouring stages: the TP ranks (of either) that exchange a part of every tensor. Where both have
    the same number, each keeps to its own; else those whose parts of the sequence overlap."""
    if source_tp == target_tp:
        return [(t, t) for t in range(source_tp)]
    return [
        (a, b)
        for a in range(source_tp)
        for b in range(target_tp)
        if a * target_tp < (b + 1) * source_tp and b * source_tp < (a + 1) * target_tp
    ]


def unequal_groups(widths: Widths, micro_batches: int, tied: bool) -> Iterator[Group]:
    """Every group of more than one rank that carries training traffic, as `parallel.groups` has them for a grid.

    `embd`: all ranks of the first and the last stage, if the embedding is `tied`. `edge`: two ranks of neighbouring
    stages whose replicas share a micro-batch. The gradient norm goes over `world`.
    """
    grid, pp = widths.grid(), widths.pp
    if widths.world_size > 1:
        yield Group("world", tuple(range(widths.world_size)), tuple(range(pp)))
    for s, ranks in enumerate(grid):
        if ranks.shape[1] > 1:
            for row in ranks.tolist():
                yield Group("tp", tuple(row), (s,))
        if ranks.shape[0] > 1:
            for column in ranks.T.tolist():
                yield Group("dp", tuple(column), (s,))
    if tied and pp > 1:
        yield Group("embd", tuple(int(r) for r in np.concatenate([grid[0].ravel(), grid[-1].ravel()])), (0, pp - 1))
    routes = widths.routes(micro_batches)
    for s in range(pp - 1):
        for a, b in sorted(set(zip(routes[s], routes[s + 1], strict=True))):
            for i, j in pieces(widths.tp_of(s), widths.tp_of(s + 1)):
                yield Group("edge", (int(grid[s][a, i]), int(grid[s + 1][b, j])), (s, s + 1))


def _refuse() -> NoReturn:
    raise PlanError(
        "its stages have unequal widths, and this takes equal ones only",
        where="plan",
        hint="use a plan of equal widths here: the same tp and dp in every stage",
    )


_SIZES = ("nodes", "tp", "dp")  # of a stage, in a plan's file


@dataclass(frozen=True)
class _Routing:
    """The rule as a plan's file has it: per stage, every replica's weight."""

    weights: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        check(self, "routing", PlanError)


def write_widths(data: dict[str, Any], widths: Widths) -> None:
    """Put `widths` into a plan's plain data: sizes beside every stage's layers, the rule under `routing`."""
    data["parallel"] = {"sequence_parallel": widths.sequence_parallel}
    for stage, width in zip(data["stages"], widths.stages, strict=True):
        stage.update(nodes=width.nodes, tp=width.tp, dp=width.dp)
    data["routing"] = {"weights": [list(w.weights or (1,) * w.dp) for w in widths.stages]}


def read_widths(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: plain data whose `parallel` is made; a grid (and then version 1) where nothing is unequal."""
    stages, given = data.get("stages"), data.get("parallel") or {}
    rule = make(_Routing, data.get("routing") or {}, "routing", PlanError)
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise PlanError(f"stages is {stages!r:.60}", where="stages", hint="list one per stage")
    if rule.weights and len(rule.weights) != len(stages):
        raise PlanError(
            f"weights of {len(rule.weights)} stages for {len(stages)}", where="routing", hint="give a list per stage"
        )
    made = [
        make(
            Width,
            {**{k: stage[k] for k in _SIZES if k in stage}, **({"weights": rule.weights[s]} if rule.weights else {})},
            f"stages[{s}]",
            PlanError,
        )
        for s, stage in enumerate(stages)
    ]
    if not isinstance(given, Mapping):
        raise PlanError(f"parallel is {given!r:.60}", where="parallel", hint="give sequence_parallel: true or false")
    widths = make(Widths, {**given, "stages": tuple(made)}, "parallel", PlanError)
    read: dict[str, Any] = {k: v for k, v in data.items() if k != "routing"}
    read["stages"] = [{k: v for k, v in stage.items() if k not in _SIZES} for stage in stages]
    read["batch"] = batch = make(Batch, data.get("batch") or {}, "batch", PlanError)
    read["parallel"] = widths
    if (grid := widths.as_grid(batch.micro_batches(1))) is not None:
        read["parallel"] = grid
        read.pop("transports", None)  # a grid has other groups
    return read
