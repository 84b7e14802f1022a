"""The choice of layers per stage and of passes in flight.

Layers are exact (shortest simulated step), proportional (as in the Holmes paper) or uniform. The search and the cost
model hold layers in arrays of shape (1, S, C): S stages of C chunks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from holmes_hpc.planning.cost.layout import Layout, memoised
from holmes_hpc.planning.cost.memory import memory, stage_capacity
from holmes_hpc.planning.cost.network_times import edge_times, transfers_s
from holmes_hpc.planning.cost.timing import step_s, timing
from holmes_hpc.planning.schedule.graph import Durations
from holmes_hpc.planning.schedule.kinds import schedule_kind

BISECTION_STEPS = 24
MANY_STAGES = 10  # above this number, layers move only from the busiest stages


def chunk_layers(counts: Sequence[int] | np.ndarray, chunks: int) -> np.ndarray:
    """Split each stage's layers, `counts` (S,), into chunks that differ by one at most. The larger chunks come last,
    but in the last stage they come first, because its last chunk also holds the head."""
    counts = np.asarray(counts)
    base, remainder = counts[:, None] // chunks, counts[:, None] % chunks
    is_larger = np.arange(chunks) >= chunks - remainder
    is_larger[-1] = np.arange(chunks) < remainder[-1]
    return np.asarray(base + is_larger)[None]


def uniform_layers(layout: Layout) -> np.ndarray:
    """Return layers as equal as possible; the first stages get the remainder. The first one has all dense layers."""
    layers, others = layout.model.layers, layout.parallel.pp - 1
    first = min(layers, max(_least_of_first_stage(layout), -(-layers // (others + 1))))
    base, remainder = divmod(layers - first, max(1, others))
    counts = [first, *(base + (s < remainder) for s in range(others))]
    return chunk_layers(counts, layout.parallel.virtual_stages)


def proportional_layers(layout: Layout) -> np.ndarray:
    """Return layers by the Holmes paper's self-adapting partition: stage i gets floor(N * S_i / sum of S) of N layers.
    The last stage gets the remaining layers, which may be too few. S_i is one over the predicted time of the compute
    and data-parallel traffic of stage i in a step with uniform layers."""
    layers, chunks = layout.model.layers, layout.parallel.virtual_stages
    times = timing(layout, uniform_layers(layout))
    d = times.replicas[0]
    busy_s = (d.compute().sum(axis=2) * layout.order.micro_batches + d.reduce.sum(axis=2))[0]
    busy_s += d.ready[0].max(axis=1) + times.gather[0]
    speed = 1 / busy_s
    counts = [
        max(least, int(layers * s / speed.sum()))
        for least, s in zip(least_layers(layout)[:-1].tolist(), speed[:-1], strict=True)
    ]
    return chunk_layers([*counts, layers - sum(counts)], chunks)


def _front_loaded(
    busy_s: np.ndarray, delay_s: np.ndarray, transfers_s: Sequence[float], max_s: float, least: Sequence[int]
) -> np.ndarray:
    """Return layers for stages that run far ahead of later stages: those of the shortest step in which each stage can
    compute its layers between the arrival of its first micro-batch and the time when its last gradients must leave.
    `busy_s`: seconds of a step in which each stage is busy with 1, 2, … layers; `delay_s`: seconds by which it then
    delays later stages, (layers, S) each. `transfers_s`: of the transfers to each stage and back. `max_s`: a step time
    that suffices. `least`: the fewest layers of each stage."""
    stages = list(zip(busy_s.T.tolist(), delay_s.T.tolist(), transfers_s, least, strict=True))

    def assign(limit_s: float) -> list[int]:
        counts, elapsed = list[int](), 0.0
        for busy, delay, transfer_s, fewest in stages:
            elapsed += transfer_s
            counts.append(max(fewest, bisect_right(busy, limit_s - elapsed)))
            elapsed += delay[counts[-1] - 1]
        return counts

    layers, low, high = len(busy_s), 0.0, max_s
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(assign(middle)) >= layers else (middle, high)
    counts = assign(high)
    for s in reversed(range(len(counts))):  # several stages may have gained a layer at the same limit
        counts[s] -= min(counts[s] - 1, sum(counts) - layers)
    return chunk_layers(counts, 1)


class LayerSplitter:
    """Divides a model's layers among the stages of one layout.

    `max_layers`: the most layers of each stage that fit in memory, (S,). `can_fit`: whether all layers fit.
    """

    def __init__(self, layout: Layout, max_gib: float | None = None) -> None:
        self.layers, self.chunks, self.pp = layout.model.layers, layout.parallel.virtual_stages, layout.parallel.pp
        self.micro_batches = layout.order.micro_batches
        self.max_layers = _max_layers(layout, max_gib)
        self.least = least_layers(layout)
        self.can_fit = bool(
            (self.max_layers >= self.least).all()
            and self.max_layers.sum() >= self.layers
            and self.least.sum() <= self.layers
        )
        self._layout = layout

    @cached_property
    def _times(self) -> tuple[Durations, ...]:
        """The durations with one and with two layers per chunk, which give the cost of a further layer."""
        return timing(self._layout, _one_and_two_layers(self._layout)).replicas

    def balanced(self) -> tuple[np.ndarray, bool]:
        """Return (layers that minimize the busy time of the busiest stage; whether a stage has as many layers as fit).
        Sorting gives the same result as adding each layer in turn to the stage that is then the least busy."""
        counts = self.least.copy()
        with_one, with_two = _busy_s(self._times, self.micro_batches)
        per_layer = (with_two - with_one) / self.chunks
        fixed = with_one - per_layer * _one_and_two_layers(self._layout)[0].sum(axis=1)  # embedding and head
        unassigned = int(self.layers - counts.sum())
        next_counts = counts[:, None] + 1 + np.arange(unassigned)
        busy_s = np.where(
            next_counts <= self.max_layers[:, None], fixed[:, None] + per_layer[:, None] * next_counts, np.inf
        )
        least_busy = np.argsort(busy_s, axis=None, kind="stable")[:unassigned]
        counts += np.bincount(least_busy // max(1, unassigned), minlength=self.pp)
        return chunk_layers(counts, self.chunks), bool((counts >= self.max_layers).any())

    def front_loaded(self) -> np.ndarray:
        """Return layers for stages that run far ahead of later stages (:func:`_front_loaded`)."""
        delay, busy, transfer = (np.zeros((2, self.pp)) for _ in range(3))  # rows: one layer, two layers per stage
        for d in self._times:
            passes = d.compute()[:, :, 0]
            delay = np.maximum(delay, passes + d.ready[:, :, 0])  # seconds by which a stage delays later ones
            busy = np.maximum(busy, self.micro_batches * passes + d.ready[:, :, 0] + d.tail[:, :, 0])
            transfer[0, 1:] = np.maximum(transfer[0, 1:], d.down[0, :-1] + d.up[0, 1:])
        counts = np.arange(1, self.layers + 1)[:, None]
        busy_s, delay_s = (one + (counts - self.least) * (two - one) for one, two in (busy, delay))
        busy_s[counts > self.max_layers] = np.inf
        max_s = float(self.layers * (delay.sum() + busy.sum()) + transfer.sum())
        return _front_loaded(busy_s, delay_s, transfer[0].tolist(), max_s, self.least.tolist())


def _busy_s(times: tuple[Durations, ...], micro_batches: int) -> np.ndarray:
    """Return the seconds of a step in which each stage computes or reduces gradients, (layer splits, S).
    The last backward pass is not counted, because the reduction overlaps with it."""
    busy_s = [(d.compute() * micro_batches - d.backward + d.reduce).sum(axis=2) for d in times]
    return np.asarray(np.max(busy_s, axis=0))


def idle_share(layout: Layout, layers: np.ndarray, seconds: float) -> float:
    """Return the share of a step of `seconds` in which the ranks do not compute, on average over all stages."""
    durations = timing(layout, layers).replicas
    work = np.mean([d.compute().sum(axis=2).mean() for d in durations]) * layout.order.micro_batches
    return float(1 - work / seconds)


def _one_and_two_layers(layout: Layout) -> np.ndarray:
    """Return two layer splits, (2, S, C): one and two layers in every chunk. First dense layers come on top."""
    shape = layout.parallel.pp, layout.parallel.virtual_stages
    splits = np.stack([np.full(shape, 1), np.full(shape, 2)])
    splits[:, 0, 0] += layout.model.experts.first_dense
    return splits


def least_layers(layout: Layout) -> np.ndarray:
    """Return the fewest layers of each stage, (S,)."""
    chunks = layout.parallel.virtual_stages
    least = np.full(layout.parallel.pp, chunks)
    least[0] = max(chunks, _least_of_first_stage(layout))
    return least


def _least_of_first_stage(layout: Layout) -> int:
    """Return the fewest layers of the first stage: its first chunk holds all dense layers before those with experts,
    and the stage has at least one with experts."""
    first_dense = layout.model.experts.first_dense
    return max(first_dense + 1, first_dense * layout.parallel.virtual_stages)


def _max_layers(layout: Layout, max_gib: float | None) -> np.ndarray:
    """Return the most layers of each stage that fit in memory, (S,). Memory grows linearly with layers per chunk."""
    chunks = layout.parallel.virtual_stages
    splits = _one_and_two_layers(layout)
    with_one, with_two = memory(layout, splits).total()
    per_layer = (with_two - with_one) / chunks
    available = stage_capacity(layout, max_gib) - (with_one - per_layer * splits[0].sum(axis=1))
    return np.floor(np.minimum(available / per_layer, layout.model.layers + 1)).astype(int)


def exact_layers(layout: Layout, start: np.ndarray, max_gib: float | None = None, max_moves: int = 50) -> np.ndarray:
    """Return layers after moves of single layers between stages, beginning with the layers `start`.
    Moves continue as long as the simulated step gets shorter and the layers fit, but at most `max_moves` times."""
    if layout.parallel.pp == 1:
        return start
    best, max_layers = start, _max_layers(layout, max_gib)
    best_s = float(step_s(layout, best)[0])
    for _ in range(max_moves):
        moves = _moves(layout, best, max_layers)
        if not len(moves):
            break
        seconds = step_s(layout, moves)
        fastest = int(np.argmin(seconds))
        if seconds[fastest] >= best_s * (1 - 1e-9):
            break
        best_s, best = float(seconds[fastest]), moves[fastest : fastest + 1]
    return best


def _moves(layout: Layout, layers: np.ndarray, max_layers: np.ndarray) -> np.ndarray:
    """Return the layers after each possible move of one layer to another stage, (moves, S, C)."""
    counts, chunks = layers[0].sum(axis=1), layout.parallel.virtual_stages
    sources: Sequence[int] = range(len(counts))
    least = least_layers(layout)
    if len(counts) > MANY_STAGES:
        busy_s = _busy_s(timing(layout, layers).replicas, layout.order.micro_batches)[0]
        sources = sorted(np.argsort(-busy_s, kind="stable")[:2].tolist())
    one_layer = np.eye(len(counts), dtype=layers.dtype)
    moves = [
        chunk_layers(counts - one_layer[source] + one_layer[target], chunks)
        for source in sources
        for target in range(len(counts))
        if source != target and counts[source] > least[source] and counts[target] < max_layers[target]
    ]
    return np.concatenate([np.empty((0, len(counts), chunks), layers.dtype), *moves])


def may_front_load(layout: Layout) -> bool:
    """Return whether stages may run farther ahead of later stages than is needed to hide transfers."""
    return (
        schedule_kind(layout.schedule.kind).deepens and layout.parallel.virtual_stages == 1 and layout.parallel.pp > 1
    )


def deepen(layout: Layout, extra: list[int]) -> Layout:
    """Return the layout with more passes in flight: stage s runs `extra[s]` passes further ahead of stage s + 1."""
    p, micro_batches = layout.parallel, layout.order.micro_batches
    base = layout.order.schedule.in_flight(p.pp, micro_batches, p.virtual_stages)
    depths = tuple(min(micro_batches * p.virtual_stages, b + sum(extra[s:])) for s, b in enumerate(base))
    order = replace(layout.order, in_flight=depths)  # `Order.depths` applies the limits of the order
    in_flight = tuple(order.depths[s] for s in range(p.pp))
    return layout.with_settings(replace(layout.schedule, in_flight=in_flight))


def extra_depth(layout: Layout, layers: np.ndarray) -> list[int]:
    """Return the values of `extra` for :func:`deepen` that hide the transfers of each stage to the next stage and back.
    With virtual stages they are zero, because the wrap-around edge makes every stage wait for the last stage."""
    p = layout.parallel
    extra = np.zeros(p.pp, dtype=int)
    for replica, d in enumerate(timing(layout, layers).replicas if p.virtual_stages == 1 else ()):
        slowest_s = float(d.compute()[0].sum(axis=1).max())
        down, up = transfers_s(layout, replica)
        extra[:-1] = np.maximum(extra[:-1], np.ceil((down[:-1] + up[1:]) / slowest_s - 1e-3))
    return [int(passes) for passes in extra]


# -- with per-stage TP/DP ----------------------------------------------------------------------------------------------


def round_trips_s(layout: Layout) -> list[float]:
    """Return, for each edge, the sum of the seconds of one stage transfer down and one stage transfer up."""
    times = edge_times(layout)
    return [sum(down) + sum(up) for down, up in zip(times.down, times.up, strict=True)]


@memoised("bucket_bytes", "split_schedule")
def busy_seconds(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return (busy seconds of each stage in a step, seconds by which each stage delays the next), (layers, S) each. Row
    n - 1 is for n layers in the stage, on its replica with most micro-batches."""
    order, d = layout.order, timing(layout, layout.all_layers).replicas[0]
    shares = np.array([len(order.micro_batches_of(order.row(s, 0))) for s in range(order.stages)])
    forward, backward, ready, tail = (p[:, :, 0] for p in (d.forward, d.backward + d.weight, d.ready, d.tail))
    return shares * (forward + backward) + ready + tail, forward + backward + ready


def balanced_layers(layout: Layout, max_gib: float | None) -> np.ndarray | None:
    """Return the layers that fit in memory and minimize the busy time of the busiest stage; None if none fit. Each
    layer in turn goes to the stage with the shortest busy time after the addition."""
    most, counts = _max_layers(layout, max_gib), [1] * layout.parallel.pp
    if most.min() < 1 or most.sum() < layout.model.layers:
        return None
    busy_s = busy_seconds(layout)[0]
    for _ in range(layout.model.layers - len(counts)):
        free = [s for s, count in enumerate(counts) if count < most[s]]
        counts[min(free, key=lambda s: busy_s[counts[s], s])] += 1  # with one layer more
    return chunk_layers(counts, 1)


def front_loaded_layers(layout: Layout) -> np.ndarray:
    """Return layers for stages that run far ahead of later stages (:func:`_front_loaded`)."""
    busy_s, delay_s = busy_seconds(layout)
    transfers_s = [0.0, *round_trips_s(layout)]
    max_s = float(busy_s[-1].sum() + delay_s[-1].sum() + sum(transfers_s))
    return _front_loaded(busy_s, delay_s, transfers_s, max_s, [1] * layout.parallel.pp)
