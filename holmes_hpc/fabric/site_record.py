"""The site file that `holmes site` writes: sources as comments, and a record of what was found, so that edits stay."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.discovery import Discovery, Origin, Probe
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu, Pool, Site
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import make, refuse
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import compress, expand
from holmes_hpc.slurm.scontrol import Node, read_config, read_nodes

HEADER = """\
# Site file of the Slurm cluster {}, written by `holmes site`. A comment beside a value says where it is from.
# Correct values by hand: a value that differs from the one under `found` is yours. `holmes site` keeps it when it
# writes this file again, and asks only kinds of nodes that are new. Comments of your own are not kept.
"""
_ORDER = ("name", "fabric", "partition", "constraint", "nodes", "node_names", "gpus_per_node", "gres_type", "gpu")
_SLURM_SOURCES = {"partition": "Slurm's partitions", "constraint": "Slurm's features", "nodes": "usable in Slurm now"}
_SLURM_SOURCES |= dict.fromkeys(("gpus_per_node", "gres_type"), "Slurm's GRES")
_HAND, _KEPT = "edited by hand", "not found in Slurm now: kept from the earlier file"
Entries = list[dict[str, Any]]


def read_record(path: str) -> dict[str, Any]:
    """Return the content of a file of `holmes site`; empty if there is no file. SiteError for another file."""
    if not Path(path).exists():
        return {}
    data = read_yaml(path, SiteError, "give another file with -o")
    if not isinstance(data.get("found"), Mapping):
        raise SiteError("not written by `holmes site`: it has no `found`", where=path, hint="give another file with -o")
    return data


def probes_of(record: Mapping[str, Any]) -> list[Probe]:
    """Return the probes of an earlier run."""
    return [make(Probe, entry, "found: probe", SiteError) for entry in record.get("found", {}).get("probes") or ()]


def site_text(discovery: Discovery, node_names: Sequence[str], record: Mapping[str, Any]) -> str:
    """Return the text of the site file. `node_names`: all nodes of Slurm; `record`: the file of an earlier run.

    Values, fabrics and pools of the record that a person changed, added or removed stay as they are."""
    site, before = discovery.site, record.get("found", {})
    names = _lasting_names(site.pools, before.get("pools") or [])
    origins = {names[name]: origin for name, origin in discovery.origins.items()}
    found = {
        "fabrics": [{"name": name, "nic": str(pools[0].nic)} for name, pools in site.fabrics.items()],
        "pools": [_entry(pool, names[pool.name], discovery.origins[pool.name]) for pool in site.pools],
        "probes": [_plain({k: v for k, v in asdict(p).items() if v}) for p in discovery.probes if not p.problem],
    }
    merged = {key: _merged(found[key], record.get(key) or [], before.get(key) or []) for key in ("fabrics", "pools")}
    used = {part.entry.get("fabric") for part in merged["pools"]}
    merged["fabrics"] = [part for part in merged["fabrics"] if part.entry["name"] in used or "nodes" in part.entry]
    missing = used - {part.entry["name"] for part in merged["fabrics"]}
    merged["fabrics"] += [_Part(fabric, fabric["name"]) for fabric in found["fabrics"] if fabric["name"] in missing]
    nic_sources = {name: discovery.origins[pools[0].name].keys["nic"] for name, pools in site.fabrics.items()}
    lines = [HEADER.format(site.name) + f"name: {_flow(record.get('name', site.name))}", "fabrics:"]
    for part in merged["fabrics"]:
        source = _HAND if part.edited else nic_sources.get(part.found_as, _KEPT)
        lines.append(f"  - {_flow(part.entry)}  # {_line(source)}")
    lines.append("pools:")
    for part in merged["pools"]:
        lines += _pool_lines(part, origins.get(part.found_as))
    lines += [f"{k}: {_flow(v)}" for k, v in record.items() if k not in ("name", "fabrics", "pools", "found")]
    lines += [f"# {_line(text)}" for text in (*discovery.left_out, *discovery.problems)]
    lines += ["", "found:  # what `holmes site` found; leave it", f"  cluster: {_flow(site.name)}"]
    lines.append(f"  nodes: {_flow(compress(node_names))}")
    assumed = {names[pool.name]: keys for pool in site.pools if (keys := discovery.origins[pool.name].assumed)}
    lines += [f"  assumed: {_flow(assumed)}"] if assumed else []
    for key, entries in found.items():
        present = {entry.get("name") for entry in entries}
        gone = [e for e in before.get(key) or [] if key != "probes" and e["name"] not in present]
        lines += [f"  {key}:", *(f"  - {_flow(entry)}" for entry in (*entries, *gone))] if entries or gone else []
    return "\n".join(lines) + "\n"


def _lasting_names(pools: Sequence[Pool], before: Entries) -> dict[str, str]:
    """Return the name in the file of each pool: that of an earlier pool with some of its nodes, else its own."""
    earlier = pools_by_node(before)
    names: dict[str, str] = {}
    for pool in pools:
        candidates = [earlier[node] for node in pool.node_names if node in earlier]
        name = next((c for c in candidates if c not in names.values()), pool.name)
        while name in names.values():
            name += "-2"
        names[pool.name] = name
    return names


def pools_by_node(entries: Entries) -> dict[str, str]:
    """Return node -> its pool among the `entries` of a file."""
    return {node: entry["name"] for entry in entries for node in _nodes(entry)}


def _nodes(entry: Mapping[str, Any]) -> set[str]:
    return {name for text in entry.get("node_names") or () for name in expand(str(text))}


def _entry(pool: Pool, name: str, origin: Origin) -> dict[str, Any]:
    """Return the keys of a pool in a site file. `name`: its name there."""
    values = {k: v for k, v in _plain(asdict(pool)).items() if v and k != "nic"}
    values |= {"name": name, "fabric": pool.fabric_name, "node_names": [compress(pool.node_names)]}
    values = {**values, "gres": False} if not pool.gres else {k: v for k, v in values.items() if k != "gres"}
    gpu = {k: v for k, v in values["gpu"].items() if v is not None}
    shown = ("name", "memory_gib") if origin.keys["gpu"].startswith("driver") else ("name",)
    values["gpu"] = gpu if origin.gpu_is_known else {k: gpu[k] for k in shown}
    return {k: values[k] for k in (*_ORDER, *values) if k in values}


@dataclass(frozen=True)
class _Part:
    """A fabric or a pool of the file. `found_as`: its name in Slurm's facts now; empty if it is not among them.
    `edited`: its keys that a person changed."""

    entry: dict[str, Any]
    found_as: str = ""
    edited: frozenset[str] = frozenset()


def _merged(detected: Entries, edited_file: Entries, last_written: Entries) -> list[_Part]:
    """Merge three versions: return what is `detected` now, with a person's edits, which are the differences between
    `edited_file` and what `holmes site` has `last_written` there."""
    written, names_in_file = {e["name"]: e for e in (*detected, *last_written)}, {e.get("name") for e in edited_file}
    removed_names = {e["name"] for e in last_written} - names_in_file
    parts, unmatched = [], list(edited_file)
    for entry in detected:
        name = entry["name"]
        user_entry = next((u for u in unmatched if u.get("name") == name), None)
        if user_entry is None and name in removed_names:  # renamed by hand, or removed
            nodes, renamed = written[name].get("node_names"), [u for u in unmatched if u.get("name") not in written]
            user_entry = next((u for u in renamed if nodes and u.get("node_names") == nodes), None)
            if user_entry is None:
                continue
        user_values = user_entry or written[name]
        edits = {k for k in {*user_values, *written[name]} if user_values.get(k) != written[name].get(k)}
        values = {k: v for k, v in entry.items() if k not in edits}
        values |= {k: v for k, v in user_values.items() if k in edits}
        unmatched = [u for u in unmatched if u is not user_entry]
        parts.append(_Part({k: values[k] for k in (*_ORDER, *values) if k in values}, name, frozenset(edits)))
    return [*parts, *(_Part(entry) for entry in unmatched)]


def _pool_lines(part: _Part, origin: Origin | None) -> Iterator[str]:
    """Yield the lines of a pool: remarks, then one per key with its source."""
    remarks = (_KEPT,) if origin is None else origin.remarks
    yield from (f"  # {_line(text)}" for text in remarks)
    sources = {**_SLURM_SOURCES, **origin.keys} if origin else {}
    if origin and not origin.gpu_is_known:
        sources["gpu"] += "; unknown: write peak_tflops, memory_gib and intra_node_gbps"
    sources |= dict.fromkeys(part.edited, _HAND)
    for position, (name, value) in enumerate(part.entry.items()):
        text = f"{'    ' if position else '  - '}{name}: {_flow(value)}"
        yield f"{text}  # {_line(sources[name])}" if name in sources else text


def _plain(value: Any) -> Any:
    """Return data as YAML reads it back, with whole numbers as integers."""
    return json.loads(
        json.dumps(value), parse_float=lambda text: int(float(text)) if text.endswith(".0") else round(float(text), 2)
    )


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def changes_since_written(path: str, site: Site) -> list[str]:
    """Return warnings about a file of `holmes site` whose Slurm has changed since; none for another file or Slurm.
    Raise SiteError if the file, even a handwritten one that names nodes of this Slurm, contradicts it."""
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
    gpus = {node: entry["gpu"]["name"] for entry in found.get("pools") or () for node in _nodes(entry)}
    for pool in (p for p in site.pools if p.node_names or found):
        members = [nodes[name] for name in pool.node_names if name in nodes] or _candidates(pool, nodes.values())
        refuse(f"{path}: pool {pool.name}", *_contradictions(pool, members, gpus, rerun_hint), error=SiteError)
        usable = sum(n.usable for n in members)
        if usable < pool.nodes:
            warnings.append(f"{path}: {usable} of the {pool.nodes} nodes of pool {pool.name} can be used now")
    return warnings


def _meets_constraint(pool: Pool, node: Node) -> bool:
    """Return whether a node may meet a pool's constraint; True for one that only Slurm can evaluate."""
    is_met = matcher(pool.constraint)
    return is_met is None or is_met(frozenset(node.features))


def _candidates(pool: Pool, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that Slurm may give to a pool without node names."""
    return [
        node
        for node in nodes
        if pool.partition in node.partitions and _meets_constraint(pool, node)
        if not pool.gres_type or pool.gres_type in node.gpu_types
    ]


def _contradictions(
    pool: Pool, members: Sequence[Node], gpus: Mapping[str, str], rerun_hint: str
) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether Slurm contradicts the file, what, hint). `members`: Slurm's nodes; `gpus`: node -> its kind of GPU
    by the driver, which may differ from GRES."""
    hint, kind_of = f"correct the file, or {rerun_hint}", read_vocabulary().gpu
    yield len(members) < pool.nodes, f"nodes is {pool.nodes}, Slurm has {len(members)} of them", hint
    kind, count = kind_of(pool.gpu.name), pool.node_gpus or pool.gpus_per_node
    for node in members:
        of_node = f"Slurm's {node.name} has"
        partitions, types = ", ".join(node.partitions), ", ".join(filter(None, node.gpu_types)) or "no type"
        is_elsewhere = pool.partition not in node.partitions
        yield is_elsewhere, f"partition is {pool.partition}, Slurm's {node.name} is in {partitions or 'none'}", hint
        lacks = not _meets_constraint(pool, node)
        yield lacks, f"constraint is {pool.constraint}, {of_node} features {','.join(node.features) or 'none'}", hint
        yield (pool.node_cpus or 0) > node.cpus, f"node_cpus is {pool.node_cpus}, {of_node} {node.cpus}", hint
        memory_gib = node.memory_mib / 1024
        has_less = (pool.node_memory_gib or 0) > memory_gib * 1.01
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
    """Return the kind without its variant, which GRES may leave open."""
    return re.sub(r"-(\d+gb|pcie|gcd)\b.*", "", gpu.name)
