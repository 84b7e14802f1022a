"""Nodes and partitions become fabrics: pure functions, and every supposition is a line that is printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import Vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nodes import SiteNode, grouped
from holmes_hpc.fabric.site import CPU, Fabric, Gpu, NicNames, Site
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Partition

ASSUMED_RDMA_GBPS = 100.0
ASSUMED_ETHERNET_GBPS = 10.0
UNKNOWN_GPU = Gpu("gpu", peak_tflops=100.0, memory_gib=16.0, intra_node_gbps=200.0)
MIG = re.compile(r"(?:^|[_-])\d+g\.\d+gb", re.IGNORECASE)  # a GPU type of GRES such as a100_1g.5gb
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class NodeSettings:
    """What the user says of a site. `vocabulary`: own file of features; `partitions`: only these are used."""

    vocabulary: str | None = None
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grouping:
    """`fabrics`, and what was supposed on the way. `left_out`: node -> why no fabric has it."""

    fabrics: tuple[Fabric, ...]
    assumptions: tuple[str, ...]
    left_out: dict[str, str]

    def site(self, name: str) -> Site:
        """The Site, or a SiteError with the first reason why there is none."""
        if not self.fabrics:
            reasons = [f"{node}: {why}" for node, why in self.left_out.items()]
            why = reasons[0] if reasons else "Slurm shows none"
            raise SiteError(f"no usable node ({why})", where=f"cluster {name}", hint="see `holmes nodes`")
        return Site(name, self.fabrics, self.assumptions)


@dataclass
class _Work:
    """What the steps of :func:`group` share: lines said so far, and nodes left out."""

    said: list[tuple[str, str]] = field(default_factory=list)  # (text, node)
    left_out: dict[str, str] = field(default_factory=dict)

    def say(self, nodes: Sequence[SiteNode], text: str) -> None:
        self.said.extend((text, n.name) for n in nodes)

    def lines(self) -> tuple[str, ...]:
        """One line for each text, with all nodes it is about."""
        return tuple(f"{compress(names)}: {text}" for text, names in grouped(self.said))

    def leave(self, nodes: Sequence[SiteNode], why: str) -> None:
        self.left_out.update((n.name, why) for n in nodes)


@dataclass(frozen=True)
class _Group:
    """Nodes (usable or not) that shall be one fabric."""

    name: str
    nic: NicType
    partition: Partition
    nodes: tuple[SiteNode, ...]


def group(
    nodes: Sequence[SiteNode],
    partitions: Sequence[Partition],
    vocabulary: Vocabulary,
    settings: NodeSettings | None = None,
) -> Grouping:
    """The fabrics of a Slurm: by label where there is one, else one per NIC type and partition.

    Left out: nodes that are down or drained, in no open partition, with two NIC types in their features, without a GPU
    on a site with GPUs, or such as no constraint can tell from others.
    """
    settings = settings or NodeSettings()
    work = _Work()
    known = {p.name for p in partitions}
    for name in settings.partitions:
        if name not in known:
            raise SiteError(f"no partition {name!r}", where="settings", hint=f"Slurm has {', '.join(sorted(known))}")
    open_ = {p.name: p for p in partitions if p.up and (not settings.partitions or p.name in settings.partitions)}
    fit = _fit(nodes, open_, work)
    groups = _labelled(fit, open_, work) + _unlabelled(fit, open_, work)
    fabrics = [fabric for g in groups if (fabric := _fabric(g, nodes, vocabulary, work)) is not None]
    for why, members in _by(lambda n: work.left_out[n.name], [n for n in nodes if n.name in work.left_out]):
        work.say(members, f"left out: {why}")
    return Grouping(tuple(fabrics), work.lines(), work.left_out)


def _fit(nodes: Sequence[SiteNode], open_: dict[str, Partition], work: _Work) -> list[SiteNode]:
    """Nodes that can be part of a fabric as far as their features and partitions go."""
    with_gpus = any(n.gpus for n in nodes)
    fit = []
    for n in nodes:
        if not any(p in open_ for p in n.partitions):
            work.leave([n], "in no open partition")
        elif n.reading.nic is None:
            work.leave([n], f"{n.reading.problems[0]}; label it with `holmes label`")
        elif any("fabrics" in p for p in n.reading.problems):
            work.leave([n], next(p for p in n.reading.problems if "fabrics" in p))
        elif slices := [kind for kind in n.gpu_types if MIG.search(kind)]:
            work.leave([n], f"its GPUs are cut into MIG slices ({slices[0]}), which NCCL cannot join")
        elif with_gpus and not n.gpus:
            work.leave([n], "no GPU in Slurm's GRES, other nodes have some")
        else:
            fit.append(n)
    return fit


def _labelled(fit: list[SiteNode], open_: dict[str, Partition], work: _Work) -> list[_Group]:
    groups = []
    for label, members in _by(lambda n: n.reading.fabric, [n for n in fit if n.reading.fabric]):
        types = _by(lambda n: n.reading.nic, members)
        if len(types) > 1:
            work.say(members, f"label fabric_{label} is on nodes of {len(types)} NIC types, taken for one fabric each")
        for nic, part in types:
            partition = _ranked(part, fit, [open_[p] for n in part for p in n.partitions if p in open_])[0]
            outside = [n for n in part if partition.name not in n.partitions]
            if outside:
                work.leave(outside, f"fabric {label} is used through partition {partition.name}, which has most of it")
            name = f"{label}-{nic}" if len(types) > 1 else str(label)
            assert nic is not None
            groups.append(_Group(name, nic, partition, tuple(n for n in part if n not in outside)))
    return groups


def _unlabelled(fit: list[SiteNode], open_: dict[str, Partition], work: _Work) -> list[_Group]:
    groups = []
    taken = {n.reading.fabric for n in fit}
    for nic, members in _by(lambda n: n.reading.nic, [n for n in fit if not n.reading.fabric]):
        assert nic is not None
        rest = members
        while rest:
            ranked = _ranked(rest, fit, [open_[p] for n in rest for p in n.partitions if p in open_], purest=True)
            partition = next((p for p in ranked if _leaves_a_way(p, rest, open_)), ranked[0])
            part = [n for n in rest if partition.name in n.partitions]
            rest = [n for n in rest if n not in part]
            base = partition.name if partition.name == str(nic) else f"{nic}-{partition.name}"
            name = _free(re.sub(r"[^A-Za-z0-9_.-]", "_", base), taken)
            taken.add(name)
            kind = "Ethernet-only nodes" if nic is NicType.ETHERNET else f"{nic} nodes"
            work.say(part, f"no fabric label: all {kind} of partition {partition.name} are taken for one fabric {name}")
            groups.append(_Group(name, nic, partition, tuple(part)))
    return groups


def _free(name: str, taken: set[str | None]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _leaves_a_way(chosen: Partition, nodes: Sequence[SiteNode], open_: dict[str, Partition]) -> bool:
    """Whether all `nodes` that are not in the `chosen` partition are in one that holds none of those that are."""
    part = {n.name for n in nodes if chosen.name in n.partitions}
    return all(
        any(not part & set(open_[p].nodes) for p in n.partitions if p in open_) for n in nodes if n.name not in part
    )


def _ranked(
    members: Sequence[SiteNode], everyone: Sequence[SiteNode], options: Sequence[Partition], purest: bool = False
) -> list[Partition]:
    """The partitions to ask for, the best first: with most of the `members` that a job may have (or, `purest`, that
    allow jobs on all they have, with fewest other nodes), then the reverse of that, then of the highest priority, then
    not the default one, then by name."""
    names = {n.name for n in members}
    others = (
        {n.name for n in everyone if n.reading.nic is not members[0].reading.nic}
        if purest
        else {n.name for n in everyone} - names
    )

    def rank(p: Partition) -> tuple[int, int, int, int, bool, str]:
        inside, foreign = len(names & set(p.nodes)), len(others & set(p.nodes))
        allowed = min(inside, int(p.max_nodes)) if p.max_nodes.isdecimal() else inside
        first = (allowed < inside, foreign, -inside) if purest else (-allowed, foreign, -inside)
        return (*first, -p.priority, p.default, p.name)

    return sorted(options, key=rank)


def _fabric(g: _Group, nodes: Sequence[SiteNode], vocabulary: Vocabulary, work: _Work) -> Fabric | None:
    usable = [n for n in g.nodes if n.usable]
    work.leave([n for n in g.nodes if not n.usable], "down, drained or not responding")
    if not usable:
        return None
    counts = {n.gpus for n in usable}
    gpus = min(counts)
    if len(counts) > 1:
        work.say(usable, f"{_and(counts)} GPUs a node in fabric {g.name}: {gpus} of each are used")
    rivals = [
        n
        for n in nodes
        if g.partition.name in n.partitions and n.gpus >= gpus and n.name not in {m.name for m in g.nodes}
    ]
    expression = constraint(usable, rivals)
    if expression is None:
        work.leave(
            usable,
            f"no constraint selects fabric {g.name} alone, it would also take {_names(rivals)}; "
            "label the nodes with `holmes label`",
        )
        return None
    for line, members in grouped((line, n) for n in usable for line in (*n.reading.assumptions, *n.reading.problems)):
        work.say(members, line)
    names, node_nics = _nic_names(g.nic, usable)
    network = vocabulary.networks.get(str(g.nic))
    return Fabric(
        g.name,
        g.nic,
        partition=g.partition.name,
        nodes=len(usable),
        gpus_per_node=gpus or _cpu_ranks(usable),
        ethernet_gbps=_rate(g, usable, "ethernet_gbps", ASSUMED_ETHERNET_GBPS, work),
        gpu=_gpu(g, usable, vocabulary, work),
        rdma_gbps=_rate(g, usable, "rdma_gbps", ASSUMED_RDMA_GBPS, work) if g.nic.rdma else None,
        constraint=expression,
        node_names=tuple(n.name for n in usable),
        gres=bool(gpus),
        ethernet=names.ethernet,
        hca=names.hca,
        storage=names.storage,
        node_nics=node_nics,
        nccl_net=network,
        node_cpus=(min(n.cpus for n in usable) or None) if gpus else None,
        node_memory_gib=(min(n.memory_mib for n in usable) / 1024 or None) if gpus else None,
        node_gpus=max(counts) if len(counts) > 1 else None,
    )


def _cpu_ranks(nodes: Sequence[SiteNode]) -> int:
    """On each of `nodes`, none of which has a GPU: as their features say, else one."""
    return min(next((m.ranks for m in n.reading.meanings if m.ranks), 1) for n in nodes)


def _nic_names(nic: NicType, nodes: Sequence[SiteNode]) -> tuple[NicNames, dict[str, NicNames] | None]:
    """What the features name for the NICs of all `nodes`; where they differ, for each kind of nodes."""
    alike = _by(lambda n: n.reading.names if nic.rdma else NicNames(n.reading.names.ethernet), nodes)
    if len(alike) == 1:
        return alike[0][0], None
    return NicNames(), {_names(members): names for names, members in alike if names != NicNames()}


def _rate(g: _Group, nodes: list[SiteNode], key: str, assumed: float, work: _Work) -> float:
    what = "Ethernet" if key == "ethernet_gbps" else str(g.nic)
    label = "eth_<rate>g" if key == "ethernet_gbps" else "nic_<rate>g"
    without = [n for n in nodes if getattr(n.reading, key) is None]
    values = sorted({v for n in nodes if (v := getattr(n.reading, key)) is not None})
    if without:
        taken = values[0] if values else assumed
        work.say(without, f"{what} rate not in the features: {taken:g} Gb/s supposed; label {label}")
    if len(values) > 1:
        work.say(nodes, f"{what} rates differ in fabric {g.name} ({_and(values)} Gb/s): the least is used")
    return values[0] if values else assumed


def _gpu(g: _Group, nodes: list[SiteNode], vocabulary: Vocabulary, work: _Work) -> Gpu:
    if not any(n.gpus for n in nodes):
        work.say(nodes, f"no GPU in Slurm's GRES: {_cpu_ranks(nodes)} CPU rank(s) a node")
        return CPU
    found: list[Gpu] = []
    for kind, members in _by(lambda n: (n.gpu_types, n.reading.gpu), nodes):
        names = [t for t in kind[0] if t] or [kind[1] or ""]
        for name in names:
            gpu = vocabulary.gpu(name) if name else None
            if gpu is None:
                gpu = replace(UNKNOWN_GPU, name=name or "gpu")
                work.say(
                    members,
                    f"GPU type {name or '(none given)'} is not in the vocabulary: {gpu.peak_tflops:g} "
                    f"TFLOP/s, {gpu.memory_gib:g} GiB supposed; add it under gpus",
                )
            found.append(gpu)
    slowest = min(found, key=lambda gpu: gpu.peak_tflops)
    if len({gpu.name for gpu in found}) > 1:
        work.say(nodes, f"GPU types differ in fabric {g.name}: all are counted as {slowest.name}")
    least = min(gpu.memory_gib for gpu in found)
    return Gpu(slowest.name, slowest.peak_tflops, least, slowest.intra_node_gbps)


def constraint(members: Sequence[SiteNode], rivals: Sequence[SiteNode]) -> str | None:
    """The shortest ``a&b`` of features that all `members` have and no rival has; the project's own NIC and fabric
    labels where they do it, None where nothing does. Empty: no feature is needed, nor any of ours there."""
    common = [f for f in dict.fromkeys(members[0].features) if all(f in m.features for m in members)]
    meanings = {m.feature: m for node in members for m in node.reading.meanings}
    own = [f for f in common if f in meanings and meanings[f].own and (meanings[f].nic or meanings[f].fabric)]

    def selects_alone(features: Sequence[str]) -> bool:
        return not any(all(f in r.features for f in features) for r in rivals)

    if own and selects_alone(own):
        return "&".join(own)
    # features that speak of NICs first, then the others
    ordered = sorted(common, key=lambda f: not (f in meanings and meanings[f].text != "nothing about NICs"))
    says_nic = [f for f in ordered if f in meanings and meanings[f].nic]
    for chosen in (*([f] for f in says_nic), [], *([f] for f in ordered), *combinations(ordered, 2), ordered):
        if selects_alone(chosen):
            return "&".join(chosen)
    return None


def _by(key: Callable[[SiteNode], K], nodes: Sequence[SiteNode]) -> list[tuple[K, list[SiteNode]]]:
    return grouped((key(n), n) for n in nodes)


def _and(values: Iterable[float]) -> str:
    return " and ".join(f"{v:g}" for v in sorted(values))


def _names(nodes: Sequence[SiteNode]) -> str:
    return compress(n.name for n in nodes)
