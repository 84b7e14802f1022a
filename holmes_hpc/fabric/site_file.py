"""Site files, for planning without Slurm or for hardware that is not bought yet (docs/howto.md)."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

from holmes_hpc.errors import HolmesError, SiteError, collected, nearest, raise_all
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import CPU, FabricLink, Gpu, Pool, Site
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import Checked, key, keys, make
from holmes_hpc.slurm.hostlist import expand

ETHERNET_GBYTES = (1.25, 3.125, 6.25, 12.5)  # GB/s of Ethernet of 10, 25, 50 and 100 Gb/s
TOLERANCE = 1.5  # largest plausible ratio to a data sheet's figure
IB_GBYTES = (12.5, 25.0)  # GB/s of EDR and HDR; NDR's 50 is left out, because two older ports have 50 Gb/s
# The highest plausible rates and sizes. A higher value was probably given in another unit.
MAX_VALUES = {"ethernet_gbps": 6400, "rdma_gbps": 25600, "gbps": 6400, "total_gbps": 1e5, "intra_node_gbps": 1e5}
MAX_VALUES |= {"peak_tflops": 1e5, "memory_gib": 4096, "delay_ms": 1e4, "gpus_per_node": 1024}
MAX_VALUES["nodes"] = 65_533  # of a Slurm cluster
MIN_GBPS = 0.001
FIGURES = ("peak_tflops", "memory_gib", "intra_node_gbps")  # from a GPU kind's data sheet
# Placeholders for the keys that a fabric leaves to its pools, so that its other keys can be checked.
_STAND_INS = {"nic": "ib", "partition": "p", "nodes": 1, "gpus_per_node": 1, "ethernet_gbps": 1.0, "gpu": CPU}
_HINT = "see docs/site-file.md"


@dataclass(frozen=True)
class SiteFile(Checked, where="site {0.name}", error=SiteError):
    """The keys of a site file; `gpu` and `ethernet_gbps` are the defaults of its fabrics and pools."""

    name: Annotated[str, key("name of the site")]
    fabrics: Annotated[tuple[Any, ...], key("list at least one")]
    pools: Annotated[tuple[Any, ...], key("pools of the fabrics that have no nodes of their own")] = ()
    ethernet_gbps: Annotated[float | None, key("Ethernet send rate of a node", unit="Gb/s", gt=0)] = None
    gpu: Annotated[Gpu | None, key("kind of GPUs: {name, peak_tflops, memory_gib, intra_node_gbps}")] = None
    links: Annotated[tuple[FabricLink, ...], key("links of fabrics: {between, gbps, total_gbps, delay_ms}")] = ()
    found: Annotated[Any, key("record of `holmes site`: what it found")] = None


def read_site_file(path: str | os.PathLike[str]) -> Site:
    """Return the Site that a YAML file describes. Raise SiteError with the file and the place of a mistake."""
    data = read_yaml(path, SiteError, _HINT)
    if "stages" in data and "fabrics" not in data:
        hint = f"a plan contains its site: give plan_file={path}"
        raise SiteError("a plan, not a site file", where=str(path), hint=hint)
    try:
        return parse_site(data)
    except SiteError as e:
        raise e.moved(lambda place: f"{path}: {place}" if place else str(path)) from e


def parse_site(data: Mapping[str, Any]) -> Site:
    """Return the Site in the parsed YAML `data`. Raise SiteError with all mistakes in its keys."""
    errors = list[HolmesError]()
    # If keys outside of fabrics and pools are wrong, this placeholder replaces them, so that the rest is checked too.
    site_file = SiteFile("", _entries(data, "fabrics"), _entries(data, "pools"), 1.0, CPU)
    with collected(errors):
        site_file = make(SiteFile, _with_figures(data), "site", SiteError)
    pools = _pools(site_file, errors)
    raise_all(errors)
    for pool in pools:
        _refuse_implausible(pool, f"pool {pool.name}")
        _refuse_implausible(pool.gpu, f"gpu {pool.gpu.name}")
    for link in site_file.links:
        _refuse_implausible(link, where := f"link {' - '.join(link.between)}")
        for name in link.between:
            gbps = max((p.ethernet_gbps for p in pools if p.fabric_name == name), default=math.inf)
            problem = f"gbps is {link.gbps or 0:g}, but the Ethernet of {name} has {gbps:g} Gb/s"
            SiteError.refuse(where, ((link.gbps or 0) > gbps, problem, "correct it, or ethernet_gbps"))
    for gpu in dict.fromkeys(p.gpu for p in pools):
        known_kind = read_vocabulary().gpu(gpu.name)
        if gpu.attention == "flash" and known_kind is not None and not known_kind.has_bf16:
            problem = f"attention is flash, which {known_kind.name} does not support"
            raise SiteError(problem, where=f"gpu {gpu.name}", hint="use attention: sdpa, or unfused")
    return Site(site_file.name, tuple(pools), (*_warnings(pools), *_guesses(data)), site_file.links)


def _guesses(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line on the values that `holmes site` assumed and that nobody has corrected, if there are any."""
    found = data["found"] if isinstance(data.get("found"), Mapping) else {}
    assumed, guesses = found.get("assumed"), list[str]()
    for name, names in assumed.items() if isinstance(assumed, Mapping) else ():
        written, entry = _pool_entry(found, name), _pool_entry(data, name)
        same = [str(key) for key in names or () if key in entry and entry[key] == written.get(key)]
        guesses += [f"{', '.join(same)} of {name}"] if same else []
    if guesses:
        yield f"assumed by `holmes site`: {'; '.join(guesses)}"


def _pool_entry(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a pool as written in the file, completed by the keys of its fabric."""
    fabrics, pools = ([e for e in _entries(data, k) if isinstance(e, Mapping)] for k in ("fabrics", "pools"))
    pool = next((entry for entry in pools if entry.get("name") == name), {})
    return {**next((entry for entry in fabrics if entry.get("name") == pool.get("fabric")), {}), **pool}


def _entries(data: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    entries = data.get(name)
    return tuple(entries) if isinstance(entries, list) else ()


def _pools(site_file: SiteFile, errors: list[HolmesError]) -> list[Pool]:
    """Return the valid pools of a site file. Add the mistakes in the other pools to `errors`."""
    defaults = {k: v for k, v in (("ethernet_gbps", site_file.ethernet_gbps), ("gpu", site_file.gpu)) if v is not None}
    fabrics, pools, fabric_of = list[tuple[str, Any]](), list[Pool](), dict[int, str]()  # pool -> its fabric's place
    for position, entry in enumerate(site_file.fabrics, 1):
        with collected(errors):
            fabrics.append(_with_defaults(entry, "fabric", position, defaults))
    places, has_all_fabrics = [where for where, _ in fabrics], len(fabrics) == len(site_file.fabrics)
    for position, entry in enumerate(site_file.pools, 1):
        with collected(errors):
            fabric_of[position] = _fabric_place(entry, position, places if has_all_fabrics else ())
    mistakes = list[HolmesError]()  # of fabrics with pools; each of their pools would report them again
    for where, values in fabrics:
        entries = [e for n, e in enumerate(site_file.pools, 1) if fabric_of.get(n) == where and isinstance(e, Mapping)]
        with collected(mistakes if entries else errors):
            if entries and isinstance(values, Mapping):
                _check_shared_keys(values, entries, where)
            elif not site_file.pools or (has_all_fabrics and len(fabric_of) == len(site_file.pools)):
                pools.append(make(Pool, values, where, SiteError))
    errors += mistakes
    for position, place in fabric_of.items():
        values_of, new_errors = dict(fabrics).get(place), list[HolmesError]()
        of_fabric = {k: v for k, v in values_of.items() if k != "name"} if isinstance(values_of, Mapping) else defaults
        with collected(new_errors):
            where, values = _with_defaults(site_file.pools[position - 1], "pool", position, of_fabric)
            pools += [make(Pool, values, where, SiteError)] if place in places or not place else []
        errors += [e for e in new_errors if e.what not in {mistake.what for mistake in mistakes}]
    return pools


def _check_shared_keys(values: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise SiteError for mistakes in the keys of a fabric that has pools (`entries`), or for nodes in no pool."""
    hint = "make a pool of them, or remove nodes from the fabric"
    has_nodes = "nodes" in values and all("nodes" in entry for entry in entries)
    SiteError.refuse(where, (has_nodes, "it has nodes of its own, and pools", hint))
    stand_ins = {**_STAND_INS, **({} if values.get("nic") == NicType.ETHERNET else {"rdma_gbps": 1})}
    try:
        make(Pool, {**stand_ins, **values}, where, SiteError)
    except SiteError as e:
        raise e.moved(lambda place: re.sub("^pool", "fabric", place)) from None


def _with_defaults(entry: Any, kind: str, position: int, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (the place of a fabric or pool for error messages: ``fabric ib-a``, its keys completed by `defaults`)."""
    if not isinstance(entry, Mapping):
        return f"{kind} {position}", entry
    where = f"{kind} {entry['name'] if isinstance(entry.get('name'), str) else position}"
    nic = entry.get("nic")
    if isinstance(nic, str) and nic not in tuple(NicType):  # perhaps another name of one, such as a node feature
        meaning = read_vocabulary().meaning(nic)
        if meaning is not None and meaning.nic is not None:
            raise SiteError(f"nic is {nic!r}", where=where, hint=f"did you mean {str(meaning.nic)!r}?")
    values = {**defaults, **_with_figures(entry, where)}
    names = values.get("node_names")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):  # host lists: ib[1-4]
        values["node_names"] = [name for host_list in names for name in expand(host_list)]
    return where, values


def _fabric_place(entry: Any, position: int, places: Sequence[str]) -> str:
    """Return the place of a pool's fabric (``fabric ib-a``); empty if the pool's entry has no keys.
    Raise SiteError if the place is not in `places`. Empty `places` mean that it cannot be checked."""
    if not isinstance(entry, Mapping):
        return ""
    name = entry.get("fabric")
    names = ", ".join(place.removeprefix("fabric ") for place in places)
    problem = "fabric is missing" if name is None else f"fabric is {name!r}, which is not under fabrics"
    is_unlisted, hint = places and f"fabric {name}" not in places, f"give one of {names}, or list it under fabrics"
    SiteError.refuse(f"pool {entry.get('name', position)}", (is_unlisted, problem, hint))
    return f"fabric {name}"


def _with_figures(entry: Mapping[str, Any], where: str = "gpu") -> dict[str, Any]:
    """Return the keys of `entry`. Missing figures of its GPU come from the kind's data sheet. `where`: its place."""
    gpu = entry.get("gpu")
    if isinstance(gpu, str):  # gpu: A100
        gpu = {"name": gpu}
    if not isinstance(gpu, Mapping) or not isinstance(gpu.get("name"), str):
        return dict(entry)
    known_kind = _known_kind(gpu["name"])
    if known_kind is None and (missing := [name for name in FIGURES if name not in gpu]):
        kinds = [kind.name for _, kind in read_vocabulary().gpus]
        problem = f"gpu {gpu['name']!r} is not a known kind and has no {', '.join(missing)}"
        similar = nearest(gpu["name"], kinds)
        raise SiteError(problem, where=where, hint=f"give all figures, or a known kind: {similar}")
    figures = {name: getattr(known_kind, name) for name in FIGURES} if known_kind is not None else {}
    return {**entry, "gpu": {**figures, **gpu}}


def _known_kind(name: str) -> Gpu | None:
    """Return the GPU kind that `name` means; None if it is unknown or has another memory size, as in a100-90gb."""
    kind = read_vocabulary().gpu(name)
    if kind is None or kind.name == name.lower():
        return kind
    size = re.search(r"[-_ ](\d{2,3})(?:g|b|gi?b)?$", name, re.IGNORECASE)
    return kind if size is None or int(size[1]) == kind.memory_gib else None


def _refuse_implausible(part: Pool | Gpu | FabricLink, where: str) -> None:
    """Raise SiteError for a rate or a size that no machine has."""
    for name, declared in keys(type(part)).items():
        value = getattr(part, name)
        if name in MAX_VALUES and value is not None and value > MAX_VALUES[name]:
            unit = f" {declared.spec.unit}".rstrip()
            hint = f"give at most {MAX_VALUES[name]:g}{unit}"
            raise SiteError(f"{name} is {value:g}{unit}, more than any machine has", where=where, hint=hint)
        if name.endswith("gbps") and value is not None and value < MIN_GBPS:
            hint = f"give at least {MIN_GBPS:g} Gb/s"
            raise SiteError(f"{name} is {value:g} Gb/s, less than any machine has", where=where, hint=hint)


def _warnings(pools: Sequence[Pool]) -> Iterator[str]:
    """Yield warnings about GPU names treated as a known kind, figures far from their data sheet, rates that are likely
    in GB/s (no Ethernet or InfiniBand has them in Gb/s), and pools whose jobs may get each other's nodes."""
    for gpu in dict.fromkeys(p.gpu for p in pools):
        known_kind = read_vocabulary().gpu(gpu.name)
        if known_kind is not None:
            if known_kind.name != gpu.name.lower():
                yield f"gpu {gpu.name} is treated as the known kind {known_kind.name}, with its tables"
            yield from _data_sheet_warnings(gpu, known_kind)
    for pool in pools:
        rates = [("ethernet_gbps", "Ethernet", pool.ethernet_gbps)] if pool.ethernet_gbps in ETHERNET_GBYTES else []
        if pool.nic is NicType.IB and pool.rdma_gbps in IB_GBYTES:
            rates.append(("rdma_gbps", "InfiniBand", pool.rdma_gbps))
        for name, network, gbps in rates:
            rate = f"{name} of {pool.name} is {gbps:g}, which no {network} has"
            yield f"{rate}; if that is in GB/s, give Gb/s: {8 * gbps:g}"
    for a, b in combinations(pools, 2):
        if all(getattr(a, key) == getattr(b, key) for key in ("partition", "constraint", "exclude", "gres_type")):
            problem = f"jobs on {a.name} and {b.name} may get each other's nodes of partition {a.partition}"
            yield f"{problem}: give them constraint, exclude or gres_type"


def _data_sheet_warnings(gpu: Gpu, kind: Gpu) -> Iterator[str]:
    """Yield warnings about figures of `gpu` that are far from the data sheet of its `kind`. NVLink rates are often
    quoted in GB/s, for one direction or for both; peaks with sparsity are twice the dense ones."""
    link_ratio = gpu.intra_node_gbps / kind.intra_node_gbps
    if any(abs(link_ratio * divisor - 1) < 0.02 for divisor in (8, 4)):
        rate = f"intra_node_gbps of {gpu.name} is {gpu.intra_node_gbps:g}"
        yield f"{rate}; if that is in GB/s, give Gb/s: {kind.intra_node_gbps:g}"
    elif link_ratio > TOLERANCE:
        yield _data_sheet_text(gpu, "intra_node_gbps", kind)
    if not 1 / TOLERANCE < gpu.peak_tflops / kind.peak_tflops < TOLERANCE:
        yield _data_sheet_text(gpu, "peak_tflops", kind) + (" dense" if gpu.peak_tflops > kind.peak_tflops else "")
    if gpu.memory_gib > TOLERANCE * kind.memory_gib:
        yield _data_sheet_text(gpu, "memory_gib", kind)


def _data_sheet_text(gpu: Gpu, name: str, kind: Gpu) -> str:
    return f"{name} of {gpu.name} is {getattr(gpu, name):g}; {kind.name}'s data sheet has {getattr(kind, name):g}"
