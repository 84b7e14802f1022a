"""Grouping of Slurm's nodes and partitions into pools. Every assumption is recorded as a line for the user."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import Vocabulary, read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.node_gpus import NodeGpus, node_gpus
from holmes_hpc.fabric.nodes import K, SiteNode, grouped
from holmes_hpc.fabric.partitions import NodeSettings, keeps_others_selectable, ranked_partitions, usable_partitions
from holmes_hpc.fabric.site import NicNames, Pool, Site
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Partition

ASSUMED_RDMA_GBPS = 100.0
ASSUMED_ETHERNET_GBPS = 10.0
MAX_EXCLUDE = 1000  # the most characters in the host list of a job's --exclude
MIG = re.compile(r"(?:^|[_-])\d+g\.\d+gb", re.IGNORECASE)  # a GRES type of a GPU slice, such as a100_1g.5gb


@dataclass(frozen=True)
class Grouping:
    """The pools of a Slurm cluster. `assumptions`: one line each. `left_out`: node -> why no pool contains it."""

    pools: tuple[Pool, ...]
    assumptions: tuple[str, ...]
    left_out: dict[str, str]

    def site(self, name: str) -> Site:
        """Return the pools as a Site called `name`. Raise SiteError without a pool, with the reason of one node."""
        if not self.pools:
            reason = next((f"{node}: {why}" for node, why in self.left_out.items()), "Slurm shows none")
            raise SiteError(f"no usable node ({reason})", where=f"cluster {name}", hint="see `holmes nodes`")
        return Site(name, self.pools, self.assumptions)


@dataclass
class _Notes:
    """The assumptions and the left-out nodes that the steps of :func:`group` record."""

    assumptions: list[tuple[str, str]] = field(default_factory=list)  # (text, node)
    left_out: dict[str, str] = field(default_factory=dict)

    def assume(self, nodes: Sequence[SiteNode], text: str) -> None:
        self.assumptions.extend((text, n.name) for n in nodes)

    def lines(self) -> tuple[str, ...]:
        """Return a line ``NODES: TEXT`` for each assumption, with all nodes to which it applies."""
        return tuple(f"{compress(names)}: {text}" for text, names in grouped(self.assumptions))

    def leave_out(self, nodes: Sequence[SiteNode], reason: str) -> None:
        self.left_out.update((n.name, reason) for n in nodes)


OTHER_ARCHITECTURE = re.compile(r"(\S+): (\w+), not \w+: set slurm\.pools\.")  # a line of :func:`group`


@dataclass(frozen=True)
class _Group:
    """The nodes, usable or not, of one fabric that jobs reach through one partition."""

    fabric: str
    nic: NicType
    partition: Partition
    nodes: tuple[SiteNode, ...]


def group(
    nodes: Sequence[SiteNode], partitions: Sequence[Partition], settings: NodeSettings = NodeSettings()
) -> Grouping:
    """Return the pools of a Slurm cluster. Nodes with the same fabric label and NIC type form a fabric. Nodes without a
    label form one fabric per NIC type and partition. Nodes of a fabric with the same GPUs and partition form a pool. A
    node is left out if it is down, drained or reserved, is in no open partition, has features of several NIC types or
    fabrics, has only slices of GPUs, has no GPU although other nodes have, or cannot be selected by jobs."""
    notes, vocabulary = _Notes(), read_vocabulary(settings.vocabulary)
    SiteError.refuse_unknown("no partition", settings.partitions, {p.name for p in partitions}, "partitions")
    open_, skipped = usable_partitions(partitions, settings)
    refusals = {p.name: f"partition {p.name}: {reason}" for p, reason in skipped}
    eligible = _eligible(nodes, open_, refusals, notes)
    pools = []
    for g in _groups(eligible, open_, notes):
        for gpu, members in _kinds(g.nodes, vocabulary):
            alike = replace(g, nodes=tuple(members))
            if pool := _pool(alike, gpu, nodes, vocabulary, notes, settings.reservation):
                pools.append(pool)
    for p, reason in skipped:
        notes.assume([n for n in nodes if p.name in n.partitions], f"partition {p.name} is skipped: {reason}")
    first, *others = _by(lambda n: n.architecture, [n for n in eligible if n.architecture]) or [("", [])]
    for architecture, members in others:
        notes.assume(members, f"{architecture}, not {first[0]}: set slurm.pools.POOL.python to a Python for them")
    for reason, members in _by(lambda n: notes.left_out[n.name], [n for n in nodes if n.name in notes.left_out]):
        notes.assume(members, f"left out: {reason}")
    return Grouping(tuple(_named(pools)), notes.lines(), notes.left_out)


def _eligible(
    nodes: Sequence[SiteNode], open_: dict[str, Partition], refusals: dict[str, str], notes: _Notes
) -> list[SiteNode]:
    """Return the nodes whose features, GPUs and partitions allow them to be part of a pool.
    `open_`: the partitions that accept the user's jobs. `refusals`: another partition -> why it does not."""
    site_has_gpus = any(n.gpus for n in nodes)
    eligible = []
    for n in nodes:
        if not any(p in open_ for p in n.partitions):
            notes.leave_out([n], next((refusals[p] for p in n.partitions if p in refusals), "in no open partition"))
        elif n.reading.nic is None:
            notes.leave_out([n], f"{n.reading.problems[0]}; label it with `holmes label`")
        elif any("fabrics" in p for p in n.reading.problems):
            notes.leave_out([n], next(p for p in n.reading.problems if "fabrics" in p))
        elif slices := [kind for kind in n.gpu_types if MIG.search(kind)]:
            notes.leave_out([n], f"its GPUs are divided into MIG slices ({slices[0]}), which NCCL cannot use together")
        elif not n.gpus and any(g.name == "shard" for g in n.gres):
            notes.leave_out([n], "it has shards of GPUs only, which NCCL cannot use together")
        elif site_has_gpus and not n.gpus:
            notes.leave_out([n], "no GPU in Slurm's GRES, but other nodes have GPUs")
        else:
            eligible.append(n)
    return eligible


def _groups(eligible: list[SiteNode], open_: dict[str, Partition], notes: _Notes) -> list[_Group]:
    """Divide the nodes into groups by fabric label, NIC type and partition. Groups without a label come last. A node in
    several partitions joins the group of the best one (:func:`ranked_partitions`). Without a label, a partition that
    keeps the remaining nodes selectable takes precedence."""
    groups = []
    labels = _by(lambda n: n.reading.fabric, eligible)
    used_names = {label for label, _ in labels}
    for label, members in sorted(labels, key=lambda item: item[0] is None):
        types = _by(lambda n: n.reading.nic, members)
        if label and len(types) > 1:
            notes.assume(members, f"label fabric_{label} is on nodes of {len(types)} NIC types: one fabric for each")
        for nic, remaining in types:
            assert nic is not None
            name = f"{label}-{nic}" if len(types) > 1 else str(label)
            while remaining:
                options = [p for name, p in open_.items() if any(name in n.partitions for n in remaining)]
                ranked = ranked_partitions(remaining, eligible, options, purest=label is None)
                best = partition = next(iter(ranked))
                if label is None:
                    partition = next((p for p in ranked if keeps_others_selectable(p, remaining, open_)), partition)
                    base = partition.name if partition.name == str(nic) else f"{nic}-{partition.name}"
                    name = _unused_name(base, used_names)
                selected = [n for n in remaining if partition.name in n.partitions]
                remaining = [n for n in remaining if partition.name not in n.partitions]
                if label is None:
                    kind = "Ethernet-only nodes" if nic is NicType.ETHERNET else f"{nic} nodes"
                    text = f"all {kind} of partition {partition.name} are assumed to be one fabric {name}"
                    notes.assume(selected, f"no fabric label: {text}")
                for p, reason in ranked.items():
                    if reason and partition is best:
                        text = f"partition {p.name} is skipped for {best.name}: {reason}"
                        notes.assume(selected, f"{text}; partitions=[{p.name}] uses it")
                groups.append(_Group(name, nic, partition, tuple(selected)))
    return groups


def _unused_name(name: str, used_names: set[str | None]) -> str:
    """Return `name` as a valid pool name, with a number if it is already used. Add the result to `used_names`."""
    base = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    names = (base, *(f"{base}-{i}" for i in range(2, len(used_names) + 2)))
    unused = next(name for name in names if name not in used_names)
    used_names.add(unused)
    return unused


def _kinds(nodes: Sequence[SiteNode], vocabulary: Vocabulary) -> list[tuple[NodeGpus, list[SiteNode]]]:
    """Group nodes by their GPUs. Return (the GPUs of one node, the nodes that have them) for each group."""
    gpus_of = {key: node_gpus(members[0], vocabulary) for key, members in _by(lambda n: (n.gres, n.features), nodes)}
    return _by(lambda n: gpus_of[n.gres, n.features], nodes)


def _named(pools: Sequence[Pool]) -> Iterator[Pool]:
    """Yield the pools with unique names: the fabric's name, with the GPU kind if the fabric has several pools."""
    counts = Counter(pool.name for pool in pools)
    used_names: set[str | None] = set(counts)
    for pool in pools:
        if counts[pool.name] > 1:
            name = _unused_name(f"{pool.name}-{pool.gpu.name}", used_names)
            pool = replace(pool, name=name, fabric=pool.name)
        yield pool


def _pool(
    g: _Group, gpus: NodeGpus, nodes: Sequence[SiteNode], vocabulary: Vocabulary, notes: _Notes, reservation: str | None
) -> Pool | None:
    """Return the pool of a group of alike nodes, named after its fabric. Return None if no node is usable, or if a job
    cannot select the nodes. `nodes`: all nodes of Slurm."""
    usable = _usable(g.nodes, notes, reservation)
    if not usable:
        return None
    count, names_of_group = usable[0].gpus, {n.name for n in g.nodes}
    others = [n for n in nodes if g.partition.name in n.partitions and n.name not in names_of_group]
    rivals = [n for n in others if n.gpus_of(gpus.gres_type) >= count]
    expression, exclude = constraint(usable, rivals), ""
    if expression is None:
        expression, exclude = "", compress(n.name for n in rivals)
        if len(exclude) > MAX_EXCLUDE:
            reason = f"no constraint selects only these nodes of fabric {g.fabric}"
            rest = f"it would also select {len(rivals)} others; label the nodes with `holmes label`"
            notes.leave_out(usable, f"{reason}, {rest}")
            return None
        notes.assume(usable, f"no feature distinguishes them from {exclude}: jobs exclude these by name")
    for line, members in grouped((line, n) for n in usable for line in (*n.reading.assumptions, *n.reading.problems)):
        notes.assume(members, line)
    for line in gpus.assumptions:
        notes.assume(usable, line)
    limit = int(min(len(usable), g.partition.node_limit))
    if limit < len(usable):
        notes.assume(usable, f"partition {g.partition.name} allows a job {limit} nodes (MaxNodes): no more are used")
    names, node_nics = _nic_names(g.nic, usable)
    ethernet_gbps = _rate(g, usable, "ethernet_gbps", ASSUMED_ETHERNET_GBPS, notes)
    return Pool(
        g.fabric,
        g.nic,
        partition=g.partition.name,
        nodes=limit,
        gpus_per_node=gpus.count,
        ethernet_gbps=ethernet_gbps,
        gpu=gpus.gpu,
        rdma_gbps=_rate(g, usable, "rdma_gbps", ASSUMED_RDMA_GBPS, notes) if g.nic.rdma else None,
        constraint=expression,
        node_names=tuple(n.name for n in usable),
        gres=bool(count),
        **vars(names),
        node_nics=node_nics,
        nccl_net=vocabulary.networks.get(str(g.nic)),
        node_cpus=(min(n.cpus for n in usable) or None) if count else None,
        node_memory_gib=(min(n.memory_mib for n in usable) / 1024 or None) if count else None,
        exclude=exclude,
        gres_type=gpus.gres_type,
    )


def _usable(nodes: Sequence[SiteNode], notes: _Notes, reservation: str | None) -> list[SiteNode]:
    """Return the nodes that jobs can use now, except nodes in a reservation other than `reservation`."""
    usable = [n for n in nodes if n.usable]
    notes.leave_out([n for n in nodes if not n.usable], "down, drained, in maintenance, blocked or not responding")
    reserved = [n for n in usable if "RESERVED" in n.states and (not reservation or n.reservation != reservation)]
    for name, members in _by(lambda n: n.reservation or "NAME", reserved):
        notes.leave_out(members, f"reserved; slurm.reservation={name} uses its reservation")
    return [n for n in usable if n.name not in notes.left_out]


def _nic_names(nic: NicType, nodes: Sequence[SiteNode]) -> tuple[NicNames, dict[str, NicNames] | None]:
    """Return (the common NIC names in the features of `nodes`, None), or (no names, host list -> its names)."""
    alike = _by(lambda n: n.reading.names if nic.rdma else NicNames(n.reading.names.ethernet), nodes)
    if len(alike) == 1:
        return alike[0][0], None
    return NicNames(), {compress(n.name for n in members): names for names, members in alike if names != NicNames()}


def _rate(g: _Group, nodes: list[SiteNode], key: str, assumed: float, notes: _Notes) -> float:
    """Return the lowest rate `key`, in Gb/s, in the features of `nodes`; `assumed` if no feature states one."""
    network, label = ("Ethernet", "eth_<rate>g") if key == "ethernet_gbps" else (str(g.nic), "nic_<rate>g")
    without_rate = [n for n in nodes if getattr(n.reading, key) is None]
    values = sorted({v for n in nodes if (v := getattr(n.reading, key)) is not None})
    rate = values[0] if values else assumed
    if without_rate:
        notes.assume(without_rate, f"{network} rate not in the features: {rate:g} Gb/s assumed; label {label}")
    if len(values) > 1:
        rates = " and ".join(f"{v:g}" for v in values)
        notes.assume(nodes, f"{network} rates differ in fabric {g.fabric} ({rates} Gb/s): the lowest is used")
    return rate


def constraint(members: Sequence[SiteNode], rivals: Sequence[SiteNode]) -> str | None:
    """Return a constraint ``a&b`` that all `members` meet and none of the `rivals` meets; None if there is none. It
    consists of the first of these that excludes all rivals: all common NIC and fabric labels of this project, one NIC
    feature, no feature, one feature, two features, all common features."""
    common = [f for f in dict.fromkeys(members[0].features) if all(f in m.features for m in members)]
    meanings = {m.feature: m for node in members for m in node.reading.meanings}
    labels = [f for f in common if f in meanings and meanings[f].is_label]
    own_labels = [f for f in labels if meanings[f].nic or meanings[f].fabric]

    def selects_alone(features: Sequence[str]) -> bool:
        return not any(all(f in r.features for f in features) for r in rivals)

    if own_labels and selects_alone(own_labels):
        return "&".join(own_labels)
    ordered = sorted(common, key=lambda f: f not in meanings or meanings[f].text == "nothing about NICs")
    nic_features = [f for f in ordered if f in meanings and meanings[f].nic]
    for features in (*([f] for f in nic_features), [], *([f] for f in ordered), *combinations(ordered, 2), ordered):
        if selects_alone(features):
            return "&".join(features)
    return None


def _by(key: Callable[[SiteNode], K], nodes: Sequence[SiteNode]) -> list[tuple[K, list[SiteNode]]]:
    """Group nodes by `key`. Return (value of `key`, the nodes with that value) for each value."""
    return grouped((key(n), n) for n in nodes)
