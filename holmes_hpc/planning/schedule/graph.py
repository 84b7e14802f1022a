"""The dependencies of a pipeline schedule, as arcs between numbered nodes.

With S stages, C chunks and T = micro-batches * C turns, the pass of stage s in direction d (0 forward, 1 backward) at
turn t is node (2s + d)*T + t. The stage transfer of its result is that + 2*S*T. Then come ``ready``, ``tail`` and
``reduce`` of every stage and chunk. Nodes are numbers, because a search builds hundreds of graphs of ten thousand
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import Exchange, Pass, StageTransfer
from holmes_hpc.planning.schedule.order import Order

PARTS = ("forward", "backward", "down", "up", "last_up", "ready", "reduce", "tail")  # columns of Durations.table


@dataclass(frozen=True)
class Graph:
    """Nodes sorted into levels: a node depends only on nodes of earlier levels.

    `node`: node numbers as above, in sorted order. `column`: their columns in the table of durations. `levels`: (first
    index, end, indices of all dependencies of the level, start of each node's dependencies among them).
    """

    node: np.ndarray
    column: np.ndarray
    levels: tuple[tuple[int, int, np.ndarray, np.ndarray], ...]

    def end_times(self, table: np.ndarray) -> np.ndarray:
        """Return the end time of each node, (plans, nodes), from a table of durations, (plans, columns)."""
        ends = table[0, self.column] if len(table) == 1 else table.T[self.column]  # one plan needs no second axis
        latest = np.maximum.reduceat
        for first, end, dependencies, starts in self.levels:
            ends[first:end] += latest(ends[dependencies], starts)
        return ends[None] if len(table) == 1 else ends.T


class NodeNumbers:
    """The node numbers and columns of an order's graph."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.stages, self.chunks = order.stages, order.chunks
        self.turns = order.micro_batches * order.chunks
        self.transfers = 2 * self.stages * self.turns
        self.collectives = 2 * self.transfers  # ready, then tail, then reduce
        self.count = self.collectives + 3 * self.stages * self.chunks
        turns = order.turns()
        self.micro_batch = np.array([m for m, _ in turns])
        self.chunk = np.array([c for _, c in turns])  # of a forward turn; a backward turn has chunks - 1 - this
        self.turn_of = {turn: t for t, turn in enumerate(turns)}

    def node(self, stage: int, p: Pass) -> int:
        chunk = p.chunk if p.forward else self.chunks - 1 - p.chunk
        return (2 * stage + (not p.forward)) * self.turns + self.turn_of[p.micro_batch, chunk]

    def transfer(self, transfer: StageTransfer) -> int:
        return self.transfers + self.node(transfer.source, transfer.source_pass)

    def chunk_of(self, direction: int) -> np.ndarray:
        return self.chunk if direction == 0 else self.chunks - 1 - self.chunk

    def columns(self, exists: np.ndarray) -> np.ndarray:
        """Return the column of each node. `exists`: a mask of the transfers; others get the column of zeros."""
        s, c, t = self.stages, self.chunks, self.turns
        sizes = (s * c, s * c, s, s, s, s * c, s * c, s * c)
        starts = dict(zip(PARTS, np.concatenate([[0], np.cumsum(sizes)]).tolist(), strict=False))
        zeros = sum(sizes)
        column = np.full(self.count, zeros)
        stage = np.arange(s)[:, None]
        passes = column[: self.transfers].reshape(s, 2, t)
        passes[:, 0] = starts["forward"] + stage * c + self.chunk_of(0)
        passes[:, 1] = starts["backward"] + stage * c + self.chunk_of(1)
        transfers = column[self.transfers : self.collectives].reshape(s, 2, t)
        transfers[:, 0] = starts["down"] + stage
        last = self.micro_batch == self.order.micro_batches - 1
        transfers[:, 1] = np.where(last, starts["last_up"], starts["up"]) + stage
        transfers[~exists.reshape(s, 2, t)] = zeros
        collectives = column[self.collectives :].reshape(3, s * c)
        for row, name in enumerate(("ready", "tail", "reduce")):
            collectives[row] = starts[name] + np.arange(s * c)
        collectives[2].reshape(s, c)[:, c - 1] = zeros  # the last chunk finishes first and only has a tail
        return column

    def describe(self, node: int) -> dict[str, Any]:
        """Return {stage, kind, chunk, micro_batch}; kind: forward, backward, send, param_sync or grad_sync."""
        if node >= self.collectives:
            part, index = divmod(node - self.collectives, self.stages * self.chunks)
            return {
                "stage": index // self.chunks,
                "kind": ("param_sync", "grad_sync", "grad_sync")[part],
                "chunk": index % self.chunks,
                "micro_batch": None,
            }
        is_transfer, index = divmod(node, self.transfers)
        direction, turn = index // self.turns % 2, index % self.turns
        return {
            "stage": index // self.turns // 2,
            "kind": "send" if is_transfer else ("forward", "backward")[direction],
            "chunk": int(self.chunk_of(direction)[turn]),
            "micro_batch": int(self.micro_batch[turn]),
        }


Arcs = list[tuple[np.ndarray, np.ndarray]]  # arrays of (waiting nodes, their dependencies)


def _collective_arcs(numbers: NodeNumbers, before_first: dict[int, list[int]]) -> Arcs:
    """Return the arcs of parameter gathers (before each chunk's first forward pass) and gradient reductions (after its
    last backward pass). `before_first`: other dependencies of those forward passes; the gathers share them."""
    n, last = numbers, numbers.order.micro_batches - 1
    arcs: list[tuple[int, int]] = []
    for stage in range(n.stages):
        reduced: list[int] = []
        for chunk in reversed(range(n.chunks)):
            ready, tail, reduce = (n.collectives + (part * n.stages + stage) * n.chunks + chunk for part in range(3))
            first = n.node(stage, Pass(True, 0, chunk))
            arcs += [(ready, b) for b in before_first.get(first, ())] + [(first, ready)]
            arcs.append((tail, n.node(stage, Pass(False, last, chunk))))
            arcs += [(reduce, r) for r in reduced]
            reduced = [tail, reduce] if reduced else [tail]
    pairs = np.array(arcs)
    return [(pairs[:, 0], pairs[:, 1])]


def _blocking_arcs(numbers: NodeNumbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Return the arcs of Megatron-Core's schedules, and a mask of the transfers.

    A stage continues when the exchanges that it waits for are complete. A transfer starts when both stages have reached
    it and the previous one in its direction is complete.
    """
    n, arcs = numbers, list[tuple[int, int]]()
    exists = np.zeros(n.transfers, dtype=bool)
    for stage in range(n.stages):
        state: list[int] = []
        latest: dict[bool, int] = {}
        for item in n.order.program(stage):
            if isinstance(item, Exchange):
                sends, receives = [n.transfer(h) for h in item.sends], [n.transfer(h) for h in item.receives]
                arcs += [(transfer, b) for transfer in (*sends, *receives) for b in state]
                for transfer, node in zip(item.sends, sends, strict=True):
                    direction = transfer.source_pass.forward or shared[stage]
                    if direction in latest:
                        arcs.append((node, latest[direction]))
                    latest[direction] = node
                    exists[node - n.transfers] = True
                waits = [*sends, *receives] if item.waits is None else [n.transfer(h) for h in item.waits]
                state = waits if item.waits is None else [*state, *waits]
            else:
                node = n.node(stage, item)
                arcs += [(node, b) for b in state]
                state = [node]
    pairs = np.array(arcs or [(0, 0)])[0 if arcs else 1 :]
    return [(pairs[:, 0], pairs[:, 1])], exists


def _background_arcs(numbers: NodeNumbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Return the arcs of a schedule that exchanges in the background, and a mask of the transfers.

    A stage waits only for the input of a pass, and for the send one window earlier. A transfer starts when its tensor
    is computed, its receive is posted, and the previous transfer of the edge is complete.
    """
    n, order = numbers, numbers.order
    s_count, t_count = n.stages, n.turns
    turns = np.arange(t_count)
    exists = np.zeros((s_count, 2, t_count), dtype=bool)
    arcs: Arcs = []
    # Per stage: its passes in order, and the transfer that must be complete before each of them, or -1.
    sequences, required_sends = [], []
    windows = [order.window_below(s) if s_count > 1 else 1 for s in range(s_count)]

    for stage in range(s_count):
        sequence = order.turn_sequence(stage)
        nodes = 2 * stage * t_count + sequence
        sequences.append(nodes)
        arcs.append((nodes[1:], nodes[:-1]))
        required = np.full(2 * t_count + 1, -1)
        position = np.empty(2 * t_count, dtype=int)
        position[sequence] = np.arange(2 * t_count)
        sends = []
        for direction in (0, 1):
            is_sent = _sent_mask(n, stage, direction)
            exists[stage, direction] = is_sent
            transfers = n.transfers + (2 * stage + direction) * t_count + turns[is_sent]
            arcs.append((transfers, transfers - n.transfers))
            arcs.append((transfers[1:], transfers[:-1]))
            window = windows[stage if direction == 0 else (stage - 1) % s_count]
            positions = position[direction * t_count + turns[is_sent]]
            if len(transfers) > window:
                required[positions[window:] + 1] = transfers[:-window]
            sends.append((positions, transfers))
        required_sends.append(required)
        waits = required[:-1] >= 0
        arcs.append((nodes[waits], required[:-1][waits]))
        if shared[stage]:
            positions, transfers = (np.concatenate(x) for x in zip(*sends, strict=True))
            transfers = transfers[np.argsort(positions)]
            arcs.append((transfers[1:], transfers[:-1]))
    for stage in range(s_count):
        position = np.empty(2 * t_count, dtype=int)
        position[sequences[stage] - 2 * stage * t_count] = np.arange(2 * t_count)
        for direction in (0, 1):
            transfers, consuming_turns = _arrivals(n, stage, direction)
            if not len(transfers):
                continue
            arcs.append(((2 * stage + direction) * t_count + consuming_turns, transfers))
            window = windows[(stage - 1) % s_count if direction == 0 else stage]
            # A pass that takes its input posts the receive one window later.
            positions = position[direction * t_count + consuming_turns[:-window]]
            later = transfers[window:]
            has_predecessor = positions > 0
            arcs.append((later[has_predecessor], sequences[stage][positions[has_predecessor] - 1]))
            required = required_sends[stage][positions]
            arcs.append((later[required >= 0], required[required >= 0]))
    last_chunk_turns = np.flatnonzero(n.chunk == 0)  # of backward passes, which follow their own forward pass
    forward_turns = np.array([n.turn_of[m, n.chunks - 1] for m in n.micro_batch[last_chunk_turns].tolist()])
    last = 2 * (s_count - 1) * t_count
    arcs.append((last + t_count + last_chunk_turns, last + forward_turns))
    return arcs, exists.ravel()


def _sent_mask(n: NodeNumbers, stage: int, direction: int) -> np.ndarray:
    """Return which turns send their result over an edge, (turns,)."""
    if n.stages == 1:
        return np.zeros(n.turns, dtype=bool)
    if stage != (n.stages - 1 if direction == 0 else 0):
        return np.ones(n.turns, dtype=bool)
    return np.asarray(n.chunk_of(direction) != (n.chunks - 1 if direction == 0 else 0))


def _arrivals(n: NodeNumbers, stage: int, direction: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (transfers that `stage` receives, the turns that need them), in order."""
    source = (stage - 1 if direction == 0 else stage + 1) % n.stages
    sent_turns = np.arange(n.turns)[_sent_mask(n, source, direction)]
    wraps_around = source == (n.stages - 1 if direction == 0 else 0)  # the next chunk's turn needs the tensor
    transfers = n.transfers + (2 * source + direction) * n.turns + sent_turns
    return transfers, sent_turns + (n.order.group if wraps_around else 0)


def _sort_into_levels(count: int, arcs: Arcs, column: np.ndarray) -> Graph | None:
    """Return the graph with nodes sorted by their longest path from a start; None if it has a cycle."""
    waiting, dependency = (np.concatenate(x) for x in zip(*arcs, strict=True))
    by_source = np.argsort(dependency, kind="stable")
    starts = np.searchsorted(dependency[by_source], np.arange(count + 1)).tolist()
    targets = waiting[by_source].tolist()  # levels are narrow: lists are faster than an array for each
    unmet, level_of = np.bincount(waiting, minlength=count).tolist(), [0] * count
    frontier, depth, visited = [node for node in range(count) if not unmet[node]], 0, 0
    while frontier:
        visited += len(frontier)
        depth += 1
        next_frontier = []
        for node in frontier:
            for target in targets[starts[node] : starts[node + 1]]:
                unmet[target] -= 1
                if not unmet[target]:
                    level_of[target] = depth
                    next_frontier.append(target)
        frontier = next_frontier
    if visited < count:
        return None
    level = np.array(level_of)
    ranked = np.argsort(level, kind="stable")
    rank = np.empty(count, dtype=int)
    rank[ranked] = np.arange(count)
    by_rank = np.argsort(rank[waiting], kind="stable")
    waiting, dependency = rank[waiting][by_rank], rank[dependency][by_rank]
    bounds = np.searchsorted(level[ranked], np.arange(1, depth + 1))
    offsets = np.searchsorted(waiting, np.arange(count + 1))
    levels = []
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        levels.append((first, end, dependency[offsets[first] : offsets[end]], offsets[first:end] - offsets[first]))
    return Graph(ranked, column[ranked], tuple(levels))


@lru_cache(maxsize=128)
def graph(order: Order, shared: tuple[bool, ...] = ()) -> Graph:
    """Return the graph of a schedule. PlanError if it would deadlock.
    `shared`: per stage, whether its sends in both directions leave through one NIC, one after the other."""
    numbers = NodeNumbers(order)
    for nic in (shared or (False,) * order.stages, (False,) * order.stages):
        arcs, exists = (_blocking_arcs if order.schedule.megatron else _background_arcs)(numbers, nic)
        first = np.zeros(numbers.count, dtype=bool)
        first[[numbers.node(s, Pass(True, 0, c)) for s in range(order.stages) for c in range(order.chunks)]] = True
        before_first: dict[int, list[int]] = {}
        for waiting, dependency in arcs:
            for i in np.flatnonzero(first[waiting]).tolist():
                before_first.setdefault(int(waiting[i]), []).append(int(dependency[i]))
        arcs += _collective_arcs(numbers, before_first)
        if (sorted_graph := _sort_into_levels(numbers.count, arcs, numbers.columns(exists))) is not None:
            return sorted_graph
    raise PlanError(
        f"with in_flight {list(order.in_flight)} the stages would wait for each other forever",
        where="schedule",
        hint="hold more passes in flight",
    )
