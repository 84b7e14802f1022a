"""The decision for a run whose components are jobs of their own (`elastic.members`): they come and go separately.

Training starts on the components whose nodes are there. The ranks save and end before a component joins or leaves, and
start again with the plan for the nodes that are there then.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.submission.elastic.decision import REJOIN_S, Beat, Decision, Placement, Sizes, State, place

CHANGE_S = 10.0  # of training that a change costs, about
ARRIVAL_S = 2.0  # between the arrivals of nodes whose jobs start together


@dataclass
class MemberState(State):
    """What the coordinator knows if each component is a separate job; see :class:`State`.

    `complete`: planned number of nodes of each component; `min_fabrics`: minimum number of components with which
    training begins; `own_member`: index of the component to whose job the coordinator belongs; `decides_from`: time
    before which it decides nothing, because other agents may still report; `steps`: number of the run's steps."""

    complete: Sizes = ()
    min_fabrics: int = 1
    own_member: int = 0
    decides_from: float = 0.0
    steps: int = 0
    is_one_job = False

    @classmethod
    def of(cls, plan: Plan, config: Mapping[str, Any], start: int, member: int) -> "MemberState":
        """Return the state before any node has reported. `config`: of the run; `start`: claimed by a takeover, 0 at the
        beginning; `member`: the component of this job."""
        settings = config["elastic"]
        pools, complete = tuple(part.pool for part in plan.components), tuple(part.nodes for part in plan.components)
        return cls(
            place(plan, pools, [()] * len(pools)),
            float(settings["dead_s"]),
            heard_at={},
            pools=pools,
            min_nodes=int(settings["min_nodes"]),
            plans={complete: plan},
            start=start,
            complete=complete,
            min_fabrics=int(settings["min_fabrics"]),
            own_member=member,
            steps=int(config["train"]["steps"]),
            decides_from=time.monotonic() + (REJOIN_S if start else 0),
        )

    @property
    def is_ending(self) -> bool:
        """Whether the coordinator's own job is being ended. Before its time limit only the agents get a signal."""
        return self.is_stopping or any(b.is_leaving and b.member == self.own_member for b in self.beats.values())

    def staying(self, now: float) -> list[str]:
        """Return the nodes whose agents report and whose jobs are not being ended."""
        return [node for node in self.present(now) if not self.beats[node].is_leaving]

    def admit(self, beat: Beat, now: float) -> bool:
        """Make the node of a new agent a spare of its component. Return False while an earlier agent's ranks run."""
        placement, index = self.placement, beat.member or 0
        if beat.node in placement.nodes and beat.start < self.start:
            return False
        self.gone.discard(beat.node)
        if not placement.nodes:  # others may follow
            self.decides_from = max(self.decides_from, now + ARRIVAL_S)
        if beat.node not in (*placement.nodes, *placement.spares[index]):
            spares = [*placement.spares]
            spares[index] += (beat.node,)
            self.placement = replace(placement, spares=tuple(spares))
        return True

    def sizes(self, staying: Collection[str]) -> Sizes:
        """Return the number of nodes of each component in the next start's plan. A component without ranks counts 0
        until all its nodes are there, except after a takeover."""
        counts = map(len, self.placement.usable_nodes(staying))
        in_use = [bool(part.nodes) or self.is_takeover for part in self.placement.components]
        rows = zip(counts, self.complete, in_use, strict=True)
        return tuple(min(count, full) if is_used or count >= full else 0 for count, full, is_used in rows)

    def missing_plans(self, now: float) -> list[Sizes]:
        """Return the node counts that may be needed and are not in `plans`, the most urgent first: the present nodes,
        then with one component added or removed, then with one node fewer."""
        current = self.sizes(self.staying(now))
        counts = [*enumerate(zip(current, self.complete, strict=True))]
        toggled = [(*current[:i], 0 if count else complete, *current[i + 1 :]) for i, (count, complete) in counts]
        fewer = [(*current[:i], max(0, count - 1), *current[i + 1 :]) for i, (count, _) in counts]
        least = max(1, self.min_nodes)
        return [n for n in dict.fromkeys([current, *toggled, *fewer]) if sum(n) >= least and n not in self.plans]

    def decide(self, now: float) -> Decision:
        """Return what the coordinator does next."""
        placement, staying = self.placement, self.staying(now)
        if now < self.decides_from:
            return Decision()
        lost = tuple(node for node in placement.nodes if self.is_lost(node, now))
        if placement.nodes and self.is_started and not lost:
            if not self.is_changing:
                reason = _reason_to_change(self, staying)
                return Decision(is_stop=True, reason=reason) if reason else self.decide_by_codes(now)
            if len(self.codes()) < placement.world_size:  # a signal kills ranks that have not begun to train
                return Decision()
        if self.is_ending:
            return Decision(is_handover=True)
        if placement.nodes and not lost and not self.is_started and {*placement.nodes} <= {*staying}:
            return Decision(is_go=self.have_ended(self.present(now)))
        return _next_start(self, lost, staying)


def _reason_to_change(state: MemberState, staying: Collection[str]) -> str:
    """Return why the ranks should save and end; "" if they should not."""
    leaving = [node for node in state.placement.nodes if node not in staying]
    if leaving or state.is_ending:
        return f"nodes {', '.join(leaving)} leave" if leaving else "the coordinator's job ends"
    plan, larger = state.plan, state.plans.get(state.sizes(staying))
    if plan is None or larger is None or plan.predicted is None or larger.predicted is None:
        return ""
    gain_s = (state.steps - state.last_step) * (plan.predicted.step_time_s - larger.predicted.step_time_s)
    new_pools = sorted({part.pool for part in larger.components} - {part.pool for part in plan.components})
    return f"{', '.join(new_pools) or 'another node'} joins" if gain_s > CHANGE_S else ""


def _next_start(state: MemberState, lost: tuple[str, ...], staying: Collection[str]) -> Decision:
    """Return the next start of the ranks on the nodes that stay; nothing while its plan is being made. If there is none
    for them, all are spare until others join: the nodes of a requeued job would not be admitted before."""
    sizes, is_first = state.sizes(staying), state.plan is None
    has_few = sum(map(bool, sizes)) < (state.min_fabrics if is_first else 1) or sum(sizes) < state.min_nodes
    plan = None if has_few else state.plans.get(sizes)
    nodes = [sorted(names) for names in state.placement.usable_nodes(staying)]
    ended = "node lost" if lost else "nodes changed"
    if plan is not None:
        text = "training begins" if is_first else "the nodes have changed"
        return Decision(lost, place(plan, state.pools, nodes), plan, reason=text, ended=ended)
    if not state.placement.nodes or (not has_few and sizes not in state.plans):
        return Decision(lost)
    components = tuple(replace(part, nodes=()) for part in state.placement.components)
    placement = Placement(components, tuple(tuple(names) for names in nodes))
    return Decision(lost, placement, reason="nodes have left, and there is no plan for the others", ended=ended)
