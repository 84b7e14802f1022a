"""What NCCL and gloo must find in a node's environment, and what must not be there; decided without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, data_interface

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


def environment(nics: NodeNics, nic: NicType, node: str = "", ethernet: str | None = None) -> dict[str, str]:
    """The variables that a rank of a fabric with `nic` sets before its first NCCL call, the same for all its groups
    (NCCL reads them once per process). `ethernet` forces the Ethernet interface.

    Values are in exact-match syntax: ``mlx5_1`` would also match ``mlx5_10``. No NCCL_IB_HCA where the node has no RDMA
    device (CPU nodes of the testbed). Raises SiteError where it has devices, but no usable port of that type.
    """
    interface = data_interface(nics, NicType.ETHERNET, ethernet, node).name
    values = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if nic.rdma and nics.ports:
        ports = nics.compute_ports(nic)
        if not ports:
            seen = ", ".join(f"{p.name} {p.kind} {p.state}" for p in nics.ports)
            raise SiteError(f"no active {nic} port among {seen}", where=f"node {node}" if node else "this node",
                            hint="bring the port up, or correct the node's features (holmes label)")
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


def refusals(env: Mapping[str, str] | None = None, wanted: Mapping[str, str] | None = None, node: str = "",
             files: Sequence[Path] | None = None, nic: str = "") -> list[Finding]:
    """What in `env` (or in NCCL's settings files) would change a group's network without a word; nothing when healthy.

    `wanted`: this node's own :func:`environment`. A different value of one of those in the environment is an error, for
    somebody meant it; in a file it is not, for the environment wins over files. `nic`: what its fast groups are to use.
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
            if name in values and values[name] not in _OFF.get(name, ("",)):
                level = "error" if name in FORBIDDEN else "warning"
                what = f"{name}={values[name]}{at} {why}{meant}"
                found.append(Finding(level, where, what, f"{hint} ({name})", node, nic))
        if source:
            continue
        for name, value in (wanted or {}).items():
            given = values.get(name, "")
            if given and not _same(given, value):
                found.append(Finding("error", where, f"{name}={given} differs from this node's {value}",
                                     f"unset {name}", node, value.lstrip("=")))
        if values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            what = "TORCH_DISTRIBUTED_DEBUG=DETAIL makes groups of its own on the default interface"
            found.append(Finding("error", where, what, "unset it, or use INFO", node))
    return found


def _same(given: str, wanted: str) -> bool:
    """Equal but for the order of ports and an exact-match sign that a single interface does not need."""
    def names(value: str) -> list[str]:
        return sorted(value.lstrip("=").split(","))

    return names(given) == names(wanted) and (given.startswith("=") or not wanted.startswith("=") or "," not in wanted)
