"""Which network a process group uses (the node itself, RDMA or TCP): the one place where that is decided."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.plan.parts import Component


@dataclass(frozen=True)
class Transport:
    """What a group's traffic uses. `kind`: ``local`` (one node, no network), ``rdma`` (`nic` ib, roce, …, in `fabric`),
    or ``tcp`` (`nic` ethernet)."""

    kind: str
    nic: NicType | None = None
    fabric: str | None = None

    def __post_init__(self) -> None:
        ok = {
            "local": self.nic is None,
            "rdma": self.nic is not None and self.nic.rdma and self.fabric is not None,
            "tcp": self.nic is NicType.ETHERNET,
        }
        if not ok.get(self.kind, False):
            raise PlanError(
                f"transport {self.kind!r} over {self.nic} in fabric {self.fabric} does not exist",
                where="transport",
                hint="use local, rdma (ib, roce, …, with its fabric) or tcp (ethernet)",
            )

    def __str__(self) -> str:
        return {"local": "local", "tcp": "tcp over ethernet"}.get(self.kind, f"rdma over {self.nic} ({self.fabric})")


LOCAL = Transport("local")
TCP = Transport("tcp", NicType.ETHERNET)


@dataclass(frozen=True)
class GroupTransport:
    """The transport of one concrete group: Megatron-Core's `kind` of it, its global ranks, its stages. Beside those:
    ``edge``, and, where ranks are GPUs, ``control``: what all ranks exchange from host memory (gloo groups of some of
    the ranks follow the same rule)."""

    kind: str
    ranks: tuple[int, ...]
    transport: Transport
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its fabric and a label of its node, unique within the job (a host name or an index)."""

    fabric: str
    node: str


def places(components: Sequence[Component]) -> list[Place]:
    """Return where each global rank runs: components in order, nodes in order within, GPUs in order within a node."""
    return [
        Place(c.fabric, f"{c.fabric}[{n}]") for c in components for n in range(c.nodes) for _ in range(c.gpus_per_node)
    ]


@dataclass(frozen=True)
class TransportRule:
    """The rule of one job, which the plan, its cost model and through the plan training go by.

    `mode`: ``holmes`` (each group has the best that its own members share) or ``single`` (plain Megatron-LM: groups
    that leave their node have the best that all ranks share). `fabrics`, `one_node`: where the whole job runs.
    """

    site: Site
    mode: str
    fabrics: frozenset[str]
    one_node: bool

    @classmethod
    def of_job(cls, site: Site, mode: str, components: Sequence[Component]) -> TransportRule:
        """Return the rule of a job of these components."""
        one_node = sum(c.nodes for c in components) == 1
        return cls(site, mode, fabrics=frozenset(c.fabric for c in components), one_node=one_node)

    def of(self, fabrics: Collection[str], one_node: bool, host_memory: bool = False) -> Transport:
        """Of a group whose members run in `fabrics`, all on one node or not. `host_memory`: its tensors lie there while
        those of training lie on GPUs. Such groups never have RDMA, as its ports need no kernel interface, which gloo
        would connect through."""
        if one_node:
            return LOCAL
        best = self._best(fabrics) if self.mode == "holmes" else self.shared
        return TCP if host_memory and best.kind == "rdma" else best

    def of_members(self, members: Sequence[Place], host_memory: bool = False) -> Transport:
        """:meth:`of`, for members that are listed."""
        return self.of({m.fabric for m in members}, len(set(members)) <= 1, host_memory)

    @property
    def shared(self) -> Transport:
        """The best transport that all ranks of the job share."""
        return LOCAL if self.one_node else self._best(self.fabrics)

    def _best(self, fabrics: Collection[str]) -> Transport:
        """Between nodes: RDMA inside one fabric that has it, else TCP over Ethernet."""
        if len(fabrics) > 1:
            return TCP
        return self._inside[next(iter(fabrics))]

    @cached_property
    def _inside(self) -> dict[str, Transport]:
        """Between nodes of each fabric."""
        return {f.name: Transport("rdma", f.nic, f.name) if f.nic.rdma else TCP for f in self.site.fabrics}
