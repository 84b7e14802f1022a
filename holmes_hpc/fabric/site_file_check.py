"""The check of a site file against Slurm: what contradicts it, and what has changed since it was written."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from holmes_hpc.errors import Case, SiteError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu, Pool, Site
from holmes_hpc.fabric.site_record import node_names
from holmes_hpc.records.files import read_yaml
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Node, read_config, read_nodes

ROUNDED = 1.01  # the factor by which `node_memory_gib` may exceed Slurm's memory


def changes_since_written(path: str, site: Site) -> list[str]:
    """Return warnings about changes in Slurm since `holmes site` wrote the file at `path`. Raise SiteError if the file
    contradicts Slurm. Ignore a file of another cluster, and a handwritten file that names no nodes or unknown ones."""
    found = read_yaml(path, SiteError, "").get("found") or {}
    try:
        if found and not (isinstance(found, Mapping) and read_config().cluster == found.get("cluster")):
            return []
        nodes = {n.name: n for n in read_nodes()}
    except SiteError:  # a machine without Slurm
        return []
    rerun_hint = f"run `holmes site -o {path}` again"
    warnings = []
    known = set(expand(str(found.get("nodes") or ""))) if found else set(nodes)
    if not found and not {name for pool in site.pools for name in pool.node_names} <= known:
        return []
    for names, text in ((set(nodes) - known, "are new in Slurm"), (known - set(nodes), "are gone from Slurm")):
        if names:
            warnings.append(f"{path}: nodes {compress(sorted(names))} {text}; {rerun_hint}")
    gpus = {node: entry["gpu"]["name"] for entry in found.get("pools") or () for node in node_names(entry)}
    for pool in (p for p in site.pools if p.node_names or found):
        members = [nodes[name] for name in pool.node_names if name in nodes] or _candidates(pool, nodes.values())
        SiteError.refuse(f"{path}: pool {pool.name}", *_contradictions(pool, members, gpus, rerun_hint))
        usable = sum(n.usable for n in members)
        if usable < pool.nodes:
            warnings.append(f"{path}: {usable} of the {pool.nodes} nodes of pool {pool.name} can be used now")
    return warnings


def _candidates(pool: Pool, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that Slurm may give to a pool without node names."""
    may_meet = matcher(pool.constraint)
    in_partition = [n for n in nodes if pool.partition in n.partitions and may_meet(frozenset(n.features))]
    return [n for n in in_partition if not pool.gres_type or pool.gres_type in n.gpu_types]


def _contradictions(pool: Pool, members: Sequence[Node], gpus: Mapping[str, str], rerun_hint: str) -> Iterator[Case]:
    """Yield (whether Slurm contradicts the file, problem, hint) for a pool's keys. `members`: its nodes in Slurm;
    `gpus`: node -> the GPU kind that `holmes site` found, which may differ from the GRES type."""
    hint, kind_of = f"correct the file, or {rerun_hint}", read_vocabulary().gpu
    yield len(members) < pool.nodes, f"nodes is {pool.nodes}, Slurm has {len(members)} of them", hint
    kind, count = kind_of(pool.gpu.name), pool.node_gpus or pool.gpus_per_node
    may_meet = matcher(pool.constraint)
    for node in members:
        of_node = f"Slurm's {node.name} has"
        partitions, types = ", ".join(node.partitions), ", ".join(filter(None, node.gpu_types)) or "no type"
        is_elsewhere = pool.partition not in node.partitions
        yield is_elsewhere, f"partition is {pool.partition}, Slurm's {node.name} is in {partitions or 'none'}", hint
        lacks = not may_meet(frozenset(node.features))
        yield lacks, f"constraint is {pool.constraint}, {of_node} features {','.join(node.features) or 'none'}", hint
        yield (pool.node_cpus or 0) > node.cpus, f"node_cpus is {pool.node_cpus}, {of_node} {node.cpus}", hint
        memory_gib = node.memory_mib / 1024
        has_less = (pool.node_memory_gib or 0) > memory_gib * ROUNDED
        yield has_less, f"node_memory_gib is {pool.node_memory_gib}, {of_node} {memory_gib:.4g}", hint
        if not pool.gres:
            continue
        yield node.gpus < count, f"gpus_per_node is {count}, {of_node} {node.gpus}", hint
        is_other_type = bool(pool.gres_type) and pool.gres_type not in node.gpu_types
        yield is_other_type, f"gres_type is {pool.gres_type}, {of_node} {types}", hint
        actual = [_family(gpu) for name in node.gpu_types if (gpu := kind_of(name))]
        is_other_kind = kind is not None and bool(actual) and _family(kind) not in actual
        yield is_other_kind and pool.gpu.name != gpus.get(node.name), f"gpu is {pool.gpu.name}, {of_node} {types}", hint


def _family(gpu: Gpu) -> str:
    """Return the GPU kind without its variant (memory size, PCIe), because GRES may not state the variant."""
    return re.sub(r"-(\d+gb|pcie|gcd)\b.*", "", gpu.name)
