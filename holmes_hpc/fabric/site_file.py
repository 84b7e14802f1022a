"""A site file: planning without a Slurm, or for hardware not bought yet (docs/site-file.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Fabric, FabricLink, Gpu, Site
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import check, key, keys, make

ETHERNET_GBYTES = (1.25, 3.125, 6.25, 12.5)  # of 10, 25, 50 and 100 Gb/s
MUCH = 1.5  # times as much as a data sheet says, or less than one of so many parts
IB_GBYTES = (12.5, 25.0)  # of EDR and HDR, in GB/s; 50 is also two ports of an older kind, in Gb/s
# The most that a rate or a size of a machine can be: what is above was given in another unit.
MOST = {
    "ethernet_gbps": 6400,
    "rdma_gbps": 25600,
    "intra_node_gbps": 1e5,
    "peak_tflops": 1e5,
    "memory_gib": 4096,
    "gbps": 6400,
    "delay_ms": 1e4,
}
FIGURES = ("peak_tflops", "memory_gib", "intra_node_gbps")  # of a GPU kind's data sheet
NO_FLASH = ("p100", "v100-16gb", "v100-32gb", "t4")  # FlashAttention-2 wants an Ampere or a later one
_HINT = "see docs/site-file.md"


@dataclass(frozen=True)
class SiteFile:
    """A file's own keys; `gpu` and `ethernet_gbps` are those of all fabrics that do not say their own."""

    name: Annotated[str, key("of the site")]
    fabrics: Annotated[tuple[Any, ...], key("list at least one")]
    ethernet_gbps: Annotated[float | None, key("what a node sends over Ethernet", unit="Gb/s", gt=0)] = None
    gpu: Annotated[
        Gpu | None,
        key("the kind of GPUs: {name, peak_tflops, memory_gib, intra_node_gbps}, if known attention and fused_norm"),
    ] = None

    links: Annotated[tuple[FabricLink, ...], key("what two fabrics have between them: {between, gbps, delay_ms}")] = ()

    def __post_init__(self) -> None:
        check(self, f"site {self.name}", SiteError)


def read_site_file(path: str | os.PathLike[str]) -> Site:
    """The Site that a YAML file describes. Raises SiteError: one line with the file, the place in it, and the hint."""
    data = read_yaml(path, SiteError, _HINT)
    try:
        return parse_site(data)
    except SiteError as e:
        where = f"{path}: {e.where}" if e.where else str(path)
        raise SiteError(e.what, where=where, hint=e.hint) from e


def parse_site(data: Mapping[str, Any]) -> Site:
    """The Site in the parsed YAML `data`."""
    file = make(SiteFile, _with_figures(data), "site", SiteError)
    common = {k: v for k, v in (("ethernet_gbps", file.ethernet_gbps), ("gpu", file.gpu)) if v is not None}
    fabrics = []
    for number, entry in enumerate(file.fabrics, 1):
        named = isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        where = f"fabric {entry['name']}" if named else f"fabric {number}"
        if isinstance(entry, Mapping):
            _refuse_other_words(entry.get("nic"), where)
            entry = {**common, **_with_figures(entry)}
        fabrics.append(make(Fabric, entry, where, SiteError))
    for fabric in fabrics:
        _refuse_absurd(fabric, f"fabric {fabric.name}")
        _refuse_absurd(fabric.gpu, f"gpu {fabric.gpu.name}")
    for link in file.links:
        _refuse_absurd(link, f"link {' - '.join(link.between)}")
    for gpu in dict.fromkeys(f.gpu for f in fabrics):
        known = read_vocabulary().gpu(gpu.name)
        if gpu.attention == "flash" and known is not None and known.name in NO_FLASH:
            raise SiteError(
                f"attention is flash, which {known.name} has not", where=f"gpu {gpu.name}", hint="use sdpa or unfused"
            )
    return Site(file.name, tuple(fabrics), tuple(_remarks(fabrics)), file.links)


def _with_figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A file's or a fabric's own keys; figures that its GPU leaves out are those of the kind's data sheet."""
    gpu = entry.get("gpu")
    if not isinstance(gpu, Mapping) or not isinstance(gpu.get("name"), str):
        return dict(entry)
    known = read_vocabulary().gpu(gpu["name"])
    if known is None and (missing := [name for name in FIGURES if name not in gpu]):
        kinds = ", ".join(kind.name for _, kind in read_vocabulary().gpus)
        raise SiteError(
            f"gpu {gpu['name']!r} is no known kind and has no {', '.join(missing)}",
            where="gpu",
            hint=f"give all figures, or one of {kinds}",
        )
    figures = {name: getattr(known, name) for name in FIGURES} if known is not None else {}
    return {**entry, "gpu": {**figures, **gpu}}


def _refuse_other_words(nic: Any, where: str) -> None:
    """Raise SiteError for another word for a NIC type, such as a node's feature would be understood as."""
    if isinstance(nic, str) and nic not in tuple(NicType):
        meaning = read_vocabulary().meaning(nic)
        if meaning is not None and meaning.nic is not None:
            raise SiteError(f"nic is {nic!r}", where=where, hint=f"did you mean {str(meaning.nic)!r}?")


def _refuse_absurd(what: Fabric | Gpu | FabricLink, where: str) -> None:
    """Raise SiteError for a rate or a size that no machine has."""
    for name, declared in keys(type(what)).items():
        value = getattr(what, name)
        if name in MOST and value is not None and value > MOST[name]:
            unit = declared.spec.unit
            raise SiteError(
                f"{name} is {value:g} {unit}, more than any machine has",
                where=where,
                hint=f"give it in {unit}, at most {MOST[name]:g}",
            )


def _remarks(fabrics: Sequence[Fabric]) -> Iterator[str]:
    """The kind that another name is taken for, figures that its data sheet does not have, and rates that look like GB/s
    where Gb/s are meant: what no Ethernet and no InfiniBand has in Gb/s."""
    for gpu in dict.fromkeys(f.gpu for f in fabrics):
        known = read_vocabulary().gpu(gpu.name)
        if known is not None:
            if known.name != gpu.name.lower():
                yield f"gpu {gpu.name} is taken for the known kind {known.name}, with its tables"
            yield from _unlike(gpu, known)
    for fabric in fabrics:
        if fabric.nic is NicType.IB and fabric.rdma_gbps in IB_GBYTES:
            yield (
                f"rdma_gbps of {fabric.name} is {fabric.rdma_gbps:g}, which no InfiniBand has; if that is in GB/s,"
                f" give Gb/s: {8 * fabric.rdma_gbps:g}"
            )
        if fabric.ethernet_gbps in ETHERNET_GBYTES:
            yield (
                f"ethernet_gbps of {fabric.name} is {fabric.ethernet_gbps:g}, which no Ethernet has; if that is in"
                f" GB/s, give Gb/s: {8 * fabric.ethernet_gbps:g}"
            )


def _unlike(gpu: Gpu, known: Gpu) -> Iterator[str]:
    """What of `gpu` is far from the data sheet of its kind, `known`. NVLink's are often said in GB/s, for one direction
    or both together; peaks with sparsity twice the dense one."""
    link = gpu.intra_node_gbps / known.intra_node_gbps
    if any(abs(link * parts - 1) < 0.02 for parts in (8, 4)):
        yield (
            f"intra_node_gbps of {gpu.name} is {gpu.intra_node_gbps:g}; if that is in GB/s, give Gb/s:"
            f" {known.intra_node_gbps:g}"
        )
    elif link > MUCH:
        yield _says(gpu, "intra_node_gbps", known)
    if not 1 / MUCH < gpu.peak_tflops / known.peak_tflops < MUCH:
        yield _says(gpu, "peak_tflops", known) + (" dense" if gpu.peak_tflops > known.peak_tflops else "")
    if gpu.memory_gib > MUCH * known.memory_gib:
        yield _says(gpu, "memory_gib", known)


def _says(gpu: Gpu, name: str, known: Gpu) -> str:
    return (
        f"{name} of {gpu.name} is {getattr(gpu, name):g}; the data sheet of {known.name} says {getattr(known, name):g}"
    )
