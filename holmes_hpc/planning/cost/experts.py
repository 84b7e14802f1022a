"""Parameters, memory and exchanges of the experts of a layout.

`Parallel.expert_ranks` consecutive ranks of a stage together hold all experts and exchange tokens.
Ranks that hold the same experts reduce the gradients of these experts.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.planning.cost.flops import expert_parameters
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.network_times import Ring, by_stage
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.parts import Component
from holmes_hpc.planning.plan.transport import LOCAL

EXCHANGES = 3  # of a layer's forward pass: tokens, probabilities, and results (all-to-all) or a map (all-gather)


def weights(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """Return the parameters of experts on one rank, shaped like `layers`."""
    with_experts = layers.astype(np.float64)
    with_experts[:, 0, 0] -= layout.model.experts.first_dense
    return with_experts * expert_parameters(layout.model, layout.parallel.expert_ranks)


def optimizer_share(layout: Layout, layers: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return how many of the `count` parameters of each stage one rank's optimizer updates, (plans, S)."""
    p = layout.parallel
    if not p.distributed_optimizer:
        return count
    experts = weights(layout, layers).sum(axis=2)
    return (count - experts) / layout.intra_dp_size + experts / (p.stages[0].ranks // p.expert_ranks)


def joined_bytes(model: ModelSpec, parallel: Parallel, element: float) -> float:
    """Return the bytes of the copies that a rank makes to multiply by the matrices of all its experts together: the
    first matrices of one layer's experts, and their gradients. Only half precision (`element` 2) needs copies."""
    count = model.experts.count // parallel.ep
    widths = (2 if model.swiglu else 1) * model.ffn_width * model.hidden
    return 2 * element * count * widths / parallel.etp if count > 1 and element == 2 else 0.0


def ep_nodes(layout: Layout, component: Component) -> int:
    """Return the number of nodes that an EP group spans."""
    ranks, per_node = layout.parallel.expert_ranks, component.gpus_per_node
    return 1 if component.nodes == 1 or per_node % ranks == 0 else max(2, ranks // per_node)


def bytes_to_each_rank(layout: Layout, component: Component, between_nodes: bool) -> float:
    """Return the bytes that a rank sends to each other rank of its EP group in a layer's forward pass. The bytes are
    tokens with their probabilities (fp32), and results. The backward pass sends as many. All experts are assumed to get
    equally many tokens. `between_nodes`: the other rank is on another node. Software may then send a token only once
    for all experts on that node (``software.deduplicated``)."""
    p, m = layout.parallel, layout.model
    copies: float = m.active_ffns  # number of times that each token is sent
    if between_nodes and layout.costs.software.deduplicated:
        nodes = ep_nodes(layout, component)
        copies = nodes * (1 - (1 - 1 / nodes) ** m.active_ffns)  # the expected number of nodes with its experts
    tokens = layout.batch.micro_size * layout.batch.sequence_length / p.tp * copies
    return tokens / p.ep * (2 * m.hidden * layout.costs.weight_bytes(layout.pool(component).gpu) + 4)


def _gathered_tensors(layout: Layout, component: Component) -> np.ndarray:
    """Return the bytes of the tensors that an EP group gathers, and of those that it reduces and scatters, in a layer's
    (forward, backward) pass, (2, 2): all ranks' tokens, their probabilities (fp32), their map and results (fp32)."""
    p, m, costs = layout.parallel, layout.model, layout.costs
    tokens = layout.batch.micro_size * layout.batch.sequence_length // p.tp * p.expert_ranks
    hidden, scores = m.hidden * costs.weight_bytes(layout.pool(component).gpu), 4 * m.experts.count
    gathered = [hidden + scores + m.experts.count, 4 * m.hidden]
    return tokens * np.array([gathered, [4 * m.hidden, hidden + scores]], float)


def gathered_bytes(layout: Layout, component: Component) -> np.ndarray:
    """Return the bytes that a rank sends around its EP group's ring in a layer's (forward, backward) pass, (2,)."""
    library, ranks = layout.costs.collectives(layout.pool(component).gpu), layout.parallel.expert_ranks
    factors = np.array([library.all_gather, library.ring_reduce_scatter])
    return factors @ _gathered_tensors(layout, component) * (ranks - 1) / ranks


def exchange_s(layout: Layout, replica: int) -> np.ndarray:
    """Return the seconds of the exchanges of a layer's forward pass, (S,). Backward takes about as long."""
    if layout.parallel.expert_ranks == 1:
        return np.zeros(layout.parallel.pp)
    return by_stage(layout, replica, ("exchange",), partial(_exchange_s, layout))


def _exchange_s(layout: Layout, component: Component) -> float:
    ep, nodes = layout.parallel.expert_ranks, ep_nodes(layout, component)
    inside, transport = ep // nodes, layout.transport_rule.of({component.pool}, nodes == 1)
    ranks = min(component.gpus_per_node, layout.parallel.stages[0].ranks)
    if layout.parallel.ep_comm == "allgather":
        ring = Ring(layout, component, transport, ep, nodes, ranks / inside)
        library = layout.costs.collectives(layout.pool(component).gpu)
        gathered, scattered = _gathered_tensors(layout, component)[:, 0]
        gather = ring.seconds("all_gather", library.all_gather, gathered) @ (1, EXCHANGES)
        return float(gather + ring.seconds("reduce_scatter", library.ring_reduce_scatter, scattered).sum())
    load = LayerShape(layout.model, layout.batch, ep=ep).expert_load(layout.costs.software.expert_imbalance)
    seconds = bytes_to_each_rank(layout, component, False) * (inside - 1) / layout.rate(LOCAL, component)
    if nodes > 1:  # all ranks of a node share its NIC
        sent_bytes = bytes_to_each_rank(layout, component, True) * (ep - inside) * ranks
        seconds = max(seconds, sent_bytes / layout.rate(transport, component))
    return EXCHANGES * layout.latency(transport, component) + seconds * load  # all wait for the busiest rank
