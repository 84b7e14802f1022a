"""Facts that each node reports from its own kernel, collected through srun.

``python -m holmes_hpc.fabric.node_facts`` prints those of the node on which it runs.
"""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_features, read_vocabulary
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.label import Change, changes, differences, features_of, spell_rate
from holmes_hpc.fabric.local_gpus import nvidia_smi
from holmes_hpc.fabric.nccl import refusals, restrict_nics
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, data_interface
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.partitions import NodeSettings, usable_partitions
from holmes_hpc.fabric.probe import probe
from holmes_hpc.fabric.software import software
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.slurm.commands import partial_outputs
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Node, read_node, read_nodes, read_partitions

MARK = "holmes-facts "  # begins the line of output with a node's facts
# States in which a node is not asked, even if it is also IDLE.
NOT_ASKED = {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_DOWN", "POWER_UP", "RESERVED"}
WAIT_S = 10  # the longest wait for Slurm to start the job on idle nodes
JOB_NODES = 16  # the most nodes that one job asks


@dataclass(frozen=True)
class Facts:
    """The facts that one node reports about itself. `expected_features`: the features that `holmes label` sets for its
    NICs; `ethernet`, `address`, `network`: name, IPv4 address and IPv4 network of its Ethernet interface; `trouble`:
    why it has no such interface, and a hint; `ipoib`: IPoIB interfaces, which NCCL would prefer for sockets;
    `findings`: differences from Slurm's features, and settings that change a process group's network; `skew_s`: seconds
    by which its clock is ahead of the asking machine's; `software`: name -> version; `missing`: the shared file, if the
    node does not see it; `hca`: its ports for collectives, set only if it has both IB and RoCE ports; `plugin`:
    features of a network for which NCCL needs a plugin, set only without IB and RoCE; `gpu`, `gpu_memory_gib`, `gpus`:
    name and memory (GiB) of its first GPU, and its number of GPUs, by nvidia-smi."""

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
    hca: tuple[str, ...] = ()
    plugin: tuple[str, ...] = ()
    gpu: str = ""
    gpu_memory_gib: float | None = None
    gpus: int = 0


def facts_of(
    node: str,
    nics: NodeNics,
    features: Sequence[str] | None,
    env: Mapping[str, str],
    files: Sequence[Path] | None = None,
    vocabulary: str | None = None,
) -> Facts:
    """Return the facts of a node with these NICs. `features`: the node's features in Slurm; None if Slurm does not know
    the node. `env`, `files`: the environment variables and NCCL's settings files on the node."""
    ethernet: dict[str, Any] = {}
    try:
        nics = as_labelled(nics, features or (), env, vocabulary, node)
        interface = data_interface(nics, NicType.ETHERNET, node=node)
        ethernet = {"ethernet": interface.name, "address": str(interface.address), "network": str(interface.network)}
    except SiteError as e:
        ethernet = {"trouble": f"{e.what}; {e.hint}"}
    findings = [] if features is None else differences(nics, features, read_vocabulary(vocabulary), node)
    findings += refusals(env, {}, node, files)
    plugin = nics.plugin_network
    has_two_types = all(nics.usable_ports(nic) for nic in (NicType.IB, NicType.ROCE))
    return Facts(
        node,
        nics.type,
        features_of(nics),
        **ethernet,
        ipoib=tuple(n.name for n in nics.interfaces if n.name.startswith("ib") and n.up and n.address),
        notes=nics.notes,
        findings=tuple(f for f in findings if f.level != "info"),
        hca=tuple(p.name for p in nics.compute_ports(nics.type)) if has_two_types else (),
        plugin=() if plugin is None or nics.type.rdma else (f"nic_plugin_{plugin[0]}", f"nic_{spell_rate(plugin[1])}"),
    )


def as_labelled(
    nics: NodeNics, features: Sequence[str], env: Mapping[str, str], vocabulary: str | None = None, node: str = ""
) -> NodeNics:
    """Return `nics` limited to the NICs that `features` name or that `env` allows (:func:`nccl.restrict_nics`)."""
    return restrict_nics(nics, read_features(features, read_vocabulary(vocabulary)).names, env, node)


def ask_nodes(
    nodes: Iterable[Node], settings: NodeSettings = NodeSettings(), shared: Path | None = None
) -> tuple[list[Facts], list[Finding]]:
    """Ask all idle `nodes` by short jobs. Return their facts, and findings for nodes that were busy or did not answer.
    The jobs run this Python, so the nodes must have it, as for training. A node that fails or hangs does not affect
    other nodes. `settings`: the settings of the jobs; `shared`: a file that the nodes should see."""
    partitions, _ = usable_partitions(read_partitions(), settings)
    jobs, unanswered = list[Job](), list[Finding]()
    usable = [n for n in nodes if n.usable and n.partitions]

    def access(n: Node) -> tuple[str | None, str | None]:
        reservation = settings.reservation if n.reservation == settings.reservation else None
        return next((p for p in n.partitions if p in partitions), None), reservation

    for (partition, reservation), members in grouped((access(n), n) for n in usable):
        if partition is None:
            unanswered.append(_unanswered("info", members, "in no partition that a job may use, so not asked"))
            continue
        not_asked = NOT_ASKED - ({"RESERVED"} if reservation else set())
        idle = [n for n in members if "IDLE" in n.states and not not_asked & set(n.states)]
        busy = [n for n in members if n not in idle]
        if busy:
            unanswered.append(_unanswered("info", busy, "busy, reserved or powered down, so not asked"))
        reserved = (f"--reservation={reservation}",) if reservation else ()
        for gpus, alike in grouped((gpu_option(n.gpu_types, n.gpus), n) for n in idle):
            for first in range(0, len(alike), JOB_NODES):
                names = tuple(n.name for n in alike[first : first + JOB_NODES])
                jobs.append(Job(partition, names, options=gpus + reserved))
    facts: list[Facts] = []
    for job, (answers, trouble) in zip(jobs, ask(jobs, settings, shared), strict=True):
        facts += answers
        if missing := [name for name in job.node_names if name not in {f.node for f in answers}]:
            unanswered.append(_unanswered("warning", missing, f"gave no answer ({trouble})".removesuffix(" ()")))
    return facts, unanswered


def answer_limit_s(node_count: int) -> int:
    """Return the seconds that answers may take: more for many nodes, which start Python from one file system."""
    return 30 + node_count // 10


def propose(
    names: Sequence[str] | None = None, fabric: str | None = None, vocabulary: str | None = None
) -> tuple[list[Change], list[Finding]]:
    """Return (the changes that `holmes label` proposes, findings for nodes that did not answer). `names`: host lists;
    by default all idle nodes. `fabric`: the name in an additional label fabric_<name>, which needs `names`."""
    nodes = read_nodes()
    hosts = [host for text in names for host in expand(text)] if names else [n.name for n in nodes]
    if fabric is not None and not names:
        raise SiteError("--fabric is given without nodes", where="label", hint="name the nodes of that fabric: ib[1-4]")
    node_names = {n.name for n in nodes}
    for name in hosts:
        if name not in node_names:
            raise SiteError(f"no node {name!r}", where="label", hint=f"choose from {compress(node_names)}")
    facts, unanswered = ask_nodes([n for n in nodes if n.name in set(hosts)], NodeSettings(vocabulary))
    labels = {f.node: f.expected_features for f in facts}
    for host in hosts if fabric else ():
        labels[host] = (*labels.get(host, ()), f"fabric_{fabric}")
    return changes(nodes, labels), unanswered


def _unanswered(level: str, nodes: Sequence[Node | str], reason: str) -> Finding:
    names = compress(n if isinstance(n, str) else n.name for n in nodes)
    return Finding(level, f"nodes {names}", reason, "ask them with `holmes probe --check` on the node itself")


@dataclass(frozen=True)
class Job:
    """A short job that asks nodes of a partition for their facts. `node_names`: the nodes to ask; empty: any one node;
    `options`: srun options of this job, which replace the same options of all jobs; `wait_s`: the longest wait for
    Slurm to start the job, in seconds; `setup`: shell lines to run after the `setup` of all jobs; `python`: the command
    that starts Python; empty: the Python of this process."""

    partition: str
    node_names: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    wait_s: int = WAIT_S
    setup: tuple[str, ...] = ()
    python: str = ""


def gpu_option(types: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the srun option that requests `count` GPUs per node; no option for 0.
    It requests a GPU type if `types`, the types that GRES names, has exactly one."""
    kind = f"{types[0]}:" if len(types) == 1 and types[0] else ""
    return (f"--gpus-per-node={kind}{count}",) if count else ()


def ask(jobs: Sequence[Job], settings: NodeSettings, shared: Path | None = None) -> list[tuple[list[Facts], str]]:
    """Run the jobs at the same time. Return (facts of its nodes, error message; empty on success) for each job. Account
    and QOS default to those of sbatch's environment. The reservation is only for jobs without `node_names`."""
    files = (("--vocabulary", settings.vocabulary), ("--shared", str(shared or "")))
    arguments = [text for option, path in files if path for text in (option, os.path.abspath(path))]
    limit_s = answer_limit_s(sum(len(job.node_names) for job in jobs))
    options = [o for o in settings.job_options if not o.startswith("--reservation=")]
    for name in ("account", "qos"):
        variables = (os.environ.get(f"{prefix}_{name.upper()}") for prefix in ("SBATCH", "SLURM"))
        value = next(filter(None, (getattr(settings, name), *variables)), None)
        if value and not any(option.startswith(f"--{name}=") for option in options):
            options.append(f"--{name}={value}")
    reserved = [f"--reservation={settings.reservation}"] if settings.reservation else []
    commands = []
    for job in jobs:
        count = len(job.node_names) or 1
        names = {option.partition("=")[0] for option in job.options}
        all_options = [*job.options, *(o for o in options if o.partition("=")[0] not in names)]
        if any(option.startswith("--gres=") for option in all_options):
            all_options = [o for o in all_options if not o.startswith("--gpus-per-node=")]
        setup = [*settings.setup, *job.setup]
        shell = ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "facts"] if setup else []
        python = shlex.split(job.python) or [sys.executable]
        node_options = [f"--nodelist={compress(job.node_names)}"] if job.node_names else reserved
        sizes = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        limits = [f"--immediate={job.wait_s}", f"--time={2 + limit_s // 60}", f"--wait={limit_s // 2}"]
        tolerant = ["--quiet", "--no-kill", "--kill-on-bad-exit=0"]  # some nodes may fail or hang
        srun = ["srun", f"--partition={job.partition}", *node_options, *all_options, *sizes, *limits, *tolerant]
        program = [*shell, *python, *module_arguments("holmes_hpc.fabric.node_facts"), *arguments]
        commands.append([*srun, "--job-name=holmes-facts", *program])
    waits_s = limit_s + max((job.wait_s for job in jobs), default=0) - WAIT_S
    return [
        ([facts for line in out.splitlines() if (facts := _parse_answer(line)) is not None], trouble)
        for out, trouble in partial_outputs(commands, waits_s)
    ]


def _parse_answer(line: str) -> Facts | None:
    """Return the facts in a line of a node's output; None if it has none."""
    if not line.startswith(MARK):
        return None
    try:
        data = json.loads(line[len(MARK) :])
        skew_s = float(data.pop("clock")) - time.time()
        return msgspec.convert({**data, "skew_s": skew_s}, Facts)
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None


def node_name() -> str:
    """Return Slurm's name of this node: $SLURMD_NODENAME in a job, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def check_here(nics: NodeNics, vocabulary: str | None = None, name: str | None = None) -> list[Finding]:
    """Return the differences between `nics` and the features that this node, or the node `name`, has in Slurm."""
    name = name or node_name()
    node = read_node(name)
    if node is None:
        hint = "run it on a node of the cluster, or give the node's name with --node"
        raise SiteError(f"Slurm knows no node {name!r}", where="probe --check", hint=hint)
    nics = as_labelled(nics, node.features, {}, vocabulary, name)
    return differences(nics, node.features, read_vocabulary(vocabulary), name)


def main(arguments: Sequence[str]) -> None:
    """Print this node's facts: a line of JSON after MARK. `arguments`: --vocabulary FILE, --shared FILE."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    vocabulary, shared = options.get("--vocabulary"), options.get("--shared", "")
    name = node_name()
    node = read_node(name)
    facts = facts_of(name, probe(), node.features if node else None, os.environ, vocabulary=vocabulary)
    if gpus := nvidia_smi():
        facts = replace(facts, gpus=len(gpus), gpu=gpus[0][0], gpu_memory_gib=gpus[0][1])
    facts = replace(facts, software=software(), missing="" if not shared or Path(shared).exists() else shared)
    sys.stdout.write(MARK + json.dumps({**asdict(facts), "clock": time.time()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
