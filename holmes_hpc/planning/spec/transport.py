"""Which network a process group can use, from where its members run: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Site


@dataclass(frozen=True)
class Transport:
    """What a group's traffic uses. `kind`: ``local`` (one node, no network), ``rdma`` (`nic` ib or roce, in `fabric`),
    or ``tcp`` (`nic` ethernet)."""

    kind: str
    nic: NicType | None = None
    fabric: str | None = None

    def __post_init__(self) -> None:
        ok = {"local": self.nic is None, "rdma": self.nic in (NicType.IB, NicType.ROCE) and self.fabric is not None,
              "tcp": self.nic is NicType.ETHERNET}
        if not ok.get(self.kind, False):
            raise PlanError(f"transport {self.kind!r} over {self.nic} in fabric {self.fabric} does not exist",
                            where="transport", hint="use local, rdma (ib or roce, with its fabric) or tcp (ethernet)")

    def __str__(self) -> str:
        return {"local": "local", "tcp": "tcp over ethernet"}.get(self.kind, f"rdma over {self.nic} ({self.fabric})")


LOCAL = Transport("local")
TCP = Transport("tcp", NicType.ETHERNET)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its fabric and a label of its node, unique within the job (a host name or an index)."""

    fabric: str
    node: str


def decide(site: Site, members: Sequence[Place]) -> Transport:
    """The best transport all `members` share: none on one node, RDMA inside one fabric, else TCP over Ethernet."""
    if len({(m.fabric, m.node) for m in members}) <= 1:
        return LOCAL
    fabrics = {m.fabric for m in members}
    if len(fabrics) == 1:
        fabric = site.fabric(next(iter(fabrics)))
        if fabric.nic.rdma:
            return Transport("rdma", fabric.nic, fabric.name)
    return TCP


def check(site: Site, group: str, members: Sequence[Place], transport: Transport) -> None:
    """Refuse a forced transport that two members do not share; the error names the group and the two nodes."""
    nodes = list(dict.fromkeys(members))
    if transport.kind == "tcp" or len(nodes) <= 1:
        return
    first = nodes[0]
    for other in nodes[1:]:
        same = other.fabric == first.fabric
        fits = same and transport.fabric == first.fabric and site.fabric(first.fabric).nic is transport.nic
        if transport.kind == "local" or not fits:
            raise PlanError(
                f"{transport} is forced on a group with node {first.node} (fabric {first.fabric}) and node {other.node}"
                f" (fabric {other.fabric})", where=f"group {group}",
                hint="leave the transport to the planner" if same else "use tcp, or keep the group inside one fabric")
