"""NCCL's and gloo's environment variables on a node: those to set, and those that must not be set."""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nic_types import OWN_NETWORKS, NicType
from holmes_hpc.fabric.nics import NodeNics, RdmaPort, candidates, data_interface
from holmes_hpc.fabric.site import NicNames

# Variables that override the network chosen for each process group, wherever they are set.
FORBIDDEN = {
    "NCCL_NET": "overrides the network of every communicator",
    "NCCL_NET_PLUGIN": "replaces NCCL's own networks",
    "NCCL_IB_DISABLE": "switches RDMA off in the whole process",
    "NCCL_COMM_ID": "sends NCCL's bootstrap to a fixed address",
    "NCCL_SOCKET_FAMILY": "may choose addresses that other nodes do not have",
}
# Better left unset: the index of a GID differs between nodes, and changes with an address.
DOUBTFUL = {"NCCL_IB_GID_INDEX": "is one index for all nodes; NCCL 2.21 and later find the RoCE v2 GID themselves"}
# Values of forbidden variables that have no effect.
_OFF = {"NCCL_IB_DISABLE": ("", "0"), "NCCL_NET_PLUGIN": ("", "none"), "NCCL_SOCKET_FAMILY": ("", "AF_INET")}
_LINE = re.compile(r"\s*([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*\Z")


def matches(value: str, name: str, port: int | None = None) -> bool:
    """Return whether `value` selects the interface (NCCL_SOCKET_IFNAME) or device (NCCL_IB_HCA) `name`, or its `port`.
    The rule is that of parseStringList and matchIfList in NCCL's src/misc/utils.cc. A value is a list of names,
    separated by commas. A leading ``^`` excludes the listed names instead of selecting them. ``=`` before the list
    requires equal names; without ``=``, `name` only has to start with a listed name. ``:1`` after a listed name selects
    only that port. An empty list matches everything."""
    excludes, names = value.startswith("^"), value.removeprefix("^")
    is_exact, names = names.startswith("="), names.removeprefix("=")

    def is_match(entry: str) -> bool:
        listed_name, colon, number = entry.partition(":")
        digits = re.match(r"\d*", number)
        is_same_name = name == listed_name if is_exact else name.startswith(listed_name)
        return is_same_name and (port is None or not colon or int((digits and digits[0]) or 0) == port)

    entries = [entry for entry in names.split(",") if entry.partition(":")[0]]
    return (not entries or any(map(is_match, entries))) is not excludes


def restrict_nics(nics: NodeNics, names: NicNames, env: Mapping[str, str], node: str = "") -> NodeNics:
    """Return `nics` limited to the NICs that the site names for its jobs or, without names, that `env` allows. NCCL's
    variables in `env` only choose among the usable NICs, without management ports. One that allows none of them is
    ignored here and reported by :func:`refusals`. Raise SiteError if the node lacks a NIC that the site names."""
    where = f"node {node}" if node else "this node"
    sockets: tuple[str, ...] | None = None
    if names.ethernet is not None:
        if nics.interface(names.ethernet) is None:
            hint = f"it has {', '.join(n.name for n in nics.interfaces) or 'none'}"
            problem = f"no interface {names.ethernet}, which the site names for its sockets"
            raise SiteError(problem, where=where, hint=hint)
        sockets = (names.ethernet,)
    elif any(env.get(variable) for variable in _INTERFACES):
        up = [n.name for n in candidates(nics, NicType.ETHERNET) if n.role == "data" and n.up]
        allowed = (name for name in up if all(_is_allowed(env, variable, name) for variable in _INTERFACES))
        sockets = tuple(allowed) or None
    return replace(nics, sockets=sockets, hcas=_rdma_ports(nics, names, env, where))


_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _is_allowed(env: Mapping[str, str], variable: str, name: str) -> bool:
    """Return whether a variable of `env`, if set, allows the interface or port (``mlx5_0:1``) `name`."""
    value = env.get(variable, "")
    if not value:
        return True
    if variable == "GLOO_SOCKET_IFNAME":
        return name in value.split(",")
    device, _, port = name.partition(":")
    return matches(value, device, int(port) if port else None)


def _rdma_ports(nics: NodeNics, names: NicNames, env: Mapping[str, str], where: str) -> tuple[str, ...] | None:
    """Return the names of the ports to which the site or the environment limits RDMA; None without a limit."""
    if not nics.ports:
        return names.hca or None
    if names.hca:
        for hca in names.hca:
            if not any(hca in (p.device, p.name) for p in nics.ports):
                hint = f"it has {', '.join(p.name for p in nics.ports)}"
                raise SiteError(f"no HCA {hca}, which the site names", where=where, hint=hint)
        return tuple(p.name for p in nics.ports if p.device in names.hca or p.name in names.hca)
    if not names.storage and not env.get("NCCL_IB_HCA"):
        return None
    port_names: list[str] = []
    for nic in (NicType.IB, NicType.ROCE):
        without_storage = [p for p in nics.ports if p.kind == nic.value and not _is_storage(nics, p, names.storage)]
        allowed = [p for p in without_storage if _is_allowed(env, "NCCL_IB_HCA", p.name)]
        port_names += [p.name for p in replace(nics, ports=tuple(allowed or without_storage)).compute_ports(nic)]
    return tuple(port_names)


def _is_storage(nics: NodeNics, port: RdmaPort, storage: Sequence[str]) -> bool:
    """Return whether `storage` names the port, its device, or a network that contains its address or its GID."""
    owner = nics.interface(port.interface) if port.interface else None
    addresses = [ipaddress.ip_address(a) for a in (owner.address if owner else None, port.gid) if a]
    addresses += [a.ipv4_mapped for a in addresses if isinstance(a, ipaddress.IPv6Address) and a.ipv4_mapped]
    networks = [ipaddress.ip_network(entry, strict=False) for entry in storage if "/" in entry]
    is_named = port.device in storage or port.name in storage
    return is_named or any(address in network for network in networks for address in addresses)


def environment(nics: NodeNics, nic: NicType, node: str = "") -> dict[str, str]:
    """Return the variables (name -> value) that a rank on this node sets before its first NCCL call.
    `nic`: the NIC type of the node's fabric. NCCL reads its variables once per process, for all process groups. Their
    values start with ``=``, because ``mlx5_1`` without ``=`` would also match ``mlx5_10``. NCCL_IB_HCA is missing if
    the node shows no RDMA device (CPU nodes of the testbed, some containers) and the site names none. Raise SiteError
    if the node has RDMA devices but no usable port of type `nic`."""
    interface = data_interface(nics, NicType.ETHERNET, node).name
    values = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if nic.verbs and not nics.ports and nics.hcas:
        values["NCCL_IB_HCA"] = "=" + ",".join(nics.hcas)
    elif nic.verbs and nics.ports:
        ports = nics.compute_ports(nic)
        if not ports:
            allowed_ports = [p for p in nics.ports if nics.hcas is None or p.name in nics.hcas] or nics.ports
            port_list = ", ".join(f"{p.name} {p.kind} {p.state}" for p in allowed_ports)
            hint = "bring the port up, or correct the node's features (holmes label)"
            where = f"node {node}" if node else "this node"
            raise SiteError(f"no active {nic} port among {port_list}", where=where, hint=hint)
        values["NCCL_IB_HCA"] = "=" + ",".join(p.name for p in ports)
    return values


def conf_files(env: Mapping[str, str]) -> list[Path]:
    """Return NCCL's settings files, highest priority first. Environment variables override both."""
    home_file = [Path(env["HOME"]) / ".nccl.conf"] if env.get("HOME") else []
    user_file = [Path(env["NCCL_CONF_FILE"])] if env.get("NCCL_CONF_FILE") else home_file
    return [*user_file, Path("/etc/nccl.conf")]


def read_conf(path: Path) -> dict[str, str]:
    """Return the ``NAME=VALUE`` lines of a settings file, the first line of each name; empty if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    settings: dict[str, str] = {}
    for match in (_LINE.match(line) for line in lines if not line.lstrip().startswith("#")):
        if match:
            settings.setdefault(match[1], match[2])
    return settings


def refusals(
    env: Mapping[str, str],
    required: Mapping[str, str],
    node: str = "",
    files: Sequence[Path] | None = None,
    nic: str = "",
    network: str = "IB",
) -> list[Finding]:
    """Return a finding for each setting in `env`, or in NCCL's settings `files`, that would change a group's network.
    `required`: the variables that training sets on this node (:func:`environment`). A value in `env` that excludes a
    NIC of `required` is an error, because somebody set it on purpose. A value that allows more NICs is not, because
    training replaces it. The same holds for values in `files`, which the environment overrides. `nic`: the NIC type of
    the process groups inside a fabric. `network`: NCCL's name of their network, possibly a plugin's."""
    where = f"node {node}" if node else "environment"
    findings: list[Finding] = []
    sources = [("", dict(env))] + [(str(f), read_conf(f)) for f in (conf_files(env) if files is None else files)]
    for source, values in sources:
        origin = f" in {source}" if source else ""
        hint = f"remove it from {source}" if source else "unset it"
        expected = f" (expected: NIC {nic})" if nic else ""
        for name, effect in (*FORBIDDEN.items(), *DOUBTFUL.items()):
            if name == "NCCL_NET_PLUGIN" and network not in OWN_NETWORKS:
                continue
            if name in values and values[name] not in _OFF.get(name, ("",)):
                level = "error" if name in FORBIDDEN else "warning"
                problem = f"{name}={values[name]}{origin} {effect}{expected}"
                findings.append(Finding(level, where, problem, f"{hint} ({name})", node, nic))
        if source:
            continue
        for name, value in required.items():
            nics = value.lstrip("=")
            if excluded := [n for n in nics.split(",") if not _is_allowed(values, name, n)]:
                key = "hca" if name == "NCCL_IB_HCA" else "ethernet"
                problem = f"{name}={values[name]} rules out {', '.join(excluded)}, which the plan uses on this node"
                hint = f"unset {name}, or name the intended NIC as the fabric's {key} (docs/nics.md)"
                findings.append(Finding("error", where, f"{problem} ({value})", hint, node, nics))
        if values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            problem = "TORCH_DISTRIBUTED_DEBUG=DETAIL creates extra groups on the default interface"
            findings.append(Finding("error", where, problem, "unset it, or use INFO", node))
    return findings


# NCCL's limits (src/transport/net_socket.cc). For one process on a 100 Gb/s network its documentation advises 4 threads
# of 4 connections: 6.25 Gb/s per connection, 25 per thread.
MAX_CONNECTIONS, MAX_THREADS = 64, 16
CONNECTION_GBPS, THREAD_GBPS = 6.25, 25.0


def socket_settings(gbps: float, senders: int) -> dict[str, str]:
    """Return NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD for `senders` ranks of a node that send `gbps` together.
    The result is empty if one connection per rank is enough. NCCL's default then applies: one connection, on some
    clouds more. Each rank sends its share of the rate, over connections of 6.25 Gb/s and threads of 25 Gb/s. These
    figures come from NCCL's documentation of the two variables and were not measured."""
    share = gbps / max(1, senders)
    connections = min(MAX_CONNECTIONS, math.ceil(share / CONNECTION_GBPS))
    if connections <= 1:
        return {}
    threads = min(MAX_THREADS, math.ceil(share / THREAD_GBPS))
    per_thread = min(MAX_CONNECTIONS // threads, math.ceil(connections / threads))
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(per_thread)}


def split_defaults(
    defaults: Mapping[str, str], env: Mapping[str, str], files: Sequence[Path] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return (the variables of `defaults` that the site does not set, a text for each variable that the site sets to
    another value). A site sets variables in the environment or in one of NCCL's settings files."""
    site_values = {}
    for path in reversed(conf_files(env) if files is None else files):
        site_values.update(read_conf(path))
    site_values.update({k: v for k, v in env.items() if v})
    others = {name: value for name, value in defaults.items() if site_values.get(name, value) != value}
    reason = "is the site's own and stays; for the plan's rate it would be"
    texts = [f"{name}={site_values[name]} {reason} {value}" for name, value in others.items()]
    return {k: v for k, v in defaults.items() if k not in site_values}, texts
