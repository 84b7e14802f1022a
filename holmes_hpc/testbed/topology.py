"""What a testbed looks like: fabrics, nodes, rates, partitions; read from YAML, checked when made. Data only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import TestbedError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "slurm" / "testbed"
NICS = ("ib", "roce", "ethernet")
PREEMPT = ("off", "requeue", "cancel")
MAX_NODES = 200  # one /24 per network
PRIORITY = 10  # of the fabrics' own partitions; a partition below it can be preempted by them

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_PREFIX = re.compile(r"[a-z][a-z0-9-]{0,5}")  # prefix, number and "-mgmt0" are an interface name: 15 characters
_SETTING = re.compile(r"[A-Za-z]+")
_VALUE = re.compile(r"[^\s#\"'\\]{1,400}")
# What the testbed itself must decide, or two testbeds (or the machine's own Slurm) would collide.
RESERVED = frozenset(key.lower() for key in (
    "ClusterName", "SlurmctldHost", "SlurmctldPort", "SlurmdPort", "SlurmUser", "SlurmdUser", "AuthType", "AuthInfo",
    "StateSaveLocation", "SlurmdSpoolDir", "SlurmctldPidFile", "SlurmdPidFile", "SlurmctldLogFile", "SlurmdLogFile",
    "AccountingStorageHost", "AccountingStoragePass",
    "AccountingStoragePort", "AccountingStorageType", "NodeName", "PartitionName", "Include",
    "PluginDir", "SlurmdParameters"))


def rate(mbit: float) -> str:
    """A rate as the features spell it: 400 Mbit/s is ``0.4g``, 25000 is ``25g``."""
    return f"{mbit / 1000:.6f}".rstrip("0").rstrip(".") + "g"


def _fail(what: str, where: str, hint: str) -> TestbedError:
    return TestbedError(what, where=where, hint=hint)


def _positive(key: str, value: Any, where: str, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 10**7:
        raise _fail(f"{key} is {value!r}, must be a {'whole ' if whole else ''}number above 0", where, f"correct {key}")


def _name(key: str, value: Any, pattern: re.Pattern[str], where: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _fail(f"{key} is {value!r}, must match {pattern.pattern}", where, f"rename {key}")


@dataclass(frozen=True)
class FabricSpec:
    """Nodes on one bridge. `rdma_mbit`: rate of the RDMA NIC in Mbit/s, None where `nic` is ethernet."""

    name: str
    nic: str
    partition: str
    nodes: int
    prefix: str = ""
    rdma_mbit: float | None = None

    def __post_init__(self) -> None:
        where = f"fabric {self.name}"
        _name("name", self.name, _NAME, "a fabric")
        if self.nic not in NICS:
            raise _fail(f"nic is {self.nic!r}", where, nearest(str(self.nic), NICS))
        _name("partition", self.partition, _NAME, where)
        _positive("nodes", self.nodes, where, whole=True)
        if not self.prefix:
            object.__setattr__(self, "prefix", self.partition.lower())
        _name("prefix", self.prefix, _PREFIX, where)
        if self.nic == "ethernet" and self.rdma_mbit is not None:
            raise _fail("an Ethernet-only fabric has rdma_mbit", where, "remove rdma_mbit, or set nic")
        if self.nic != "ethernet":
            _positive("rdma_mbit", self.rdma_mbit, where)

    @property
    def interface(self) -> str | None:
        """The kernel's name of the RDMA NIC in its nodes: ``ib0``, ``roce0`` or None."""
        return None if self.nic == "ethernet" else f"{self.nic}0"


@dataclass(frozen=True)
class PartitionSpec:
    """A further partition over nodes that have their own; `preempt`: what happens to its jobs when those are needed."""

    name: str
    fabrics: tuple[str, ...]
    priority: int = PRIORITY
    preempt: str = "off"
    grace_s: int = 0

    def __post_init__(self) -> None:
        where = f"partition {self.name}"
        _name("name", self.name, _NAME, "a partition")
        if not isinstance(self.fabrics, (list, tuple)) or not all(isinstance(f, str) for f in self.fabrics):
            raise _fail("fabrics is not a list of names", where, "write fabrics: [ib-a]")
        object.__setattr__(self, "fabrics", tuple(self.fabrics))
        _positive("priority", self.priority, where, whole=True)
        preempt = "off" if self.preempt is False else self.preempt  # YAML reads a bare off as false
        if preempt not in PREEMPT:
            raise _fail(f"preempt is {self.preempt!r}", where, nearest(str(self.preempt), PREEMPT))
        object.__setattr__(self, "preempt", preempt)
        if not isinstance(self.grace_s, int) or isinstance(self.grace_s, bool) or not 0 <= self.grace_s <= 3600:
            raise _fail(f"grace_s is {self.grace_s!r}, must be whole seconds", where, "correct grace_s")


@dataclass(frozen=True)
class NodeSpec:
    """One node: its number over all fabrics (from 0) and its fabric (and the fabric's own number)."""

    name: str
    index: int
    fabric: FabricSpec
    fabric_index: int


@dataclass(frozen=True)
class Topology:
    """A whole testbed. `ethernet_mbit` is every node's Ethernet rate; `slurm` are further lines of slurm.conf."""

    name: str
    ethernet_mbit: float
    fabrics: tuple[FabricSpec, ...]
    partitions: tuple[PartitionSpec, ...] = ()
    cpus_per_node: int = 8
    memory_mib: int = 16384
    slurm: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"topology {self.name}"
        _name("name", self.name, _NAME, "topology")
        _positive("ethernet_mbit", self.ethernet_mbit, where)
        _positive("cpus_per_node", self.cpus_per_node, where, whole=True)
        _positive("memory_mib", self.memory_mib, where, whole=True)
        if not self.fabrics:
            raise _fail("no fabric", where, "list at least one under fabrics")
        object.__setattr__(self, "fabrics", tuple(self.fabrics))
        object.__setattr__(self, "partitions", tuple(self.partitions))
        self._check_unique("fabric", [f.name for f in self.fabrics])
        self._check_unique("partition", [*dict.fromkeys(f.partition for f in self.fabrics),
                                         *(p.name for p in self.partitions)])
        self._check_unique("node", [n.name for n in self.nodes])
        if len(self.nodes) > MAX_NODES:
            raise _fail(f"{len(self.nodes)} nodes, at most {MAX_NODES} fit", where, "use fewer nodes")
        known = [f.name for f in self.fabrics]
        for partition in self.partitions:
            for name in partition.fabrics or ("",):
                if name not in known:
                    raise _fail(f"partition {partition.name} names the fabric {name!r}", where, nearest(name, known))
        self._check_settings(where)

    def _check_unique(self, what: str, names: list[str]) -> None:
        for name in names:
            if names.count(name) > 1:
                raise _fail(f"two {what}s are named {name!r}", f"topology {self.name}", "rename one")

    def _check_settings(self, where: str) -> None:
        if not isinstance(self.slurm, Mapping):
            raise _fail("slurm is not a map of settings", where, "write slurm: {KillWait: 5}")
        for key, value in self.slurm.items():
            if not isinstance(key, str) or not _SETTING.fullmatch(key):
                raise _fail(f"{key!r} is not a setting of slurm.conf", where, "correct its name")
            if key.lower() in RESERVED:
                raise _fail(f"slurm.{key} is the testbed's own to decide", where, f"remove slurm.{key}")
            if isinstance(value, bool) or not _VALUE.fullmatch(str(value)):
                raise _fail(f"slurm.{key} is {value!r}", where, "write one word, without blanks and quotes")
        object.__setattr__(self, "slurm", {key: str(value) for key, value in self.slurm.items()})

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """All nodes, fabric after fabric: ``ib1, ib2, …, roce1, …``."""
        names = [(f"{fabric.prefix}{number}", fabric, position)
                 for position, fabric in enumerate(self.fabrics) for number in range(1, fabric.nodes + 1)]
        return tuple(NodeSpec(name, index, fabric, position) for index, (name, fabric, position) in enumerate(names))

    def features(self, fabric: FabricSpec) -> tuple[str, ...]:
        """The features that Slurm shows for a node of this fabric."""
        fast = self.ethernet_mbit if fabric.rdma_mbit is None else fabric.rdma_mbit
        return (f"nic_{fabric.nic}", f"nic_{rate(fast)}", f"eth_{rate(self.ethernet_mbit)}", f"fabric_{fabric.name}")


def _build(kind: type, data: Any, where: str) -> Any:
    """`kind` from a map, with unknown and missing keys said by name."""
    if not isinstance(data, dict):
        raise _fail(f"{data!r:.40} is not a map", where, "see slurm/testbed/default.yaml")
    known = [f.name for f in fields(kind)]
    for key in data:
        if key not in known:
            raise _fail(f"unknown key {key!r}", where, nearest(str(key), known))
    try:
        return kind(**data)
    except TypeError as error:
        missing = re.findall(r"'(\w+)'", str(error))
        raise _fail(f"missing: {', '.join(missing) or error}", where, "see slurm/testbed/default.yaml") from None


def parse(text: str, where: str) -> Topology:
    """A topology from YAML text.

    :raises TestbedError: one line, naming `where` and what is wrong.
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = f" in line {line + 1}" if line is not None else ""
        raise _fail(f"not YAML{at}", where, "correct it; see slurm/testbed/default.yaml") from None
    if not isinstance(data, dict):
        raise _fail("not a map", where, "see slurm/testbed/default.yaml")
    for key in ("fabrics", "partitions"):
        if not isinstance(data.get(key, []), list):
            raise _fail(f"{key} is not a list", where, "see slurm/testbed/default.yaml")
    try:
        data = {**data,
                "fabrics": tuple(_build(FabricSpec, f, f"fabrics[{i}]") for i, f in enumerate(data.get("fabrics", []))),
                "partitions": tuple(_build(PartitionSpec, p, f"partitions[{i}]")
                                    for i, p in enumerate(data.get("partitions", [])))}
        topology: Topology = _build(Topology, data, "topology")
    except TestbedError as error:
        raise _fail(f"{error.where}: {error.what}", where, error.hint) from None
    return topology


def find(path: str | Path | None) -> Path:
    """The topology file that `path` names: a file, or the name of one under slurm/testbed/; None is the default one."""
    path = Path("default" if path is None else path)
    for candidate in (path, FOLDER / path, FOLDER / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    known = [p.stem for p in FOLDER.glob("*.yaml")] if FOLDER.is_dir() else []
    raise _fail("no such topology file", str(path), nearest(path.stem, known) if known else "name a YAML file")


def read(path: str | Path | None) -> Topology:
    """The topology in a file (see `find`).

    :raises TestbedError: the file is missing, unreadable or wrong; one line.
    """
    file = find(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _fail(f"cannot be read: {error}", str(file), "name a readable YAML file") from None
    return parse(text, str(file))
