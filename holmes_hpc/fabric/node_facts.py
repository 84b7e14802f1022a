"""What each node's own kernel says, asked through srun. ``python -m holmes_hpc.fabric.node_facts`` prints one's."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_features, read_vocabulary
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.label import Change, changes, differences, features_of
from holmes_hpc.fabric.nccl import narrowed, refusals
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, data_interface
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.probe import probe
from holmes_hpc.fabric.software import software
from holmes_hpc.slurm.commands import partial_output
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Node, read_node, read_nodes, read_partitions

MARK = "holmes-facts "
ASLEEP = {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_DOWN", "POWER_UP", "RESERVED"}  # though idle
WAIT_S = 10  # for idle nodes; a busy node is said to be so, not waited for


@dataclass(frozen=True)
class Facts:
    """One node, as it sees itself. `ethernet`: its Ethernet interface, address and network, or why there is none;
    `ipoib`: interfaces that NCCL would try first; `findings`: differences from `features` that Slurm shows, and what
    would override NCCL's choices; `skew_s`: its clock less the asking machine's; `software`: versions; `missing`: a
    file of the asking machine that it does not see."""

    node: str
    nic: NicType
    deserves: tuple[str, ...]
    ethernet: str = ""
    address: str = ""
    network: str = ""
    trouble: str = ""
    ipoib: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    skew_s: float = 0.0
    software: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "nic": str(self.nic)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        known["nic"] = NicType(data["nic"])
        known["findings"] = tuple(Finding(**f) for f in data.get("findings", ()))
        return cls(**known)


def facts_of(
    node: str,
    nics: NodeNics,
    features: Sequence[str] | None,
    env: Mapping[str, str],
    files: Sequence[Path] | None = None,
    vocabulary: str | None = None,
) -> Facts:
    """The facts of a node with these NICs. `features`: Slurm's for it, None where it knows no such node."""
    ethernet = address = network = trouble = ""
    try:
        nics = as_labelled(nics, features or (), env, vocabulary, node)
        found = data_interface(nics, NicType.ETHERNET, node=node)
        ethernet, address, network = found.name, str(found.address), str(found.network)
    except SiteError as e:
        trouble = f"{e.what}; {e.hint}"
    findings = [] if features is None else differences(nics, features, read_vocabulary(vocabulary), node)
    findings += refusals(env, {}, node, files)
    first = tuple(n.name for n in nics.interfaces if n.name.startswith("ib") and n.up and n.address)
    return Facts(
        node,
        nic=nics.type,
        deserves=features_of(nics),
        ethernet=ethernet,
        address=address,
        network=network,
        trouble=trouble,
        ipoib=first,
        notes=nics.notes,
        findings=tuple(f for f in findings if f.level != "info"),
    )


def as_labelled(
    nics: NodeNics, features: Sequence[str], env: Mapping[str, str], vocabulary: str | None = None, node: str = ""
) -> NodeNics:
    """A node's NICs, limited to those that its features name. SiteError where it has none of that name."""
    return narrowed(nics, read_features(features, read_vocabulary(vocabulary)).names, env, node)


def ask_nodes(
    nodes: Iterable[Node], vocabulary: str | None = None, shared: Path | None = None, setup: Sequence[str] = ()
) -> tuple[list[Facts], list[Finding]]:
    """Ask all idle `nodes`; and a finding for those that were busy or gave no answer. Needs this Python on the nodes,
    as training does. A node that fails or hangs takes no other's answer with it. `shared`: a file that they
    should see; `setup`: lines of shell before Python starts, a job's own (`slurm.setup`)."""
    up = {p.name for p in read_partitions() if p.up}
    facts: list[Facts] = []
    silent: list[Finding] = []
    usable = [n for n in nodes if n.usable and n.partitions]
    for partition, members in grouped((next((p for p in n.partitions if p in up), None), n) for n in usable):
        if partition is None:
            silent.append(_silent("info", members, "in closed partitions only, so not asked"))
            continue
        idle = [n for n in members if "IDLE" in n.states and not ASLEEP & set(n.states)]
        busy = [n for n in members if n not in idle]
        if busy:
            silent.append(_silent("info", busy, "busy, reserved or powered down, so not asked"))
        if not idle:
            continue
        limit_s = limit(len(idle))
        out, trouble = partial_output(*_srun(partition, idle, vocabulary, shared, setup), timeout_s=limit_s)
        found = [f for f in map(_understand, out.splitlines()) if f is not None]
        facts += found
        missing = [n for n in idle if n.name not in {f.node for f in found}]
        if missing:
            silent.append(_silent("warning", missing, "gave no answer" + (f" ({trouble})" if trouble else "")))
    return facts, silent


def limit(nodes: int) -> int:
    """Seconds in which so many nodes must answer: Python starts from a file system that all of them share."""
    return 30 + nodes // 10


def propose(
    names: Sequence[str] | None = None, fabric: str | None = None, vocabulary: str | None = None
) -> tuple[list[Change], list[Finding]]:
    """What `holmes label` would change: the nodes' own answers merged with their present features.

    `names`: host lists; all idle nodes without them. `fabric`: put fabric_<name> on them (needs `names`, for two
    fabrics cannot be told apart by asking).
    """
    nodes = read_nodes()
    wanted = [host for text in names for host in expand(text)] if names else [n.name for n in nodes]
    if fabric is not None and not names:
        raise SiteError("a fabric's name for all nodes", where="label", hint="name the nodes of that fabric: ib[1-4]")
    known = {n.name for n in nodes}
    for name in wanted:
        if name not in known:
            raise SiteError(f"no node {name!r}", where="label", hint=f"Slurm has {compress(known)}")
    facts, silent = ask_nodes([n for n in nodes if n.name in set(wanted)], vocabulary)
    labels = dict.fromkeys(wanted, fabric) if fabric else None
    return changes(nodes, {f.node: f.deserves for f in facts}, labels), silent


def _silent(level: str, nodes: Sequence[Node], why: str) -> Finding:
    names = compress(n.name for n in nodes)
    return Finding(level, f"nodes {names}", why, "ask them with `holmes probe --check` on the node itself")


def _srun(
    partition: str, nodes: Sequence[Node], vocabulary: str | None, shared: Path | None, setup: Sequence[str]
) -> list[str]:
    own = [
        word
        for option, path in (("--vocabulary", vocabulary), ("--shared", str(shared or "")))
        if path
        for word in (option, os.path.abspath(path))
    ]
    names, count = compress(n.name for n in nodes), len(nodes)
    limit_s = limit(count)
    first = ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "facts"] if setup else []
    return [
        "srun",
        f"--partition={partition}",
        f"--nodelist={names}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--immediate={WAIT_S}",
        f"--time={2 + limit_s // 60}",
        "--quiet",
        "--no-kill",
        "--kill-on-bad-exit=0",
        f"--wait={limit_s // 2}",  # some may fail, or hang
        "--job-name=holmes-facts",
        *first,
        sys.executable,
        "-m",
        "holmes_hpc.fabric.node_facts",
        *own,
    ]


def _understand(line: str) -> Facts | None:
    if not line.startswith(MARK):
        return None
    try:
        data = json.loads(line[len(MARK) :])
        skew = float(data.pop("clock")) - time.time()
        return Facts.from_dict({**data, "skew_s": skew})
    except (ValueError, KeyError, TypeError):
        return None


def node_name() -> str:
    """What Slurm calls this node, as far as it can be known without asking."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def check_here(nics: NodeNics, vocabulary: str | None = None, name: str | None = None) -> list[Finding]:
    """`holmes probe --check`: these NICs against Slurm's features for this node (or for `name`)."""
    name = name or node_name()
    node = read_node(name)
    if node is None:
        raise SiteError(
            f"Slurm knows no node {name!r}",
            where="probe --check",
            hint="run it on a node of the cluster, or give the node's name with --node",
        )
    nics = as_labelled(nics, node.features, {}, vocabulary, name)
    return differences(nics, node.features, read_vocabulary(vocabulary), name)


def main(arguments: Sequence[str]) -> None:
    """Print this node's facts, one marked line of JSON."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    vocabulary, shared = given.get("--vocabulary"), given.get("--shared", "")
    name = node_name()
    node = read_node(name)
    facts = facts_of(name, probe(), node.features if node else None, os.environ, vocabulary=vocabulary)
    facts = replace(facts, software=software(), missing="" if not shared or Path(shared).exists() else shared)
    sys.stdout.write(MARK + json.dumps({**facts.to_dict(), "clock": time.time()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
