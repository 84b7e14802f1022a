"""The coordinator's decision: a pure function of which nodes answer and how their ranks stand."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.submission.executor.environment import ComponentRanks
from holmes_hpc.submission.lifecycle.failed_rank import signal_message

JOIN_S = 120.0  # limit of an agent's first beat, before which it loads torch and Megatron-Core
REJOIN_S = 5.0  # the same after a takeover
ISOLATION_S = 2.0  # nodes that fall silent within this time may all be beyond a network that failed
BEATS_S = 0.5  # nodes that fall silent together differ by less, because their agents report at different times
SETTLE_S = 0.5  # after a rank was killed, its node may still turn out to be lost
REQUEUE = 75  # exit code of an agent whose job is to be requeued: it is preempted, or nears its limit and has trained
GRACE_S = 1.0  # after a rank has failed, its cause may still turn out to be a node that is silent for `dead_s`

Sizes = tuple[int, ...]  # number of nodes of each component of the job
Plans = dict[Sizes, Plan | None]  # plans for such numbers of nodes; None: there is no plan


@dataclass(frozen=True)
class Placement:
    """The nodes that have ranks, and the spare nodes, of each component of the job. The plan may use only some."""

    components: tuple[ComponentRanks, ...]
    spares: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> list[str]:
        return [node for part in self.components for node in part.nodes]

    @property
    def planned(self) -> list[ComponentRanks]:
        """The components that have ranks, in the order of the plan."""
        return sorted((part for part in self.components if part.nodes), key=lambda part: part.first_rank)

    @property
    def world_size(self) -> int:
        return sum(len(part.nodes) * part.tasks_per_node for part in self.components)

    def ranks_on(self, node: str) -> range:
        """Return the ranks on `node`; none on a spare node."""
        for part in (part for part in self.components if node in part.nodes):
            first = part.first_rank + part.nodes.index(node) * part.tasks_per_node
            return range(first, first + part.tasks_per_node)
        return range(0)

    def without(self, lost: Collection[str], usable: Collection[str]) -> "Placement | None":
        """Return this placement with a `usable` spare of its component for each `lost` node; None if one is missing."""
        components, remaining = [], []
        for part, spares in zip(self.components, self.spares, strict=True):
            free = [node for node in spares if node in usable]
            if len(free) < sum(node in lost for node in part.nodes):
                return None
            components.append(replace(part, nodes=tuple(free.pop(0) if n in lost else n for n in part.nodes)))
            remaining.append(tuple(n for n in spares if n not in (*lost, *components[-1].nodes)))
        return Placement(tuple(components), tuple(remaining))

    def usable_nodes(self, usable: Collection[str]) -> list[list[str]]:
        """Return the `usable` nodes of each component, its spares last."""
        pairs = zip(self.components, self.spares, strict=True)
        return [[node for node in (*part.nodes, *spares) if node in usable] for part, spares in pairs]


def place(plan: Plan, pools: Sequence[str], nodes: Sequence[Sequence[str]]) -> Placement:
    """Return the placement of `plan` on the first `nodes` of each component (in `pools`); the others are spare."""
    first_ranks = accumulate((part.ranks for part in plan.components), initial=0)
    planned = {part.pool: (part, first) for part, first in zip(plan.components, first_ranks, strict=False)}
    components, spares = [], []
    for pool, names in zip(pools, nodes, strict=True):
        part, first_rank = planned.get(pool, (None, 0))
        count = part.nodes if part else 0
        components.append(ComponentRanks(tuple(names[:count]), first_rank, part.gpus_per_node if part else 0))
        spares.append(tuple(names[count:]))
    return Placement(tuple(components), tuple(spares))


@dataclass(frozen=True)
class Beat:
    """A message from the agent of `node`. `start`: number of the latest start of ranks that the agent knows; `running`:
    number of these ranks that run on the node; `codes`: {rank: exit code} of those that ended; `member`: index of the
    component to whose job the node belongs, if each is a separate job; `is_leaving`: whether that job is ending;
    `code`: version and commit of the agent's code."""

    node: str
    start: int = 0
    running: int = 0
    codes: Mapping[int, int] = field(default_factory=dict)
    member: int | None = None
    is_leaving: bool = False
    code: str = "an earlier release"


@dataclass
class State:
    """What the coordinator knows. Times are in seconds of one clock.

    `dead_s`: seconds of silence after which a node is lost; `heard_at`: time of each node's last beat, at first that of
    the job's start, -inf after its agent's end; `pools`: the pools of the job's components; `min_nodes`: minimum number
    of nodes with which the run continues; `plans`: plans made so far for fewer nodes; `start`: number of the ranks'
    latest start; `is_started`: whether agents may start these ranks; `gone`: nodes that are lost or whose agent has
    ended; `failed_at`: time at which the first rank of this start failed; `has_new_steps`: whether this start had made
    new steps by then; `is_stopping`: whether the coordinator's job is being ended from outside; `is_takeover`: whether
    the agents had another coordinator before; `plan`: plan of the latest start, None before the first change;
    `is_changing`: whether the ranks were told to save and end; `may_restart`: whether the ranks may start again after
    this failure; `last_step`: number of the run's last step."""

    placement: Placement
    dead_s: float
    heard_at: dict[str, float]
    pools: tuple[str, ...]
    min_nodes: int = 1
    plans: Plans = field(default_factory=dict)
    start: int = 1
    is_started: bool = False
    beats: dict[str, Beat] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    failed_at: float | None = None
    has_new_steps: bool = False
    is_stopping: bool = False
    is_takeover: bool = False
    plan: Plan | None = None
    is_changing: bool = False
    may_restart: bool = False
    last_step: int = 0
    is_one_job: ClassVar[bool] = True  # Slurm can requeue it

    def is_lost(self, node: str, now: float) -> bool:
        join_s = REJOIN_S if self.is_takeover else JOIN_S
        return node in self.gone or now - self.heard_at[node] > (self.dead_s if node in self.beats else join_s)

    def is_isolated(self, now: float) -> bool:
        """Return whether more nodes have just fallen silent than answer, so that the coordinator's node may be lost."""
        silence_s = {node: now - self.heard_at[node] for node in self.beats}
        silent = {n for n, s in silence_s.items() if self.dead_s - BEATS_S < s < self.dead_s + ISOLATION_S}
        has_lost_one = any(silence_s[node] > self.dead_s for node in silent)
        return has_lost_one and len(silent) > len({*self.present(now)} - silent)

    def present(self, now: float) -> list[str]:
        """Return the nodes whose agents report."""
        return [node for node in self.beats if not self.is_lost(node, now)]

    def missing_plans(self, now: float) -> list[Sizes]:
        """Return the numbers of nodes without a plan that are needed now, or after the loss of one more node.
        There are none before the first start, which planning would delay."""
        if not self.is_started and not self.gone:
            return []
        components = self.placement.components
        remaining = [len(nodes) for nodes in self.placement.usable_nodes(self.present(now))]
        is_smaller = any(count < len(part.nodes) for count, part in zip(remaining, components, strict=True))
        sizes = [tuple(remaining)] * is_smaller
        for index, part in enumerate(components):
            if 0 < remaining[index] <= len(part.nodes):
                sizes.append((*remaining[:index], remaining[index] - 1, *remaining[index + 1 :]))
        return [size for size in sizes if sum(size) >= self.min_nodes and size not in self.plans]

    def have_ended(self, nodes: Collection[str]) -> bool:
        """Return whether all ranks of earlier starts have ended on `nodes`."""
        return all(self.beats[n].start == self.start and not self.beats[n].running for n in nodes)

    def codes(self) -> dict[int, int]:
        """Return the exit code by rank of the ranks of this start that have ended."""
        return {rank: code for b in self.beats.values() if b.start == self.start for rank, code in b.codes.items()}

    def admit(self, beat: Beat, now: float) -> bool:
        """Return whether a node that reports for the first time is admitted now."""
        return True

    def decide(self, now: float) -> "Decision":
        """Return what the coordinator does next."""
        nodes, present = self.placement.nodes, self.present(now)
        awaited = [n for n in self.heard_at if n not in self.beats and not self.is_lost(n, now)]
        if self.is_takeover and awaited:  # an agent may still find the new coordinator
            return Decision()
        if lost := tuple(node for node in nodes if self.is_lost(node, now)):
            return Decision(lost, code=1) if self.is_stopping else _decide_without(lost, self, present, awaited)
        if not self.is_started:
            is_go = self.have_ended(present) and self.beats.keys() >= set(nodes)
            return Decision(code=1) if self.is_stopping else Decision(is_go=is_go)
        return self.decide_by_codes(now)

    def decide_by_codes(self, now: float) -> "Decision":
        """Return the decision while ranks run. It depends on the ranks that have ended."""
        codes, num_ranks = self.codes(), self.placement.world_size
        if (killed := [rank for rank in codes if codes[rank] < 0]) and self.has_new_steps and not self.is_stopping:
            has_settled = self.failed_at is not None and now - self.failed_at > SETTLE_S
            reason = f"rank {killed[0]}: {signal_message(-codes[killed[0]])}"
            restart = Decision(placement=self.placement, reason=reason, ended="rank killed")
            return restart if has_settled else Decision()
        is_failure = self.failed_at is not None and now - self.failed_at > self.dead_s + GRACE_S
        code = max(map(abs, codes.values())) if len(codes) == num_ranks or is_failure else None
        if code and self.may_restart and not self.is_stopping:
            return Decision(placement=self.placement, reason="a rank has failed", ended="failed")
        return Decision(code=code)


@dataclass(frozen=True)
class Decision:
    """What to do next. `lost`: nodes to give up; `placement`: if set, end all ranks and start the next ones in it;
    `plan`: new plan of the next start; `is_go`: start the ranks; `is_stop`: let the ranks save and end; `is_handover`:
    leave the agents to another coordinator; `code`: end the run with this exit status; `reason`: reason of the
    decision; `ended`: why the ranks' last start ended, for the run's record."""

    lost: tuple[str, ...] = ()
    placement: Placement | None = None
    plan: Plan | None = None
    is_go: bool = False
    is_stop: bool = False
    is_handover: bool = False
    code: int | None = None
    reason: str = ""
    ended: str = "node lost"


def _decide_without(lost: tuple[str, ...], state: State, present: list[str], awaited: list[str]) -> Decision:
    """Return the decision when nodes are lost: a spare, or another plan. `awaited`: nodes still loading torch."""
    if placement := state.placement.without(lost, present) or state.placement.without(lost, {*present, *awaited}):
        return Decision(lost, placement)
    nodes = state.placement.usable_nodes(present)
    sizes, problem = tuple(map(len, nodes)), "no spare node of its component is left"
    if sum(sizes) < state.min_nodes:
        return Decision(lost, code=1, reason=f"{problem}, and elastic.min_nodes is {state.min_nodes}")
    if sizes not in state.plans:  # it is being made
        return Decision(lost)
    if (plan := state.plans[sizes]) is None:
        return Decision(lost, code=1, reason=f"{problem}, and there is no plan for the other nodes")
    return Decision(lost, place(plan, state.pools, nodes), plan)
