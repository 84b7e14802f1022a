"""Costs per pool at one micro-batch size and TP: seconds of a layer, link rates, latencies, memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from holmes_hpc.config.model import Batch
from holmes_hpc.fabric.site import Pool
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.layout import window_rate
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.plan.transport import LOCAL, TCP, TransportRule
from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.search.estimate import Estimate
from holmes_hpc.planning.search.placement import Block, Placement, shortest_order
from holmes_hpc.planning.search.problem import AvailablePool, Problem

T = TypeVar("T")
MAX_CHUNKS = 8


def payload_gbps(
    rule: TransportRule, costs: Costs, sender: Pool, receiver: Pool, nodes: float, connections: int
) -> float:
    """Return the payload rate in Gbit/s from a node of `sender` to one of `receiver`, over the best transport between
    the two. `nodes`: the nodes of `sender` that send at the same time, by so many TCP `connections` per GPU."""
    transport = rule.of({sender.name, receiver.name}, one_node=False)
    gbps = rule.site.rate_gbps(transport.kind, sender, receiver, nodes) * costs.link(transport, sender).efficiency
    delay_s = rule.site.delay_s(transport.kind, sender, receiver)
    return min(gbps, window_rate(sender.gpus_per_node, delay_s, costs) * connections * 8e-9)


def latency_s(rule: TransportRule, costs: Costs, sender: Pool, receiver: Pool) -> float:
    """Return the seconds until data of `sender` arrives at `receiver`, over the best transport between the two."""
    transport = rule.of({sender.name, receiver.name}, one_node=False)
    return costs.link(transport, sender).latency_s + rule.site.delay_s(transport.kind, sender, receiver)


class PoolCosts:
    """Costs at one micro-batch size and TP. Arrays have one entry per pool `f` of `available`, (P,).

    `layer_s`: forward and backward seconds of a layer for one micro-batch. `micro_batches`: micro-batches of a step on
    all data-parallel ranks together. `layer_size`: parameters of a layer on a rank. `layer_bytes`: bytes of their
    weights and gradients. `taus`: all times that a whole number of layers takes on some pool, (T,). `layers_in_tau`:
    the layers that a stage can compute in each of these times, (T, P).
    """

    def __init__(self, problem: Problem, micro_size: int, tp: int, available: list[AvailablePool]) -> None:
        model, batch, site, options, costs = problem
        self.model, self.batch, self.options, self.cost_model = model, batch, options, costs
        self.micro_size, self.tp, self.available = micro_size, tp, available
        micro_batch = Batch(batch.global_size, micro_size, batch.sequence_length)
        sequence_parallel = tp > 1 and options.sequence_parallel is not False
        recompute = "none" if options.recompute == "auto" else options.recompute
        gpus = [a.pool.gpu for a in available]
        # For lower bounds, a rank has as few experts as possible, and each gets as many tokens.
        ep = options.ep or max(1, model.experts.count)
        fixed = sequence_parallel, recompute, ep, options.etp or 1
        self.layer_s = np.array([sum(costs.layer_s(model, micro_batch, tp, a.pool, *fixed)) for a in available])
        self.layer_s_list = [float(s) for s in self.layer_s]  # faster than the array for single numbers
        self.head_s = min(sum(costs.part_s("head", model, micro_batch, tp, a.pool)) for a in available)
        rule = TransportRule(site, "holmes", frozenset(), one_node=False)
        pools = [(a.pool, rule.of({a.pool.name}, one_node=False)) for a in available]
        self.inside_gbps = {  # inside a fabric, by collective ("": stage transfers)
            collective: np.array(
                [site.rate_gbps(t.kind, pool) * costs.link(t, pool, collective).efficiency for pool, t in pools]
            )
            for collective in ("", "reduce_scatter", "all_gather")
        }
        self.latency_s = np.array([costs.link(t, pool).latency_s for pool, t in pools])
        self.site, self._transport_rule = site, rule
        self.ethernet_gbps = np.array(
            [site.rate_gbps("tcp", a.pool) * costs.link(TCP, a.pool).efficiency for a in available]
        )
        self.between_latency_s = np.array(
            [[latency_s(rule, costs, a.pool, b.pool) for b in available] for a in available]
        )
        self.micro_batches = batch.global_size // micro_size
        self.layers = model.layers - model.experts.first_dense  # for lower bounds, first dense layers cost nothing
        self.gpus_per_node = np.array([a.gpus_per_node for a in available])
        self.ranks = np.array([a.nodes * a.gpus_per_node for a in available])
        self.is_fixed = any(a.is_fixed for a in available)
        weight_bytes = np.array([costs.weight_bytes(gpu) for gpu in gpus])
        etp = options.etp or (int(self.ranks.max()) if options.ep_comm == "allgather" else 1)
        self.layer_size = layer_parameters(model, tp, ep * etp)
        self.layer_bytes = self.layer_size * (weight_bytes + costs.gradient_size)
        self.capacity_bytes = np.array([capacity(gpu, options.max_memory_gib) for gpu in gpus])
        self.taus = np.unique(np.concatenate([s * np.arange(1, model.layers + 1) for s in self.layer_s]))
        self.layers_in_tau = np.floor(self.taus[:, None] / self.layer_s + 1e-9).astype(int)
        counts = range(1, 1 + (1 if options.strategy == "one-fabric" else len(available)))
        self.pool_choices = [
            (choice, frozenset(available[f].pool.name for f in choice))
            for count in counts
            for choice in combinations(range(len(available)), count)
        ]  # (indices, names) of each choice
        self.node_stride = int(self.gpus_per_node.max()) // tp + 1  # TP blocks this far apart share no node
        self._layers_per_s = [float(ranks) / s for ranks, s in zip(self.ranks, self.layer_s_list, strict=True)]
        self._memo = Memo()

    def between_gbps(self, ranks: int) -> np.ndarray:
        """Return the payload rate in Gbit/s from a node of each pool to a node of each other pool, (P, P).
        `ranks`: the number of ranks whose nodes send at the same time."""
        if not any(link.total_gbps for link in self.site.links):
            ranks = 1  # no link limits the total rate, so compute the rates only once
        return self.cached(self._between_gbps, ranks)

    def _between_gbps(self, ranks: int) -> np.ndarray:
        rule, costs, connections = self._transport_rule, self.cost_model, self.options.edge_connections
        senders = [(a.pool, max(1, ranks / a.gpus_per_node)) for a in self.available]
        return np.array([[payload_gbps(rule, costs, a, b, n, connections) for b, _ in senders] for a, n in senders])

    def order_pools(self, pools: list[int], edge_s: np.ndarray, is_ring: bool = False) -> list[int]:
        """Return the pools, in :func:`shortest_order` if the site defines links and the user does not fix the order."""
        is_fixed = not self.site.links or self.options.pool_order is not None
        return pools if is_fixed else shortest_order(edge_s, pools, is_ring)

    def placement(
        self,
        strategy: str,
        dp: int,
        ranks_and_stages: Mapping[int, tuple[int, int]],
        estimate: Estimate,
        instances: int = 1,
    ) -> Placement:
        """Return the placement with pools in the user's order. `ranks_and_stages`: pool index -> (ranks, stages)."""
        order = self.options.pool_order or ()
        blocks = [
            Block(a.pool, ranks // a.gpus_per_node, a.gpus_per_node, stages)
            for f, (ranks, stages) in ranks_and_stages.items()
            for a in [self.available[f]]
        ]
        if order:
            blocks.sort(key=lambda b: order.index(b.pool.name) if b.pool.name in order else len(order))
        return Placement(
            strategy, self.micro_size, self.tp, dp, blocks=tuple(blocks), estimate=estimate, instances=instances
        )

    def bound_s(self, dp: int, pools: Sequence[int]) -> float:
        """Return a lower bound, in seconds, of every step with this DP on these pools: its slowest stage has at least
        one layer, and at least its share of all layers."""
        layers_per_s = sum(self._layers_per_s[f] for f in pools) / (self.tp * dp)
        return self.micro_batches / dp * max(min(self.layer_s_list[f] for f in pools), self.layers / layers_per_s)

    def ring_s(self, pools: tuple[int, ...], rings: int) -> float:
        """Return the seconds of an all-reduce of one layer's gradients of one rank around a ring of pools.
        `rings`: the number of such all-reduces that run at the same time."""
        size, between_gbps = 2.0 * self.layer_size * self.cost_model.gradient_size, self.between_gbps(rings)
        return size / min(
            min(self.ethernet_gbps[a], between_gbps[a, b]) * 1e9 / 8 / self.available[a].gpus_per_node
            for a, b in zip(pools, pools[1:] + pools[:1], strict=True)
        )

    def max_chunks(self, stages: int, micro_batches: int) -> int:
        """Return the largest number of virtual stages of a pipeline of `stages` stages, or the user's number if set. It
        is 1 unless PP divides `micro_batches`, which Megatron-Core assigns in groups of PP."""
        kind = self.options.schedule
        limit = None if kind == "auto" else schedule_kind(kind).chunks[1]
        if self.options.virtual_stages or stages < 2 or micro_batches % stages:
            return self.options.virtual_stages or 1
        return max(1, min(self.layers // stages, limit or MAX_CHUNKS, MAX_CHUNKS))

    def max_chunks_array(self, stages: np.ndarray, micro_batches: int) -> np.ndarray:
        """Return :meth:`max_chunks` for an array of stage counts."""
        return np.array([self.max_chunks(s, micro_batches) for s in range(self.layers + 1)])[stages]

    def cached(self, compute: Callable[..., T], *args: Any) -> T:
        """Return ``compute(*args)``; later calls with the same arguments return the stored result."""
        return self._memo.of(compute.__name__, *args, compute=partial(compute, *args))

    def transfers_s(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a stage transfer inside each pool, (P,), and between two pools, (P, P)."""
        element_bytes = max(self.cost_model.weight_bytes(a.pool.gpu) for a in self.available)
        size = self.micro_size * self.batch.sequence_length * self.model.hidden * element_bytes * 8e-9
        if self.options.sequence_parallel is not False:
            size /= self.tp
        ranks = np.minimum(self.gpus_per_node, self.tp * dp)
        between = size * ranks[:, None] / self.between_gbps(self.tp * dp) + self.between_latency_s
        return size * ranks / self.inside_gbps[""] + self.latency_s, np.maximum(between, between.T)

    def sync_s(self, dp: int, stride: int = 1) -> np.ndarray:
        """Return the seconds to (reduce the gradients, gather the parameters) of one layer in each pool, (2, P).

        `stride`: distance, in blocks of TP ranks, between two ranks that share a gradient.
        """
        seconds, costs = [], self.cost_model
        for f, available in enumerate(self.available):
            gpu = available.pool.gpu
            collectives, parameters = costs.collectives(gpu), self.layer_size
            is_inside = self.tp * dp * stride <= available.gpus_per_node
            per_node = max(1, available.gpus_per_node // (self.tp * stride))
            reduce_factor = collectives.reduce_scatter(dp, 1 if is_inside else max(2, dp // per_node))
            bytes_per_parameter = reduce_factor * costs.gradient_size, collectives.all_gather * costs.weight_bytes(gpu)
            sizes = parameters * (dp - 1) / dp * np.array(bytes_per_parameter)
            if is_inside:
                rates = np.full(2, gpu.intra_node_gbps * costs.link(LOCAL, available.pool).efficiency)
            else:
                rates = np.array([self.inside_gbps[name][f] for name in ("reduce_scatter", "all_gather")]) / self.tp
            seconds.append(sizes / (rates * 1e9 / 8))
        return np.array(seconds).T
