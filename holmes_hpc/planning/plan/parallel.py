"""The parallel layout of a plan: TP and DP of every stage, their ranks, and the process groups.

A uniform layout has the same TP and DP in every stage. It is a grid of ranks (pp, dp, tp), and its groups are slices,
as in Megatron-Core. With per-stage TP/DP, routes assign each micro-batch to one replica of every stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import Annotated, Any

import numpy as np

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import Case, PlanError
from holmes_hpc.planning.plan.rows import Rows, exchanged_rows
from holmes_hpc.schema import Checked, check, key

# Megatron-Core's names: the first name varies fastest.
PIPELINE_ORDER = "tp-cp-ep-dp-pp"  # a stage is one block of ranks: a fabric can hold whole stages
HIERARCHICAL_ORDER = "tp-cp-ep-pp-dp"  # a pipeline is one block of ranks: data parallelism crosses fabrics
ORDERS = (PIPELINE_ORDER, HIERARCHICAL_ORDER)


@dataclass(frozen=True)
class StageParallel:
    """One stage: `dp` replicas of `tp` x `cp` ranks each.
    `weights`: the relative number of micro-batches of each replica (empty: all the same). `cp`: ranks that share each
    sequence, if stages differ in it. Otherwise it is 1, and such replicas count separately (:attr:`Parallel.cp`)."""

    tp: Annotated[int, key("tensor parallel in the stage", ge=1)]
    dp: Annotated[int, key("replicas of the stage", ge=1)]
    weights: Annotated[tuple[float, ...], key("micro-batches of each replica, in proportion", gt=0)] = ()
    cp: Annotated[int, key("context parallel in the stage", ge=1)] = 1

    def __post_init__(self) -> None:
        check(self, "stages", PlanError)
        if len(set(self.weights)) == 1:
            object.__setattr__(self, "weights", ())
        if self.weights and len(self.weights) != self.dp:
            message = f"{len(self.weights)} weights for DP {self.dp}"
            raise PlanError(message, where="routing", hint="give one weight per replica of the stage")

    def sizes(self) -> str:
        """Return TP, CP if above 1, and DP as text."""
        return f"TP {self.tp} x " + f"CP {self.cp} x " * (self.cp > 1) + f"DP {self.dp}"

    @property
    def ranks(self) -> int:
        return self.tp * self.copies

    @property
    def copies(self) -> int:
        """The number of ranks with the same parameters."""
        return self.dp * self.cp


stage_parallel = lru_cache(maxsize=1024)(StageParallel)  # a search asks for the same values again and again


@dataclass(frozen=True)
class Parallel(Checked, where="parallel", error=PlanError):
    """TP and DP of every stage, and the order of the ranks. `virtual_stages`: model chunks of one pipeline rank (1: not
    interleaved). `optimizer_instances`: the number of equal blocks of ranks in a data-parallel group. Gradients are
    reduce-scattered inside a block and all-reduced across blocks (Megatron-Core's num_distributed_optimizer_instances).
    `sequence_parallel` applies to stages with TP above 1. `cp`: number of consecutive replicas of a stage that share
    each sequence; what users set as DP excludes CP (:attr:`replicas`). `ep` x `etp`: number of consecutive ranks of a
    stage that together hold all experts; each expert is on `etp` ranks. _UNIFORM_ONLY: fields for uniform layouts."""

    stages: tuple[StageParallel, ...]
    cp: Annotated[int, key("context parallel", ge=1)] = 1
    order: str = PIPELINE_ORDER
    virtual_stages: Annotated[int, key("model chunks of a pipeline rank", ge=1)] = 1
    optimizer_instances: Annotated[int, key("blocks of ranks of a data-parallel group", ge=1)] = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    ep: Annotated[int, key("expert parallel", ge=1)] = 1
    cp_comm: Annotated[str, key("how ranks that share a sequence exchange it", one_of=("ring", "a2a"))] = "ring"
    ep_comm: Annotated[str, key("how EP's ranks exchange tokens", one_of=("alltoall", "allgather"))] = "alltoall"
    etp: Annotated[int, key("expert tensor parallel", ge=1)] = 1

    @classmethod
    def uniform(cls, tp: int = 1, pp: int = 1, dp: int = 1, **settings: Any) -> Parallel:
        """Return the layout in which all `pp` stages have the same `tp` and `dp`."""
        return cls((stage_parallel(tp, dp),) * pp, **settings)

    def _mistakes(self) -> Iterator[Case]:
        yield not self.stages, "no stages", "give at least one stage"
        instances, dp, ranks = self.optimizer_instances, self.stages[0].dp, self.stages[0].ranks
        problem, hint = f"CP {self.cp} does not divide {dp} replicas", "use a multiple of CP"
        yield dp % self.cp, problem, hint, "parallel.cp"
        problem, hint = f"unknown rank order {self.order!r}", f"use one of {', '.join(ORDERS)}"
        yield self.order not in ORDERS, problem, hint, "parallel.order"
        problem = f"stages of TP {', '.join(map(str, self.tps))} without sequence_parallel"
        hint = "set it: stages of different TP exchange parts of the sequence"
        yield len(self.tps) > 1 and not self.sequence_parallel, problem, hint
        problem, hint = f"every stage has CP {self.stages[0].cp}", "set parallel.cp in place of the stages' cp"
        yield self.is_even and self.stages[0].cp > 1, problem, hint, "stages"
        for name, default in _UNIFORM_ONLY.items() if not self.is_uniform else ():
            problem = f"{name} is {getattr(self, name)} with per-stage TP/DP"
            hint = f"use {default}, or the same TP and DP in every stage"
            is_unsupported = getattr(self, name) != default and not (name == "order" and self.is_even)
            yield is_unsupported, problem, hint, f"parallel.{name}"
        problem = f"dp={dp} cannot be cut into {instances} equal optimizer instances"
        yield dp % instances, problem, "choose a divisor of dp"
        problem = f"{self.expert_sizes} does not divide the {ranks} ranks of a stage"
        yield ranks % self.expert_ranks, problem, "choose a divisor of TP x DP", "parallel.ep"
        problem = "expert tensor parallelism needs all-gathered tokens"
        yield self.etp > 1 and self.ep_comm != "allgather", problem, "set ep_comm: allgather", "parallel.etp"
        problem = "optimizer instances need the distributed optimizer"
        yield instances > 1 and not self.distributed_optimizer, problem, "set distributed_optimizer"
        hint = "use pp above 1 or virtual_stages=1"
        yield self.virtual_stages > 1 and self.pp == 1, "virtual stages need a pipeline", hint
        is_useless = self.sequence_parallel and self.tps == (1,)
        yield is_useless, "sequence parallel needs tp above 1", "unset sequence_parallel"

    @cached_property
    def is_uniform(self) -> bool:
        """True if all stages have the same TP and DP, and all replicas the same share of a step."""
        first = self.stages[0]
        return not first.weights and all(stage is first or stage == first for stage in self.stages)

    @cached_property
    def is_even(self) -> bool:
        """True if all stages have the same TP, DP and weights, so that a pipeline has one replica of each stage."""
        return all(stage == self.stages[0] for stage in self.stages)

    @property
    def is_hierarchical(self) -> bool:
        """True if a pipeline is one block of ranks, so that data parallelism crosses fabrics."""
        return self.order == HIERARCHICAL_ORDER

    def is_grid(self, micro_batches: int) -> bool:
        """Return whether all replicas compute equally many of `micro_batches`, so that each rank has one pipeline."""
        return self.is_uniform and micro_batches % self.stages[0].dp == 0

    @property
    def tp(self) -> int:
        """The TP of every stage. Raise PlanError if stages differ."""
        return self._any_stage().tp

    @property
    def dp(self) -> int:
        """The DP of every stage. Raise PlanError if stages differ."""
        return self._any_stage().dp

    def _any_stage(self) -> StageParallel:
        if not self.is_even:
            problem = "the plan has per-stage TP/DP, but only uniform layouts are supported here"
            raise PlanError(problem, where="plan", hint="use a plan with the same tp and dp in every stage")
        return self.stages[0]

    @property
    def replicas(self) -> int:
        """The number of replicas of every stage that compute different sequences: DP divided by CP."""
        return self.dp // self.cp

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that together hold all experts of a layer."""
        return self.ep * self.etp

    @property
    def expert_sizes(self) -> str:
        """EP, and ETP above 1, as text."""
        return f"EP {self.ep}" + f" x ETP {self.etp}" * (self.etp > 1)

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def world_size(self) -> int:
        return self._first_ranks[-1]

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [0, *accumulate(stage.ranks for stage in self.stages)]

    def tp_of(self, stage: int) -> int:
        return self.stages[stage].tp

    def cp_of(self, stage: int) -> int:
        return self.cp * self.stages[stage].cp

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """The distinct TP sizes of the stages, ascending."""
        return tuple(sorted({stage.tp for stage in self.stages}))

    @property
    def vocabulary_parts(self) -> int:
        """The number of equal parts into which the padded vocabulary is divisible."""
        return math.lcm(*self.tps)

    @property
    def can_overlap(self) -> bool:
        """True if gradient and parameter collectives can overlap with compute. In a pipeline, replicas must take turns:
        with weights, one that finishes early could wait in a collective for others that wait for its transfers."""
        return self.pp == 1 or not any(stage.weights for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for checkpoints: the sizes of a uniform layout, otherwise the sizes of each stage."""
        if not self.is_uniform:
            stages = [{k: v for k, v in asdict(stage).items() if (k, v) != ("cp", 1)} for stage in self.stages]
            order = {"order": self.order} if self.order != PIPELINE_ORDER else {}
            return {"stages": stages, "sequence_parallel": self.sequence_parallel, **order}
        return {"tp": self.tp, "pp": self.pp, "dp": self.replicas} | self.settings()

    def settings(self) -> dict[str, Any]:
        """Return the fields other than `stages`, without those at their defaults that older versions lack."""
        return {k: v for k, v in asdict(self).items() if k != "stages" and v != _NEWER.get(k)}

    def __str__(self) -> str:
        if self.is_even:
            shares = ", shares of a step by speed" if self.stages[0].weights else ""
            chunks = f" x {self.virtual_stages} virtual" if self.virtual_stages > 1 else ""
            rest = "".join(f", {k.upper()} {n}" for k in ("cp", "ep", "etp") if (n := getattr(self, k)) > 1)
            rest += ", all-to-all attention" if self.cp_comm == "a2a" else ""
            rest += ", all-gathered tokens" if self.ep_comm == "allgather" else ""
            return f"TP {self.tp}, PP {self.pp}{chunks}, DP {self.replicas}{rest}{shares}"
        return f"PP {self.pp} of " + " + ".join(stage.sizes() for stage in self.stages)

    def grid(self) -> list[np.ndarray]:
        """Return the global ranks of each stage, shape (dp, tp), or (dp, cp x tp) if stages differ in CP."""
        if self.is_hierarchical:
            ranks = np.arange(self.world_size).reshape(self.dp, self.pp, self.tp)
            return [ranks[:, stage] for stage in range(self.pp)]
        return [
            np.arange(first, end).reshape(stage.dp, -1)
            for stage, (first, end) in zip(self.stages, pairwise(self._first_ranks), strict=True)
        ]

    @property
    def stage_ranks(self) -> list[list[int]]:
        """The global ranks of every stage."""
        return [ranks.ravel().tolist() for ranks in self.grid()]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (stage, replica, TP rank) of a rank; if stages differ in CP, (…, CP rank x TP + TP rank)."""
        if self.is_hierarchical:
            return rank // self.tp % self.pp, rank // (self.tp * self.pp), rank % self.tp
        stage = next(s for s, end in enumerate(self._first_ranks[1:]) if rank < end)
        sizes = self.stages[stage]
        return stage, *divmod(rank - self._first_ranks[stage], sizes.tp * sizes.cp)

    def exchanged_rows(self, upper: int, lower: int, length: int = 0) -> dict[tuple[int, int], Rows]:
        """Return the rows that two stages exchange, for each pair of parts of a sequence: of a replica's row in
        :meth:`grid`. `length`: tokens of a sequence; 0: some length that all sizes divide."""
        sizes = (self.tp_of(upper), self.stages[upper].cp), (self.tp_of(lower), self.stages[lower].cp)
        return exchanged_rows(*sizes, self.sequence_parallel, length or 2 * math.prod((*sizes[0], *sizes[1])))

    def routes(self, micro_batches: int) -> tuple[tuple[int, ...], ...]:
        """Return, per stage, the replica of each micro-batch of a step. Raise PlanError if a replica gets none."""
        return tuple(_route(stage, s, micro_batches) for s, stage in enumerate(self.stages))

    def pipeline_shares(self, ranks: Sequence[int], micro_batches: int) -> list[list[int]]:
        """Return, for each component, the micro-batches of each pipeline through it. `ranks`: the components' ranks."""
        counts = [count for _, count in sorted(Counter(self.routes(micro_batches)[0]).items())]
        if not self.is_hierarchical:
            return [counts for _ in ranks]
        pipelines = iter(counts)
        return [list(islice(pipelines, n // (self.tp * self.pp))) for n in ranks]


# Fields that older versions lack, and their defaults.
_NEWER = {"ep": 1, "cp_comm": "ring", "ep_comm": "alltoall", "etp": 1}
_UNIFORM_ONLY: dict[str, Any] = {name: 1 for name in ("virtual_stages", "optimizer_instances", "ep", "etp", "cp")}
_UNIFORM_ONLY |= {"order": PIPELINE_ORDER, "distributed_optimizer": True, "cp_comm": "ring"}


@lru_cache(maxsize=256)
def _route(parallel: StageParallel, stage: int, micro_batches: int) -> tuple[int, ...]:
    """Return the replica of each micro-batch. With weights, the last replica ends as early as possible. Micro-batches
    are in the order in which they would start without pauses. Therefore each replica computes one of the first
    micro-batches, and all replicas of a stage gather parameters together in their first passes."""
    problem = f"stage {stage} has {parallel.dp} replicas for {micro_batches} micro-batches a step"
    hint = "use fewer replicas, or a larger batch"
    PlanError.refuse("routing", (parallel.dp > micro_batches, problem, hint))
    if not parallel.weights:
        return tuple(k % parallel.dp for k in range(micro_batches))
    counts = [0] * parallel.dp
    for _ in range(micro_batches):
        counts[min(range(parallel.dp), key=lambda r: ((counts[r] + 1) / parallel.weights[r], r))] += 1
    problem = f"stage {stage}: replica {counts.index(min(counts))} gets none of {micro_batches} micro-batches"
    PlanError.refuse("routing", (0 in counts, problem, "raise the replica's weight, or remove the replica"))
    starts = sorted((n / parallel.weights[r], r) for r, count in enumerate(counts) for n in range(count))
    return tuple(r for _, r in starts)


@dataclass(frozen=True)
class Group:
    """One concrete group of ranks. `kind`: Megatron-Core's name, or `edge` for two pipeline neighbours."""

    kind: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()


def groups(parallel: Parallel, micro_batches: int, tied: bool, has_experts: bool = False) -> Iterator[Group]:
    """Yield every group of more than one rank that carries training traffic. `micro_batches`: number in the whole step.

    The order is: `world`, the groups inside each stage, the groups across stages, the edges. Inside a stage: `tp`, `cp`
    (exchanges keys and values), and `dp` (Megatron's dp with cp). Several optimizer instances add `intra_dp`
    (reduce-scatter inside an instance) and `inter_dp` (all-reduce across instances). With experts, `ep` exchanges
    tokens, and `expt_dp` reduces the experts' gradients. Across the stages of a grid, `mp` reduces the gradient norm,
    `pp` is a pipeline, `embd` is its first and last rank, and `tp_ep_pp` reduces the norm of the experts' gradients. In
    other layouts, `world` reduces the norm, and `embd` is all ranks of the first and last stage, if the embedding is
    `tied`. An `edge` is two ranks that exchange, first the sender of activations; interleaving adds another one."""
    grid, pp = parallel.grid(), parallel.pp
    is_grid = parallel.is_grid(micro_batches)
    yield from _groups("world", np.arange(parallel.world_size)[None], range(pp))
    for s, ranks in enumerate(grid):
        rows, cp = ranks.reshape(-1, parallel.tp_of(s)), parallel.cp_of(s)
        yield from _groups("tp", rows, [s])
        yield from _groups("cp", rows.reshape(-1, cp, rows.shape[1]).swapaxes(1, 2).reshape(-1, cp), [s])
        for column in rows.T:
            yield from _groups("dp", column[None], [s])
            if parallel.optimizer_instances > 1:
                blocks = column.reshape(parallel.optimizer_instances, -1)
                yield from _groups("intra_dp", blocks, [s])
                yield from _groups("inter_dp", blocks.T, [s])
        if has_experts:
            blocks = ranks.reshape(-1, parallel.expert_ranks)
            yield from _groups("ep", blocks, [s])
            yield from _groups("expt_dp", blocks.T, [s])
    if is_grid:
        yield from _pipeline_groups(np.stack(grid))
        if has_experts and parallel.expert_ranks > 1 and pp > 1:
            across_stages = np.stack(grid).reshape(pp, -1, parallel.expert_ranks).swapaxes(0, 1)
            yield from _groups("tp_ep_pp", across_stages, range(pp))
    elif tied and pp > 1:
        yield from _groups("embd", np.concatenate([grid[0].ravel(), grid[-1].ravel()])[None], [0, pp - 1])
    edges = [(s, s + 1) for s in range(pp - 1)]
    if parallel.virtual_stages > 1 and pp > 2:
        edges.append((pp - 1, 0))
    routes = parallel.routes(parallel.dp if is_grid else micro_batches)
    for s, t in edges:
        for a, b in sorted(set(zip(routes[s], routes[t], strict=True))):
            for i, j in parallel.exchanged_rows(s, t):
                yield Group("edge", (int(grid[s][a, i]), int(grid[t][b, j])), (s, t))


def _groups(kind: str, rows: np.ndarray, stages: Iterable[int]) -> Iterator[Group]:
    """Yield a group for each of `rows` that has more than one rank."""
    for ranks in rows:
        if ranks.size > 1:
            yield Group(kind, tuple(sorted(ranks.ravel().tolist())), tuple(stages))


def _pipeline_groups(grid: np.ndarray) -> Iterator[Group]:
    """Yield the groups that cross the stages of a grid of ranks, (pp, dp, tp)."""
    pp, dp, tp = grid.shape
    for d in range(dp):
        if tp > 1:
            yield from _groups("mp", grid[None, :, d], range(pp))
        for t in range(tp):
            yield from _groups("pp", grid[None, :, d, t], range(pp))
            if pp > 1:
                yield from _groups("embd", grid[None, [0, pp - 1], d, t], [0, pp - 1])


def abbreviated(values: Iterable[object], separator: str = ", ") -> str:
    """Return a list of ranks or layers as short text: the first three and the last if there are more than eight."""
    texts = [str(value) for value in values]
    return separator.join(texts if len(texts) <= 8 else [*texts[:3], "…", texts[-1]])


def indivisible_sizes(model: ModelSpec, tp: int) -> list[Case]:
    """Return an error case for each size of the model's layers that `tp` does not divide."""
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.tp_ffn}
    sizes |= {"ffn (dense)": model.ffn} if model.experts.first_dense else {}
    return [
        (True, f"{size} {name} cannot be divided by TP {tp}", f"use a TP that divides {size}", f"model {model.name}")
        for name, size in sizes.items()
        if size % tp
    ]


def tp_across_nodes(tp: int, ranks: int, where: str) -> Case:
    """Return the error case that TP groups of `tp` ranks do not fill a node with `ranks` ranks."""
    message = f"TP {tp} does not divide {ranks} GPUs per node"
    return ranks % tp, message, "keep tensor parallelism inside a node", where
