"""The schema (version 3), reader and writer of plan.yaml. Keys that follow from others are under `derived`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import yaml

from holmes_hpc.errors import HolmesError, PlanError
from holmes_hpc.fabric.site import with_pools
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.records.untrusted import from_yaml, read_file
from holmes_hpc.schema import Checked, key, make

P = TypeVar("P")  # Plan, whose methods call these functions

VERSION = 3
UNIFORM, PER_STAGE = 1, 2  # versions of earlier releases, which can still be read
_ENTIRE_VALUE: tuple[str, ...] = ()
# Keys that an older plan may lack, and that change what runs.
_ALWAYS_WRITTEN = ("bucket_bytes", "edge_dtype", "edge_connections", "transport_mode")
_SIZES = ("tp", "dp", "cp")  # keys of a stage


def to_dict(plan: Any) -> dict[str, Any]:
    """Return a plan as plain data, with the derived keys. Null keys `pace_*`, `grad_*` and `early_*` are left out."""
    data: dict[str, Any] = {"version": VERSION}
    for f in fields(plan):
        value = getattr(plan, f.name)
        if f.name != "site" and (not f.name.startswith(("pace_", "grad_", "early_")) or value is not None):
            data[f.name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value
    if not plan.schedule.deferred:
        data["schedule"] = {"kind": plan.schedule.kind, "in_flight": plan.schedule.in_flight}
    data["model"] = plan.model.to_dict()
    unnamed = () if _has_pools(plan) else ("pool",)  # if each pool of the plan is a fabric by itself
    data["components"] = [_pick(asdict(c), unnamed, False) for c in plan.components]
    data["stages"] = [_pick(asdict(s), unnamed, False) for s in plan.stages]
    p, ranks_of_node = plan.parallel, {c.pool: c.gpus_per_node for c in plan.components}
    data["parallel"] = p.settings() | {"pp": p.pp}
    if p.is_uniform:
        data["parallel"] |= {"tp": p.tp, "dp": p.replicas}
    for stage, pool, sizes in zip(data["stages"], [s.pool for s in plan.stages], p.stages, strict=True):
        nodes, extra_ranks = divmod(sizes.ranks, ranks_of_node[pool])
        stage |= {"tp": sizes.tp, "dp": sizes.dp // p.cp} | ({"cp": sizes.cp} if sizes.cp > 1 else {})
        stage |= {} if extra_ranks else {"nodes": nodes}
    if plan.is_per_stage:
        data["routing"] = {"weights": [list(s.weights or (1,) * s.dp) for s in p.stages]}
    data["unused"] = plan.unused
    data["transports"] = [
        {"kind": g.kind, "ranks": g.ranks, "stages": g.stages, "transport": t.kind, "nic": t.nic, "fabric": t.fabric}
        for g, t in ((g, g.transport) for g in plan.transports())
    ]
    data["site"] = plan.site.to_dict()
    return json.loads(json.dumps(data))


def _has_pools(plan: Any) -> bool:
    return any(c.pool != c.fabric for c in plan.components)


def digest(plan: Any) -> str:
    """Return twelve hex digits that identify what a plan runs, the same in every release: of plan.yaml in version 1
    (uniform) or 2 (per-stage TP/DP), without the entry of kind `control`, which the oldest plan files lack."""
    data = to_dict(replace(plan, predicted=None, assumptions=(), alternatives=()))
    data["version"] = PER_STAGE if plan.is_per_stage else UNIFORM
    if plan.is_per_stage:
        data["parallel"] = {"sequence_parallel": plan.parallel.sequence_parallel}
    else:
        data["stages"] = [_pick(stage, ("nodes", *_SIZES), False) for stage in data["stages"]]
    data["transports"] = _without_control(data["transports"])
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def to_yaml(plan: Any) -> str:
    """Return the text of plan.yaml."""
    values, names_of = to_dict(plan), _derived_names(plan)
    data = {k: _pick(v, names_of.get(k, ()), False) for k, v in values.items() if names_of.get(k) != _ENTIRE_VALUE}
    derived = {k: _pick(values[k], names, True) if names else values[k] for k, names in names_of.items()}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    style: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 110, "allow_unicode": True}
    return str(yaml.dump({**data, "derived": derived}, Dumper=dumper, **style))


def _derived_names(plan: Any) -> dict[str, tuple[str, ...]]:
    """Return {key: the names of the derived keys inside its value}; _ENTIRE_VALUE if the whole value is derived."""
    chunks = "chunks" if plan.parallel.virtual_stages == 1 else "layers"
    return {
        "parallel": ("tp", "pp", "dp"),
        "components": ("partition", "constraint", "stages", *(("fabric",) if _has_pools(plan) else ())),
        "stages": ("pool", "fabric", "nodes", chunks),
        "unused": _ENTIRE_VALUE,
        "transports": _ENTIRE_VALUE,
    }


def _pick(value: Any, names: Sequence[str], keep: bool) -> Any:
    """Return a mapping, or a list of mappings, with only the keys in `names` if `keep`, otherwise without them."""
    if isinstance(value, list):
        return [_pick(item, names, keep) for item in value]
    return {k: v for k, v in value.items() if (k in names) == keep} if isinstance(value, Mapping) else value


def flatten(data: Mapping[str, Any]) -> Any:
    """Return the plain data of a plan.yaml in the form of :func:`to_dict`, with `derived` merged into it."""
    return _merged({k: v for k, v in data.items() if k != "derived"}, data.get("derived") or {})


def _merged(data: Any, derived: Any) -> Any:
    if isinstance(data, Mapping) and isinstance(derived, Mapping):
        return {**derived, **{k: _merged(v, derived[k]) if k in derived else v for k, v in data.items()}}
    if isinstance(data, list) and isinstance(derived, list) and len(data) == len(derived):
        return [_merged(*pair) for pair in zip(data, derived, strict=True)]
    return data


def read(path: str | os.PathLike[str]) -> Any:
    """Return the plain data of a file. Raise PlanError if it is missing or not YAML."""
    errors, hint = (yaml.YAMLError, UnicodeDecodeError), "make it again with `holmes plan`"
    not_yaml = PlanError.instead_of(*errors, where=path, hint=hint, what="not YAML:")
    with PlanError.instead_of(OSError, where=path, hint="make it with `holmes plan -o plan.yaml`"), not_yaml:
        return from_yaml(read_file(path).decode("utf-8"))


def from_dict(cls: type[P], data: Any, where: str) -> P:
    """Build a plan from plain data of version 1, 2 or 3.
    Derived keys must equal their computed values. Keys that an older version lacks get their defaults."""
    if not isinstance(data, Mapping):
        raise PlanError("not a plan", where=where, hint="make it with `holmes plan -o plan.yaml`")
    is_site, hint = "fabrics" in data and "stages" not in data, f"plan with it first: `holmes plan --site {where}`"
    PlanError.refuse(where, (is_site, "a site file, not a plan", hint))
    try:
        version = data.get("version", UNIFORM)
        problem = f"plan version {version}, this release reads {UNIFORM} to {VERSION}"
        hint = "make the plan again with `holmes plan`"
        PlanError.refuse("plan", (version not in (UNIFORM, PER_STAGE, VERSION), problem, hint))
        flat = flatten(data)
        plan: Any = make(cls, _stored_fields(flat), "plan", PlanError)
        # Version 2 listed other groups for a plan that is a grid.
        unchecked = ("transports",) if version == PER_STAGE and not plan.is_per_stage else ()
        _check_derived(plan, {k: v for k, v in flat.items() if k not in unchecked})
    except HolmesError as e:
        raise e.moved(lambda at: f"{where}: {at.removeprefix('plan').removeprefix('.')}".removesuffix(": ")) from e
    missing = [k for k in _ALWAYS_WRITTEN if k not in data]
    note = f"the plan is older and lacks {', '.join(missing)}: the defaults are used"
    return replace(plan, assumptions=(*plan.assumptions, note)) if missing else plan


def _stored_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan without derived keys. Derived keys of components are set to empty values."""
    values = {k: v for k, v in flat.items() if k not in ("version", "unused", "transports", "routing")}
    stages, components = values.get("stages"), values.get("components")
    values |= {"parallel": _parallel(flat), "site": with_pools(values.get("site"))}
    if isinstance(stages, list):
        values["stages"] = [_pick(s, ("pool", "fabric", "nodes", *_SIZES), False) for s in stages]
    if isinstance(components, list):
        derived = {"partition": "", "constraint": "", "stages": (), "fabric": ""}
        values["components"] = [
            {"pool": c.get("fabric", ""), **c, **derived} if isinstance(c, Mapping) else c for c in components
        ]
    return values


@dataclass(frozen=True)
class _Uniform(Checked, where="parallel", error=PlanError):
    """The sizes of a uniform layout in plan.yaml."""

    tp: Annotated[int, key("tensor parallel", ge=1)] = 1
    pp: Annotated[int, key("pipeline stages", ge=1)] = 1
    dp: Annotated[int, key("data parallel", ge=1)] = 1
    cp: Annotated[int, key("context parallel", ge=1)] = 1


@dataclass(frozen=True)
class _Routing(Checked, where="routing", error=PlanError):
    """The key `routing` of plan.yaml: per stage, the weight of each replica."""

    weights: tuple[tuple[float, ...], ...] = ()


def _parallel(flat: Mapping[str, Any]) -> Parallel:
    """Return the layout that the keys `parallel`, `stages` and `routing` describe."""
    parallel, stages = flat.get("parallel") or {}, flat.get("stages")
    if not isinstance(parallel, Mapping):
        raise PlanError(f"parallel is {parallel!r:.60}", where="parallel", hint="give its keys: tp, dp, …")
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        hint = "give a list with one mapping of keys (pool, layers, …) per stage"
        raise PlanError(f"stages is {stages!r:.60}", where="stages", hint=hint)
    settings = {k: v for k, v in parallel.items() if k not in ("tp", "pp", "dp", "stages")}
    sizes = {k: v for k, v in parallel.items() if k in ("tp", "pp", "dp", "cp")}
    uniform = make(_Uniform, {"pp": len(stages), **sizes}, "parallel", PlanError)
    if not any(name in stage for stage in stages for name in _SIZES):
        equal_stages = (StageParallel(uniform.tp, uniform.dp * uniform.cp),) * uniform.pp
        return make(Parallel, {**settings, "stages": equal_stages}, "parallel", PlanError)
    weights = make(_Routing, flat.get("routing") or {}, "routing", PlanError).weights or ((),) * len(stages)
    problem = f"weights for {len(weights)} of {len(stages)} stages"
    PlanError.refuse("routing", (len(weights) != len(stages), problem, "give a list per stage"))
    sizes_of = [{**_pick(stage, _SIZES, True), "weights": weights[s]} for s, stage in enumerate(stages)]
    without_cp = [make(StageParallel, sizes, f"stages[{s}]", PlanError) for s, sizes in enumerate(sizes_of)]
    stage_parallels = tuple(replace(stage, dp=stage.dp * uniform.cp) for stage in without_cp)
    return make(Parallel, {**settings, "stages": stage_parallels}, "parallel", PlanError)


def _check_derived(plan: Any, flat: Mapping[str, Any]) -> None:
    """Raise PlanError if a derived key differs from its computed value."""
    computed = to_dict(plan)
    for name, names in _derived_names(plan).items():
        if name not in flat or (name == "transports" and flat[name] == _without_control(computed[name])):
            continue
        for where, written, value in _differences(flat[name], computed[name], names, name):
            hint = "remove the key (it is derived), or change the keys it is derived from"
            raise PlanError(f"it is {_shown(written)}, but the other keys give {_shown(value)}", where=where, hint=hint)


def _differences(written: Any, computed: Any, names: Sequence[str], where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (where, written value, computed value) for each derived value that differs."""
    if isinstance(written, list) and isinstance(computed, list) and len(written) == len(computed):
        for i, pair in enumerate(zip(written, computed, strict=True)):
            yield from _differences(*pair, names, f"{where}[{i}]")
    elif names and isinstance(written, Mapping) and isinstance(computed, Mapping):
        for name in names:
            if name in written and name in computed and written[name] != computed[name]:
                yield f"{where}.{name}", written[name], computed[name]
    elif written != computed:
        yield where, written, computed


def _without_control(transports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in transports if entry["kind"] != "control"]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
