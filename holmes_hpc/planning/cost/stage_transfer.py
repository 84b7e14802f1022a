"""What the slowest hop between pipeline stages costs a plan, and how much of that its schedule hides."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Setting
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.schedule.orders import in_flight
from holmes_hpc.planning.schedule.simulation import step_seconds
from holmes_hpc.planning.spec.plan import Plan, Schedule


@dataclass(frozen=True)
class HopCost:
    """`stages`: above and below the slowest edge; `transport`: its. `one_way_s`: one hop, the mean of down and up.
    `ratio`: that over the longest time a stage computes for a micro-batch. `wire_s`: all hops of a step over this edge,
    both ways. `exposed_s`: what the hops make the step longer; `waiting_s`: what they would under Megatron-Core's own
    schedule."""

    stages: tuple[int, int]
    transport: str
    one_way_s: float
    ratio: float
    wire_s: float
    exposed_s: float
    waiting_s: float

    @property
    def hidden(self) -> float:
        """Share of the time on the wire that the step does not notice."""
        return max(0.0, 1 - self.exposed_s / self.wire_s)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, `hidden` included."""
        return {**asdict(self), "stages": list(self.stages), "hidden": self.hidden}


def hop_cost(plan: Plan, costs: Costs) -> HopCost | None:
    """Of `plan`; None where it has no hops, or they take no time."""
    p, layers = plan.parallel, layer_array(plan)
    if p.pp == 1:
        return None
    setting = Setting.of(plan, costs)
    times = timing(setting, layers)
    lane = int(np.argmax([d.down[0, :-1].max() + d.up[0, 1:].max() for d in times.lanes]))
    d = times.lanes[lane]
    both = d.down[0, :-1] + d.up[0, 1:]
    at = int(np.argmax(both))
    if both[at] <= 0:
        return None
    chunks = p.virtual_stages
    kind = "1f1b" if chunks == 1 else "interleaved"
    own = replace(setting, schedule=Schedule(kind, in_flight(p.pp, setting.order.micro_batches, chunks)))
    computing = float((d.forward + d.backward)[0].sum(axis=1).max())
    return HopCost((at, at + 1), str(setting.edge(lane, at)), float(both[at]) / 2, float(both[at]) / 2 / computing,
                   float(both[at]) * setting.order.micro_batches * chunks, _exposed_s(setting, layers),
                   _exposed_s(own, layers))


def _exposed_s(setting: Setting, layers: np.ndarray) -> float:
    """How much longer the step is than with hops that take no time."""
    times = timing(setting, layers)
    ends = []
    for without in (False, True):
        lanes = [replace(d, down=0 * d.down, up=0 * d.up, last_up=d.last_up - d.up) if without else d
                 for d in times.lanes]
        ends.append(max(float(step_seconds(setting.order, d, nic)[0])
                        for d, nic in zip(lanes, times.shared, strict=True)))
    return ends[0] - ends[1]
