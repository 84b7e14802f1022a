"""The network interfaces of this node that carry the plan's transports, for gloo and NCCL. No torch is needed.

The Plan gives each group a transport (``local``, ``rdma``, ``tcp``). This module translates the transport into a kernel
interface of this node for gloo, a network name for NCCL's communicator, and the environment that NCCL reads once per
process. It refuses variables and configuration files that would change NCCL's or gloo's choice.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError, NetworkError, SiteError
from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.finding import Finding, raise_errors
from holmes_hpc.fabric.nics import Nic, NodeNics, candidates, data_interface
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network import link_check
from holmes_hpc.training.network.link_diagnosis import CommunicationGroup, Endpoint, NodeInformation

LOOPBACK = "lo"
# These groups carry the model's traffic: their links are measured at start.
MEASURED_GROUPS = ("tp", "cp", "dp", "intra_dp", "inter_dp", "ep", "expt_dp", "edge")


@dataclass(frozen=True)
class NodeTransports:
    """The transports of the plan on this node.

    `interfaces`: transport kind (rdma, tcp) -> (interface, IPv4 address); `environment`: the variables that NCCL needs
    before its first call; `one_host`: all ranks run on this machine; `defaults`: NCCL variables that are set unless the
    site sets them; `network`: NCCL's name of the network for the fabric's fast traffic; `notes`: lines for the log.
    """

    node: str
    fabric: str
    interfaces: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]
    one_host: bool
    defaults: Mapping[str, str] = field(default_factory=dict)
    network: str = "IB"
    notes: tuple[str, ...] = ()

    def interface(self, transport: Transport) -> str:
        """Return the kernel interface of this node that carries `transport`."""
        if self.one_host or transport.kind == "local":
            return LOOPBACK
        what, hint = f"no interface for {transport}", "compare the plan's fabrics with `holmes probe` on this node"
        with NetworkError.instead_of(KeyError, where=f"node {self.node}", hint=hint, what=what):
            return self.interfaces[transport.kind][0]

    def nic(self, name: str | None) -> str:
        """Return the text by which the run record names the NICs of a group on this node.

        `name`: a kernel interface, which is returned unchanged; or NCCL's name of a network, for which the NICs in
        `environment` are returned; or None for NVLink and shared memory, for which ``local`` is returned.
        """
        variables = {"IB": "NCCL_IB_HCA", self.network: "NCCL_IB_HCA", "Socket": "NCCL_SOCKET_IFNAME"}
        variable = variables.get(name or "", "")
        return self.environment.get(variable, "").lstrip("=") or name or "local"

    @property
    def address(self) -> str:
        """Return the address at which other nodes reach this one by TCP."""
        return "127.0.0.1" if self.one_host else self.interfaces["tcp"][1]


def transport_kinds(plan: Plan, rank: int) -> set[str]:
    """Return the transport kinds that the groups of `rank` use."""
    return {g.transport.kind for g in plan.transports() if rank in g.ranks}


def site_nics(plan: Plan, rank: int, nics: NodeNics, node: str, environ: Mapping[str, str] = os.environ) -> NodeNics:
    """Return this node's NICs, limited to those that the plan's site names or, if it names none, to those that the
    environment allows. Raise NetworkError if the site names a NIC that the node lacks."""
    pool = plan.site.pool(plan.places[rank].pool)
    try:
        return nccl.restrict_nics(nics, pool.nic_names(node), environ, node)
    except SiteError as e:
        raise NetworkError(e.what, where=f"{e.where} (pool {pool.name})", hint=e.hint) from e


def node_transports(plan: Plan, rank: int, nics: NodeNics, node: str, one_host: bool, cuda: bool) -> NodeTransports:
    """Return this node's interfaces and environment. With `cuda`, RDMA ports need no kernel interface, because NCCL
    uses them directly. Raise NetworkError if an interface that the plan needs is missing, down or without an address.
    """
    pool = plan.site.pool(plan.places[rank].pool)
    if one_host:
        return NodeTransports(node, pool.fabric_name, {}, {}, True)
    notes, interfaces = list[str](), dict[str, tuple[str, str]]()
    needed = [("tcp", NicType.ETHERNET)]  # always: the rendezvous uses it
    if "rdma" in transport_kinds(plan, rank):
        needed.append(("rdma", pool.nic))
    try:
        environment = nccl.environment(nics, pool.nic if len(needed) > 1 else NicType.ETHERNET, node)
        for kind, nic_type in needed:
            if kind == "rdma" and cuda:
                notes += _container_notes(nics, nic_type, node)
                if not any(n.up and n.address is not None for n in candidates(nics, nic_type)):
                    continue
            nic = data_interface(nics, nic_type, node=node)
            assert nic.address is not None
            if kind == "tcp":
                _refuse_substitute(nics, nic, node)
            interfaces[kind] = nic.name, nic.address
    except SiteError as e:
        raise NetworkError(e.what, where=f"{e.where} (pool {pool.name})", hint=e.hint) from e
    defaults = nccl.socket_settings(*_socket_traffic(plan, rank)) if cuda else {}
    return NodeTransports(
        node,
        pool.fabric_name,
        interfaces,
        environment,
        one_host=False,
        defaults=defaults,
        network=pool.nccl_network,
        notes=tuple(notes),
    )


def _container_notes(nics: NodeNics, nic: NicType, node: str) -> list[str]:
    """Return a line for the log if NCCL must find its RDMA ports itself, because a container's sysfs lists none.
    Return no line otherwise. Raise SiteError if NCCL cannot open a port."""
    if nics.ports or not nic.verbs:
        return []
    problem = f"no {nic} device: there is neither /sys/class/infiniband nor /dev/infiniband/uverbs*"
    hint = "load the driver; start a container with /dev/infiniband in it"
    SiteError.refuse(f"node {node}", (not nics.verbs, problem, hint))
    hca_text = f" among {', '.join(nics.hcas)}" if nics.hcas else ""
    return [
        f"node {node}: no /sys/class/infiniband (a container), but /dev/infiniband: NCCL finds its {nic} ports"
        f"{hca_text} itself; their state and their bytes are not monitored"
    ]


def _socket_traffic(plan: Plan, rank: int) -> tuple[float, int]:
    """Return (highest TCP rate from `rank`'s node to another node in Gb/s, number of the node's ranks that use TCP)."""
    groups = [g for g in plan.transports() if g.transport.kind == "tcp" and g.kind in MEASURED_GROUPS]
    place = plan.places[rank]
    senders = {r for g in groups for r in g.ranks if plan.places[r] == place}
    peers = {plan.places[r] for g in groups if senders & set(g.ranks) for r in g.ranks} - {place}
    pool = plan.site.pool(place.pool)
    rates = [plan.site.rate_gbps("tcp", pool, plan.site.pool(name)) for name in {peer.pool for peer in peers}]
    return max(rates, default=pool.ethernet_gbps), len(senders)


def _refuse_substitute(nics: NodeNics, chosen: Nic, node: str) -> None:
    """Raise SiteError if `chosen`, a management port or a RoCE NIC, would replace an Ethernet NIC that is down.

    Only a NIC with an address matters, because the other nodes use its network. A NIC that is slower than `chosen` does
    not matter, because it would not be used even if it were up."""
    if nics.sockets is not None or (chosen.type is NicType.ETHERNET and chosen.role == "data"):
        return
    for nic in candidates(nics, NicType.ETHERNET):
        is_slower = chosen.role == "data" and nic.gbps is not None and nic.gbps < (chosen.gbps or 0)
        is_ethernet = nic.role == "data" and nic.type is NicType.ETHERNET
        is_down = not nic.up and nic.address is not None
        problem = f"ethernet interface {nic.name} is down, and {chosen.name} is no substitute"
        hint = f"ip link set {nic.name} up, or name the interface to use: ethernet: {chosen.name} (docs/nics.md)"
        SiteError.refuse(f"node {node}", (is_ethernet and is_down and not is_slower, problem, hint))


def refuse_overrides(
    node: NodeTransports, environ: Mapping[str, str] = os.environ, files: Sequence[Path] | None = None
) -> list[Finding]:
    """Raise NetworkError for a variable or settings file that would override a group's network. Return warnings."""
    fastest = node.interfaces.get("rdma") or node.interfaces.get("tcp")
    findings = nccl.refusals(environ, node.environment, node.node, files, fastest[0] if fastest else "", node.network)
    raise_errors(findings)
    return findings


def log_lines(
    node: NodeTransports, environ: Mapping[str, str] = os.environ, files: Sequence[Path] | None = None
) -> list[str]:
    """Return lines for the log: this node's notes, and the site's settings that differ from the defaults."""
    kept = nccl.split_defaults(node.defaults, environ, files)[1]
    return [*node.notes, *(f"node {node.node}: {line}" for line in kept)]


def endpoints(plan: Plan, rank: int, node: NodeTransports) -> dict[str, Endpoint]:
    """Return the NICs of `node`, on which `rank` runs: transport kind -> Endpoint with the site's declared rates.

    All samples between two fabrics in one round share the link between them. There are at most as many samples as the
    smaller fabric has nodes, so the declared rate is the share of one of that many senders."""
    site = plan.site
    pool = site.pool(plan.places[rank].pool)
    counts = Counter(site.pool(place.pool).fabric_name for place in set(plan.places))
    peers = [p for p in site.pools if p.fabric_name in counts and site.link(pool.fabric_name, p.fabric_name)]
    own, nics = counts[pool.fabric_name], dict[str, Endpoint]()
    for kind, (interface, address) in node.interfaces.items():
        gbps_to = {p.fabric_name: site.rate_gbps(kind, pool, p, min(own, counts[p.fabric_name])) for p in peers}
        nics[kind] = Endpoint(interface, address, gbps=site.rate_gbps(kind, pool), gbps_to=gbps_to)
    return nics


def check_links(
    plan: Plan, rank: int, first_on_node: bool, nodes: Sequence[NodeTransports], store: Any
) -> list[Finding]:
    """Check the links between nodes that share a group, before the first group is created.
    Return warnings on each node's first rank, [] on other ranks. On failure, raise NetworkError on all ranks."""
    if not first_on_node:
        link_check.await_link_check(store)
        return []
    node = nodes[rank]
    ranks = tuple(r for r, n in enumerate(nodes) if n.node == node.node)
    return link_check.run_link_check(
        store,
        NodeInformation(node.node, node.fabric, ranks, endpoints(plan, rank, node)),
        list(dict.fromkeys(n.node for n in nodes)),
        groups=[
            CommunicationGroup(
                f"{g.kind} of ranks {abbreviated(g.ranks, ',')}", g.transport.kind, g.ranks, g.kind in MEASURED_GROUPS
            )
            for g in plan.transports()
            if all(g.transport.kind in nodes[r].interfaces for r in g.ranks)  # between nodes, over NICs with an address
        ],
        token=store.get("token").decode(),
    )


def check_placement(plan: Plan, nodes: Sequence[NodeTransports]) -> None:
    """Raise NetworkError if the ranks of one planned node run on several nodes, or two planned nodes are the same."""
    node_of, hint = dict[Any, str](), "start the plan's number of tasks on each node"
    for rank, (place, node) in enumerate(zip(plan.places, nodes, strict=True)):
        first_node = node_of.setdefault(place, node.node)
        problem = f"rank {rank} shares node {first_node} in the plan, but runs on {node.node}"
        NetworkError.refuse("ranks", (first_node != node.node, problem, hint))
    used = len(set(node_of.values()))
    NetworkError.refuse("ranks", (used != len(node_of), f"{len(node_of)} nodes are planned, {used} are used", hint))


def check_addresses(nodes: Sequence[NodeTransports], job_nodes: Sequence[str]) -> None:
    """Raise NetworkError for a rank whose node is not in the job, has an address that other nodes cannot reach, or
    shares an address with another node. RDMA addresses need to differ only within a fabric.
    `job_nodes`: from Slurm, empty if unknown."""
    owners: dict[tuple[str, str], str] = {}
    for rank, node in enumerate(nodes):
        where, hint = f"rank {rank} on {node.node}", "start the ranks with srun in one job"
        is_outside = job_nodes and node.node not in job_nodes
        NetworkError.refuse(where, (is_outside, "this node is not in the job", hint))
        hint = "give each node's NIC its own IP address (`ip address show` lists them)"
        for kind, (interface, address) in node.interfaces.items():
            owner = owners.setdefault((address, "" if kind == "tcp" else node.fabric), node.node)
            problem = f"{interface} has address {address!r}, which "
            NetworkError.refuse(
                where,
                (owner != node.node, f"{problem}is also {owner}'s", hint),
                (not _is_host_address(address), f"{problem}other nodes cannot reach", hint),
            )


def _is_host_address(address: str) -> bool:
    """Return whether other nodes can reach a NIC with this address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast)


def links_of_rank(groups: Sequence[Mapping[str, Any]], nodes: Sequence[NodeTransports], rank: int) -> str:
    """Return a text that names each NIC over which `rank` reaches other nodes, its transport, and these nodes.
    `groups`: the groups of `rank` in the run record."""
    own_node = nodes[rank]
    peers: dict[str, list[str]] = {}
    for group in groups:
        if others := [nodes[peer].node for peer in group["ranks"] if nodes[peer].node != own_node.node]:
            peers.setdefault(f"{own_node.nic(group['interface'])} ({group['transport']})", []).extend(others)
    return " and ".join(f"{nic} to {compress(dict.fromkeys(names))}" for nic, names in peers.items())


def as_network_error(
    error: Exception, kind: str, ranks: Sequence[int], transport: Transport, node: str, interface: str
) -> HolmesError:
    """Return torch's error during a group's creation as a NetworkError that names the group, its ranks and transport.
    A HolmesError is returned as it is."""
    if isinstance(error, HolmesError):
        return error
    text = " ".join(str(error).split())
    hints = {
        "Unable to find address": f"give {interface} an IPv4 address and bring it up",
        "unreachable": f"connect the networks of these ranks' nodes, or correct the address of {interface}",
        "": f"check that all these ranks run and reach each other over {interface} (cable, subnet, firewall)",
    }
    where = f"{kind} group of ranks {abbreviated(ranks, ',')} ({transport}) on node {node}"
    hint = next(hint for phrase, hint in hints.items() if phrase in text)
    return NetworkError(f"set-up on {interface} failed: {text[:300]}", where=where, hint=hint)
