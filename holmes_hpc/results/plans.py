"""A run's plan.yaml as plain data: placement, NIC environment, sizes, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from holmes_hpc.planning.plan.plan_file import flatten
from holmes_hpc.records.files import to_json
from holmes_hpc.records.rates import number
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import from_yaml, read_file

NIC_WORDS = {
    "ib": "IB",
    "roce": "RoCE",
    "efa": "EFA",
    "slingshot": "Slingshot",
    "omnipath": "Omni-Path",
    "ethernet": "Ethernet",
}

SHAPE: dict[str, Any] = {  # examples of the values that results compute with
    "model": {},
    "batch": {},
    "parallel": {},
    "schedule": {},
    "site": {"fabrics": [{}]},
    "stages": [{}],
    "components": [{"nodes": 0, "gpus_per_node": 0}],
    "transports": [{"ranks": [0]}],
    "predicted": {
        "step_time_s": 0.0,
        "samples_per_s": 0.0,
        "model_tflops_per_gpu": 0.0,
        "hardware_tflops_per_gpu": 0.0,
        "memory_bytes_per_gpu": [0],
        "nic_bytes_per_step": {},
    },
}


def read_plan(run: RunDirectory) -> dict[str, Any]:
    """Return plan.yaml as plain data, which callers must not change; empty if missing or unreadable."""
    try:
        return _plan(read_file(run.plan_path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


@lru_cache(maxsize=100)
def _plan(text: str) -> dict[str, Any]:
    """Parse a plan once: repeats have the same plan, byte for byte."""
    plan = mapping(flatten(from_yaml(text)))
    return {key: _shaped(value, SHAPE.get(key)) for key, value in plan.items()}


def _shaped(value: Any, shape: Any) -> Any:
    """Return `value` without the parts whose type differs from `shape`, as in a plan edited by hand.

    `shape` is an example, as in SHAPE; None stands for values that are only shown."""
    if isinstance(shape, dict):
        return {key: _shaped(element, shape.get(key)) for key, element in mapping(value).items()}
    if isinstance(shape, list):
        return (
            [
                _shaped(element, shape[0])
                for element in value
                if isinstance(element, type(shape[0])) and not isinstance(element, bool)
            ]
            if isinstance(value, list)
            else []
        )
    if isinstance(shape, int):
        return integer(value)
    return number(value) if isinstance(shape, float) else value


def plan_columns(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the table of runs that come from the plan; missing values are None or NaN."""
    model, batch, parallel = mapping(plan.get("model")), mapping(plan.get("batch")), mapping(plan.get("parallel"))
    predicted, site = mapping(plan.get("predicted")), mapping(plan.get("site"))
    components = [c for c in plan.get("components") or [] if isinstance(c, dict)]
    nodes: dict[str, int] = {}
    for c in components:
        nodes[str(c.get("fabric"))] = nodes.get(str(c.get("fabric")), 0) + int(c.get("nodes") or 0)
    stages = [s.get("layers") for s in plan.get("stages") or [] if isinstance(s, dict)]
    return {
        "strategy": text(plan.get("strategy")),
        "transport": text(plan.get("transport_mode")),
        "schedule": text(mapping(plan.get("schedule")).get("kind")),
        "recompute": text(plan.get("recompute")),
        "edge_dtype": text(plan.get("edge_dtype")),
        "site": text(site.get("name")),
        "environment": environment(nodes, nic_types(plan)) if nodes else None,
        "placement": " ".join(f"{name}:{count}" for name, count in nodes.items()) or None,
        "layers_per_stage": ",".join(map(str, stages)) or None,
        "nodes": sum(nodes.values()) if nodes else None,
        "ranks": sum(int(c.get("nodes") or 0) * int(c.get("gpus_per_node") or 0) for c in components) or None,
        "model": text(model.get("name")),
        "model_spec": to_json(model) if model else None,
        "global_batch": integer(batch.get("global_size")),
        "micro_batch": integer(batch.get("micro_size")),
        "sequence_length": integer(batch.get("sequence_length")),
        "virtual_stages": integer(parallel.get("virtual_stages")),
        **{name: integer(parallel.get(name)) for name in ("tp", "pp", "dp")},
        "predicted_step_time_s": number(predicted.get("step_time_s")),
        "predicted_samples_per_s": number(predicted.get("samples_per_s")),
    }


def nic_types(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return fabric name -> NIC type from the plan's site."""
    fabrics = mapping(plan.get("site")).get("fabrics") or []
    return {str(f.get("name")): str(f.get("nic")) for f in fabrics if isinstance(f, dict)}


def environment(nodes: Mapping[str, int], types: Mapping[str, str]) -> str:
    """Return the name of a placement's NIC environment (fabric -> nodes).

    The name is IB, RoCE or Ethernet, hybrid for IB with RoCE, or "one node". Other mixes are lists, `2 x IB`, `IB +
    RoCE + Ethernet`."""
    if sum(nodes.values()) == 1:
        return "one node"
    kinds = [types.get(name, name) for name in nodes]
    if sorted(kinds) == ["ib", "roce"]:
        return "hybrid"
    names = []
    for kind in sorted(set(kinds), key=lambda k: (list(NIC_WORDS).index(k) if k in NIC_WORDS else 9, k)):
        count = kinds.count(kind)
        names.append(f"{count} x {NIC_WORDS.get(kind, kind)}" if count > 1 else NIC_WORDS.get(kind, kind))
    return " + ".join(names)


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping as it is, and an empty one for anything else: records of dead runs may hold anything."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str | None:
    return None if value is None else str(value)


def integer(value: Any) -> int | None:
    """Return an integer of 64 bits; None for anything else."""
    try:
        converted = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return converted if -(2**63) <= converted < 2**63 else None
