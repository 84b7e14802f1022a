"""The output of `holmes nodes` and `holmes probe`, as tables and as one JSON document."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.grouping import Grouping, NodeSettings, group
from holmes_hpc.fabric.label import features_of
from holmes_hpc.fabric.nics import NodeNics
from holmes_hpc.fabric.nodes import SiteNode, grouped, read_nodes
from holmes_hpc.fabric.partitions import with_associations
from holmes_hpc.fabric.site import Pool, Site
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Partition, read_config, read_partitions

# Properties of a node and of a partition that `holmes nodes --json` shows as they are.
_NODE_KEYS = ("name", "partitions", "states", "usable", "gpus", "gpu_types", "cpus", "memory_mib", "features")
_PARTITION_KEYS = ("name", "default", "up", "max_time", "nodes")
Table = tuple[str, list[str], list[list[Any]], str]  # title, columns, rows, caption


@dataclass(frozen=True)
class Listing:
    """Slurm's nodes and partitions, and the pools formed from them."""

    cluster: str
    nodes: tuple[SiteNode, ...]
    partitions: tuple[Partition, ...]
    grouping: Grouping

    @cached_property
    def pool_of(self) -> dict[str, Pool]:
        """Node -> its pool."""
        return {node: pool for pool in self.grouping.pools for node in pool.node_names}

    def remarks(self, node: SiteNode) -> list[str]:
        """Return remarks on a node: why no pool has it, its features, problems and assumptions, Slurm's reason."""
        texts = [self.grouping.left_out[node.name]] if node.name in self.grouping.left_out else []
        if node.reading.unknown:
            texts.append(f"not understood: {', '.join(node.reading.unknown)}")
        texts += [p for p in (*node.reading.problems, *node.reading.assumptions) if not any(p in s for s in texts)]
        inactive = [f for f in node.available if f not in node.features]
        texts += [f"available but not active: {', '.join(inactive)}"] if inactive else []
        return texts + ([f"reason: {node.reason}"] if node.reason and not node.usable else [])

    def tables(self) -> list[Table]:
        """Return tables of pools, partitions and nodes. Nodes with equal descriptions share a row."""
        pools = []
        for p in self.grouping.pools:
            rdma = "" if p.rdma_gbps is None else f"{p.rdma_gbps:g}"
            rates = [f"{p.gpus_per_node}×{p.gpu.name}", rdma, f"{p.ethernet_gbps:g}"]
            pools.append([p.name, p.fabric_name, p.nic, p.partition, p.nodes, *rates, p.constraint])
        caption = "\n".join(f"assumed: {a}" for a in self.grouping.assumptions)
        partitions = [
            [p.name + "*" * p.default, "up" if p.up else "closed", p.max_time, len(p.nodes), compress(p.nodes)]
            for p in self.partitions
        ]
        columns = ["pool", "fabric", "NIC", "partition", "nodes", "GPUs per node", "RDMA Gb/s", "Ethernet Gb/s"]
        node_columns = ["nodes", "state", "NIC", "GPUs", "CPUs", "GiB", "pool", "features", "remarks"]
        return [
            (f"Pools of {self.cluster}", [*columns, "constraint"], pools, caption),
            ("Partitions", ["partition", "state", "time limit", "nodes", "names"], partitions, "*: the default"),
            ("Nodes", node_columns, self._node_rows(), ""),
        ]

    def _node_rows(self) -> list[list[Any]]:
        rows = []
        for n in self.nodes:
            gpus = ", ".join(f"{g.count} {g.type}".strip() for g in n.gres if g.name == "gpu")
            hardware = (str(n.reading.nic or "?"), gpus, n.cpus, round(n.memory_mib / 1024))
            pool = self.pool_of[n.name].name if n.name in self.pool_of else ""
            texts = (pool, " ".join(n.features), "; ".join(self.remarks(n)))
            rows.append((("+".join(n.states).lower(), *hardware, *texts), n.name))
        return [[compress(names), *row] for row, names in grouped(rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        pools = [{**asdict(p), "nic": str(p.nic), "fabric": p.fabric_name} for p in self.grouping.pools]
        nodes = [
            {
                **{key: getattr(n, key) for key in _NODE_KEYS},
                "nic": str(n.reading.nic) if n.reading.nic else None,
                "rdma_gbps": n.reading.rdma_gbps,
                "ethernet_gbps": n.reading.ethernet_gbps,
                "pool": pool.name if pool else None,
                "fabric": pool.fabric_name if pool else None,
                "understood": {m.feature: m.text for m in n.reading.meanings},
                "unknown": n.reading.unknown,
                "remarks": self.remarks(n),
            }
            for n in self.nodes
            for pool in [self.pool_of.get(n.name)]
        ]
        partitions = [{key: getattr(p, key) for key in _PARTITION_KEYS} for p in self.partitions]
        return {
            "cluster": self.cluster,
            "pools": pools,
            # a fabric with a single pool also has the keys of that pool
            "fabrics": [
                {**(of_fabric[0] if len(of_fabric) == 1 else {}), "name": name, "nic": of_fabric[0]["nic"]}
                | {"pools": [p["name"] for p in of_fabric]}
                for name, of_fabric in grouped((p["fabric"], p) for p in pools)
            ],
            "partitions": partitions,
            "nodes": nodes,
            "assumptions": self.grouping.assumptions,
            "left_out": self.grouping.left_out,
        }


def listing_of(
    cluster: str,
    nodes: Sequence[SiteNode],
    partitions: Sequence[Partition],
    settings: NodeSettings = NodeSettings(),
    site: Site | None = None,
) -> Listing:
    """Return the listing of these nodes and partitions, with the pools of `site` if it is given. Runs no command."""
    grouping = Grouping(site.pools, site.assumptions, {}) if site else group(nodes, partitions, settings)
    return Listing(cluster, tuple(nodes), tuple(partitions), grouping)


def listing(settings: NodeSettings = NodeSettings(), site: Site | None = None) -> Listing:
    """Return the listing of this Slurm's nodes and partitions, with the pools of `site` if it is given."""
    partitions = read_partitions()
    settings = with_associations(settings, partitions)
    return listing_of(read_config().cluster, read_nodes(settings.vocabulary), partitions, settings, site)


def read_site(settings: NodeSettings = NodeSettings()) -> Site:
    """Return the Site that Slurm's present nodes form. Raise SiteError without Slurm, or if no node is usable."""
    shown = listing(settings)
    return shown.grouping.site(shown.cluster)


def probe_tables(nics: NodeNics) -> list[Table]:
    """Return the tables of `holmes probe`: interfaces, RDMA ports, and the node's expected features."""
    interfaces: list[list[Any]] = []
    for n in nics.interfaces:
        state = "up" if n.up else "down" if n.carrier else "no carrier"
        network = [_format_gbps(n.gbps), n.address and f"{n.address}/{n.prefix}", ",".join(n.rdma)]
        interfaces.append([n.name, n.type, state, *network, n.member_of, n.role])
    has_unknown_speed = any(n.gbps is None for n in nics.interfaces if n.role == "data")
    speeds = ["Gb/s unknown: a virtual NIC, or one that is down"] * has_unknown_speed
    ports: list[list[Any]] = []
    for p in nics.ports:
        gid = "" if p.gid_index is None else f"{p.gid_index}: {p.gid}"
        place = [p.interface, gid, ",".join(map(str, p.gpus)), p.pci[-1] if p.pci else ""]
        ports.append([p.name, p.kind, p.state, _format_gbps(p.gbps), *place])
    caption = "\n".join([*speeds, *(f"note: {note}" for note in nics.notes)])
    vocabulary = read_vocabulary()
    meanings = {f: meaning.text for f in features_of(nics) if (meaning := vocabulary.meaning(f)) is not None}
    meanings["fabric_<name>"] = "the same on all nodes that reach each other by RDMA; the site chooses it"
    columns = ["interface", "type", "state", "Gb/s", "address", "RDMA ports", "member of", "role"]
    tables: list[Table] = [("Network interfaces", columns, interfaces, "" if ports else caption)]
    if ports:
        columns = ["port", "kind", "state", "Gb/s", "interface", "RoCE v2 GID", "nearest GPUs", "PCI"]
        tables.append(("RDMA ports", columns, ports, caption))
    feature_rows = [list(row) for row in meanings.items()]
    return [*tables, ("Expected features of this node", ["feature", "meaning"], feature_rows, "")]


def probe_dict(nics: NodeNics) -> dict[str, Any]:
    """Return a node's NICs, their type and the expected features as plain data for `holmes probe --json`."""
    data = json.loads(json.dumps(asdict(nics)))
    return {"type": str(nics.type), "features": list(features_of(nics)), **data}


def findings_table(title: str, findings: Sequence[Finding]) -> Table:
    """Return a table of findings. Findings that differ only in their node share a row. The column `where` comes first,
    because a narrow terminal splits the table into blocks that repeat the first column."""
    rows = []
    for (where, level, what, hint), nodes in grouped((_without_node(f), f.node) for f in findings):
        place = where.replace(f"node {_NODE}", f"nodes {_NODE}") if len(nodes) > 1 else where
        rows.append([text.replace(_NODE, compress(filter(None, nodes))) for text in (place, level, what, hint)])
    return title, ["where", "level", "what", "hint"], rows, "" if findings else "nothing found"


_NODE = "\0"  # replaces the node's name in a finding's texts, so that the texts of different nodes are equal


def _without_node(finding: Finding) -> tuple[str, str, str, str]:
    """Return the texts of a finding, with its node's name replaced by _NODE."""
    texts, name = (finding.where, finding.what, finding.hint), rf"(?<![\w-]){re.escape(finding.node)}(?![\w-])"
    where, what, hint = (t if not finding.node else re.sub(name, _NODE, t) for t in texts)
    return where, finding.level, what, hint


def _format_gbps(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:g}"
