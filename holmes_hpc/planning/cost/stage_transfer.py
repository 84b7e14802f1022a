"""What the slowest transfer between pipeline stages costs a plan, and how much of that its schedule hides."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.kinds import megatrons_own
from holmes_hpc.planning.schedule.simulation import step_seconds


@dataclass(frozen=True)
class StageTransferCost:
    """`stages`: above and below the slowest edge; `transport`: its. `one_way_s`: one transfer, the mean of down and up.
    `ratio`: that over the longest time a stage computes for a micro-batch. `wire_s`: all transfers of a step over this
    edge, both ways. `exposed_s`: what the transfers make the step longer; `waiting_s`: what they would under
    Megatron-Core's own schedule."""

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


def stage_transfer_cost(plan: Plan, costs: Costs) -> StageTransferCost | None:
    """Of `plan`; None where it has no transfers, or they take no time, or stages of unequal widths: Megatron-Core's own
    schedule, beside which it is held, has none such."""
    p, layers = plan.parallel, layer_array(plan)
    if p.pp == 1 or plan.is_per_stage:
        return None
    layout = Layout.of(plan, costs)
    times = timing(layout, layers)
    replica = int(np.argmax([d.down[0, :-1].max() + d.up[0, 1:].max() for d in times.replicas]))
    d = times.replicas[replica]
    both = d.down[0, :-1] + d.up[0, 1:]
    at = int(np.argmax(both))
    if both[at] <= 0:
        return None
    chunks = p.virtual_stages
    computing = float((d.forward + d.backward)[0].sum(axis=1).max())
    one_way_s = float(both[at]) / 2
    return StageTransferCost(
        (at, at + 1),
        str(layout.edges[replica][at]),
        one_way_s,
        ratio=one_way_s / computing,
        wire_s=float(both[at]) * layout.order.micro_batches * chunks,
        exposed_s=_exposed_s(layout, layers),
        waiting_s=_exposed_s(layout.scheduled(megatrons_own(chunks)), layers),
    )


def _exposed_s(layout: Layout, layers: np.ndarray) -> float:
    """How much longer the step is than with transfers that take no time."""
    times = timing(layout, layers)
    ends = []
    for without in (False, True):
        replicas = [
            replace(d, down=0 * d.down, up=0 * d.up, last_up=d.last_up - d.up) if without else d for d in times.replicas
        ]
        ends.append(
            max(float(step_seconds(layout.order, d, nic)[0]) for d, nic in zip(replicas, times.shared, strict=True))
        )
    return ends[0] - ends[1]
