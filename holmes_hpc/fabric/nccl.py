"""What NCCL and gloo must find in a node's environment, and what must not be there; decided without torch."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nic_types import OWN_NETWORKS, NicType
from holmes_hpc.fabric.nics import NodeNics, RdmaPort, candidates, data_interface
from holmes_hpc.fabric.site import NicNames

# What undoes the choice per group, wherever it is set.
FORBIDDEN = {
    "NCCL_NET": "overrides the network of every communicator",
    "NCCL_NET_PLUGIN": "replaces NCCL's own networks",
    "NCCL_IB_DISABLE": "switches RDMA off in the whole process",
    "NCCL_COMM_ID": "sends NCCL's bootstrap to a fixed address",
    "NCCL_SOCKET_FAMILY": "may choose addresses that other nodes do not have",
}
# What is better left to NCCL: the index of a GID differs between nodes, and changes when an address does.
DOUBTFUL = {"NCCL_IB_GID_INDEX": "is one index for all nodes; NCCL 2.21 and later find the RoCE v2 GID themselves"}
_OFF = {"NCCL_IB_DISABLE": ("", "0"), "NCCL_NET_PLUGIN": ("", "none"), "NCCL_SOCKET_FAMILY": ("", "AF_INET")}
_LINE = re.compile(r"\s*([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*\Z")


def matches(value: str, name: str, port: int | None = None) -> bool:
    """Whether NCCL, with `value` in NCCL_SOCKET_IFNAME or NCCL_IB_HCA, uses the interface or RDMA device `name` (its
    port number `port`).

    The rule is that of parseStringList and matchIfList in NCCL's src/misc/utils.cc: ``^`` excludes what the rest
    matches; ``=`` after it asks for equal names, where otherwise a name need only begin so; words are parted by commas,
    and ``:1`` after one asks for that port. A list without a word matches everything.
    """
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")

    def fits(word: str) -> bool:
        wanted, colon, number = word.partition(":")
        digits = re.match(r"\d*", number)
        same = name == wanted if exact else name.startswith(wanted)
        return same and (port is None or not colon or int((digits and digits[0]) or 0) == port)

    words = [word for word in rest.split(",") if word.partition(":")[0]]
    return (not words or any(map(fits, words))) is not excludes


def narrowed(nics: NodeNics, names: NicNames, env: Mapping[str, str], node: str = "") -> NodeNics:
    """`nics` limited to what the site names for the job and what NCCL's variables in `env` allow.

    A name decides; a variable only chooses among what could be used (no management ports), and where it allows nothing
    of that it is left to :func:`refusals`. Raises SiteError for an interface or a device that is named and not there.
    """
    where = f"node {node}" if node else "this node"
    sockets: tuple[str, ...] | None = None
    if names.ethernet is not None:
        if nics.interface(names.ethernet) is None:
            raise SiteError(
                f"no interface {names.ethernet}, which the site names for its sockets",
                where=where,
                hint=f"it has {', '.join(n.name for n in nics.interfaces) or 'none'}",
            )
        sockets = (names.ethernet,)
    elif any(env.get(variable) for variable in _INTERFACES):
        sockets = (
            tuple(
                n.name
                for n in candidates(nics, NicType.ETHERNET)
                if n.role == "data" and n.up and all(_allows(env, variable, n.name) for variable in _INTERFACES)
            )
            or None
        )
    return replace(nics, sockets=sockets, hcas=_hcas(nics, names, env, where))


_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _allows(env: Mapping[str, str], variable: str, name: str) -> bool:
    """Whether a variable of `env`, where it is set, allows the interface or the port (``mlx5_0:1``) `name`."""
    given = env.get(variable, "")
    if not given:
        return True
    if variable == "GLOO_SOCKET_IFNAME":
        return name in given.split(",")
    device, _, port = name.partition(":")
    return matches(given, device, int(port) if port else None)


def _hcas(nics: NodeNics, names: NicNames, env: Mapping[str, str], where: str) -> tuple[str, ...] | None:
    """The ports for RDMA where site or environment say something about them, else None."""
    if not nics.ports:
        return names.hca or None
    if names.hca:
        for word in names.hca:
            if not any(word in (p.device, p.name) for p in nics.ports):
                raise SiteError(
                    f"no HCA {word}, which the site names",
                    where=where,
                    hint=f"it has {', '.join(p.name for p in nics.ports)}",
                )
        return tuple(p.name for p in nics.ports if p.device in names.hca or p.name in names.hca)
    if not names.storage and not env.get("NCCL_IB_HCA"):
        return None
    chosen: list[str] = []
    for nic in (NicType.IB, NicType.ROCE):
        left = [p for p in nics.ports if p.kind == nic.value and not _is_storage(nics, p, names.storage)]
        allowed = [p for p in left if _allows(env, "NCCL_IB_HCA", p.name)]
        chosen += [p.name for p in replace(nics, ports=tuple(allowed or left)).compute_ports(nic)]
    return tuple(chosen)


def _is_storage(nics: NodeNics, port: RdmaPort, storage: Sequence[str]) -> bool:
    """Whether a port is one of those left out: by its name, its device's, an address of its interface, or a GID."""
    owner = nics.interface(port.interface) if port.interface else None
    known = [ipaddress.ip_address(a) for a in (owner.address if owner else None, port.gid) if a]
    known += [a.ipv4_mapped for a in known if isinstance(a, ipaddress.IPv6Address) and a.ipv4_mapped]
    return any(
        word in (port.device, port.name)
        if "/" not in word
        else any(a in ipaddress.ip_network(word, strict=False) for a in known)
        for word in storage
    )


def environment(nics: NodeNics, nic: NicType, node: str = "") -> dict[str, str]:
    """The variables that a rank of a fabric with `nic` sets before its first NCCL call, the same for all its groups
    (NCCL reads them once per process).

    Values are in exact-match syntax: ``mlx5_1`` would also match ``mlx5_10``. No NCCL_IB_HCA where the node shows no
    RDMA device (CPU nodes of the testbed, some containers), unless the site names some. Raises SiteError where it has
    devices, but no usable port of that type.
    """
    interface = data_interface(nics, NicType.ETHERNET, node).name
    values = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if nic.verbs and not nics.ports and nics.hcas:
        values["NCCL_IB_HCA"] = "=" + ",".join(nics.hcas)
    elif nic.verbs and nics.ports:
        ports = nics.compute_ports(nic)
        if not ports:
            named = [p for p in nics.ports if nics.hcas is None or p.name in nics.hcas] or nics.ports
            seen = ", ".join(f"{p.name} {p.kind} {p.state}" for p in named)
            raise SiteError(
                f"no active {nic} port among {seen}",
                where=f"node {node}" if node else "this node",
                hint="bring the port up, or correct the node's features (holmes label)",
            )
        values["NCCL_IB_HCA"] = "=" + ",".join(p.name for p in ports)
    return values


def conf_files(env: Mapping[str, str]) -> list[Path]:
    """The files that NCCL reads settings from, the one that wins first. Variables of the environment win over both."""
    own = Path(env["NCCL_CONF_FILE"]) if env.get("NCCL_CONF_FILE") else None
    if own is None and env.get("HOME"):
        own = Path(env["HOME"]) / ".nccl.conf"
    return [*([own] if own else []), Path("/etc/nccl.conf")]


def read_conf(path: Path) -> dict[str, str]:
    """``NAME=VALUE`` lines of a settings file, a name's first one; empty where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for match in (_LINE.match(line) for line in lines if not line.lstrip().startswith("#")):
        if match:
            found.setdefault(match[1], match[2])
    return found


def refusals(
    env: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
    node: str = "",
    files: Sequence[Path] | None = None,
    nic: str = "",
    network: str = "IB",
) -> list[Finding]:
    """What in `env` (or in NCCL's settings files) would change a group's network without a word; nothing when healthy.

    `wanted`: this node's own :func:`environment`. A value in the environment that rules out what is wanted is an error,
    for somebody meant it; in a file it is not, for the environment wins over files. One that allows more than what is
    wanted is none: the process's own value takes its place. `nic`: what its fast groups are to use; `network`: what
    NCCL calls their network, which may be a plugin's.
    """
    env = os.environ if env is None else env
    where = f"node {node}" if node else "environment"
    found: list[Finding] = []
    sources = [("", dict(env))] + [(str(f), read_conf(f)) for f in (conf_files(env) if files is None else files)]
    for source, values in sources:
        at = f" in {source}" if source else ""
        hint = f"remove it from {source}" if source else "unset it"
        meant = f" (meant: NIC {nic})" if nic else ""
        for name, why in (*FORBIDDEN.items(), *DOUBTFUL.items()):
            if name == "NCCL_NET_PLUGIN" and network not in OWN_NETWORKS:
                continue
            if name in values and values[name] not in _OFF.get(name, ("",)):
                level = "error" if name in FORBIDDEN else "warning"
                what = f"{name}={values[name]}{at} {why}{meant}"
                found.append(Finding(level, where, what, f"{hint} ({name})", node, nic))
        if source:
            continue
        for name, value in (wanted or {}).items():
            ruled_out = [w for w in value.lstrip("=").split(",") if not _allows(values, name, w)]
            if ruled_out:
                key = "hca" if name == "NCCL_IB_HCA" else "ethernet"
                found.append(
                    Finding(
                        "error",
                        where,
                        f"{name}={values[name]} rules out {', '.join(ruled_out)}, which "
                        f"the plan uses on this node ({value})",
                        f"unset {name}, or name what is meant as the fabric's {key} (docs/nics.md)",
                        node,
                        value.lstrip("="),
                    )
                )
        if values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            what = "TORCH_DISTRIBUTED_DEBUG=DETAIL makes groups of its own on the default interface"
            found.append(Finding("error", where, what, "unset it, or use INFO", node))
    return found


# NCCL's limits (src/transport/net_socket.cc), and what its documentation advises for a network of 100 Gb/s that one
# process uses alone: 4 threads of 4 connections. So a connection is reckoned at 6.25 Gb/s, a thread at 25.
MOST_CONNECTIONS, MOST_THREADS = 64, 16
CONNECTION_GBPS, THREAD_GBPS = 6.25, 25.0


def socket_settings(gbps: float, senders: int) -> dict[str, str]:
    """NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD for a node that sends `gbps` (Gb/s) over sockets by `senders`
    ranks at a time. Nothing where one connection a rank is enough: that is NCCL's default, and on some clouds it has a
    better one of its own.

    Rule: each rank carries its share of the rate, over connections of 6.25 Gb/s and threads of 25 Gb/s, from NCCL's
    documentation of the two variables; not measured by this project.
    """
    share = gbps / max(1, senders)
    connections = min(MOST_CONNECTIONS, math.ceil(share / CONNECTION_GBPS))
    if connections <= 1:
        return {}
    threads = min(MOST_THREADS, math.ceil(share / THREAD_GBPS))
    each = min(MOST_CONNECTIONS // threads, math.ceil(connections / threads))
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(each)}


def kept(
    defaults: Mapping[str, str], env: Mapping[str, str], files: Sequence[Path] | None = None
) -> tuple[dict[str, str], list[str]]:
    """What of `defaults` is to be set, and a line for each that the site has set itself (in the environment or one of
    NCCL's settings files), which stays."""
    own = {}
    for path in reversed(conf_files(env) if files is None else files):
        own.update(read_conf(path))
    own.update({k: v for k, v in env.items() if v})
    said = [
        f"{name}={own[name]} is the site's own and stays; the plan's rate would take {value}"
        for name, value in defaults.items()
        if name in own and own[name] != value
    ]
    return {k: v for k, v in defaults.items() if k not in own}, said
