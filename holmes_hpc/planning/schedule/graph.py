"""The dependencies of a pipeline schedule, as arcs between numbered nodes.

With S stages and C chunks, a stage makes T = micro-batches * C passes in each direction. Its t-th pass in a direction
is its turn t there (a virtual micro-batch of Megatron-LM). The pass of stage s in direction d (0 forward, 1 backward)
at turn t is node (2s + d)*T + t. The stage transfer of its result is node 2*S*T + (2s + d)*T + t. The collectives
follow, from node 4*S*T on: ``ready`` of every stage and chunk, then ``tail``, then ``reduce`` (:class:`Durations`). If
backward passes are split, the weight passes of every stage and turn come last. Nodes are numbers, because a search
builds hundreds of graphs of ten thousand nodes.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import Exchange, Pass, StageTransfer, WeightPass
from holmes_hpc.planning.schedule.megatron_programs import program
from holmes_hpc.planning.schedule.order import Order

SMALL_PASSES = 300  # graphs of fewer forward passes take at most 50 KB, so the cache holds more of them


@dataclass(frozen=True)
class Durations:
    """Durations in seconds, one row per candidate plan, for S stages of C chunks.

    `forward`, `backward`, `weight`: one pass, (plans, S, C); `weight` only if backward passes are split. `down`, `up`:
    one stage transfer from stage s to s+1 and to s-1, with wrap-around, (plans, S). `last_up`: `up` of the last
    micro-batch, which competes with gradient traffic, so it is never shorter than `up`. `ready`: the part of the
    parameter gather that delays a chunk's first pass. `reduce`: the reduction of a chunk's gradients. `tail`: the part
    of `reduce` that at least follows the chunk's last backward or weight pass. These three are (plans, S, C).
    """

    forward: np.ndarray
    backward: np.ndarray
    down: np.ndarray
    up: np.ndarray
    last_up: np.ndarray
    ready: np.ndarray
    reduce: np.ndarray
    tail: np.ndarray
    weight: np.ndarray = field(default_factory=lambda: np.zeros(()))  # no weight passes

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", np.broadcast_to(self.weight, self.forward.shape))

    def compute(self) -> np.ndarray:
        """Return the seconds of all passes of a micro-batch, (plans, S, C)."""
        return self.forward + self.backward + self.weight

    def table(self) -> np.ndarray:
        """Return all durations side by side, in the columns of :class:`NodeNumbers`, and a column of zeros."""
        plans = len(self.forward)
        parts = (part.reshape(plans, -1) for part in vars(self).values())
        return np.concatenate([*parts, np.zeros((plans, 1))], axis=1)


@dataclass(frozen=True)
class Graph:
    """Nodes sorted into levels: a node depends only on nodes of earlier levels.

    An index is a position in this sorted order. `node`: the node number at each index. `column`: its column in the
    table of durations. `levels`: for each level but the first, (first index, end index, indices of its nodes'
    dependencies, position of each node's first dependency among these).
    """

    node: np.ndarray
    column: np.ndarray
    levels: tuple[tuple[int, int, np.ndarray, np.ndarray], ...]

    def end_times(self, table: np.ndarray) -> np.ndarray:
        """Return the end time of each node, (plans, nodes), from a table of durations, (plans, columns)."""
        ends = table[0, self.column] if len(table) == 1 else table.T[self.column]  # one plan needs no second axis
        for first, end, dependencies, starts in self.levels:  # a node starts when its last dependency ends
            ends[first:end] += np.maximum.reduceat(ends[dependencies], starts)
        return ends[None] if len(table) == 1 else ends.T


class NodeNumbers:
    """The node numbers and columns of an order's graph.

    `transfers`, `collectives`, `weights`: the node number of the first stage transfer, collective and weight pass.
    `micro_batch`: the micro-batch of each turn, (T,). `turn_of`: {(micro-batch, chunk) of a forward pass: its turn}.
    `chunk_of`: by direction, the chunk of each turn, (T,). Backward passes go through the chunks in reverse order.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.stages, self.chunks = order.stages, order.chunks
        self.turns = order.micro_batches * order.chunks
        self.transfers = 2 * self.stages * self.turns
        self.collectives = 2 * self.transfers  # ready, then tail, then reduce
        self.weights = self.collectives + 3 * self.stages * self.chunks
        self.count = self.weights + (self.stages * self.turns if order.schedule.splits else 0)
        turns = order.turns()
        self.micro_batch = np.array([m for m, _ in turns])
        chunk = np.array([c for _, c in turns])
        self.chunk_of = chunk, self.chunks - 1 - chunk
        self.turn_of = {turn: t for t, turn in enumerate(turns)}

    def node(self, stage: int, p: Pass) -> int:
        """Return the node number of a pass of `stage`."""
        chunk = p.chunk if p.forward else self.chunks - 1 - p.chunk
        return (2 * stage + (not p.forward)) * self.turns + self.turn_of[p.micro_batch, chunk]

    def weight(self, stage: int, p: WeightPass) -> int:
        """Return the node number of a weight pass of `stage`."""
        return self.weights + stage * self.turns + self.turn_of[p.micro_batch, p.chunk]

    def transfer(self, transfer: StageTransfer) -> int:
        """Return the node number of a stage transfer."""
        return self.transfers + self.node(transfer.source, transfer.source_pass)

    def columns(self, exists: np.ndarray) -> np.ndarray:
        """Return the column of each node in :meth:`Durations.table`.
        `exists`: for each transfer, whether the schedule has it. Otherwise it gets the last column, which is zero."""
        per_stage, per_chunk = self.stages, self.stages * self.chunks
        names = [f.name for f in fields(Durations)]
        widths = [per_stage if name in ("down", "up", "last_up") else per_chunk for name in names]
        *starts, zeros = accumulate(widths, initial=0)
        start_of = dict(zip(names, starts, strict=True))
        column = np.full(self.count, zeros)
        stage = np.arange(self.stages)[:, None]
        passes = column[: self.transfers].reshape(self.stages, 2, self.turns)
        passes[:, 0] = start_of["forward"] + stage * self.chunks + self.chunk_of[0]
        passes[:, 1] = start_of["backward"] + stage * self.chunks + self.chunk_of[1]
        transfers = column[self.transfers : self.collectives].reshape(passes.shape)
        transfers[:, 0] = start_of["down"] + stage
        is_last = self.micro_batch == self.order.micro_batches - 1
        transfers[:, 1] = np.where(is_last, start_of["last_up"], start_of["up"]) + stage
        transfers[~exists.reshape(passes.shape)] = zeros
        collectives = column[self.collectives : self.weights].reshape(3, self.stages, self.chunks)
        for row, part in zip(collectives, ("ready", "tail", "reduce"), strict=True):
            row[:] = start_of[part] + np.arange(per_chunk).reshape(row.shape)
        collectives[2, :, -1] = zeros  # no reduction precedes that of the last chunk: its tail alone sets its end
        column[self.weights :] = start_of["weight"] + np.arange(self.count - self.weights) // self.turns
        return column

    def describe(self, node: int) -> dict[str, Any]:
        """Return {stage, kind, chunk, micro_batch}; kind: forward, backward, weight, send, param_sync or grad_sync."""
        if node >= self.weights:
            stage, turn = divmod(node - self.weights, self.turns)
            return {"stage": stage, "kind": "weight", "chunk": 0, "micro_batch": int(self.micro_batch[turn])}
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
            "chunk": int(self.chunk_of[direction][turn]),
            "micro_batch": int(self.micro_batch[turn]),
        }


Arcs = list[tuple[np.ndarray, np.ndarray]]  # arrays of (waiting nodes, their dependencies)


def _collective_arcs(numbers: NodeNumbers, before_first: dict[int, list[int]]) -> Arcs:
    """Return the arcs of parameter gathers, which precede their chunk's first forward pass, and of gradient reductions,
    which follow its last backward pass and the reductions of later chunks. `before_first`: {first forward pass of a
    chunk: its other dependencies}, which the chunk's gather has, too."""
    n, last_micro_batch = numbers, numbers.order.micro_batches - 1
    arcs: list[tuple[int, int]] = []
    for stage in range(n.stages):
        earlier_reductions: list[int] = []
        for chunk in reversed(range(n.chunks)):
            ready, tail, reduce = (n.collectives + (part * n.stages + stage) * n.chunks + chunk for part in range(3))
            first_pass = n.node(stage, Pass(True, 0, chunk))
            arcs += [(ready, dependency) for dependency in before_first.get(first_pass, ())]
            last_pass = n.node(stage, Pass(False, last_micro_batch, chunk))
            if n.order.schedule.splits:
                last_pass = n.weight(stage, WeightPass(last_micro_batch, chunk))
            arcs += [(first_pass, ready), (tail, last_pass)]
            arcs += [(reduce, reduction) for reduction in earlier_reductions]
            earlier_reductions = [tail, reduce] if earlier_reductions else [tail]
    waiting, dependency = np.transpose(arcs)
    return [(waiting, dependency)]


def _blocking_arcs(numbers: NodeNumbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Return (the arcs of Megatron-Core's schedules, whether each transfer exists). A transfer starts when both stages
    have reached it, and the sender's previous transfer in the same direction is complete."""
    n, arcs = numbers, list[tuple[int, int]]()
    exists = np.zeros(n.transfers, dtype=bool)
    for stage in range(n.stages):
        awaited: list[int] = []  # nodes that must end before the stage continues
        previous_send: dict[bool, int] = {}  # by direction; one NIC for both directions has one entry
        for item in program(n.order, stage):
            if isinstance(item, Exchange):
                sends, receives = [n.transfer(t) for t in item.sends], [n.transfer(t) for t in item.receives]
                arcs += [(transfer, dependency) for transfer in (*sends, *receives) for dependency in awaited]
                for transfer, node in zip(item.sends, sends, strict=True):
                    direction = transfer.source_pass.forward or shared[stage]
                    if direction in previous_send:
                        arcs.append((node, previous_send[direction]))
                    previous_send[direction] = node
                    exists[node - n.transfers] = True
                waits = [*sends, *receives] if item.waits is None else [n.transfer(t) for t in item.waits]
                awaited = waits if item.waits is None else [*awaited, *waits]
            else:
                node = n.node(stage, item)
                arcs += [(node, dependency) for dependency in awaited]
                awaited = [node]
    waiting, dependency = np.array(arcs, dtype=int).reshape(-1, 2).T
    return [(waiting, dependency)], exists


def _background_arcs(numbers: NodeNumbers, shared: tuple[bool, ...]) -> tuple[Arcs, np.ndarray]:
    """Return (the arcs of a schedule that exchanges in the background, whether each transfer exists). After a send, a
    stage waits for the send one window earlier (:meth:`Order.window`). A transfer starts when its tensor is computed,
    its receive is posted, and the edge's previous transfer is complete."""
    n, order, stages = numbers, numbers.order, range(numbers.stages)
    turns, both_turns = np.arange(n.turns), np.arange(2 * n.turns)
    exists = np.zeros((n.stages, 2, n.turns), dtype=bool)
    arcs: Arcs = []
    # Per stage: the node before each pass, in the order of passes; the position of each pass in this order; and the
    # send that must be complete before the pass at each position (-1: none).
    previous_nodes, positions_of, required_sends = [], [], []
    windows = [order.window_below(s) if n.stages > 1 else 1 for s in stages]

    for stage in stages:
        sequence = order.turn_sequence(stage)
        nodes = 2 * stage * n.turns + sequence
        computed, previous = _with_weight_passes(n, stage, nodes)
        previous_nodes.append(previous)
        arcs.append((computed[1:], computed[:-1]))
        required = np.full(2 * n.turns + 1, -1)
        position = np.empty(2 * n.turns, dtype=int)
        position[sequence] = both_turns
        positions_of.append(position)
        sends = []
        for direction in (0, 1):
            is_sent = _is_sent(n, stage, direction)
            exists[stage, direction] = is_sent
            transfers = n.transfers + (2 * stage + direction) * n.turns + turns[is_sent]
            arcs.append((transfers, transfers - n.transfers))
            arcs.append((transfers[1:], transfers[:-1]))
            window = windows[stage if direction == 0 else (stage - 1) % n.stages]
            positions = position[direction * n.turns + turns[is_sent]]
            if len(transfers) > window:
                required[positions[window:] + 1] = transfers[:-window]
            sends.append((positions, transfers))
        required_sends.append(required)
        waits = required[:-1] >= 0
        arcs.append((nodes[waits], required[:-1][waits]))
        if shared[stage]:
            positions, transfers = (np.concatenate(both) for both in zip(*sends, strict=True))
            transfers = transfers[np.argsort(positions)]
            arcs.append((transfers[1:], transfers[:-1]))
    for stage in stages:
        for direction in (0, 1):
            transfers, consuming_turns = _arrivals(n, stage, direction)
            if not len(transfers):
                continue
            arcs.append(((2 * stage + direction) * n.turns + consuming_turns, transfers))
            window = windows[(stage - 1) % n.stages if direction == 0 else stage]
            # When a pass takes its input, the stage posts the receive of the transfer one window later.
            positions = positions_of[stage][direction * n.turns + consuming_turns[:-window]]
            later_transfers = transfers[window:]
            has_predecessor = positions > 0
            arcs.append((later_transfers[has_predecessor], previous_nodes[stage][positions[has_predecessor]]))
            required = required_sends[stage][positions]
            arcs.append((later_transfers[required >= 0], required[required >= 0]))
    # On the last stage, the backward passes of the last chunk follow the forward passes of their micro-batches.
    backward_turns = np.flatnonzero(n.chunk_of[1] == n.chunks - 1)
    forward_turns = np.array([n.turn_of[m, n.chunks - 1] for m in n.micro_batch[backward_turns].tolist()])
    first_node = 2 * (n.stages - 1) * n.turns
    arcs.append((first_node + n.turns + backward_turns, first_node + forward_turns))
    return arcs, exists.ravel()


def _with_weight_passes(n: NodeNumbers, stage: int, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the nodes of passes and weight passes of `stage` in order, the node before each pass of `nodes`)."""
    computed = nodes
    if n.order.schedule.splits:  # without virtual stages: the k-th weight pass belongs to the k-th backward pass
        backward = nodes[nodes >= (2 * stage + 1) * n.turns]
        weights = backward - (2 * stage + 1) * n.turns + n.weights + stage * n.turns
        counts = n.order.weight_passes_before(stage)
        before = np.repeat(np.arange(len(nodes) + 1), [*counts, n.turns - sum(counts)])
        computed = np.insert(nodes, before, weights)
    is_pass = computed < n.weights
    return computed, np.concatenate([computed[:1], computed[:-1]])[is_pass]


def _is_sent(n: NodeNumbers, stage: int, direction: int) -> np.ndarray:
    """Return for each turn of `stage` whether its result goes over an edge, (turns,)."""
    if n.stages == 1:
        return np.zeros(n.turns, dtype=bool)
    if stage != (n.stages - 1 if direction == 0 else 0):
        return np.ones(n.turns, dtype=bool)
    return np.asarray(n.chunk_of[direction] != (n.chunks - 1 if direction == 0 else 0))


def _arrivals(n: NodeNumbers, stage: int, direction: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (nodes of the transfers that `stage` receives, the turns of `stage` that need them), in order."""
    source = (stage - 1 if direction == 0 else stage + 1) % n.stages
    sent_turns = np.flatnonzero(_is_sent(n, source, direction))
    wraps_around = source == (n.stages - 1 if direction == 0 else 0)  # the next chunk's turn needs the tensor
    transfers = n.transfers + (2 * source + direction) * n.turns + sent_turns
    return transfers, sent_turns + (n.order.group if wraps_around else 0)


def _sort_into_levels(count: int, arcs: Arcs, column: np.ndarray) -> Graph | None:
    """Return the graph of `count` nodes, sorted by the longest path to each node; None if it has a cycle."""
    waiting, dependency = (np.concatenate(nodes) for nodes in zip(*arcs, strict=True))
    by_dependency = np.argsort(dependency, kind="stable")
    starts = np.searchsorted(dependency[by_dependency], np.arange(count + 1)).tolist()
    dependents = waiting[by_dependency].tolist()  # levels are narrow: lists are faster than an array for each
    unmet, level_of = np.bincount(waiting, minlength=count).tolist(), [0] * count
    frontier, depth, visited = [node for node in range(count) if not unmet[node]], 0, 0
    while frontier:
        visited += len(frontier)
        depth += 1
        next_frontier = []
        for node in frontier:
            for dependent in dependents[starts[node] : starts[node + 1]]:
                unmet[dependent] -= 1
                if not unmet[dependent]:
                    level_of[dependent] = depth
                    next_frontier.append(dependent)
        frontier = next_frontier
    if visited < count:
        return None
    level = np.array(level_of)
    by_level = np.argsort(level, kind="stable")  # node numbers
    index_of = np.empty(count, dtype=int)
    index_of[by_level] = np.arange(count)
    by_index = np.argsort(index_of[waiting], kind="stable")
    waiting, dependency = index_of[waiting][by_index], index_of[dependency][by_index]
    bounds = np.searchsorted(level[by_level], np.arange(1, depth + 1)).tolist()
    offsets = np.searchsorted(waiting, np.arange(count + 1))
    levels = tuple(
        (first, end, dependency[offsets[first] : offsets[end]], offsets[first:end] - offsets[first])
        for first, end in pairwise(bounds)
    )
    return Graph(by_level, column[by_level], levels)


def graph(order: Order, shared: tuple[bool, ...] = ()) -> Graph:
    """Return the graph of a schedule. PlanError if it would deadlock.
    `shared`: for each stage, whether one NIC carries its sends in both directions, one after the other."""
    is_small = order.stages * order.micro_batches * order.chunks < SMALL_PASSES
    return (_small_graph if is_small else _large_graph)(order, shared)


def _build(order: Order, shared: tuple[bool, ...]) -> Graph:
    """Build the graph that :func:`graph` returns."""
    numbers, separate_nics = NodeNumbers(order), (False,) * order.stages
    for shared_nics in (shared or separate_nics, separate_nics):  # a shared NIC may cause a cycle
        arcs, exists = (_blocking_arcs if order.schedule.megatron else _background_arcs)(numbers, shared_nics)
        is_first = np.zeros(numbers.count, dtype=bool)
        is_first[[numbers.node(s, Pass(True, 0, c)) for s in range(order.stages) for c in range(order.chunks)]] = True
        before_first: dict[int, list[int]] = {}
        waiting, dependency = (np.concatenate(nodes) for nodes in zip(*arcs, strict=True))
        for i in np.flatnonzero(is_first[waiting]).tolist():
            before_first.setdefault(int(waiting[i]), []).append(int(dependency[i]))
        arcs = [(waiting, dependency), *_collective_arcs(numbers, before_first)]
        if (sorted_graph := _sort_into_levels(numbers.count, arcs, numbers.columns(exists))) is not None:
            return sorted_graph
    problem = f"with in_flight {list(order.in_flight)} the stages would wait for each other forever"
    raise PlanError(problem, where="schedule", hint="raise in_flight: hold more passes in flight")


_small_graph, _large_graph = lru_cache(maxsize=2048)(_build), lru_cache(maxsize=128)(_build)
