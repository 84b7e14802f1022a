"""Shapes of per-stage TP/DP layouts: the nodes and the TP of each stage, with the shortest estimated steps.

The longest time tau that any stage computes in a step (its micro-batches times its layers) decides how good a shape is.
For each limit on tau in a series, dynamic programming over a pool's nodes finds how many layers k stages on the pool
can compute within the limit. Each choice of stage counts per pool gets the least limit within which its stages compute
all layers. The time to fill and drain the pipeline adds to the step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, permutations, product
from math import factorial, inf

import numpy as np

from holmes_hpc.config.plan_options import RECOMPUTE
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.memory import max_layers
from holmes_hpc.planning.plan.transport import Transport, TransportRule
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.pool_costs import PoolCosts, latency_s, payload_gbps
from holmes_hpc.planning.search.problem import (
    AvailablePool,
    Problem,
    available_pools,
    is_allowed,
    micro_sizes,
    tp_sizes,
)
from holmes_hpc.planning.search.stage_lists import (
    Stage,
    Stages,
    StageTable,
    in_best_orders,
    lists_on,
    neighbours,
    other_pools,
    pools_of,
    stage_orders,
)

TAU_STEP, TAU_RANGE = 1.006, 1.8  # ratio of each limit on tau to the previous one, and of a choice's last to its first
MAX_TAU_RANGE = 8.0  # ratio of the last limit on tau to the first
MAX_CHOICES = 16  # choices of pools to search, besides all pools
MAX_STAGES = 12  # on one pool
MAX_COMBINATIONS = 8000  # of stage counts of all pools
EQUAL_TP_FIRST, EQUAL_TP_MARGIN = 12, 1.3  # shapes per TP to put first, up to this ratio to the best
MAX_SHAPES = 24  # shapes of one micro-batch size, recomputation and choice of TPs
MAX_LISTED = 3000  # if at most this many lists of stages exist (in every order), all are estimated
FORWARD = 1 / 3  # the share of the forward pass in a layer's seconds
NIC_WAIT = 1.3  # ratio of a busy NIC's time to that of its bytes, because it also waits for other nodes
TIE_BREAK = 1e-3  # the share of the shorter of compute and NIC time in an estimate: many shapes keep a NIC equally busy
MAX_RATIO, BISECTION_STEPS = 64, 10  # ratio of the longest estimate to the least tau; steps of the bisection

TpChoice = Mapping[int, tuple[int, ...]]  # pool -> the TPs that its stages may have


@dataclass(frozen=True)
class Shape:
    """The nodes and the TP of each stage. `stages`: (index of the pool, nodes, TP) of each stage, pool by pool.

    `estimate`: seconds of the step, good enough to rank shapes."""

    micro_size: int
    recompute: str
    stages: Stages
    estimate: float
    estimator: "_ShapeEstimator" = field(repr=False, compare=False)

    @property
    def passes(self) -> int:
        """The number of passes in a step."""
        return 2 * len(self.stages) * self.estimator.micro_batches

    @cached_property
    def neighbours(self) -> "list[Shape]":
        """Return the shapes with one change on a pool (see stage_lists), the shortest estimate first."""
        return self._with_stages(neighbours(self.stages, self.estimator.single_stages()))

    def on_other_pools(self) -> "list[Shape]":
        """Return the shapes on one pool fewer or one more, the shortest estimate first. Empty with `plan.nodes`."""
        if any(available.is_fixed for available in self.estimator.available):
            return []
        return self._with_stages(other_pools(self.stages, self.estimator.single_stages()))

    def _with_stages(self, lists: Iterable[Stages]) -> "list[Shape]":
        allowed = [stages for stages in dict.fromkeys(lists) if self.estimator.is_allowed(stages)]
        return sorted(self.estimator.shapes_of(allowed), key=lambda s: (s.estimate, s.stages))


def best_shapes(problem: Problem, max_s: float = inf, orders_pools: bool = False) -> list[Shape]:
    """Return the shapes whose estimated step takes at most `max_s` seconds: three groups, each with the shortest first.
    The first group has the best shape on each set of pools, because an estimate ignores much of what a set costs. The
    second has the best few with one TP for all stages (estimates of unequal TPs are too short), the third the rest.
    `orders_pools`: use :func:`in_best_orders`."""
    options, batch, shapes = problem.options, problem.batch, list[Shape]()
    available = available_pools(problem.site, options)
    modes = RECOMPUTE if options.recompute == "auto" else (options.recompute,)
    sizes = [m for m in micro_sizes(batch, options) if batch.global_size % m == 0]
    for micro_size, recompute in product(sizes, modes):
        shapes += _ShapeEstimator(problem, available, micro_size, recompute, max_s).shapes(orders_pools)
    shapes.sort(key=lambda s: (s.estimate, len(s.stages), s.stages))
    first = {pools_of(shape.stages): shape for shape in reversed(shapes)}
    equal_tp, counts = list[Shape](), Counter[int]()
    for shape in dict.fromkeys(shapes):
        tps = {tp for *_, tp in shape.stages}
        if len(tps) == 1 and shape.estimate < EQUAL_TP_MARGIN * shapes[0].estimate:
            counts.update(tps)
            equal_tp += [shape] if counts[tps.pop()] <= EQUAL_TP_FIRST else []
    return list(dict.fromkeys([*sorted(first.values(), key=lambda s: s.estimate), *equal_tp, *shapes]))


class _ShapeEstimator:
    """The shapes of one micro-batch size and recomputation, and their estimates."""

    def __init__(
        self, problem: Problem, available: list[AvailablePool], micro_size: int, recompute: str, max_s: float
    ) -> None:
        self.model, self.options, self.cost_model = problem.model, problem.options, problem.costs
        self.available, self.max_s = available, max_s
        self._transport_rule = TransportRule(problem.site, "holmes", frozenset(), one_node=False)
        self.batch, self.recompute = replace(problem.batch, micro_size=micro_size), recompute
        self.micro_batches = self.batch.micro_batches(1)
        self._transfers_s, self._edges = cache(self._transfer_s), cache(self._edge)
        self._max_layers = cache(self._max_layers_of)
        problem = problem._replace(options=replace(self.options, recompute=recompute))
        self.costs_by_tp = {
            tp: PoolCosts(problem, micro_size, tp, usable)
            for tp in tp_sizes(self.model, self.options, available)
            if (usable := [a for a in available if a.gpus_per_node % tp == 0]) and self.batch.sequence_length % tp == 0
        }

    def _stage(self, pool: int, tp: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the costs of a stage with TP `tp` on 1 to N nodes of a pool: (seconds of a step per layer, (N,);
        number of layers that fit in memory, (N,); seconds in which a layer computes one micro-batch)."""
        available, costs = self.available[pool], self.costs_by_tp[tp]
        index, replicas_per_node = costs.available.index(available), available.gpus_per_node // tp
        nodes = np.arange(1, available.nodes + 1)
        dp = nodes * replicas_per_node
        layer_s = costs.layer_s_list[index]

        def whole_tensor_s(sample_dp: int) -> list[float]:
            """Return the seconds to (reduce, gather) if a rank sent the whole tensor, not (n - 1) / n of it."""
            return [float(s[index]) / max(1, sample_dp - 1) * sample_dp for s in costs.sync_s(sample_dp)]

        reduce, gather = (
            np.where(nodes == 1, inside, between) * (dp - 1) / dp  # a single node uses NVLink
            for inside, between in zip(
                whole_tensor_s(replicas_per_node), whole_tensor_s(2 * replicas_per_node), strict=True
            )
        )
        exposed = np.maximum(0, reduce - (1 - FORWARD) * layer_s) + np.maximum(0, gather - FORWARD * layer_s)
        step_s = -(-self.micro_batches // dp) * layer_s + exposed
        fit = np.array([self._max_layers(pool, tp, int(d), 1) for d in dp])
        return np.where(dp <= self.micro_batches, step_s, np.inf), fit, layer_s  # a replica needs a micro-batch

    def _max_layers_of(self, pool: int, tp: int, dp: int, depth: int) -> float:
        """Return an upper bound of the layers that fit on a stage with `depth` passes in flight."""
        sequence_parallel = tp > 1 and self.options.sequence_parallel is not False
        shape = LayerShape(self.model, self.batch, tp, sequence_parallel, self.recompute)
        gpu, max_gib = self.available[pool].pool.gpu, self.options.max_memory_gib
        return float(max_layers(shape, self.cost_model, gpu, dp, np.array([depth]), max_gib)[0])

    @cached_property
    def _stage_costs(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, float]]:
        """{(pool, TP): result of :meth:`_stage`}, for each TP that divides the GPUs of the pool's nodes."""
        pairs = product(range(len(self.available)), self.costs_by_tp)
        return {(f, tp): self._stage(f, tp) for f, tp in pairs if self.available[f].gpus_per_node % tp == 0}

    @cached_property
    def _tables(self) -> dict[tuple[int, tuple[int, ...]], StageTable]:
        """{(pool, TPs): table}, for each single TP and for all TPs together."""
        tables, stages = {}, self._max_stages(min(2, len(self.available)))
        for f, available in enumerate(self.available):
            per_tp = {tp: costs for (g, tp), costs in self._stage_costs.items() if g == f}
            for tps in [(tp,) for tp in per_tp] + ([tuple(per_tp)] if len(per_tp) > 1 else []):
                costs = [per_tp[tp] for tp in tps]
                tables[f, tps] = StageTable(tps, costs, available, stages, self.stage_time_limits)
        return tables

    def _max_stages(self, pools: int) -> int:
        """Return the maximum number of stages on each pool of a choice of `pools` pools."""
        return min(MAX_STAGES, self.model.layers, int(MAX_COMBINATIONS ** (1 / pools)) - 1)

    @cached_property
    def _needed_layers(self) -> int:
        """The number of layers that all stages compute together. The output layer counts as layers of the same time."""
        return self.model.layers + int(min(c.head_s / min(c.layer_s_list) for c in self.costs_by_tp.values()))

    def _least_s(self, pools: Sequence[int]) -> float:
        """Return the seconds of a step in which all nodes of some pools compute, with layers divided perfectly."""
        layers_per_s, costs = 0.0, self.costs_by_tp.items()
        for a in (self.available[f] for f in pools):
            layer_s = {tp: c.layer_s_list[c.available.index(a)] for tp, c in costs if a in c.available}
            layers_per_s += max((a.nodes * a.gpus_per_node / tp / s for tp, s in layer_s.items()), default=0.0)
        return self._needed_layers * self.micro_batches / layers_per_s if layers_per_s else inf

    @cached_property
    def stage_time_limits(self) -> np.ndarray:
        """The series of limits on tau. The first is the least time on all pools."""
        least = self._least_s(range(len(self.available)))
        largest = min(MAX_TAU_RANGE, max(TAU_STEP, self.max_s / least))
        return np.asarray(least * TAU_STEP ** np.arange(1 + int(np.log(largest) / np.log(TAU_STEP))))

    def shapes(self, orders_pools: bool) -> list[Shape]:
        """Return all shapes if they are few, else the best for each choice of pools and TPs in several stage orders."""
        if not self.costs_by_tp:
            return []
        lists = self._all_lists()
        if lists is None:
            best = in_best_orders(self._best_lists(), self.estimates) if orders_pools else self._best_lists()
            lists = list(dict.fromkeys(order for stages in best for order in stage_orders(stages)))
        return self.shapes_of(lists)

    def shapes_of(self, lists: Sequence[Stages]) -> list[Shape]:
        """Return the shapes of those lists of stages that have an estimate."""
        pairs = zip(lists, self.estimates(lists), strict=True)
        return [Shape(self.batch.micro_size, self.recompute, s, seconds, self) for s, seconds in pairs if seconds < inf]

    def _pool_choices(self) -> list[tuple[int, ...]]:
        """Return the choices of pools to search: all, the most promising pools and fabrics, and pairs of either."""
        indices = tuple(range(len(self.available)))
        if any(a.is_fixed for a in self.available):
            return [indices]
        names = [a.pool.fabric_name for a in self.available]
        fabrics = [tuple(f for f in indices if names[f] == name) for name in dict.fromkeys(names)]
        parts = [
            choice for units in ([(f,) for f in indices], fabrics) for n in (1, 2) for choice in combinations(units, n)
        ]
        choices = {tuple(sorted(sum(choice, ()))) for choice in parts} - {indices}
        least_s = {pools: min(self._combinations(self._all_tps(pools))[2], default=inf) for pools in choices}
        promising = sorted((pools for pools in choices if least_s[pools] < self.max_s), key=lambda p: (least_s[p], p))
        return [indices, *promising[:MAX_CHOICES]]

    def _all_tps(self, pools: Sequence[int]) -> TpChoice:
        """Return the TPs that stages on each of these pools may have; empty if a pool has none."""
        sets = [[tps for g, tps in self._tables if g == f] for f in pools]
        return {f: max(tps, key=len) for f, tps in zip(pools, sets, strict=True)} if all(sets) else {}

    def _tp_choices(self, pools: tuple[int, ...]) -> list[TpChoice]:
        """Return the TPs to search for the stages on each pool: on up to two pools, all combinations; on more pools,
        each TP on all pools, and all TPs on all pools."""
        all_tps = self._all_tps(pools)
        if len(all_tps) <= 2:
            sets = ([tps for g, tps in self._tables if g == f] for f in all_tps)
            return [dict(zip(pools, choice, strict=True)) for choice in product(*sets)] if all_tps else []
        one_tp = ({f: (tp,) if (f, (tp,)) in self._tables else all_tps[f] for f in pools} for tp in self.costs_by_tp)
        return [*one_tp, all_tps]

    def _best_lists(self) -> Iterator[Sequence[Stage]]:
        """Yield the lists of stages with the shortest estimated steps, for each choice of pools and TPs."""
        for tp_choice in (tps for pools in self._pool_choices() for tps in self._tp_choices(pools)):
            counts, limits, seconds = self._combinations(tp_choice)
            for i in np.argsort(seconds, kind="stable")[:MAX_SHAPES].tolist():
                yield [
                    (f, *stage)
                    for (f, tps), count in zip(tp_choice.items(), counts[i].tolist(), strict=True)
                    for stage in self._tables[f, tps].stages(count, int(limits[i]))
                ]

    def _combinations(self, tp_choice: TpChoice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return n possible combinations: the number of stages on each of P pools, (n, P); the index of each
        combination's limit on tau, (n,); and the estimated seconds of its step, (n,)."""
        tables = [self._tables[f, tps] for f, tps in tp_choice.items()]
        first = int(np.searchsorted(self.stage_time_limits, self._least_s([*tp_choice]) * (1 - 1e-9)))
        window = slice(first, first + 1 + int(np.log(TAU_RANGE) / np.log(TAU_STEP)))
        if not tables or first == len(self.stage_time_limits):
            return np.zeros((0, 0), int), np.zeros(0, int), np.zeros(0)
        most = 1 + self._max_stages(len(tables))
        counts = np.array(list(product(*(range(min(most, len(t.reach))) for t in tables))))  # stages of each pool
        stages = counts.sum(axis=1)
        is_valid = is_allowed(self.options, self.model.layers, stages, (counts > 0).sum(axis=1))
        is_valid &= ((counts > 0) | ~np.array([t.available.is_fixed for t in tables])).all(axis=1)
        counts, stages = counts[is_valid], stages[is_valid]
        layers = sum((t.reach[counts[:, i], window] for i, t in enumerate(tables)), np.zeros(()))  # (n, limits)
        is_enough = layers >= self._needed_layers
        is_possible = is_enough.any(axis=1)
        counts, stages = counts[is_possible], stages[is_possible]
        limits = first + np.argmax(is_enough[is_possible], axis=1)  # the first limit with enough layers
        reach = np.stack([t.reach[counts[:, i], limits] for i, t in enumerate(tables)], axis=1)
        shares = reach / reach.sum(axis=1, keepdims=True)
        latency = shares @ np.array([t.layer_s for t in tables]) * self.model.layers  # of one micro-batch
        transfer = np.zeros(len(counts))  # lower bound, with a pool's stages as wide as possible
        for i, f in enumerate(tp_choice if len(tables) > 1 else ()):
            least = min(self._transfers_s(f, g, 1) for g in tp_choice if g != f)
            has_edge = (counts[:, i] > 0) & (counts[:, i] < stages)
            transfer = np.maximum(transfer, np.where(has_edge, least * counts[:, i] / tables[i].available.nodes, 0.0))
        seconds = np.maximum(self.stage_time_limits[limits], transfer) + latency * (1 - 1 / stages)
        return counts, limits, seconds

    def _all_lists(self) -> list[Stages] | None:
        """Return every possible list of stages, in every order; None if there are more than MAX_LISTED."""
        count, per_pool = factorial(len(self.available)), list[list[Stages]]()
        for f, available in enumerate(self.available):
            tps = sum(available.gpus_per_node % tp == 0 for tp in self.costs_by_tp)
            count *= tps * (tps + 1) ** (available.nodes - 1) if available.is_fixed else (tps + 1) ** available.nodes
            if count > MAX_LISTED:
                return None
            per_pool.append(lists_on(f, available, [tp for g, tp in self._stage_costs if g == f]))
        lists = list[Stages]()
        for order in permutations(range(len(self.available))):
            lists += [sum(parts, ()) for parts in product(*(per_pool[f] for f in order))]
        return [stages for stages in dict.fromkeys(lists) if self.is_allowed(stages)]

    def single_stages(self) -> list[Stage]:
        """Return the stages that hold all nodes of a pool."""
        return [(f, self.available[f].nodes, tp) for f, tp in self._stage_costs]

    def is_allowed(self, stages: Stages) -> bool:
        """Return whether the options allow these stages."""
        return bool(is_allowed(self.options, self.model.layers, len(stages), len(pools_of(stages))))

    def estimates(self, lists: Sequence[Stages]) -> list[float]:
        """Return the estimated seconds of a step for each list of stages; infinite if the layers do not fit, or if they
        exceed `max_s`. An estimate is the least step time in which each stage can compute its layers between the
        arrival of its first micro-batch and the time at which its last gradients must leave, or the time of all
        transfers of one node if that is longer. A stage with more replicas than a stage above it waits for them all."""
        seconds = dict.fromkeys(lists, inf)
        costs = ((stages, self._costs(stages)) for stages in seconds)
        for _, same_length in grouped((len(stages), (stages, *c)) for stages, c in costs if c is not None):
            stages, per_stage, nic_s = zip(*same_length, strict=True)
            seconds |= zip(stages, self._step_s(np.array(per_stage).T, np.array(nic_s)).tolist(), strict=True)
        return [seconds[stages] for stages in lists]

    def _costs(self, stages: Stages) -> tuple[list[tuple[float, ...]], float] | None:
        """Return (for each stage: seconds of a layer for one micro-batch and for all, layers that fit, DP, seconds in
        which a micro-batch arrives, seconds of the output layer; seconds in which the busiest node sends all).
        Return None if a replica would have no micro-batch."""
        m, costs, transfer, busiest_s = self.micro_batches, list[tuple[float, ...]](), 0.0, 0.0
        dps = tuple(nodes * (self.available[f].gpus_per_node // tp) for f, nodes, tp in stages)
        if max(dps) > m:
            return None
        edge: tuple[Transport | None, float] = None, 0.0  # the one above: (transport, seconds of a node's NIC)
        for s, ((f, nodes, tp), dp, depth) in enumerate(zip(stages, dps, least_in_flight(dps), strict=True)):
            step_s, _, layer_s = self._stage_costs[f, tp]
            fit = self._max_layers(f, tp, dp, min(depth, -(-m // dp)))
            if s:
                f_above, nodes_above, tp_above = stages[s - 1]
                transport, wait_s = self._edges(f_above, f)
                both = min(nodes_above, nodes)
                sent_s = max(self._transfers_s(f_above, f, both), self._transfers_s(f, f_above, both))
                above, own = self.available[f_above].gpus_per_node, self.available[f].gpus_per_node
                transfer = sent_s * (above / tp_above + own / tp) / m + 2 * wait_s
                down_s = sent_s / nodes_above + wait_s * m / dps[s - 1]
                busiest_s = max(busiest_s, edge[1] + down_s if edge[0] == transport else down_s, edge[1])
                edge = transport, sent_s / nodes + wait_s * m / dp
            head = self.costs_by_tp[tp].head_s * -(-m // dp) if s == len(stages) - 1 else 0.0
            costs.append((layer_s, step_s[nodes - 1], fit, dp, transfer, head))
        return costs, max(busiest_s, edge[1])

    def _step_s(self, costs: np.ndarray, busiest_nic: np.ndarray) -> np.ndarray:
        """Return the estimates of n lists of S stages, (n,). The arguments hold :meth:`_costs`, (6, S, n) and (n,)."""
        m, layers = self.micro_batches, self.model.layers

        def assign(limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Return (layers assigned within `limit` seconds, seconds until a micro-batch reaches the last stage)."""
            count, elapsed, wave_s = np.zeros((3, len(limit)))
            wave = is_possible = np.ones(len(limit))
            # `wave`: replicas of the slowest stage above; it needs `wave_s` for one micro-batch on each
            for layer_s, step_s, fit, dp, transfer, head in costs.swapaxes(0, 1):
                arrival = elapsed = elapsed + transfer
                left_s = limit - elapsed - head
                compute_s = np.minimum(
                    left_s - (m - 1) % dp // wave * wave_s,  # the last replica with the larger share
                    (left_s - (dp - 1) // wave * wave_s) * -(-m // dp) / (m // dp),  # the last replica
                )
                assigned = np.minimum(fit, compute_s / step_s + 1e-9) // 1
                is_possible = is_possible * (assigned >= 1)
                stage_s = assigned * layer_s
                count, elapsed = count + assigned, elapsed + stage_s
                is_slower = stage_s * FORWARD * wave >= wave_s * dp
                wave, wave_s = np.where(is_slower, (dp, stage_s * FORWARD), (wave, wave_s))
            return count * is_possible, arrival

        least_s = self.stage_time_limits[0]
        low, high = np.full((len(busiest_nic), 2), (least_s / 2, min(least_s * MAX_RATIO, self.max_s))).T
        is_possible = assign(high)[0] >= layers
        for _ in range(BISECTION_STEPS):
            middle = np.sqrt(low * high)
            low, high = np.where(assign(middle)[0] >= layers, (low, middle), (middle, high))
        nic = np.maximum(NIC_WAIT * busiest_nic, busiest_nic + assign(high)[1])
        seconds = np.maximum(high, nic) + TIE_BREAK * np.minimum(high, nic)
        return np.where(is_possible, seconds, inf)

    def _edge(self, source: int, target: int) -> tuple[Transport, float]:
        """Return (the transport between two pools, the seconds until data arrives)."""
        pools, rule = [self.available[f].pool for f in (source, target)], self._transport_rule
        return rule.of({p.name for p in pools}, one_node=False), latency_s(rule, self.cost_model, *pools)

    def _transfer_s(self, source: int, target: int, nodes: int) -> float:
        """Return the seconds in which one node of pool `source` would send all activations of a step to pool `target`.
        `nodes`: number of nodes of the sending stage, which all send at the same time."""
        sender, receiver = self.available[source].pool, self.available[target].pool
        rule, connections = self._transport_rule, self.options.edge_connections
        gbps = payload_gbps(rule, self.cost_model, sender, receiver, nodes, connections)
        element_bytes = self.cost_model.weight_bytes(sender.gpu)
        return self.batch.tokens * self.model.hidden * element_bytes * 8e-9 / gbps
