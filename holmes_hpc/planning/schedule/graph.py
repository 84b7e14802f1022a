"""What waits for what in a pipeline schedule, as arcs between numbered nodes.

Nodes, with S stages, C chunks, T = micro-batches * C turns: pass (stage s, way w: 0 forward, 1 backward, turn t) is
node (2s + w)*T + t; the stage transfer that takes its result away is that + 2*S*T; then come ``ready``, ``tail`` and
``reduce`` of every stage and chunk. Numbers instead of objects, because a search builds hundreds of graphs of ten
thousand nodes.
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
    """Nodes sorted into levels: all that a node waits for lies in earlier levels.

    `node`: numbers as above; `column`: of the table of durations; `levels`: (first node, end, indices of all that its
    nodes wait for, where each node's begin among them).
    """

    node: np.ndarray
    column: np.ndarray
    levels: tuple[tuple[int, int, np.ndarray, np.ndarray], ...]

    def ends(self, table: np.ndarray) -> np.ndarray:
        """When each node is done, (plans, nodes), from a table of durations, (plans, columns)."""
        ends = table[0, self.column] if len(table) == 1 else table.T[self.column]  # of one plan numbers, else rows
        latest = np.maximum.reduceat
        for first, end, before, starts in self.levels:
            ends[first:end] += latest(ends[before], starts)
        return ends[None] if len(table) == 1 else ends.T


class Numbers:
    """Node numbers and columns of an order's graph."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.stages, self.chunks = order.stages, order.chunks
        self.turns = order.micro_batches * order.chunks
        self.transfers = 2 * self.stages * self.turns
        self.around = 2 * self.transfers  # ready, then tail, then reduce
        self.count = self.around + 3 * self.stages * self.chunks
        turns = order.turns()
        self.micro_batch = np.array([m for m, _ in turns])
        self.chunk = np.array([c for _, c in turns])  # of a forward turn; a backward turn's is chunks - 1 - that
        self.turn_of = {turn: t for t, turn in enumerate(turns)}

    def node(self, stage: int, done: Pass) -> int:
        chunk = done.chunk if done.forward else self.chunks - 1 - done.chunk
        return (2 * stage + (not done.forward)) * self.turns + self.turn_of[done.micro_batch, chunk]

    def transfer(self, transfer: StageTransfer) -> int:
        return self.transfers + self.node(transfer.source, transfer.made)

    def chunk_of(self, way: int) -> np.ndarray:
        return self.chunk if way == 0 else self.chunks - 1 - self.chunk

    def columns(self, moved: np.ndarray) -> np.ndarray:
        """The column of each node; `moved`: which transfers there are. What does not exist takes no time."""
        s, c, t = self.stages, self.chunks, self.turns
        sizes = (s * c, s * c, s, s, s, s * c, s * c, s * c)
        starts = dict(zip(PARTS, np.concatenate([[0], np.cumsum(sizes)]).tolist(), strict=False))
        nothing = sum(sizes)
        column = np.full(self.count, nothing)
        stage = np.arange(s)[:, None]
        passes = column[: self.transfers].reshape(s, 2, t)
        passes[:, 0] = starts["forward"] + stage * c + self.chunk_of(0)
        passes[:, 1] = starts["backward"] + stage * c + self.chunk_of(1)
        transfers = column[self.transfers : self.around].reshape(s, 2, t)
        transfers[:, 0] = starts["down"] + stage
        last = self.micro_batch == self.order.micro_batches - 1
        transfers[:, 1] = np.where(last, starts["last_up"], starts["up"]) + stage
        transfers[~moved.reshape(s, 2, t)] = nothing
        around = column[self.around :].reshape(3, s * c)
        for row, name in enumerate(("ready", "tail", "reduce")):
            around[row] = starts[name] + np.arange(s * c)
        around[2].reshape(s, c)[:, c - 1] = nothing  # the last chunk is the first to finish
        return column

    def describe(self, node: int) -> dict[str, Any]:
        """What a node is: {stage, kind, chunk, micro_batch}; kind: forward, backward, send, param_sync, grad_sync."""
        if node >= self.around:
            part, place = divmod(node - self.around, self.stages * self.chunks)
            return {
                "stage": place // self.chunks,
                "kind": ("param_sync", "grad_sync", "grad_sync")[part],
                "chunk": place % self.chunks,
                "micro_batch": None,
            }
        sent, place = divmod(node, self.transfers)
        way, turn = place // self.turns % 2, place % self.turns
        return {
            "stage": place // self.turns // 2,
            "kind": "send" if sent else ("forward", "backward")[way],
            "chunk": int(self.chunk_of(way)[turn]),
            "micro_batch": int(self.micro_batch[turn]),
        }


Arcs = list[tuple[np.ndarray, np.ndarray]]  # (what waits, what it waits for), in pieces


def _around(numbers: Numbers, before_first: dict[int, list[int]]) -> Arcs:
    """Parameters before the first forward pass of each chunk, gradients after the last backward pass of each.
    `before_first`: what those forward passes wait for otherwise: the gathering does too."""
    n, last = numbers, numbers.order.micro_batches - 1
    arcs: list[tuple[int, int]] = []
    for stage in range(n.stages):
        reduced: list[int] = []
        for chunk in reversed(range(n.chunks)):
            here = n.around + stage * n.chunks + chunk
            ready, tail, behind = (here + part * n.stages * n.chunks for part in range(3))
            first = n.node(stage, Pass(True, 0, chunk))
            arcs += [(ready, b) for b in before_first.get(first, ())] + [(first, ready)]
            arcs.append((tail, n.node(stage, Pass(False, last, chunk))))
            arcs += [(behind, r) for r in reduced]
            reduced = [tail, behind] if reduced else [tail]
    pairs = np.array(arcs)
    return [(pairs[:, 0], pairs[:, 1])]


def _waiting(numbers: Numbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Megatron-Core's schedules: a stage goes on when what it waits for is complete, and a transfer starts when both
    of its ends have come to it and the one before it on the same way has gone."""
    n, arcs = numbers, list[tuple[int, int]]()
    moved = np.zeros(n.transfers, dtype=bool)
    for stage in range(n.stages):
        state: list[int] = []
        latest: dict[bool, int] = {}
        for item in n.order.program(stage):
            if isinstance(item, Exchange):
                sends, receives = [n.transfer(h) for h in item.sends], [n.transfer(h) for h in item.receives]
                arcs += [(transfer, b) for transfer in (*sends, *receives) for b in state]
                for transfer, node in zip(item.sends, sends, strict=True):
                    way = transfer.made.forward or shared[stage]
                    if way in latest:
                        arcs.append((node, latest[way]))
                    latest[way] = node
                    moved[node - n.transfers] = True
                waits = [*sends, *receives] if item.waits is None else [n.transfer(h) for h in item.waits]
                state = waits if item.waits is None else [*state, *waits]
            else:
                node = n.node(stage, item)
                arcs += [(node, b) for b in state]
                state = [node]
    pairs = np.array(arcs or [(0, 0)])[0 if arcs else 1 :]
    return [(pairs[:, 0], pairs[:, 1])], moved


def _background(numbers: Numbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Exchanging in the background: a stage waits only for what it computes on, and for a send that is more than a
    window behind; a transfer starts when its data is there, its receive is posted, and the one before it has gone."""
    n, order = numbers, numbers.order
    s_count, t_count = n.stages, n.turns
    turns = np.arange(t_count)
    moved = np.zeros((s_count, 2, t_count), dtype=bool)
    arcs: Arcs = []
    # per stage: its passes in order; the transfer that must have left before each, or -1
    sequence, left_before = [], []
    windows = [order.window_below(s) if s_count > 1 else 1 for s in range(s_count)]

    for stage in range(s_count):
        at = order.computing(stage)
        nodes = 2 * stage * t_count + at
        sequence.append(nodes)
        arcs.append((nodes[1:], nodes[:-1]))
        settle = np.full(2 * t_count + 1, -1)
        place = np.empty(2 * t_count, dtype=int)
        place[at] = np.arange(2 * t_count)
        sent_at = []
        for way in (0, 1):
            leaves = _leaves(n, stage, way)
            moved[stage, way] = leaves
            transfers = n.transfers + (2 * stage + way) * t_count + turns[leaves]
            arcs.append((transfers, transfers - n.transfers))
            arcs.append((transfers[1:], transfers[:-1]))
            window = windows[stage if way == 0 else (stage - 1) % s_count]
            places = place[way * t_count + turns[leaves]]
            if len(transfers) > window:
                settle[places[window:] + 1] = transfers[:-window]
            sent_at.append((places, transfers))
        left_before.append(settle)
        waits = settle[:-1] >= 0
        arcs.append((nodes[waits], settle[:-1][waits]))
        if shared[stage]:
            places, transfers = (np.concatenate(x) for x in zip(*sent_at, strict=True))
            transfers = transfers[np.argsort(places)]
            arcs.append((transfers[1:], transfers[:-1]))
    for stage in range(s_count):
        place = np.empty(2 * t_count, dtype=int)
        place[sequence[stage] - 2 * stage * t_count] = np.arange(2 * t_count)
        for way in (0, 1):
            transfers, needed = _arrivals(n, stage, way)
            if not len(transfers):
                continue
            consumers = (2 * stage + way) * t_count + needed
            arcs.append((consumers, transfers))
            window = windows[(stage - 1) % s_count if way == 0 else stage]
            places = place[way * t_count + needed[:-window]]  # taking one posts the receive a window further
            later = transfers[window:]
            known = places > 0
            arcs.append((later[known], sequence[stage][places[known] - 1]))
            settle = left_before[stage][places]
            arcs.append((later[settle >= 0], settle[settle >= 0]))
    turned = np.flatnonzero(n.chunk == 0)  # backward turns of the last chunk come after its own forward pass
    forwards = np.array([n.turn_of[m, n.chunks - 1] for m in n.micro_batch[turned].tolist()])
    last = 2 * (s_count - 1) * t_count
    arcs.append((last + t_count + turned, last + forwards))
    return arcs, moved.ravel()


def _leaves(n: Numbers, stage: int, way: int) -> np.ndarray:
    """Which turns' results go over an edge, (turns,)."""
    if n.stages == 1:
        return np.zeros(n.turns, dtype=bool)
    if stage != (n.stages - 1 if way == 0 else 0):
        return np.ones(n.turns, dtype=bool)
    return np.asarray(n.chunk_of(way) != (n.chunks - 1 if way == 0 else 0))


def _arrivals(n: Numbers, stage: int, way: int) -> tuple[np.ndarray, np.ndarray]:
    """(transfers that come to `stage`, the turns that need them), in order."""
    source = (stage - 1 if way == 0 else stage + 1) % n.stages
    leaves = _leaves(n, source, way)
    sent = np.arange(n.turns)[leaves]
    around = source == (n.stages - 1 if way == 0 else 0)  # over the edge that closes the ring: the next chunk's turn
    return n.transfers + (2 * source + way) * n.turns + sent, sent + (n.order.group if around else 0)


def _levels(count: int, arcs: Arcs, column: np.ndarray) -> Graph | None:
    """Sort nodes by the longest way to them; None if two wait for each other."""
    waits, before = (np.concatenate(x) for x in zip(*arcs, strict=True))
    by_source = np.argsort(before, kind="stable")
    targets = waits[by_source]
    starts = np.searchsorted(before[by_source], np.arange(count + 1))
    reached, begins = targets.tolist(), starts.tolist()  # levels are narrow: lists are quicker than an array for each
    left, steps = np.bincount(waits, minlength=count).tolist(), [0] * count
    frontier, depth, seen = [node for node in range(count) if not left[node]], 0, 0
    while frontier:
        seen += len(frontier)
        depth += 1
        free = []
        for node in frontier:
            for target in reached[begins[node] : begins[node + 1]]:
                left[target] -= 1
                if not left[target]:
                    steps[target] = depth
                    free.append(target)
        frontier = free
    if seen < count:
        return None
    level = np.array(steps)
    ranked = np.argsort(level, kind="stable")
    place = np.empty(count, dtype=int)
    place[ranked] = np.arange(count)
    order = np.argsort(place[waits], kind="stable")
    waits, before = place[waits][order], place[before][order]
    bounds = np.searchsorted(level[ranked], np.arange(1, depth + 1))
    at = np.searchsorted(waits, np.arange(count + 1))
    levels = []
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        levels.append((first, end, before[at[first] : at[end]], at[first:end] - at[first]))
    return Graph(ranked, column[ranked], tuple(levels))


@lru_cache(maxsize=128)
def graph(order: Order, shared: tuple[bool, ...] = ()) -> Graph:
    """The graph of a schedule. `shared`: per stage, do its sends up and down leave by one NIC, one after the other?
    Raises PlanError if the schedule would wait for itself for ever."""
    numbers = Numbers(order)
    for nic in (shared or (False,) * order.stages, (False,) * order.stages):
        arcs, moved = (_waiting if order.schedule.megatron else _background)(numbers, nic)
        first = np.zeros(numbers.count, dtype=bool)
        first[[numbers.node(s, Pass(True, 0, c)) for s in range(order.stages) for c in range(order.chunks)]] = True
        before_first: dict[int, list[int]] = {}
        for waits, before in arcs:
            for i in np.flatnonzero(first[waits]).tolist():
                before_first.setdefault(int(waits[i]), []).append(int(before[i]))
        made = _levels(numbers.count, [*arcs, *_around(numbers, before_first)], numbers.columns(moved))
        if made is not None:
            return made
    raise PlanError(
        f"with in_flight {list(order.in_flight)} the stages would wait for each other for ever",
        where="schedule",
        hint="hold more passes in flight",
    )
