"""The site file that `holmes site` writes. Its record `found` lets a later run recognise and keep manual edits."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.discovery import Discovery, Origin, Probe
from holmes_hpc.fabric.site import Pool
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import make
from holmes_hpc.slurm.hostlist import compress, expand

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
    """Return the content of a file by `holmes site`; empty if it does not exist. Raise SiteError for any other file."""
    if not Path(path).exists():
        return {}
    hint, problem = "give another file with -o", "`holmes site` did not write this file: it has no key `found`"
    data = read_yaml(path, SiteError, hint)
    SiteError.refuse(path, (not isinstance(data.get("found"), Mapping), problem, hint))
    return data


def probes_of(record: Mapping[str, Any]) -> list[Probe]:
    """Return the probes of an earlier run."""
    return [make(Probe, entry, "found: probe", SiteError) for entry in record.get("found", {}).get("probes") or ()]


def site_text(discovery: Discovery, node_names: Sequence[str], record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (the text of the site file, lines about failed probes and unknown GPU kinds). `node_names`: all nodes of
    Slurm; `record`: the file of an earlier run, whose manual edits stay: changed values, added or removed parts."""
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
    unknown_gpus = {names[name]: line for name, line in discovery.unknown_gpus.items()}
    uncorrected = [part.found_as for part in merged["pools"] if "gpu" not in part.edited]
    problems = [*discovery.problems, *(unknown_gpus[name] for name in uncorrected if name in unknown_gpus)]
    lines += [f"# {_line(text)}" for text in (*discovery.left_out, *problems)]
    lines += ["", "found:  # what `holmes site` found; leave it", f"  cluster: {_flow(site.name)}"]
    lines.append(f"  nodes: {_flow(compress(node_names))}")
    assumed = {names[pool.name]: keys for pool in site.pools if (keys := discovery.origins[pool.name].assumed)}
    lines += [f"  assumed: {_flow(assumed)}"] if assumed else []
    for key, entries in found.items():
        present = {entry.get("name") for entry in entries}
        gone = [e for e in before.get(key) or [] if key != "probes" and e["name"] not in present]
        lines += [f"  {key}:", *(f"  - {_flow(entry)}" for entry in (*entries, *gone))] if entries or gone else []
    return "\n".join(lines) + "\n", problems


def _lasting_names(pools: Sequence[Pool], before: Entries) -> dict[str, str]:
    """Return {pool: its name in the file}. A pool that shares nodes with an earlier pool takes the earlier name."""
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
    return {node: entry["name"] for entry in entries for node in node_names(entry)}


def node_names(entry: Mapping[str, Any]) -> set[str]:
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
    """A fabric or a pool in the file. `entry`: its keys and values; `found_as`: its name among the parts discovered
    now; empty if it was not discovered; `edited`: the keys that were edited by hand."""

    entry: dict[str, Any]
    found_as: str = ""
    edited: frozenset[str] = frozenset()


def _merged(detected: Entries, edited_file: Entries, last_written: Entries) -> list[_Part]:
    """Apply manual edits to the `detected` fabrics or pools (a three-way merge). The manual edits are the differences
    between `edited_file` and the entries that `holmes site` had `last_written` to it."""
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
    text = json.dumps(value)
    return json.loads(text, parse_float=lambda t: int(float(t)) if t.endswith(".0") else round(float(t), 2))


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _line(text: str) -> str:
    return " ".join(text.split())
