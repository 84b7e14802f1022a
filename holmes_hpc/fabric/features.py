"""The meaning of Slurm features. A vocabulary of regular expressions maps them to facts about NICs and GPUs."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Gpu, NicNames
from holmes_hpc.records.untrusted import from_yaml, read_file

_SECTIONS = ("features", "rates", "ignored", "gpus", "networks")
_GROUPS = ("nic", "rate", "port", "ethernet", "fabric", "gpu", "interface", "hca", "storage", "ranks")
_RULE_KEYS = ("match", "own", "unsupported", *_GROUPS)
_GPU_KEYS = ("match", "name", "peak_tflops", "memory_gib", "intra_node_gbps")
DEFAULT = tuple(Path(__file__).with_name(name) for name in ("features.yaml", "gpu_kinds.yaml"))


@dataclass(frozen=True)
class Meaning:
    """The meaning of one feature. Facts that the feature does not state are None, empty or 0. `rate`: total rate of the
    node's RDMA NICs; `port`: rate of one RDMA port; `ethernet`: rate of the node's Ethernet (all in Gb/s);
    `unsupported`: the fallback for a NIC that this project cannot use; `is_label`: whether the feature is a label of
    this project; `names`: NICs that it names; `ranks`: CPU ranks of a node without GPUs."""

    feature: str
    nic: NicType | None = None
    rate: float | None = None
    port: float | None = None
    ethernet: float | None = None
    fabric: str | None = None
    gpu: str | None = None
    unsupported: str | None = None
    is_label: bool = False
    names: NicNames = field(default_factory=NicNames)
    ranks: int = 0

    @property
    def text(self) -> str:
        """The meaning in words, for display."""
        names = self.names
        parts = (
            (self.nic, f"{self.nic}"),
            (self.rate, f"{self.rate or 0:g} Gb/s per node"),
            (self.port, f"{self.port or 0:g} Gb/s per port"),
            (self.ethernet, f"Ethernet {self.ethernet or 0:g} Gb/s"),
            (self.fabric, f"fabric {self.fabric}"),
            (self.gpu, f"GPU {self.gpu}"),
            (self.ranks, f"{self.ranks} CPU ranks"),
            (names.ethernet, f"sockets over {names.ethernet}"),
            (names.hca, f"HCA {', '.join(names.hca)}"),
            (names.storage, f"storage {', '.join(names.storage)}"),
            (self.unsupported, self.unsupported),
        )
        return ", ".join(str(text) for value, text in parts if value) or "nothing about NICs"


@dataclass(frozen=True)
class Rule:
    """A regular expression for whole features. Its named groups are facts about the matched feature. `fixed`: further
    facts of every match; `own`: its features are labels of this project; `unsupported`: as in :class:`Meaning`."""

    pattern: re.Pattern[str]
    fixed: dict[str, Any]
    own: bool = False
    unsupported: str | None = None


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The rules that give features their meaning. The first rule that matches a feature decides.
    `rates`: name of a rate (``hdr``) -> Gb/s; `ignored`: patterns of known features that say nothing about NICs or
    GPUs; `gpus`: (pattern, GPU) pairs; `networks`: NIC type -> NCCL's name of its network."""

    rules: tuple[Rule, ...]
    rates: dict[str, float]
    ignored: tuple[re.Pattern[str], ...]
    gpus: tuple[tuple[re.Pattern[str], Gpu], ...]
    networks: dict[str, str] = field(default_factory=dict)

    def meaning(self, feature: str) -> Meaning | None:
        """Return the meaning of a feature; None if it is unknown."""
        for rule in self.rules:
            match = rule.pattern.fullmatch(feature)
            if match:
                facts = {**rule.fixed, **{k: v for k, v in match.groupdict().items() if v is not None}}
                return self._meaning(feature, rule, facts)
        if any(pattern.fullmatch(feature) for pattern in self.ignored):
            return Meaning(feature)
        gpu = self.gpu(feature)
        return Meaning(feature, gpu=gpu.name) if gpu else None

    def _meaning(self, feature: str, rule: Rule, facts: dict[str, Any]) -> Meaning | None:
        """Return the meaning of a feature with these `facts`; None if a rate or a NIC type is not valid."""
        spellings = {key: str(facts[key]).lower() for key in ("rate", "port", "ethernet", "ranks") if key in facts}
        try:
            numbers: dict[str, Any] = {key: float(self.rates.get(text, text)) for key, text in spellings.items()}
            nic = NicType(str(facts["nic"]).lower()) if "nic" in facts else None
        except ValueError:
            return None
        if not all(0 < number < float("inf") for number in numbers.values()):
            return None
        values = numbers | {key: facts[key] for key in ("fabric", "gpu") if key in facts}
        values |= {"unsupported": rule.unsupported, "is_label": rule.own, "ranks": int(numbers.get("ranks", 0))}
        return Meaning(feature, nic, names=_names_in(facts), **values)

    def gpu(self, name: str) -> Gpu | None:
        """Return the GPU that a GRES type or a feature names; None if it is unknown."""
        return next((gpu for pattern, gpu in self.gpus if pattern.fullmatch(name)), None)


def _names_in(facts: dict[str, Any]) -> NicNames:
    """Return the NIC names among the facts of a rule or a feature. Raise SiteError for an invalid name."""
    return NicNames(facts.get("interface"), _as_tuple(facts.get("hca")), _as_tuple(facts.get("storage")))


@dataclass(frozen=True)
class Reading:
    """The combined meaning of one node's features. `nic`: the NIC type; None if features contradict each other;
    `rdma_gbps`, `ethernet_gbps`: rates of the node in Gb/s, if stated; `meanings`: one per feature with a known
    meaning; `unknown`: the other features; `assumptions`, `problems`: a line per assumed fact and per contradiction."""

    nic: NicType | None
    rdma_gbps: float | None = None
    ethernet_gbps: float | None = None
    fabric: str | None = None
    meanings: tuple[Meaning, ...] = ()
    unknown: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = field(default=())
    problems: tuple[str, ...] = field(default=())
    names: NicNames = field(default_factory=NicNames)


def read_features(features: Sequence[str], vocabulary: Vocabulary) -> Reading:
    """Return the combined meaning of one node's features."""
    return _read_features(tuple(features), vocabulary)


@lru_cache(maxsize=4096)  # many nodes have the same features
def _read_features(features: tuple[str, ...], vocabulary: Vocabulary) -> Reading:
    by_feature = {feature: vocabulary.meaning(feature) for feature in dict.fromkeys(features)}
    meanings = [m for m in by_feature.values() if m is not None]
    unknown = tuple(f for f, m in by_feature.items() if m is None)
    assumptions, problems = list[str](), list[str]()
    nic = _nic_type(meanings, assumptions, problems)
    fabrics = sorted({m.fabric for m in meanings if m.fabric})
    if len(fabrics) > 1:
        problems.append(f"features name {len(fabrics)} fabrics: {', '.join(fabrics)}")
    rate = _single_value(meanings, "rate", "nic_<rate>g", problems)
    ethernet = _single_value(meanings, "ethernet", "Ethernet rate", problems)
    if nic is NicType.ETHERNET:
        ethernet, rate = ethernet or rate, None
    elif nic is not None and rate is None:
        rate = _single_value([m for m in meanings if m.nic in (nic, None)], "port", "rate", problems)
        if rate is not None:
            assumptions.append(f"{rate:g} Gb/s of one port is used as the node's whole RDMA rate; label nic_<rate>g")
        elif nic is NicType.ROCE and ethernet is not None and not any(m.is_label and m.ethernet for m in meanings):
            rate = ethernet
            assumptions.append(f"the Ethernet rate {rate:g} Gb/s also serves RoCE; label nic_<rate>g and eth_<rate>g")
    names, fabric = _merge_names(meanings, problems), fabrics[0] if len(fabrics) == 1 else None
    texts = {"unknown": unknown, "assumptions": tuple(assumptions), "problems": tuple(problems)}
    return Reading(nic, rate, ethernet, fabric, tuple(meanings), names=names, **texts)


def _merge_names(meanings: list[Meaning], problems: list[str]) -> NicNames:
    """Return the NIC names in `meanings`: one interface for sockets, and all HCAs and storage devices.
    If features name several interfaces, labels of this project take precedence, and `problems` gets a line."""
    labels_first = sorted(meanings, key=lambda m: not m.is_label)
    interfaces = list(dict.fromkeys(m.names.ethernet for m in labels_first if m.names.ethernet))
    if len(interfaces) > 1:
        names = ", ".join(interfaces)
        problems.append(f"features name {len(interfaces)} interfaces for sockets: {names}; the first is used")
    return NicNames(
        interfaces[0] if interfaces else None,
        tuple(dict.fromkeys(h for m in meanings for h in m.names.hca)),
        tuple(dict.fromkeys(s for m in meanings for s in m.names.storage)),
    )


def _as_tuple(value: Any) -> tuple[str, ...]:
    """Return a single value, or each element of a list, as text; an empty tuple for None."""
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),) if value is not None else ()


def _nic_type(meanings: list[Meaning], assumptions: list[str], problems: list[str]) -> NicType | None:
    """Return the NIC type that features name: Ethernet if they name none, None if they contradict each other. Labels of
    this project override other features, RDMA types override Ethernet. Lines for the user go to the two lists."""
    label_types = {m.nic for m in meanings if m.nic and m.is_label}
    all_types = {m.nic for m in meanings if m.nic}
    rdma_types = {n for n in all_types if n.rdma}
    types = label_types or rdma_types or all_types  # a node with InfiniBand also has Ethernet
    if len(types) > 1:
        conflict = ", ".join(f"{m.feature} ({m.nic})" for m in meanings if m.nic in types)
        problems.append(f"features name {len(types)} NIC types: {conflict}")
        return None
    if len(label_types) == 1 and rdma_types - label_types:
        overruled = ", ".join(m.feature for m in meanings if m.nic in rdma_types - label_types)
        assumptions.append(f"the label nic_{next(iter(label_types))} wins over {overruled}")
    if types:
        return next(iter(types))
    unsupported = [f"{m.feature}: {m.unsupported}" for m in meanings if m.unsupported]
    assumptions.append(unsupported[0] if unsupported else "no feature names a NIC: Ethernet only is assumed")
    return NicType.ETHERNET


def _single_value(meanings: list[Meaning], key: str, name: str, problems: list[str]) -> float | None:
    """Return the lowest value of `key` in labels of this project, or in all features if no label has one; else None.
    If there are several values, `problems` gets a line, in which `name` stands for the value."""
    with_value = [m for m in meanings if getattr(m, key) is not None]
    values = sorted({getattr(m, key) for m in [m for m in with_value if m.is_label] or with_value})
    if len(values) > 1:
        value_list = ", ".join(f"{v:g}" for v in values)
        problems.append(f"features give several values of {name}: {value_list}; the lowest is used")
    return values[0] if values else None


def read_vocabulary(path: str | os.PathLike[str] | None = None) -> Vocabulary:
    """Return the default vocabulary. The rules of the site's own file, if it has one, come first.
    `path`: the site's own file; by default the file that the variable HOLMES_FEATURES names."""
    path = path or os.environ.get("HOLMES_FEATURES") or None
    return _load_vocabulary(os.path.abspath(path) if path else None)


@cache
def _load_vocabulary(path: str | None) -> Vocabulary:
    documents = ([_load_file(Path(path))] if path else []) + [_load_file(default) for default in DEFAULT]
    rules = [rule for where, d in documents for rule in _parse_rules(d.get("features"), where)]
    all_rates = [_check_rates(d.get("rates"), f"{where}: rates") for where, d in reversed(documents)]
    rates = {str(name).lower(): rate for rates in all_rates for name, rate in rates.items()}
    texts = [(text, where) for where, d in documents for text in _as_list(d.get("ignored"), where)]
    ignored = [_compile(text, f"{where}: ignored") for text, where in texts]
    gpus = [_parse_gpu(entry, where) for where, d in documents for entry in _as_list(d.get("gpus"), where)]
    networks = {k: v for where, d in documents for k, v in _parse_networks(d.get("networks"), where).items()}
    return Vocabulary(tuple(rules), rates, tuple(ignored), tuple(gpus), networks)


def _load_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return (name of the file for error messages, its content). Raise SiteError if the file is not valid."""
    hint = "see holmes_hpc/fabric/features.yaml for the allowed content"
    not_yaml = SiteError.instead_of(yaml.YAMLError, UnicodeDecodeError, where=path, hint=hint, what="not YAML:")
    with SiteError.instead_of(OSError, where=path, hint="correct HOLMES_FEATURES"), not_yaml:
        data = from_yaml(read_file(path).decode("utf-8"))
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise SiteError("not a mapping of features, rates, ignored, gpus or networks", where=str(path), hint=hint)
    SiteError.refuse_unknown("unknown key", data, _SECTIONS, str(path))
    return path.name, data


def _as_list(value: Any, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise SiteError(f"{value!r} is not a list", where=where, hint="write each entry on a line after '-'")
    return value or []


def _check_rates(value: Any, where: str) -> dict[Any, Any]:
    is_map = isinstance(value, dict) and all(type(rate) in (int, float) and rate > 0 for rate in value.values())
    if value is not None and not is_map:
        raise SiteError(f"{value!r} is not a map of names to rates", where=where, hint="write {hdr: 200}")
    return value or {}


def _parse_networks(value: Any, where: str) -> dict[str, str]:
    types = [n.value for n in NicType]
    is_map = isinstance(value, dict) and all(k in types and isinstance(v, str) and v for k, v in value.items())
    if value is not None and not is_map:
        hint = f"write {{ib: IBext_v11}}; NIC types are {', '.join(types)}"
        problem = f"{value!r} is not a map of NIC types to network names"
        raise SiteError(problem, where=f"{where}: networks", hint=hint)
    return value or {}


def _compile(text: Any, where: str) -> re.Pattern[str]:
    what, hint = f"{text!r} is not a regular expression:", "write a Python regular expression; quote it in YAML"
    with SiteError.instead_of(re.error, TypeError, where=where, hint=hint, what=what):
        return re.compile(text, re.IGNORECASE)


def _parse_rules(entries: Any, where: str) -> Iterator[Rule]:
    for entry in _as_list(entries, where):
        section = f"{where}: features"
        if not isinstance(entry, dict) or "match" not in entry:
            raise SiteError(f"rule {entry!r} lacks 'match'", where=section, hint="write {match: 'REGEX', nic: ib}")
        SiteError.refuse_unknown("unknown key", entry, _RULE_KEYS, section)
        pattern = _compile(entry["match"], section)
        SiteError.refuse_unknown("unknown group", pattern.groupindex, _GROUPS, f"{section}: {entry['match']}")
        nic_types = [entry["nic"]] if "nic" in entry else []
        SiteError.refuse_unknown("unknown NIC type", nic_types, [n.value for n in NicType], section)
        with SiteError.instead_of(SiteError, where=f"{section}: {entry['match']}"):
            _names_in(entry)
        fixed = {k: entry[k] for k in _GROUPS if k in entry}
        yield Rule(pattern, fixed, bool(entry.get("own", False)), entry.get("unsupported"))


def _parse_gpu(entry: Any, where: str) -> tuple[re.Pattern[str], Gpu]:
    if not isinstance(entry, dict) or set(entry) - {"nvlink_gpus"} != set(_GPU_KEYS):
        raise SiteError(f"{entry!r} is not a GPU", where=f"{where}: gpus", hint=f"give {', '.join(_GPU_KEYS)}")
    return _compile(entry["match"], where), Gpu(**{k: value for k, value in entry.items() if k != "match"})
