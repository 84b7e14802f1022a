"""The cost of the slowest stage transfer of a plan, and the share of it that the schedule hides."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.kinds import megatron_kind
from holmes_hpc.planning.schedule.simulation import step_seconds


@dataclass(frozen=True)
class StageTransferCost:
    """The cost of transfers over the slowest edge.
    `stages`: the stages above and below the edge. `one_way_s`: seconds of one transfer, the mean of both directions.
    `ratio`: `one_way_s` over the longest compute time of a stage per micro-batch. `wire_s`: seconds of all transfers of
    a step over this edge, both directions added. `exposed_s`: seconds by which transfers over all edges lengthen the
    step. `waiting_s`: `exposed_s` under Megatron-Core's own schedule."""

    stages: tuple[int, int]
    transport: str
    one_way_s: float
    ratio: float
    wire_s: float
    exposed_s: float
    waiting_s: float

    @property
    def hidden(self) -> float:
        """Share of the time on the wire that overlaps with computing."""
        return max(0.0, 1 - self.exposed_s / self.wire_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, `hidden` included."""
        return {**asdict(self), "stages": list(self.stages), "hidden": self.hidden}


def stage_transfer_cost(plan: Plan, costs: Costs) -> StageTransferCost | None:
    """Return the cost of stage transfers in `plan`. None if they take no time.
    Also None with per-stage TP/DP, which Megatron-Core's own schedule does not support."""
    p, layers = plan.parallel, layer_array(plan)
    if p.pp == 1 or plan.is_per_stage:
        return None
    layout = Layout.of(plan, costs)
    times = timing(layout, layers)
    replica = int(np.argmax([d.down[0, :-1].max() + d.up[0, 1:].max() for d in times.replicas]))
    d = times.replicas[replica]
    round_trips_s = d.down[0, :-1] + d.up[0, 1:]
    edge = int(np.argmax(round_trips_s))
    if round_trips_s[edge] <= 0:
        return None
    chunks = p.virtual_stages
    compute_s = float(d.compute()[0].sum(axis=1).max())
    one_way_s = float(round_trips_s[edge]) / 2
    return StageTransferCost(
        (edge, edge + 1),
        str(layout.edges[replica][edge]),
        one_way_s,
        ratio=one_way_s / compute_s,
        wire_s=float(round_trips_s[edge]) * layout.order.micro_batches * chunks,
        exposed_s=_exposed_s(layout, layers),
        waiting_s=_exposed_s(layout.with_schedule(megatron_kind(chunks)), layers),
    )


def _exposed_s(layout: Layout, layers: np.ndarray) -> float:
    """Return the seconds that stage transfers add to the step."""
    times = timing(layout, layers)
    without_transfers = [replace(d, down=0 * d.down, up=0 * d.up, last_up=d.last_up - d.up) for d in times.replicas]
    ends = []
    for replicas in (times.replicas, without_transfers):
        pairs = zip(replicas, times.one_nic, strict=True)
        ends.append(max(float(step_seconds(layout.order, d, nic)[0]) for d, nic in pairs))
    return ends[0] - ends[1]
