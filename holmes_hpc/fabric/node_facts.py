"""Facts that each node reports from its own kernel, collected through srun.

``python -m holmes_hpc.fabric.node_facts`` prints those of the node on which it runs.
"""

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
from holmes_hpc.fabric.nccl import refusals, restrict_nics
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, data_interface
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.partitions import NodeSettings, usable_partitions
from holmes_hpc.fabric.probe import probe
from holmes_hpc.fabric.software import software
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.slurm.commands import partial_output
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Node, read_node, read_nodes, read_partitions

MARK = "holmes-facts "
# States in which a node is not asked, even if it is also IDLE.
NOT_ASKED = {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_DOWN", "POWER_UP", "RESERVED"}
WAIT_S = 10  # the longest wait for Slurm to start the job on idle nodes


@dataclass(frozen=True)
class Facts:
    """The facts about one node, from its kernel.

    `expected_features`: those that `holmes label` sets for its NICs. `ethernet`, `address`, `network`: name, address
    and IPv4 network of its Ethernet interface; `trouble`: why it has none, and a hint. `ipoib`: IPoIB interfaces, which
    NCCL would prefer. `findings`: differences from Slurm's features, and settings that change a group's network.
    `skew_s`: its clock minus that of the asking machine. `software`: name -> version. `missing`: the asking machine's
    file if the node does not see it.
    """

    node: str
    nic: NicType
    expected_features: tuple[str, ...]
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
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values["nic"] = NicType(data["nic"])
        values["findings"] = tuple(Finding(**f) for f in data.get("findings", ()))
        return cls(**values)


def facts_of(
    node: str,
    nics: NodeNics,
    features: Sequence[str] | None,
    env: Mapping[str, str],
    files: Sequence[Path] | None = None,
    vocabulary: str | None = None,
) -> Facts:
    """Return the facts of a node with these NICs. `features`: Slurm's for it; None if Slurm does not know the node.
    `env`, `files`: the environment and NCCL's settings files on the node."""
    ethernet = address = network = trouble = ""
    try:
        nics = as_labelled(nics, features or (), env, vocabulary, node)
        interface = data_interface(nics, NicType.ETHERNET, node=node)
        ethernet, address, network = interface.name, str(interface.address), str(interface.network)
    except SiteError as e:
        trouble = f"{e.what}; {e.hint}"
    findings = [] if features is None else differences(nics, features, read_vocabulary(vocabulary), node)
    findings += refusals(env, {}, node, files)
    ipoib = tuple(n.name for n in nics.interfaces if n.name.startswith("ib") and n.up and n.address)
    return Facts(
        node,
        nic=nics.type,
        expected_features=features_of(nics),
        ethernet=ethernet,
        address=address,
        network=network,
        trouble=trouble,
        ipoib=ipoib,
        notes=nics.notes,
        findings=tuple(f for f in findings if f.level != "info"),
    )


def as_labelled(
    nics: NodeNics, features: Sequence[str], env: Mapping[str, str], vocabulary: str | None = None, node: str = ""
) -> NodeNics:
    """Return `nics` limited to those that the node's `features` name (:func:`nccl.restrict_nics`)."""
    return restrict_nics(nics, read_features(features, read_vocabulary(vocabulary)).names, env, node)


def ask_nodes(
    nodes: Iterable[Node], settings: NodeSettings | None = None, shared: Path | None = None, setup: Sequence[str] = ()
) -> tuple[list[Facts], list[Finding]]:
    """Ask all idle `nodes`. Return their facts, and findings for nodes that were busy or did not answer.

    The nodes need this Python, as for training. A node that fails or hangs does not affect others. `settings`: of the
    jobs that ask; `shared`: a file that the nodes should see; `setup`: shell lines before Python starts, a job's own
    (`slurm.setup`).
    """
    settings = settings or NodeSettings()
    partitions, _ = usable_partitions(read_partitions(), settings)
    facts: list[Facts] = []
    unanswered: list[Finding] = []
    usable = [n for n in nodes if n.usable and n.partitions]
    for (partition, reservation), members in grouped(
        (
            (
                next((p for p in n.partitions if p in partitions), None),
                settings.reservation if n.reservation == settings.reservation else None,
            ),
            n,
        )
        for n in usable
    ):
        if partition is None:
            unanswered.append(_unanswered("info", members, "in no partition that a job may use, so not asked"))
            continue
        not_asked = NOT_ASKED - ({"RESERVED"} if reservation else set())
        idle = [n for n in members if "IDLE" in n.states and not not_asked & set(n.states)]
        busy = [n for n in members if n not in idle]
        if busy:
            unanswered.append(_unanswered("info", busy, "busy, reserved or powered down, so not asked"))
        if not idle:
            continue
        limit_s = answer_limit_s(len(idle))
        command = _srun_command(partition, idle, replace(settings, reservation=reservation), shared, setup)
        answers, trouble = partial_output(*command, timeout_s=limit_s)
        partition_facts = [f for f in map(_parse_answer, answers.splitlines()) if f is not None]
        facts += partition_facts
        missing_nodes = [n for n in idle if n.name not in {f.node for f in partition_facts}]
        if missing_nodes:
            unanswered.append(
                _unanswered("warning", missing_nodes, "gave no answer" + (f" ({trouble})" if trouble else ""))
            )
    return facts, unanswered


def answer_limit_s(node_count: int) -> int:
    """Return the seconds within which nodes must answer; they all start Python from one shared file system."""
    return 30 + node_count // 10


def propose(
    names: Sequence[str] | None = None, fabric: str | None = None, vocabulary: str | None = None
) -> tuple[list[Change], list[Finding]]:
    """Return (the changes that `holmes label` proposes, findings for nodes that did not answer).

    `names`: host lists of the nodes; by default all idle nodes. `fabric`: the name in an additional label
    fabric_<name>. It needs `names`, because no node knows its fabric.
    """
    nodes = read_nodes()
    hosts = [host for text in names for host in expand(text)] if names else [n.name for n in nodes]
    if fabric is not None and not names:
        raise SiteError("--fabric is given without nodes", where="label", hint="name the nodes of that fabric: ib[1-4]")
    node_names = {n.name for n in nodes}
    for name in hosts:
        if name not in node_names:
            raise SiteError(f"no node {name!r}", where="label", hint=f"Slurm has {compress(node_names)}")
    facts, unanswered = ask_nodes([n for n in nodes if n.name in set(hosts)], NodeSettings(vocabulary))
    labels = dict.fromkeys(hosts, fabric) if fabric else None
    return changes(nodes, {f.node: f.expected_features for f in facts}, labels), unanswered


def _unanswered(level: str, nodes: Sequence[Node], reason: str) -> Finding:
    names = compress(n.name for n in nodes)
    return Finding(level, f"nodes {names}", reason, "ask them with `holmes probe --check` on the node itself")


def _srun_command(
    partition: str, nodes: Sequence[Node], settings: NodeSettings, shared: Path | None, setup: Sequence[str]
) -> list[str]:
    options = [
        text
        for option, path in (("--vocabulary", settings.vocabulary), ("--shared", str(shared or "")))
        if path
        for text in (option, os.path.abspath(path))
    ]
    names, count = compress(n.name for n in nodes), len(nodes)
    limit_s = answer_limit_s(count)
    shell = ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "facts"] if setup else []
    return [
        "srun",
        f"--partition={partition}",
        *(f"--{key}={value}" for key in ("account", "qos", "reservation") if (value := getattr(settings, key))),
        f"--nodelist={names}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--immediate={WAIT_S}",
        f"--time={2 + limit_s // 60}",
        "--quiet",
        "--no-kill",
        "--kill-on-bad-exit=0",
        f"--wait={limit_s // 2}",  # some nodes may fail or hang
        "--job-name=holmes-facts",
        *shell,
        sys.executable,
        *module_arguments("holmes_hpc.fabric.node_facts"),
        *options,
    ]


def _parse_answer(line: str) -> Facts | None:
    """Return the facts in a line of a node's output; None if it has none."""
    if not line.startswith(MARK):
        return None
    try:
        data = json.loads(line[len(MARK) :])
        skew = float(data.pop("clock")) - time.time()
        return Facts.from_dict({**data, "skew_s": skew})
    except (ValueError, KeyError, TypeError):
        return None


def node_name() -> str:
    """Return Slurm's name of this node: $SLURMD_NODENAME in a job, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def check_here(nics: NodeNics, vocabulary: str | None = None, name: str | None = None) -> list[Finding]:
    """Compare these NICs with Slurm's features for this node, or for `name` (`holmes probe --check`)."""
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
    """Print this node's facts: a line of JSON after MARK. `arguments`: --vocabulary FILE, --shared FILE."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    vocabulary, shared = options.get("--vocabulary"), options.get("--shared", "")
    name = node_name()
    node = read_node(name)
    facts = facts_of(name, probe(), node.features if node else None, os.environ, vocabulary=vocabulary)
    facts = replace(facts, software=software(), missing="" if not shared or Path(shared).exists() else shared)
    sys.stdout.write(MARK + json.dumps({**facts.to_dict(), "clock": time.time()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
