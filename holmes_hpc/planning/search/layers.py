"""How many layers each stage gets: exactly (shortest simulated step), by the paper's rule, or all the same; and how
many passes it holds in flight under a schedule that may run deeper.

Everywhere in the search and the cost model layers are arrays of shape (1, S, C): S stages, C chunks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np

from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import memory, stage_capacity
from holmes_hpc.planning.cost.timing import step_s, timing
from holmes_hpc.planning.cost.traffic import transfers_s
from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.schedule.simulation import Durations

STEPS = 24  # of a bisection
WIDE = 10  # stages up to which every move of one layer is tried; beyond, only those from the busiest stages


def chunked(counts: Sequence[int] | np.ndarray, chunks: int) -> np.ndarray:
    """Layers from their `counts` per stage: each stage's cut into chunks that differ by one at most, the larger ones
    last but in the last stage, whose last chunk has the head."""
    counts = np.asarray(counts)
    base, over = counts[:, None] // chunks, counts[:, None] % chunks
    is_larger = np.arange(chunks) >= chunks - over
    is_larger[-1] = np.arange(chunks) < over[-1]
    return np.asarray(base + is_larger)[None]


def uniform(layout: Layout) -> np.ndarray:
    """As equal as can be; the first stages get one more where it does not divide."""
    stages = layout.parallel.pp
    base, over = divmod(layout.model.layers, stages)
    return chunked([base + (s < over) for s in range(stages)], layout.parallel.virtual_stages)


def proportional(layout: Layout) -> np.ndarray:
    """The paper's self-adapting partition: stage i gets floor(N * S_i / sum(S)) of N layers, the last one the rest
    (which may be too few). S_i: speed of its fabric, here one over the predicted seconds that an equal share of the
    layers keeps it busy: computing, and its data-parallel traffic."""
    layers, chunks = layout.model.layers, layout.parallel.virtual_stages
    times = timing(layout, uniform(layout))
    d = times.replicas[0]
    busy = ((d.forward + d.backward).sum(axis=2) * layout.order.micro_batches + d.reduce.sum(axis=2))[0]
    busy += d.ready[0].max(axis=1) + times.gather[0]
    speed = 1 / busy
    made = [max(chunks, int(layers * s / speed.sum())) for s in speed[:-1]]
    return chunked([*made, layers - sum(made)], chunks)


def all_dealt(dealt: Callable[[float], list[int]], layers: int, longest: float) -> list[int]:
    """Return what `dealt` deals out to each stage under the least limit, of `longest` at most, at which that is all
    `layers`."""
    low, high = 0.0, longest
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(dealt(middle)) >= layers else (middle, high)
    counts = dealt(high)
    for s in reversed(range(len(counts))):  # where several stages had room for one more at the same limit
        counts[s] -= min(counts[s] - 1, sum(counts) - layers)
    return counts


class Stages:
    """What a layer more means for each stage of a layout: it is worked out once, for all ways to divide the layers.
    `most`: layers that fit, (S,)."""

    def __init__(self, layout: Layout, most_gib: float | None = None) -> None:
        self.layers, self.chunks, self.pp = layout.model.layers, layout.parallel.virtual_stages, layout.parallel.pp
        self.micro_batches = layout.order.micro_batches
        self.most = _most(layout, most_gib)
        self.fit = bool(
            (self.most >= self.chunks).all() and self.most.sum() >= self.layers and self.pp * self.chunks <= self.layers
        )
        self._layout = layout

    @cached_property
    def _times(self) -> tuple[Durations, ...]:
        return timing(self._layout, _one_and_two(self._layout)).replicas

    def balanced(self) -> tuple[np.ndarray, bool]:
        """(the split with the least of the largest (computing + gradient traffic) over stages; whether any stage has as
        many layers as fit). Adding layers one by one where the result is least is optimal for such a maximum."""
        made = np.full(self.pp, self.chunks)
        one, two = _busy(self._times, self.micro_batches)
        each = (two - one) / self.chunks  # seconds of a further layer; what is left: embedding, head
        fixed = one - each * self.chunks
        left = int(self.layers - made.sum())
        more = made[:, None] + 1 + np.arange(left)  # of a stage, one after the other
        after = np.where(more <= self.most[:, None], fixed[:, None] + each[:, None] * more, np.inf).ravel()
        made += np.bincount(np.argsort(after, kind="stable")[:left] // max(1, left), minlength=self.pp)
        return chunked(made, self.chunks), bool((made >= self.most).any())

    def early(self) -> np.ndarray:
        """The split for stages that run far ahead of those below them: the later a micro-batch comes to a stage, the
        fewer layers it has. For a limit of the step, stage after stage gets as many layers as it can compute between
        the first micro-batch's coming and the last gradients' way up; the least limit counts that deals out all."""
        late, busy, moved = (np.zeros((2, self.pp)) for _ in range(3))
        for d in self._times:
            passes = d.forward[:, :, 0] + d.backward[:, :, 0]
            late = np.maximum(late, passes + d.ready[:, :, 0])  # what a stage makes those below it later
            busy = np.maximum(busy, self.micro_batches * passes + d.ready[:, :, 0] + d.tail[:, :, 0])
            moved[0, 1:] = np.maximum(moved[0, 1:], d.down[0, :-1] + d.up[0, 1:])
        rows = list(
            zip(
                late[0].tolist(),
                (late[1] - late[0]).tolist(),
                busy[0].tolist(),
                (busy[1] - busy[0]).tolist(),
                moved[0].tolist(),
                self.most.tolist(),
                strict=True,
            )
        )

        def dealt(limit: float) -> list[int]:
            made, gone = list[int](), 0.0
            for late_by, late_each, busy_by, busy_each, moved_by, most in rows:
                gone += moved_by
                made.append(min(most, 1 + int(max(0.0, limit - gone - busy_by) / busy_each)))
                gone += late_by + late_each * (made[-1] - 1)
            return made

        longest = float(self.layers * (late.sum() + busy.sum()) + moved.sum())
        return chunked(all_dealt(dealt, self.layers, longest), 1)


def _busy(times: tuple[Durations, ...], m: int) -> np.ndarray:
    """Seconds that each stage is busy in a step, and that its gradients take beyond their last backward pass."""
    busy = [(d.forward * m + d.backward * (m - 1) + d.reduce).sum(axis=2) for d in times]
    return np.asarray(np.max(busy, axis=0))


def idle_share(layout: Layout, layers: np.ndarray, seconds: float) -> float:
    """Return the share of a step of `seconds` in which a rank does not compute, on average over all stages."""
    durations = timing(layout, layers).replicas
    work = np.mean([(d.forward + d.backward).sum(axis=2).mean() for d in durations]) * layout.order.micro_batches
    return float(1 - work / seconds)


def _one_and_two(layout: Layout) -> np.ndarray:
    """One, and two, layers in every chunk, (2, S, C)."""
    shape = layout.parallel.pp, layout.parallel.virtual_stages
    return np.stack([np.full(shape, 1), np.full(shape, 2)])


def _most(layout: Layout, most_gib: float | None) -> np.ndarray:
    """Layers that fit on each stage (memory grows linearly with them, in steps of the largest chunk)."""
    chunks = layout.parallel.virtual_stages
    one, two = memory(layout, _one_and_two(layout)).total()
    each = (two - one) / chunks
    left = stage_capacity(layout, most_gib) - (one - each * chunks)
    return np.floor(left / each).astype(int)


def exact(layout: Layout, start: np.ndarray, most_gib: float | None = None, tries: int = 50) -> np.ndarray:
    """Move single layers between stages as long as the simulated step gets shorter, from `start`, within memory."""
    best = start
    if layout.parallel.pp == 1:
        return best
    most = _most(layout, most_gib)
    least = float(step_s(layout, best)[0])
    for _ in range(tries):
        moves = _moves(layout, best, most)
        if not len(moves):
            break
        times = step_s(layout, moves)
        at = int(np.argmin(times))
        if times[at] >= least * (1 - 1e-9):
            break
        least, best = float(times[at]), moves[at : at + 1]
    return best


def _moves(layout: Layout, layers: np.ndarray, most: np.ndarray) -> np.ndarray:
    """All ways to move one layer to another stage, (ways, S, C)."""
    counts, chunks = layers[0].sum(axis=1), layout.parallel.virtual_stages
    sources: Sequence[int] = range(len(counts))
    if len(counts) > WIDE:
        busy = _busy(timing(layout, layers).replicas, layout.order.micro_batches)[0]
        sources = sorted(np.argsort(-busy, kind="stable")[:2].tolist())
    one = np.eye(len(counts), dtype=layers.dtype)
    moves = [
        chunked(counts - one[source] + one[target], chunks)
        for source in sources
        for target in range(len(counts))
        if source != target and counts[source] > chunks and counts[target] < most[target]
    ]
    return np.concatenate([np.empty((0, len(counts), chunks), layers.dtype), *moves])


def may_be_early(layout: Layout) -> bool:
    """Whether stages may run farther ahead of those below them than hides the transfers."""
    return (
        schedule_kind(layout.schedule.kind).deepens and layout.parallel.virtual_stages == 1 and layout.parallel.pp > 1
    )


def deepened(layout: Layout, extra: list[int]) -> Layout:
    """With `extra` passes in flight at each stage beyond one more than the stage below."""
    p, total = layout.parallel, layout.order.micro_batches
    base = layout.order.schedule.in_flight(p.pp, total, p.virtual_stages)
    depths = tuple(min(total * p.virtual_stages, b + sum(extra[s:])) for s, b in enumerate(base))
    order = replace(layout.order, in_flight=depths)
    return layout.with_settings(schedule_of(order.kind, tuple(order.depths[s] for s in range(p.pp))))


def extra_depth(layout: Layout, layers: np.ndarray) -> list[int]:
    """Per stage, passes in flight beyond one more than the stage below that hide the transfer to it. None for virtual
    stages: one further ahead of the last stage would wait for it all the longer, over the edge that closes the ring."""
    p = layout.parallel
    extra = np.zeros(p.pp, dtype=int)
    if p.virtual_stages > 1:
        return [0] * p.pp
    for replica, d in enumerate(timing(layout, layers).replicas):
        longest = float((d.forward + d.backward)[0].sum(axis=1).max())
        down, up = transfers_s(layout, replica)
        hidden = [ceil((a + b) / longest - 1e-3) for a, b in zip(down[:-1], up[1:], strict=True)]
        extra[:-1] = np.maximum(extra[:-1], hidden)
    return [int(e) for e in extra]
