"""A site file: planning without a Slurm, or for hardware not bought yet (README: Hardware that this Slurm does not
have)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import SiteError, nearest
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Fabric, Gpu, Site

_SITE_KEYS = ("name", "ethernet_gbps", "gpu", "fabrics")
_GPU_KEYS = ("name", "peak_tflops", "memory_gib", "intra_node_gbps")
_NEEDED = ("name", "nic", "partition", "nodes", "gpus_per_node")
_FABRIC_KEYS = (*_NEEDED, "rdma_gbps", "ethernet_gbps", "gpu", "constraint", "node_names", "gres")
_NUMBERS = ("rdma_gbps", "ethernet_gbps", "peak_tflops", "memory_gib", "intra_node_gbps")
_HINT = "see README: Hardware that this Slurm does not have"


def read_site_file(path: str | os.PathLike[str]) -> Site:
    """The Site that a YAML file describes. Raises SiteError: one line with the file, the place in it, and the hint."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise SiteError(e.strerror or str(e), where=str(path), hint="give the path of a site file") from e
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise SiteError(f"not YAML: {e}", where=str(path), hint=_HINT) from e
    try:
        return parse_site(data)
    except SiteError as e:
        where = f"{path}: {e.where}" if e.where else str(path)
        raise SiteError(e.what, where=where, hint=e.hint) from e


def parse_site(data: Any) -> Site:
    """The Site in the parsed YAML `data`."""
    site = _mapping(data, "site", _SITE_KEYS)
    name = _text(site, "name", "site")
    fabrics = site.get("fabrics")
    if not isinstance(fabrics, list) or not fabrics:
        raise SiteError("no fabrics", where=f"site {name}", hint="list at least one under fabrics")
    common = {"ethernet_gbps": _number(site, "ethernet_gbps", f"site {name}"),
              "gpu": _gpu(site["gpu"], f"site {name}") if "gpu" in site else None}
    return Site(name, tuple(_fabric(entry, f"fabric {i + 1}", common) for i, entry in enumerate(fabrics)))


def _fabric(entry: Any, where: str, common: dict[str, Any]) -> Fabric:
    given = _mapping(entry, where, _FABRIC_KEYS)
    if isinstance(given.get("name"), str):
        where = f"fabric {given['name']}"
    for key in _NEEDED:
        if key not in given:
            raise SiteError(f"{key} is missing", where=where, hint=f"give {key}")
    values = dict(given)
    values["name"], values["partition"] = _text(given, "name", where), _text(given, "partition", where)
    types = [str(n) for n in NicType]
    if given["nic"] not in types:
        raise SiteError(f"nic is {given['nic']!r}", where=where, hint=nearest(str(given["nic"]), types))
    values["nic"] = NicType(given["nic"])
    if values["nic"].rdma and "rdma_gbps" not in given:
        raise SiteError("rdma_gbps is missing", where=where,
                        hint="give what one node can send over all its RDMA NICs, in Gb/s")
    values["rdma_gbps"] = _number(given, "rdma_gbps", where)
    values["ethernet_gbps"] = _number(given, "ethernet_gbps", where) or common["ethernet_gbps"]
    if values["ethernet_gbps"] is None:
        raise SiteError("ethernet_gbps is missing", where=where, hint="give it for the site or for the fabric, in Gb/s")
    values["gpu"] = _gpu(given["gpu"], where) if "gpu" in given else common["gpu"]
    if values["gpu"] is None:
        raise SiteError("gpu is missing", where=where,
                        hint=f"give gpu: {{{', '.join(_GPU_KEYS)}}} for the site or the fabric")
    names = given.get("node_names", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise SiteError(f"node_names is {names!r}", where=where, hint="list the names, or leave node_names out")
    if not isinstance(given.get("constraint", ""), str) or not isinstance(given.get("gres", True), bool):
        raise SiteError("constraint is not text, or gres not true or false", where=where, hint="correct it")
    return Fabric(**{**values, "node_names": tuple(names)})


def _gpu(entry: Any, where: str) -> Gpu:
    given = _mapping(entry, f"{where}: gpu", _GPU_KEYS)
    for key in _GPU_KEYS:
        if key not in given:
            raise SiteError(f"{key} is missing", where=f"{where}: gpu", hint=f"give {key}")
    numbers = {key: _number(given, key, f"{where}: gpu") for key in _GPU_KEYS[1:]}
    return Gpu(_text(given, "name", f"{where}: gpu"), **{k: v for k, v in numbers.items() if v is not None})


def _mapping(data: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SiteError(f"is {data!r:.60}, not keys with values", where=where, hint=_HINT)
    for key in data:
        if key not in known:
            raise SiteError(f"unknown key {key!r}", where=where, hint=nearest(str(key), known))
    return data


def _text(data: dict[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise SiteError(f"{key} is {value!r}, must be a name", where=where, hint=f"correct {key}")
    return str(value)


def _number(data: dict[str, Any], key: str, where: str) -> float | None:
    """A number above 0, None where the key is absent."""
    if key not in data:
        return None
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise SiteError(f"{key} is {value!r}, must be a number above 0", where=where, hint=f"correct {key}")
    return float(value)
