"""Which network interfaces of this node carry the plan's transports, found without torch, for gloo and NCCL alike.

The Plan says what a group's members share (``local``, ``rdma``, ``tcp``); here that becomes a kernel interface of this
node (gloo connects through it), a network name for NCCL's communicator, and the environment that NCCL reads once per
process. What else would change NCCL's or gloo's choice (variables, configuration files) is found and refused.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError, NetworkError, SiteError
from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.finding import Finding, raise_errors
from holmes_hpc.fabric.nics import Nic, NodeNics, candidates, data_interface
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.training.network import link_check
from holmes_hpc.training.network.link_diagnosis import CommunicationGroup, Endpoint

LOOPBACK = "lo"
# Groups that carry the model's own traffic: their links are measured at start.
MEASURED = ("tp", "dp", "intra_dp", "inter_dp", "edge")


@dataclass(frozen=True)
class NodeTransports:
    """This node's share of the plan's transports. `interfaces`: transport kind (local, rdma, tcp) -> (interface, IPv4
    address, prefix); `environment`: what NCCL must find before its first call, `defaults`: what it is given where the
    site says nothing; `network`: what it calls the network of the fabric's RDMA; `notes`: lines for the log; `node` and
    `fabric` are for messages."""

    node: str
    fabric: str
    interfaces: Mapping[str, tuple[str, str, int]]
    environment: Mapping[str, str]
    one_host: bool
    defaults: Mapping[str, str] = field(default_factory=dict)
    network: str = "IB"
    notes: tuple[str, ...] = ()

    def interface(self, transport: Transport) -> str:
        """Return the kernel interface that carries `transport` here."""
        if self.one_host:
            return LOOPBACK
        try:
            return self.interfaces[transport.kind][0]
        except KeyError:
            raise NetworkError(
                f"no interface for {transport}",
                where=f"node {self.node}",
                hint="compare the plan's fabrics with `holmes probe` on this node",
            ) from None

    def nic(self, name: str | None) -> str:
        """Return what carries a group here, for the record: an interface stands for itself, one of NCCL's networks for
        the NICs that this node gives it, none for NVLink and shared memory."""
        variables = {"IB": "NCCL_IB_HCA", self.network: "NCCL_IB_HCA", "Socket": "NCCL_SOCKET_IFNAME"}
        variable = variables.get(name or "", "")
        return self.environment.get(variable, "").lstrip("=") or name or "local"

    @property
    def address(self) -> str:
        """Return where the other nodes reach this one by TCP."""
        return "127.0.0.1" if self.one_host else self.interfaces["tcp"][1]


def kinds_of(plan: Plan, rank: int) -> set[str]:
    """Return the transport kinds that the groups of `rank` use."""
    return {g.transport.kind for g in plan.transports() if rank in g.ranks}


def site_nics(plan: Plan, rank: int, nics: NodeNics, node: str, environ: Mapping[str, str] = os.environ) -> NodeNics:
    """This node's NICs, limited to what the plan's site names and the environment allows. NetworkError for a name that
    it does not have."""
    fabric = plan.site.fabric(plan.places[rank].fabric)
    try:
        return nccl.restrict_nics(nics, fabric.nic_names(node), environ, node)
    except SiteError as e:
        raise NetworkError(e.what, where=f"{e.where} (fabric {fabric.name})", hint=e.hint) from e


def node_transports(plan: Plan, rank: int, nics: NodeNics, node: str, one_host: bool, cuda: bool) -> NodeTransports:
    """This node's interfaces and environment. Raises NetworkError when one that the plan needs is missing, down or
    without an address. With `cuda`, RDMA ports need no kernel interface: NCCL speaks to them directly."""
    fabric = plan.site.fabric(plan.places[rank].fabric)
    notes: list[str] = []
    interfaces = {"local": (LOOPBACK, "127.0.0.1", 8)}
    if one_host:
        return NodeTransports(node, fabric.name, interfaces, {}, True)
    wanted = [("tcp", NicType.ETHERNET)]  # always: the ranks meet there
    if "rdma" in kinds_of(plan, rank):
        wanted.append(("rdma", fabric.nic))
    try:
        environment = nccl.environment(nics, fabric.nic if len(wanted) > 1 else NicType.ETHERNET, node)
        for kind, nic in wanted:
            if kind == "rdma" and cuda:
                notes += _opened(nics, nic, node)
                if not any(n.up and n.address is not None for n in candidates(nics, nic)):
                    continue
            found = data_interface(nics, nic, node=node)
            assert found.address is not None
            if kind == "tcp":
                _refuse_stand_in(nics, found, node)
            interfaces[kind] = (found.name, found.address, 32 if found.prefix is None else found.prefix)
    except SiteError as e:
        raise NetworkError(e.what, where=f"{e.where} (fabric {fabric.name})", hint=e.hint) from e
    defaults = nccl.socket_settings(*_sockets(plan, rank)) if cuda else {}
    return NodeTransports(
        node,
        fabric.name,
        interfaces,
        environment,
        one_host=False,
        defaults=defaults,
        network=fabric.nccl_network,
        notes=tuple(notes),
    )


def _opened(nics: NodeNics, nic: NicType, node: str) -> list[str]:
    """A line where NCCL must find its RDMA ports itself, since a container shows none in sysfs; SiteError where it
    cannot open any."""
    if nics.ports or not nic.verbs:
        return []
    if not nics.verbs:
        raise SiteError(
            f"no {nic} device: there is neither /sys/class/infiniband nor /dev/infiniband/uverbs*",
            where=f"node {node}",
            hint="load the driver; start a container with /dev/infiniband in it",
        )
    limited = f" among {', '.join(nics.hcas)}" if nics.hcas else ""
    return [
        f"node {node}: no /sys/class/infiniband (a container), but /dev/infiniband: NCCL finds its {nic} ports"
        f"{limited} itself; their state and their bytes are not seen here"
    ]


def _sockets(plan: Plan, rank: int) -> tuple[float, int]:
    """Return what the node of `rank` sends over sockets (Gb/s), and how many of its ranks do."""
    groups = [g for g in plan.transports() if g.transport.kind == "tcp" and g.kind in MEASURED]
    here = plan.places[rank]
    senders = {r for g in groups for r in g.ranks if plan.places[r] == here}
    peers = {plan.places[r] for g in groups if senders & set(g.ranks) for r in g.ranks} - {here}
    fabric = plan.site.fabric(here.fabric)
    rates = [plan.site.rate_gbps("tcp", fabric, plan.site.fabric(name)) for name in {peer.fabric for peer in peers}]
    return max(rates, default=fabric.ethernet_gbps), len(senders)


def _refuse_stand_in(nics: NodeNics, found: Nic, node: str) -> None:
    """Raise SiteError when a management port or a RoCE NIC would stand in for an Ethernet NIC that is down, though it
    has an address: the other nodes' traffic goes elsewhere. One that is known to be slower would not be used anyway."""
    if nics.sockets is not None or (found.type is NicType.ETHERNET and found.role == "data"):
        return
    for nic in candidates(nics, NicType.ETHERNET):
        slower = found.role == "data" and nic.gbps is not None and nic.gbps < (found.gbps or 0)
        if (
            nic.role == "data"
            and nic.type is NicType.ETHERNET
            and not nic.up
            and nic.address is not None
            and not slower
        ):
            raise SiteError(
                f"ethernet interface {nic.name} is down, and {found.name} is no substitute",
                where=f"node {node}",
                hint=f"ip link set {nic.name} up, or name the one that is meant: ethernet: {found.name} (docs/nics.md)",
            )


def refuse(
    decision: NodeTransports, environ: Mapping[str, str] = os.environ, files: Sequence[Path] | None = None
) -> list[Finding]:
    """Raise NetworkError for a variable or settings file that would change a group's network behind our back; warnings
    come back."""
    fast = decision.interfaces.get("rdma") or decision.interfaces.get("tcp")
    found = nccl.refusals(
        environ, decision.environment, decision.node, files, fast[0] if fast else "", decision.network
    )
    raise_errors(found)
    return found


def remarks(
    decision: NodeTransports, environ: Mapping[str, str] = os.environ, files: Sequence[Path] | None = None
) -> list[str]:
    """Return lines for the log: what was found and settled on this node, and which of the site's settings stay."""
    return [
        *decision.notes,
        *(f"node {decision.node}: {line}" for line in nccl.split_defaults(decision.defaults, environ, files)[1]),
    ]


def endpoints(plan: Plan, node: NodeTransports) -> dict[str, Endpoint]:
    """Return the NICs of `node` with the rates that the plan's site declares, by transport kind."""
    site = plan.site
    fabric = site.fabric(node.fabric)
    return {
        kind: Endpoint(
            interface,
            address,
            gbps=site.rate_gbps(kind, fabric),
            gbps_to={f.name: site.rate_gbps(kind, fabric, f) for f in site.fabrics if site.link(fabric.name, f.name)},
        )
        for kind, (interface, address, _) in node.interfaces.items()
        if kind != "local"
    }


def check_links(
    plan: Plan, rank: int, first_on_node: bool, nodes: Sequence[NodeTransports], store: Any
) -> list[Finding]:
    """Try and measure every pair of nodes that must talk, before the first group is made. Raise NetworkError, the same
    on all ranks; return warnings on each node's first rank."""
    if not first_on_node:
        link_check.await_links(store)
        return []
    own = nodes[rank]
    return link_check.prove_links(
        store,
        own.node,
        list(dict.fromkeys(n.node for n in nodes)),
        fabric=own.fabric,
        ranks=[r for r, n in enumerate(nodes) if n.node == own.node],
        nics=endpoints(plan, own),
        groups=[
            CommunicationGroup(f"{g.kind} of ranks {short(g.ranks)}", g.transport.kind, g.ranks, g.kind in MEASURED)
            for g in plan.transports()
            # those that leave their node, over NICs with an address
            if g.transport.kind != "local" and all(g.transport.kind in nodes[r].interfaces for r in g.ranks)
        ],
        token=store.get("token").decode(),
    )


def check_places(plan: Plan, nodes: Sequence[NodeTransports]) -> None:
    """Raise NetworkError when ranks that the plan puts on one node run on several, or the other way round."""
    seen: dict[Any, str] = {}
    for rank, (place, node) in enumerate(zip(plan.places, nodes, strict=True)):
        if seen.setdefault(place, node.node) != node.node:
            raise NetworkError(
                f"rank {rank} is planned on the node of its neighbours, {seen[place]}, and runs on {node.node}",
                where="ranks",
                hint="start the plan's number of tasks on each node",
            )
    if len(set(seen.values())) != len(seen):
        raise NetworkError(
            f"{len(seen)} nodes are planned, {len(set(seen.values()))} are used",
            where="ranks",
            hint="start the plan's number of tasks on each node",
        )


def check_addresses(nodes: Sequence[NodeTransports], job_nodes: Sequence[str] = ()) -> None:
    """Raise NetworkError when a rank names a node that is not the job's (`job_nodes`, where Slurm tells them), or an
    address that cannot be its NIC's: connections to it would go elsewhere. Fabrics that share no network may have the
    same addresses."""
    owners: dict[tuple[str, str], str] = {}
    for rank, node in enumerate(nodes):
        where = f"rank {rank} on {node.node}"
        if job_nodes and node.node not in job_nodes:
            raise NetworkError("that is no node of the job", where=where, hint="start the ranks with srun in one job")
        for kind, (interface, address, _) in node.interfaces.items():
            if kind == "local":
                continue
            try:
                meant = ipaddress.ip_address(address.partition("%")[0])
                bad = meant.is_loopback or meant.is_unspecified or meant.is_multicast
            except ValueError:
                bad = True
            other = owners.setdefault((address, "" if kind == "tcp" else node.fabric), node.node)
            if bad or other != node.node:
                also = f", as {other} does" if other != node.node else ", which other nodes cannot reach"
                raise NetworkError(
                    f"it says that {interface} has address {address!r}{also}",
                    where=where,
                    hint="give each node's NIC an address of its own (ip address)",
                )


def short(ranks: Sequence[int]) -> str:
    """Return ranks as text, not all where there are many."""
    text = [str(r) for r in ranks]
    return ",".join(text if len(text) <= 6 else [*text[:3], "…", text[-1]])


def as_network_error(
    error: Exception, kind: str, ranks: Sequence[int], transport: Transport, node: str, interface: str
) -> HolmesError:
    """What went wrong while a group was made, as one line with the group, its ranks and its transport."""
    if isinstance(error, HolmesError):
        return error
    text = " ".join(str(error).split())
    hint = {
        "Unable to find address": f"give {interface} an IPv4 address and bring it up",
        "unreachable": f"connect the networks of these ranks' nodes, or correct the address of {interface}",
    }.get(
        next((w for w in ("Unable to find address", "unreachable") if w in text), ""),
        f"see whether all these ranks run and reach each other over {interface} (cable, subnet, firewall)",
    )
    return NetworkError(
        f"set-up on {interface} failed: {text[:300]}",
        where=f"{kind} group of ranks {short(ranks)} ({transport}) on node {node}",
        hint=hint,
    )
