"""How many passes each stage holds in flight under a schedule that may run deeper."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

import numpy as np

from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.cost.traffic import transfers_s
from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.spec.parts import Schedule

schedule_of = lru_cache(maxsize=4096)(Schedule)  # a search asks for the same ones over and over


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
    return layout.varied(schedule_of(order.kind, tuple(order.depth(s) for s in range(p.pp))))


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
