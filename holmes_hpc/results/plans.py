"""The plan of a run as plain data, and the columns of the table of runs that come from it."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

from holmes_hpc.planning.plan.plan_file import flatten
from holmes_hpc.records.files import to_json
from holmes_hpc.records.rates import number
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import from_yaml, read_file
from holmes_hpc.tables import read_table

NIC_WORDS = {"ib": "IB", "roce": "RoCE", "efa": "EFA", "slingshot": "Slingshot", "omnipath": "Omni-Path"}
NIC_WORDS["ethernet"] = "Ethernet"  # the last one, because lists of fabrics have this order

SHAPE: dict[str, Any] = read_table(__file__)  # an example of a plan; values of other types are dropped


def read_plan(run: RunDirectory | str | os.PathLike[str]) -> dict[str, Any]:
    """Return plan.yaml of a run, given as its directory; empty if it is unreadable. Callers must not change it."""
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    try:
        return _plan(read_file(directory.plan_path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


@lru_cache(maxsize=100)
def _plan(text: str) -> dict[str, Any]:
    """Parse the text of a plan. The result is cached, because all repeats of a setting have the same text."""
    return {key: _shaped(value, SHAPE.get(key)) for key, value in mapping(flatten(from_yaml(text))).items()}


def _shaped(value: Any, shape: Any) -> Any:
    """Return `value` without the parts whose types differ from `shape`. A plan edited by hand can have such parts.
    `shape`: the example of this value in SHAPE; None: any value is allowed, because it is only shown."""
    if isinstance(shape, dict):
        return {key: _shaped(element, shape.get(key)) for key, element in mapping(value).items()}
    if isinstance(shape, list):
        elements = value if isinstance(value, list) else []
        alike = [e for e in elements if isinstance(e, type(shape[0])) and not isinstance(e, bool)]
        return [_shaped(element, shape[0]) for element in alike]
    if isinstance(shape, int):
        return integer(value)
    return number(value) if isinstance(shape, float) else value


def plan_columns(plan: dict[str, Any]) -> dict[str, Any]:
    """Return {column: value} of the columns that come from the plan. Missing values are None or NaN."""
    model, batch, parallel = mapping(plan.get("model")), mapping(plan.get("batch")), mapping(plan.get("parallel"))
    predicted, site = mapping(plan.get("predicted")), mapping(plan.get("site"))
    components = plan.get("components") or []
    nodes = _nodes_by(components, ("pool", "fabric"))
    stages = [stage.get("layers") for stage in plan.get("stages") or []]
    return {
        **{name: text(plan.get(name)) for name in ("strategy", "recompute", "edge_dtype")},
        "transport": text(plan.get("transport_mode")),
        "schedule": text(mapping(plan.get("schedule")).get("kind")),
        "site": text(site.get("name")),
        "environment": environment(_nodes_by(components, ("fabric",)), nic_types(plan)) if nodes else None,
        "placement": " ".join(f"{name}:{count}" for name, count in nodes.items()) or None,
        "layers_per_stage": ",".join(map(str, stages)) or None,
        "nodes": sum(nodes.values()) if nodes else None,
        "ranks": sum(int(c.get("nodes") or 0) * int(c.get("gpus_per_node") or 0) for c in components) or None,
        "model": text(model.get("name")),
        "model_spec": to_json(model) if model else None,
        "global_batch": integer(batch.get("global_size")),
        "micro_batch": integer(batch.get("micro_size")),
        "sequence_length": integer(batch.get("sequence_length")),
        **{name: integer(parallel.get(name)) for name in ("tp", "pp", "dp", "virtual_stages")},
        "predicted_step_time_s": number(predicted.get("step_time_s")),
        "predicted_samples_per_s": number(predicted.get("samples_per_s")),
    }


def _nodes_by(components: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, int]:
    """Return {name: number of nodes}. A component is named by its value of the first of the `keys` that it has."""
    nodes: dict[str, int] = {}
    for c in components:
        name = next((str(c[k]) for k in keys if c.get(k)), "None")
        nodes[name] = nodes.get(name, 0) + int(c.get("nodes") or 0)
    return nodes


def nic_types(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return {name of a pool or fabric: its NIC type} of the plan's site."""
    site = mapping(plan.get("site"))
    pools = site.get("pools") or site.get("fabrics") or []
    return {str(name): str(p.get("nic")) for p in pools for name in (p.get("name"), p.get("fabric")) if name}


def environment(nodes: Mapping[str, int], types: Mapping[str, str]) -> str:
    """Return the name of a placement's NIC environment.

    It is "one node", the NIC type of a single fabric (IB, RoCE, Ethernet, …), "hybrid" for one IB and one RoCE fabric,
    or a list for other mixes (`2 x IB`, `IB + RoCE`). `nodes`: {fabric: count}; `types`: from :func:`nic_types`."""
    if sum(nodes.values()) == 1:
        return "one node"
    kinds = [types.get(name, name) for name in nodes]
    if sorted(kinds) == ["ib", "roce"]:
        return "hybrid"
    counts = Counter(kinds)
    ordered = sorted(counts, key=lambda kind: (list(NIC_WORDS).index(kind) if kind in NIC_WORDS else 9, kind))
    return " + ".join(f"{counts[kind]} x " * (counts[kind] > 1) + NIC_WORDS.get(kind, kind) for kind in ordered)


def mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dictionary, otherwise an empty one, because damaged records may have any value."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str | None:
    return None if value is None else str(value)


def integer(value: Any) -> int | None:
    """Return `value` converted to an integer; None if it is no number or does not fit into 64 bits."""
    try:
        converted = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return converted if -(2**63) <= converted < 2**63 else None
