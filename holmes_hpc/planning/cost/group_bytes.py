"""Payload bytes that each process group sends over NICs in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from holmes_hpc.planning.cost import experts
from holmes_hpc.planning.cost.layer_times import exchanged_bytes, key_value_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.network_times import activation_bytes, embedding_bytes
from holmes_hpc.planning.cost.timing import parameters
from holmes_hpc.planning.plan.parallel import Group, Parallel, groups
from holmes_hpc.planning.plan.transport import GroupTransport, Place, places


def sent_bytes(layout: Layout, layers: np.ndarray) -> Iterator[tuple[GroupTransport, int, float]]:
    """Yield (group, sending rank, payload bytes per step) for each rank that sends over its node's NIC.
    Only groups that span several nodes have such ranks. `layers`: one layer split, (1, stages, chunks)."""
    p, costs, place_of = layout.parallel, layout.costs, places(layout.components)
    sparse = experts.weights(layout, layers)[0].sum(axis=1)  # parameters of routed experts on a rank
    count = parameters(layout, layers)[0].sum(axis=1) - sparse
    component_of = {c.pool: c for c in layout.components}
    micro_batches = layout.batch.micro_batches(1)
    is_grid = p.is_grid(micro_batches)
    edges = enumerate(pairwise(() if is_grid else p.routes(micro_batches)))
    edge_counts = Counter((s, *pair) for s, routes in edges for pair in zip(*routes, strict=True))
    for group in groups(p, micro_batches, layout.model.tied, layout.model.experts.count > 0):
        transport = layout.transport_rule.of_members([place_of[rank] for rank in group.ranks])
        if transport.kind == "local":
            continue
        component = component_of[place_of[group.ranks[0]].pool]
        gpu = layout.pool(component).gpu
        factors, n, stage = costs.collectives(gpu), len(group.ranks), group.stages[0]
        senders, amount, peer_bytes = group.ranks, 0.0, 0.0  # bytes of each sender; bytes to each peer outside its node
        view = layout.views[stage].layout if layout.is_per_stage else layout
        if group.kind == "edge":
            tensor = activation_bytes(view, transport, component) * _tensor_share(p, group)
            (_, a, _), (_, b, _) = (p.coordinates(rank) for rank in group.ranks)
            amount = tensor * (_transfer_count(layout, group) if is_grid else edge_counts[stage, a, b])
        elif group.kind == "embd" and layout.model.tied:
            tp = p.tp if is_grid else 1
            senders = first_rank_per_node(group.ranks, place_of)
            amount = factors.all_reduce * embedding_bytes(layout) / tp * (n - 1) / n
        elif group.kind == "cp":  # rounds of keys and values: 1 forward, 2 backward (with their gradients)
            parts = {"full": ("scores",), "selective": costs.software.recompute_parts}.get(layout.recompute, ())
            passes, rounds = float(layers[0, stage].sum()) * view.order.micro_batches, 3 + ("scores" in parts)
            tokens = view.batch.micro_size * view.batch.sequence_length
            sizes = layout.model, tokens, view.parallel.tp, costs.weight_bytes(gpu)
            if p.cp_comm == "a2a":
                peer_bytes = (rounds - 1) * passes * exchanged_bytes(*sizes) / n
            else:
                amount = rounds * passes * (n - 1) * key_value_bytes(*sizes)
            senders = tuple(a for a, b in pairwise((*group.ranks, group.ranks[0])) if place_of[a] != place_of[b])
        elif group.kind == "ep":
            forwards = 2 if layout.recompute == "full" else 1
            dense = layout.model.experts.first_dense if stage == 0 else 0
            passes = (layers[0, stage].sum() - dense) * layout.order.micro_batches
            if p.ep_comm == "allgather":
                senders = first_rank_per_node(group.ranks, place_of)
                amount = passes * (experts.gathered_bytes(layout, component) @ (forwards, 1))
            else:  # as many bytes backward as forward
                peer_bytes = (forwards + 1) * passes * experts.bytes_to_each_rank(layout, component, True)
        elif group.kind in ("intra_dp" if p.optimizer_instances > 1 else "dp", "expt_dp"):
            size = float((sparse if group.kind == "expt_dp" else count)[stage])
            senders = first_rank_per_node(group.ranks, place_of)
            reduce_factor = factors.reduce_scatter(n, len(senders), p.optimizer_instances)
            per_parameter = reduce_factor * costs.gradient_size + factors.all_gather * costs.weight_bytes(gpu)
            if not p.distributed_optimizer:
                per_parameter = factors.all_reduce * costs.gradient_size
            amount = per_parameter * size * (n - 1) / n
        elif group.kind == "inter_dp":
            senders = first_rank_per_node(group.ranks, place_of)
            amount = factors.all_reduce * (n - 1) / n * float(count[stage]) * costs.gradient_size / layout.intra_dp_size
        group_transport = GroupTransport(group.kind, group.ranks, transport, group.stages)
        for rank in group.ranks if peer_bytes else senders if amount else ():
            peers = sum(place_of[peer] != place_of[rank] for peer in group.ranks) if peer_bytes else 0
            yield group_transport, rank, float(amount + peers * peer_bytes)


def first_rank_per_node(ranks: Sequence[int], place_of: Sequence[Place]) -> tuple[int, ...]:
    """Return the first of `ranks` on each node. It counts as the node's sender, because a ring leaves a node once."""
    return tuple({place_of[rank]: rank for rank in reversed(ranks)}.values())


def _tensor_share(p: Parallel, group: Group) -> float:
    """Return the share of the first rank's part of a tensor that the second rank of the edge receives."""
    (upper, _, i), (lower, _, j) = (p.coordinates(rank) for rank in group.ranks)
    if p.is_even:
        return 1.0
    exchanged = p.exchanged_rows(upper, lower)
    of_part = [rows for (part, _), rows in exchanged.items() if part == i]
    sizes = [sum((above.stop or 1) - (above.start or 0) for above, _ in rows) for rows in (exchanged[i, j], *of_part)]
    return sizes[0] / sum(sizes[1:])


def _transfer_count(layout: Layout, group: Group) -> int:
    """Return the number of stage transfers in a step over an edge, in one direction (:meth:`Parallel.is_grid` only)."""
    chunks, micro_batches = layout.parallel.virtual_stages, layout.order.micro_batches
    transfers = micro_batches * (chunks if group.stages[0] < group.stages[1] else chunks - 1)
    if layout.parallel.pp == 2:  # the wrap-around edge connects the same two ranks
        transfers += micro_batches * (chunks - 1)
    return transfers
