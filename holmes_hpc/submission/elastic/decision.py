"""The coordinator's decision: a pure function of which nodes answer and how their ranks stand."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from holmes_hpc.submission.executor.environment import ComponentRanks

JOIN_S = 120.0  # limit of an agent's first beat, before which it loads torch and Megatron-Core
GRACE_S = 1.0  # after a rank has failed, its cause may still turn out to be a node that is silent for `dead_s`


@dataclass(frozen=True)
class Placement:
    """The nodes that have ranks, and the spare nodes of each component."""

    components: tuple[ComponentRanks, ...]
    spares: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> list[str]:
        return [node for part in self.components for node in part.nodes]

    def ranks_on(self, node: str) -> range:
        """Return the ranks on `node`; none on a spare node."""
        for part in (part for part in self.components if node in part.nodes):
            first = part.first_rank + part.nodes.index(node) * part.tasks_per_node
            return range(first, first + part.tasks_per_node)
        return range(0)

    def without(self, lost: Collection[str], usable: Collection[str]) -> "Placement | None":
        """Return this placement with a `usable` spare of its component in the place of each `lost` node; None if a
        component has too few."""
        components, remaining = [], []
        for part, spares in zip(self.components, self.spares, strict=True):
            free = [node for node in spares if node in usable]
            if len(free) < sum(node in lost for node in part.nodes):
                return None
            components.append(replace(part, nodes=tuple(free.pop(0) if n in lost else n for n in part.nodes)))
            remaining.append(tuple(n for n in spares if n not in (*lost, *components[-1].nodes)))
        return Placement(tuple(components), tuple(remaining))


@dataclass(frozen=True)
class Beat:
    """A message of a node's agent. `start`: the latest start of the ranks that it knows of; `running`: how many of that
    start's ranks run on the node; `codes`: the exit code by rank of those that ended."""

    node: str
    start: int = 0
    running: int = 0
    codes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class State:
    """What the coordinator knows. Times are in seconds of one clock.

    `heard_at`: of each node's last beat, of the job's start without one; `start`: number of the latest start of the
    ranks; `is_started`: agents may start them; `left`: nodes whose agent has ended; `failed_at`: when the first rank of
    this start failed; `is_stopping`: the job is being ended from outside."""

    placement: Placement
    dead_s: float
    heard_at: dict[str, float]
    start: int = 1
    is_started: bool = False
    beats: dict[str, Beat] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    failed_at: float | None = None
    is_stopping: bool = False

    def is_lost(self, node: str, now: float) -> bool:
        return node in self.left or now - self.heard_at[node] > (self.dead_s if node in self.beats else JOIN_S)

    def codes(self) -> dict[int, int]:
        """Return the exit code by rank of the ranks of this start that have ended."""
        return {rank: code for b in self.beats.values() if b.start == self.start for rank, code in b.codes.items()}


@dataclass(frozen=True)
class Decision:
    """What to do next. `lost`: nodes to give up; `placement`: end all ranks, this is the next start's; `is_go`: start
    the ranks; `code`: end the run with this exit status."""

    lost: tuple[str, ...] = ()
    placement: Placement | None = None
    is_go: bool = False
    code: int | None = None


def decide(state: State, now: float) -> Decision:
    """Return what the coordinator does next."""
    nodes, present = state.placement.nodes, [node for node in state.beats if not state.is_lost(node, now)]
    if lost := tuple(node for node in nodes if state.is_lost(node, now)):
        placement = None if state.is_stopping else state.placement.without(lost, present)
        return Decision(lost, placement, code=1 if placement is None else None)
    if not state.is_started:
        have_ended = all(state.beats[n].start == state.start and not state.beats[n].running for n in present)
        is_go = have_ended and state.beats.keys() >= set(nodes)
        return Decision(code=1) if state.is_stopping else Decision(is_go=is_go)
    codes, num_ranks = state.codes(), sum(len(state.placement.ranks_on(node)) for node in nodes)
    is_failure = state.failed_at is not None and now - state.failed_at > state.dead_s + GRACE_S
    return Decision(code=max(map(abs, codes.values())) if len(codes) == num_ranks or is_failure else None)
