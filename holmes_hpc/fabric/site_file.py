"""A site file: planning without a Slurm, or for hardware not bought yet (README: Hardware that this Slurm does not
have)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.site import Fabric, Gpu, Site
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import check, key, make

_HINT = "see README: Hardware that this Slurm does not have"


@dataclass(frozen=True)
class SiteFile:
    """A file's own keys; `gpu` and `ethernet_gbps` are those of all fabrics that do not say their own."""

    name: Annotated[str, key("of the site")]
    fabrics: Annotated[tuple[Any, ...], key("list at least one")]
    ethernet_gbps: Annotated[float | None, key("what a node sends over Ethernet", unit="Gb/s", gt=0)] = None
    gpu: Annotated[Gpu | None, key("the kind of GPUs: {name, peak_tflops, memory_gib, intra_node_gbps}")] = None

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
    file = make(SiteFile, data, "site", SiteError)
    common = {k: v for k, v in (("ethernet_gbps", file.ethernet_gbps), ("gpu", file.gpu)) if v is not None}
    fabrics = []
    for number, entry in enumerate(file.fabrics, 1):
        named = isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        where = f"fabric {entry['name']}" if named else f"fabric {number}"
        fabrics.append(make(Fabric, {**common, **entry} if isinstance(entry, Mapping) else entry, where, SiteError))
    return Site(file.name, tuple(fabrics))
