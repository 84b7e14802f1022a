"""The transport of each process group: inside a node, RDMA or TCP. Only this module decides it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.plan.parts import Component


@dataclass(frozen=True)
class Transport:
    """The transport of a group. `kind`: ``local`` (in a node), ``rdma`` (`nic`, in `fabric`), or ``tcp`` (Ethernet)."""

    kind: str
    nic: NicType | None = None
    fabric: str | None = None

    def __str__(self) -> str:
        return {"local": "local", "tcp": "tcp over ethernet"}.get(self.kind, f"rdma over {self.nic} ({self.fabric})")


LOCAL = Transport("local")
TCP = Transport("tcp", NicType.ETHERNET)


@dataclass(frozen=True)
class GroupTransport:
    """The transport of one concrete group, with its global ranks and stages. `kind`: Megatron-Core's name, ``edge``, or
    ``control`` (traffic of all ranks in host memory, if any has a GPU). Smaller Gloo groups have no entry."""

    kind: str
    ranks: tuple[int, ...]
    transport: Transport
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """The place of a rank: its pool, and a label of its node (host name or index) that is unique in the job."""

    pool: str
    node: str


def places(components: Sequence[Component]) -> list[Place]:
    """Return the place of each global rank: by component, then by node, then by GPU."""
    return [Place(c.pool, f"{c.pool}[{n}]") for c in components for n in range(c.nodes) for _ in range(c.gpus_per_node)]


@dataclass(frozen=True)
class TransportRule:
    """The rule that picks the transport of each group of a job, for the plan, its cost model and training. `mode`:
    ``holmes`` (the best transport that the group's members share) or ``single`` (plain Megatron-LM: the best that all
    ranks share, except inside a node). `pools`: the job's pools; `one_node`: whether the job has only one node."""

    site: Site
    mode: str
    pools: frozenset[str]
    one_node: bool

    @classmethod
    def of_job(cls, site: Site, mode: str, components: Sequence[Component]) -> TransportRule:
        """Return the rule of a job of these components."""
        one_node = sum(c.nodes for c in components) == 1
        return cls(site, mode, pools=frozenset(c.pool for c in components), one_node=one_node)

    def of(self, pools: Collection[str], one_node: bool, host_memory: bool = False) -> Transport:
        """Return the transport of a group whose members run in `pools`; `one_node`: all on one node. `host_memory`: the
        group exchanges tensors in host memory while training uses GPUs. It runs on gloo and never uses RDMA, because
        gloo needs a kernel interface, and RDMA ports may have none."""
        if one_node:
            return LOCAL
        best = self._best(pools) if self.mode == "holmes" else self.shared
        return TCP if host_memory and best.kind == "rdma" else best

    def of_members(self, members: Sequence[Place], host_memory: bool = False) -> Transport:
        """Return the transport of a group of these members; see :meth:`of`."""
        return self.of({m.pool for m in members}, len(set(members)) <= 1, host_memory)

    @property
    def shared(self) -> Transport:
        """The best transport that all ranks of the job share."""
        return LOCAL if self.one_node else self._best(self.pools)

    def _best(self, pools: Collection[str]) -> Transport:
        """Return the best transport between nodes: RDMA inside one fabric that has it, else TCP over Ethernet."""
        first, *others = {self._inside[pool] for pool in pools}
        return TCP if others else first

    @cached_property
    def _inside(self) -> dict[str, Transport]:
        """{Pool: the transport between its nodes}."""
        return {p.name: Transport("rdma", p.nic, p.fabric_name) if p.nic.rdma else TCP for p in self.site.pools}
