"""Discovery of a site for `holmes site`: Slurm's topology and probe jobs supply the facts that node features lack."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import Reading, read_features, read_vocabulary
from holmes_hpc.fabric.grouping import Grouping, constraint, group
from holmes_hpc.fabric.listing import Listing
from holmes_hpc.fabric.node_facts import NOT_ASKED, Facts, Job, ask, gpu_option
from holmes_hpc.fabric.nodes import SiteNode, grouped
from holmes_hpc.fabric.partitions import NodeSettings, PoolJob
from holmes_hpc.fabric.site import Gpu, Pool, Site
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Topology

_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")  # the number of a rack, block or node inside a feature
_PLACE = re.compile(r"(.*[\W_])?(rack|row|cage|chassis|pod|room|cell|island|cluster|block|switch|leaf)", re.IGNORECASE)
# Assumptions of the grouping that the site file does not list. The comments beside its keys already state those of
# _BY_KEY. A probe of the node settles those of _NIC_GUESS and _GPU_GUESS.
_BY_KEY = re.compile(r"Gb/s assumed|no feature names a NIC|no fabric label|^left out")
_NIC_GUESS = re.compile(r"through its Ethernet address only")
_GPU_GUESS = re.compile(r"GPU .*(assumed|vocabulary|CPU rank)")
# srun's messages when a job with --immediate has not started in time.
_WAITED = re.compile("(?i)are busy|immediate execution|revoked|temporarily unavailable|timed out|no answer in")
SAME_MEMORY = 0.1  # relative tolerance, because the driver reports somewhat less than the data sheet


@dataclass(frozen=True)
class Probe:
    """The facts that one probed node gives about all nodes of its kind (:func:`kind_of`). `node`: the probed node;
    `features`: the labels for its NICs; `gpu`, `gpu_memory_gib`: name and memory (GiB) of its first GPU; `gpus`: its
    number of GPUs; `problem`: one line on why the probe is not usable; empty if it is."""

    kind: str
    node: str
    features: tuple[str, ...] = ()
    gpu: str = ""
    gpu_memory_gib: float | None = None
    gpus: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Origin:
    """The sources of a pool's values. `keys`: key of the pool -> source of its value (a guess begins with "assumed");
    `remarks`: comment lines about the pool; `gpu_is_known`: whether the figures of its GPU kind are known."""

    keys: Mapping[str, str]
    remarks: tuple[str, ...]
    gpu_is_known: bool

    @property
    def assumed(self) -> list[str]:
        """The keys whose values are guesses."""
        guesses = [name for name, source in self.keys.items() if source.startswith("assumed")]
        has_gpu = not self.gpu_is_known or any(_GPU_GUESS.search(text) for text in self.remarks)
        return list(dict.fromkeys([*guesses, *["gpu"] * has_gpu]))


@dataclass(frozen=True)
class Discovery:
    """A discovered site. `origins`: pool -> the sources of its values; `problems`: one line per failed probe;
    `unknown_gpus`: pool with an unknown GPU kind -> a line about it; `left_out`: lines about nodes in no pool."""

    site: Site
    origins: Mapping[str, Origin]
    probes: tuple[Probe, ...]
    problems: tuple[str, ...]
    unknown_gpus: Mapping[str, str]
    left_out: tuple[str, ...]


def discover(
    listing: Listing,
    topology: Topology,
    settings: NodeSettings,
    known: Sequence[Probe] = (),
    wait_s: int | None = None,
    earlier: Mapping[str, str] | None = None,
) -> Discovery:
    """Return the site that Slurm's nodes form. `known`: probes of an earlier run. Node kinds with such a probe are not
    probed again. `wait_s`: the longest wait for a probe job, in seconds; None: run no jobs. `earlier`: node -> pool."""
    earlier = earlier or {}
    both_names = {n: (p.name, earlier.get(n, p.name)) for p in listing.grouping.pools for n in p.node_names}
    pool_names = list(dict.fromkeys(name for pair in both_names.values() for name in pair))
    SiteError.refuse_unknown("no pool", settings.pools, pool_names, "slurm.pools")
    pools_of = {n: settings.pools[name] for n, pair in both_names.items() for name in pair if name in settings.pools}
    settings = replace(settings, pools=pools_of)
    kinds = {n.name: kind_of(n, p.partition) for p in listing.grouping.pools for n in _members(p, listing.nodes)}
    probes = {probe.kind: probe for probe in known}
    if wait_s is not None:
        probes |= _probe(listing, kinds, [kind for kind in kinds.values() if kind not in probes], settings, wait_s)
    nodes = [_probed(n, kinds, probes, settings.vocabulary) for n in listing.nodes]
    grouping = group(nodes, listing.partitions, settings)
    problems = [probe.problem for probe in probes.values() if probe.problem]
    pools, origins, unknown_gpus = [], {}, {}
    parts = _with_trees(grouping.site(listing.cluster).pools, nodes, topology)
    taken_names = {pool.name for pool, _ in parts}
    names_with_kind = {p.name for p in grouping.pools if p.fabric and p.name == f"{p.fabric}-{p.gpu.name}"}
    for pool, tree in parts:
        names = set(pool.node_names)
        answers = [p for kind, p in probes.items() if not p.problem and kind in {kinds.get(n) for n in names}]
        old_kind = pool.gpu.name
        pool, gpu_source, gpu_is_known = _with_driver(pool, answers, settings.vocabulary)
        members = _members(pool, listing.nodes)
        sources = {
            **_nic_sources(pool, members, answers),
            "fabric": _fabric_source(pool, members, tree),
            "gpu": gpu_source,
            **({} if pool.gres else {"gpus_per_node": gpu_source.partition(";")[0]}),
        }
        settled = [_BY_KEY, *[_GPU_GUESS] * any(p.gpu for p in answers), *[_NIC_GUESS] * bool(answers)]
        assumptions = _assumptions(grouping, names, settled)
        name = pool.name.removesuffix(old_kind) + pool.gpu.name if pool.name in names_with_kind else pool.name
        pool = pool if name in taken_names else replace(pool, name=name)
        taken_names.add(name)
        pools.append(pool)
        origins[pool.name] = Origin(sources, (*assumptions, *_divisions(members, topology)), gpu_is_known)
        if not gpu_is_known:
            figures = "peak_tflops (dense bf16), memory_gib and intra_node_gbps of its data sheet"
            unknown_kind = f"pool {pool.name}: GPU kind {pool.gpu.name} is not known"
            unknown_gpus[pool.name] = f"{unknown_kind}; write {figures} under gpu in the site file"
    left_out = tuple(line for line in grouping.assumptions if ": left out: " in line)
    site = Site(listing.cluster, tuple(pools))
    return Discovery(site, origins, tuple(probes.values()), tuple(problems), unknown_gpus, left_out)


def kind_of(node: SiteNode, partition: str) -> str:
    """Return the kind of a node, as a text. Nodes with the same partition, GPUs and features are of one kind.
    Numbers in features without a known meaning (rack numbers, for example) do not count."""
    meaningful_features = {m.feature for m in node.reading.meanings if m.text != "nothing about NICs"}
    features = dict.fromkeys(f if f in meaningful_features else _NUMBER.sub("#", f) for f in node.features)
    gpus = [f"{g.type or 'gpu'}:{g.count}" for g in node.gres if g.name == "gpu"]
    return " ".join([partition, *gpus, ",".join(features)]).strip()


def _members(pool: Pool, nodes: Sequence[SiteNode]) -> list[SiteNode]:
    names = set(pool.node_names)
    return [n for n in nodes if n.name in names]


def _probe(
    listing: Listing, kinds: Mapping[str, str], new_kinds: Sequence[str], settings: NodeSettings, wait_s: int
) -> dict[str, Probe]:
    """Probe one node of each of the `new_kinds`. Return kind -> its probe. `kinds`: node -> its kind."""
    members: dict[str, tuple[Pool, list[SiteNode]]] = {}
    for pool in listing.grouping.pools:
        for kind, nodes in grouped((kinds[n.name], n) for n in _members(pool, listing.nodes)):
            if kind in new_kinds:
                members.setdefault(kind, (pool, nodes))
    jobs = [_job(pool, nodes, settings, wait_s) for pool, nodes in members.values()]
    probes = {}
    for (kind, (pool, nodes)), (answers, trouble) in zip(members.items(), ask(jobs, settings), strict=True):
        if answers:
            node = next((n for n in nodes if n.name == answers[0].node), nodes[0])
            probes[kind] = _read_answer(kind, node, answers[0])
            continue
        reason = f"the probe job failed ({trouble or 'no answer'})"
        hint = "check slurm.account, slurm.qos and slurm.setup"
        if _WAITED.search(trouble):
            reason, hint = f"no node was free in {wait_s} s ({trouble})", "give a longer --wait, or --no-jobs"
        probes[kind] = Probe(kind, "", problem=f"pool {pool.name} (partition {pool.partition}): {reason}; {hint}")
    return probes


def _job(pool: Pool, nodes: Sequence[SiteNode], settings: NodeSettings, wait_s: int) -> Job:
    """Return the job that probes an idle node of `nodes`; if none is idle, any node that a job of the pool may get."""
    idle = [n for n in nodes if "IDLE" in n.states]
    node = next((n for n in idle if not NOT_ASKED & set(n.states)), next(iter(idle), None))
    options = gpu_option((pool.gres_type or "",), pool.node_gpus or pool.gpus_per_node) if pool.gres else ()
    if node is None:
        selection = (("constraint", pool.constraint), ("exclude", pool.exclude))
        options = (*options, *(f"--{name}={value}" for name, value in selection if value))
    if settings.reservation and any(n.reservation == settings.reservation for n in nodes):
        options = (*options, f"--reservation={settings.reservation}")
    special = settings.pools.get(nodes[0].name, PoolJob())
    options = (*options, *special.options)
    return Job(pool.partition, (node.name,) if node else (), options, wait_s, special.setup, special.python)


def _read_answer(kind: str, node: SiteNode, facts: Facts) -> Probe:
    """Return the :class:`Probe` of a kind from the facts of its probed node. Its `problem` is set if the node lacks the
    NIC type that Slurm's features name. NICs that need an NCCL plugin are exempt: the kernel may not show them."""
    nic = node.reading.nic if any(m.nic for m in node.reading.meanings) else None
    features = (*facts.expected_features, *(f"nic_hca_{name}" for name in facts.hca))
    if facts.plugin or (nic is not None and nic.rdma and not nic.verbs):
        features = (*facts.plugin, *(f for f in features if f.startswith("eth_")))
    elif nic not in (None, facts.nic):
        mismatches = (f.what for f in facts.findings if "the kernel reports" in f.what)
        reason = next(mismatches, f"the kernel reports {facts.nic}")
        problem = f"node {facts.node}: without its {nic} NIC ({reason}); repair it, or correct its features"
        return Probe(kind, facts.node, problem=problem)
    return Probe(kind, facts.node, features, facts.gpu, facts.gpu_memory_gib, facts.gpus)


def _probed(node: SiteNode, kinds: Mapping[str, str], probes: Mapping[str, Probe], vocabulary: str | None) -> SiteNode:
    """Return the node with a reading of its features in Slurm and of those that the probe of its kind found. `kinds`:
    node -> kind, for nodes in pools. A node in no pool (a node that is down, for example) takes the first probed kind
    that it would have in one of its partitions."""
    possible = [kinds[node.name]] if node.name in kinds else [kind_of(node, p) for p in node.partitions]
    features = next((probes[kind].features for kind in possible if kind in probes), ())
    if not features:
        return node
    return replace(node, reading=read_features([*node.features, *features], read_vocabulary(vocabulary)))


def _with_trees(pools: Sequence[Pool], nodes: Sequence[SiteNode], topology: Topology) -> list[tuple[Pool, str | None]]:
    """Return (pool, the top switch of its tree) for each pool. The switch is None if it is unknown or does not matter.
    It does not matter for Ethernet-only pools, and for pools whose fabric a feature names. Other pools with the same
    NIC type and tree form one fabric. A pool in several trees is split into one part per tree. The jobs of a part
    select its nodes by features if possible; otherwise they exclude the nodes of the other parts by name."""
    parts: list[tuple[Pool, str | None]] = []
    for pool in pools:
        members = _members(pool, nodes)
        trees = grouped((topology.trees.get(n.name), n) for n in members)
        if not pool.nic.rdma or any(n.reading.fabric for n in members) or None in dict(trees):
            parts.append((pool, None))
            continue
        if len(trees) == 1:
            parts.append((pool, trees[0][0]))
            continue
        for tree, part in trees:
            names = tuple(n.name for n in part)
            others = [n for n in members if topology.trees[n.name] != tree]
            choice = constraint(part, others)
            features = "&".join(filter(None, (pool.constraint, choice)))
            exclude = ",".join(filter(None, (pool.exclude, compress(n.name for n in others) if choice is None else "")))
            split = replace(pool, nodes=min(pool.nodes, len(part)), node_names=names, constraint=features)
            parts.append((replace(split, name=f"{pool.name}-{tree}", exclude=exclude), tree))
    fabrics = grouped(((pool.nic, tree), pool.name) for pool, tree in parts if tree)
    shared = {name: f"{nic}-{tree}" for (nic, tree), names in fabrics for name in names if len(names) > 1}
    return [(replace(pool, fabric=shared.get(pool.name, "")) if tree else pool, tree) for pool, tree in parts]


def _with_driver(pool: Pool, probes: Sequence[Probe], vocabulary: str | None) -> tuple[Pool, str, bool]:
    """Return (the pool with the GPU that a probe's driver names, the GPU's source, whether its figures are known).
    If no probe names a GPU, the pool keeps its GPU."""
    kinds = read_vocabulary(vocabulary)
    known, probe = kinds.gpu(pool.gpu.name) if pool.gres else None, next((p for p in probes if p.gpu), None)
    source = f"GRES type {pool.gres_type}" if pool.gres_type else "Slurm's features"
    if not pool.gres and probe is None:
        return pool, "assumed: no GPU in Slurm's GRES", True
    gpu: Gpu = pool.gpu
    if probe is not None:
        name = re.sub(r"\W+", "_", probe.gpu.lower())
        driver_kind = kinds.gpu(name)
        gpu = driver_kind or (gpu if known else replace(gpu, name=name))
        known, source = known or driver_kind, f"driver of {probe.node}: {probe.gpu}"
        memory = probe.gpu_memory_gib
        if memory and (not known or abs(memory / gpu.memory_gib - 1) > SAME_MEMORY):
            gpu = replace(gpu, memory_gib=memory)
        if not pool.gres:
            pool = replace(pool, gpus_per_node=max(1, probe.gpus))
    return replace(pool, gpu=gpu), f"{source}; figures: data sheet" if known else source, known is not None


def _nic_sources(pool: Pool, nodes: Sequence[SiteNode], probes: Sequence[Probe]) -> dict[str, str]:
    """Return the source of a pool's NIC type and rates: a probe, else Slurm's features, else an assumption."""
    probed = read_features(probes[0].features, read_vocabulary()) if probes else Reading(None)
    is_named = all(any(m.nic for m in n.reading.meanings) for n in nodes)
    sources = {}
    for name in ("nic", "rdma_gbps", "ethernet_gbps"):
        in_features = is_named if name == "nic" else all(getattr(n.reading, name) for n in nodes)
        if (probed.nic is pool.nic) if name == "nic" else getattr(probed, name):
            sources[name] = f"probe of {', '.join(p.node for p in probes)}"
            if name == "nic" and pool.nic.rdma and not pool.nic.verbs:
                sources[name] += "; NCCL needs its plugin: without it, write nic: ethernet and remove rdma_gbps"
        else:
            sources[name] = "Slurm's features" if in_features else "assumed: neither features nor a probe say it"
    return sources


def _fabric_source(pool: Pool, nodes: Sequence[SiteNode], tree: str | None) -> str:
    if any(n.reading.fabric for n in nodes):
        return "Slurm's features"
    if tree:
        return f"Slurm's topology: switch {tree}"
    return "assumed: no feature and no switch says which nodes RDMA joins" if pool.nic.rdma else "Ethernet only"


def _assumptions(grouping: Grouping, names: set[str], settled: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Yield the assumptions about the nodes `names`, except assumptions that match a pattern in `settled`."""
    for line in grouping.assumptions:
        hosts, _, text = line.partition(": ")
        if not any(p.search(text) for p in settled) and not names.isdisjoint(expand(hosts)):
            yield f"assumed: {text}"


def _divisions(nodes: Sequence[SiteNode], topology: Topology) -> Iterator[str]:
    """Yield an `unsure:` line for each topology block or numbered feature (rack, say) at which RDMA may end."""
    places = [f for n in nodes for f in n.features if f in n.reading.unknown or _PLACE.match(f)]
    families = grouped((_NUMBER.sub("#", f), f) for f in places if _NUMBER.search(f))
    blocks = [topology.blocks[n.name] for n in nodes if n.name in topology.blocks]
    for noun, values in (("blocks", blocks), *(("features", features) for _, features in families)):
        if len(names := list(dict.fromkeys(values))) > 1:
            shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            yield f"unsure: the {noun} {shown} divide its nodes; if RDMA ends there, make a pool of each"
