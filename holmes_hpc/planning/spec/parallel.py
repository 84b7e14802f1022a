"""The ranks of a plan and the groups they form: a grid of (pp, dp, tp) and slices of it, as Megatron-Core counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.schema import check, key

# Megatron-Core's names: the first name varies fastest. Context and expert parallelism are 1 here.
PIPELINE_ORDER = "tp-cp-ep-dp-pp"  # a stage is one block of ranks: stage boundaries can lie on fabric boundaries
HIERARCHICAL_ORDER = "tp-cp-ep-pp-dp"  # a pipeline is one block of ranks: data parallel goes across fabrics
ORDERS = (PIPELINE_ORDER, HIERARCHICAL_ORDER)


@dataclass(frozen=True)
class Parallel:
    """Sizes of every parallel dimension.

    `virtual_stages`: model chunks one pipeline rank holds (1: not interleaved). `optimizer_instances`: data-parallel
    groups are cut into that many equal runs of ranks; gradients are reduce-scattered inside a run and all-reduced
    across runs (Megatron-Core's num_distributed_optimizer_instances).
    """

    tp: Annotated[int, key("tensor parallel", ge=1)] = 1
    pp: Annotated[int, key("pipeline stages", ge=1)] = 1
    dp: Annotated[int, key("data parallel", ge=1)] = 1
    cp: Annotated[int, key("context parallel", ge=1)] = 1
    order: str = PIPELINE_ORDER
    virtual_stages: Annotated[int, key("model chunks of a pipeline rank", ge=1)] = 1
    optimizer_instances: Annotated[int, key("runs of ranks of a data-parallel group", ge=1)] = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        check(self, "parallel", PlanError)
        if self.cp != 1:
            raise PlanError("context parallelism is not supported", where="parallel.cp", hint="use cp=1")
        if self.order not in ORDERS:
            raise PlanError(f"unknown rank order {self.order!r}", where="parallel.order", hint=f"use one of {ORDERS}")
        if self.dp % self.optimizer_instances:
            raise PlanError(
                f"dp={self.dp} cannot be cut into {self.optimizer_instances} optimizer instances",
                where="parallel",
                hint="choose a divisor of dp",
            )
        if self.optimizer_instances > 1 and not self.distributed_optimizer:
            raise PlanError(
                "optimizer instances need the distributed optimizer", where="parallel", hint="set distributed_optimizer"
            )
        if self.virtual_stages > 1 and self.pp == 1:
            raise PlanError(
                "virtual stages need a pipeline", where="parallel", hint="use pp above 1 or virtual_stages=1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("sequence parallel needs tp above 1", where="parallel", hint="unset sequence_parallel")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    # what stages of unequal widths (widths.py) have too

    @property
    def stage_ranks(self) -> list[list[int]]:
        """The global ranks of every stage."""
        ranks: list[list[int]] = self.grid().reshape(self.pp, -1).tolist()
        return ranks

    def tp_of(self, stage: int) -> int:
        return self.tp

    def dp_of(self, stage: int) -> int:
        return self.dp

    @property
    def tps(self) -> tuple[int, ...]:
        """Every number of TP ranks that a stage has."""
        return (self.tp,)

    @property
    def vocabulary_parts(self) -> int:
        """Into how many equal parts the padded vocabulary can be cut."""
        return self.tp

    @property
    def words(self) -> str:
        return f"TP {self.tp} PP {self.pp} DP {self.dp}"

    @property
    def product(self) -> str:
        """What gives the number of ranks, in words."""
        return f"TP {self.tp} x PP {self.pp} x DP {self.dp}"

    def grid(self) -> np.ndarray:
        """Global ranks, shape (pp, dp, tp)."""
        ranks = np.arange(self.world_size)
        if self.order == PIPELINE_ORDER:
            return ranks.reshape(self.pp, self.dp, self.tp)
        return ranks.reshape(self.dp, self.pp, self.tp).transpose(1, 0, 2)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp) of a global rank."""
        tp = rank % self.tp
        if self.order == PIPELINE_ORDER:
            return rank // (self.tp * self.dp), rank // self.tp % self.dp, tp
        return rank // self.tp % self.pp, rank // (self.tp * self.pp), tp


@dataclass(frozen=True)
class Group:
    """One concrete group of ranks. `kind` is Megatron-Core's name of it, `edge` for two pipeline neighbours."""

    kind: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()


def groups(parallel: Parallel) -> Iterator[Group]:
    """Every group with more than one rank that carries training traffic: world, tp, dp, dp instances, pp, embd, edges.

    `dp` is Megatron's dp (with cp); with several optimizer instances also `intra_dp` (reduce-scatter inside) and
    `inter_dp` (all-reduce across). `mp` carries the gradient norm. `edge`: the ranks of two neighbouring stages that
    talk, in the forward direction; the wrap-around edge is there when stages are interleaved.
    """
    grid = parallel.grid()
    pp, dp, tp = grid.shape

    def group(kind: str, ranks: np.ndarray, stages: tuple[int, ...]) -> Iterator[Group]:
        if ranks.size > 1:
            yield Group(kind, tuple(int(r) for r in sorted(ranks.ravel())), stages)

    yield from group("world", grid, tuple(range(pp)))
    for s in range(pp):
        for d in range(dp):
            yield from group("tp", grid[s, d], (s,))
        for t in range(tp):
            yield from group("dp", grid[s, :, t], (s,))
            if parallel.optimizer_instances > 1:
                runs = grid[s, :, t].reshape(parallel.optimizer_instances, -1)
                for run in runs:
                    yield from group("intra_dp", run, (s,))
                for across in runs.T:
                    yield from group("inter_dp", across, (s,))
    for d in range(dp):
        if tp > 1:
            yield from group("mp", grid[:, d], tuple(range(pp)))
        for t in range(tp):
            yield from group("pp", grid[:, d, t], tuple(range(pp)))
            if pp > 1:
                yield from group("embd", grid[[0, pp - 1], d, t], (0, pp - 1))
    edges = [(s, s + 1) for s in range(pp - 1)]
    if parallel.virtual_stages > 1 and pp > 2:
        edges.append((pp - 1, 0))
    for a, b in edges:
        for d in range(dp):
            for t in range(tp):
                yield Group("edge", (int(grid[a, d, t]), int(grid[b, d, t])), (a, b))
