"""What a testbed looks like: fabrics, nodes, rates, partitions; read from YAML, checked when made. Data only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from holmes_hpc.errors import TestbedError, nearest
from holmes_hpc.schema import check, key, make, refuse

FOLDER = Path(__file__).parent / "topologies"  # in the repository slurm/testbed
NICS = ("ib", "roce", "ethernet")
PREEMPT = ("off", "requeue", "cancel")
MAX_NODES = 200  # one /24 per network
PRIORITY = 10  # of the fabrics' own partitions; a partition below it can be preempted by them

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_PREFIX = re.compile(r"[a-z][a-z0-9-]{0,5}")  # prefix, number and "-mgmt0" are an interface name: 15 characters
_SETTING = re.compile(r"[A-Za-z]+")
_VALUE = re.compile(r"[^\s#\"'\\]{1,400}")
# What the testbed itself must decide, or two testbeds (or the machine's own Slurm) would collide.
RESERVED = frozenset(
    key.lower()
    for key in (
        "ClusterName",
        "SlurmctldHost",
        "SlurmctldPort",
        "SlurmdPort",
        "SlurmUser",
        "SlurmdUser",
        "AuthType",
        "AuthInfo",
        "StateSaveLocation",
        "SlurmdSpoolDir",
        "SlurmctldPidFile",
        "SlurmdPidFile",
        "SlurmctldLogFile",
        "SlurmdLogFile",
        "AccountingStorageHost",
        "AccountingStoragePass",
        "AccountingStoragePort",
        "AccountingStorageType",
        "NodeName",
        "PartitionName",
        "Include",
        "PluginDir",
        "SlurmdParameters",
    )
)


def rate(mbit: float) -> str:
    """A rate as the features spell it: 400 Mbit/s is ``0.4g``, 25000 is ``25g``."""
    return f"{mbit / 1000:.6f}".rstrip("0").rstrip(".") + "g"


def _fail(what: str, where: str, hint: str) -> TestbedError:
    return TestbedError(what, where=where, hint=hint)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _name(key: str, value: Any, pattern: re.Pattern[str], where: str) -> None:
    if not _matches(pattern, value):
        raise _fail(f"{key} is {value!r}, must match {pattern.pattern}", where, f"rename {key}")


@dataclass(frozen=True)
class FabricSpec:
    """Nodes on one bridge."""

    name: Annotated[str, key("of the fabric")]
    nic: Annotated[str, key("what its fast NIC stands for", one_of=NICS)]
    partition: Annotated[str, key("Slurm's partition of its nodes")]
    nodes: Annotated[int, key("how many", ge=1, lt=10**7)]
    prefix: Annotated[str, key("of its nodes' names; the partition's name unless said")] = ""
    rdma_mbit: Annotated[
        float | None, key("rate of the RDMA NIC; none where nic is ethernet", unit="Mbit/s", gt=0, lt=10**7)
    ] = None
    ranks: Annotated[int, key("that each of its nodes holds", ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        where = f"fabric {self.name}"
        check(self, where, TestbedError)
        _name("name", self.name, _NAME, "a fabric")
        _name("partition", self.partition, _NAME, where)
        if not self.prefix:
            object.__setattr__(self, "prefix", self.partition.lower())
        _name("prefix", self.prefix, _PREFIX, where)
        is_ethernet, has_rdma = self.nic == "ethernet", self.rdma_mbit is not None
        refuse(
            where,
            (is_ethernet and has_rdma, "an Ethernet-only fabric has rdma_mbit", "remove rdma_mbit, or set nic"),
            (not is_ethernet and not has_rdma, "rdma_mbit is missing", "give the rate of its RDMA NIC in Mbit/s"),
            error=TestbedError,
        )

    @property
    def interface(self) -> str | None:
        """The kernel's name of the RDMA NIC in its nodes: ``ib0``, ``roce0`` or None."""
        return None if self.nic == "ethernet" else f"{self.nic}0"


@dataclass(frozen=True)
class PartitionSpec:
    """A further partition over nodes that have their own."""

    name: Annotated[str, key("of the partition")]
    fabrics: Annotated[tuple[str, ...], key("[ib-a]: whose nodes it has")]
    priority: Annotated[int, key("a partition below another can be preempted by it", ge=1, lt=10**7)] = PRIORITY
    preempt: Annotated[str, key("what happens to its jobs when their nodes are needed", one_of=PREEMPT)] = "off"
    grace_s: Annotated[int, key("between telling a preempted job and ending it", unit="s", ge=0, le=3600)] = 0

    def __post_init__(self) -> None:
        where = f"partition {self.name}"
        if self.preempt is False:
            object.__setattr__(self, "preempt", "off")  # YAML reads a bare off as false
        check(self, where, TestbedError)
        _name("name", self.name, _NAME, "a partition")


@dataclass(frozen=True)
class NodeSpec:
    """One node: its number over all fabrics (from 0) and its fabric (and the fabric's own number)."""

    name: str
    index: int
    fabric: FabricSpec
    fabric_index: int


@dataclass(frozen=True)
class Topology:
    """A whole testbed."""

    name: Annotated[str, key("of the topology")]
    ethernet_mbit: Annotated[float, key("every node's Ethernet rate", unit="Mbit/s", gt=0, lt=10**7)]
    fabrics: Annotated[tuple[FabricSpec, ...], key("list at least one")]
    partitions: Annotated[tuple[PartitionSpec, ...], key("further ones, over the fabrics' nodes")] = ()
    cpus_per_node: Annotated[int, key("that Slurm is told", ge=1, lt=10**7)] = 8
    memory_mib: Annotated[int, key("of a node, that Slurm is told", unit="MiB", ge=1, lt=10**7)] = 16384
    slurm: Annotated[Mapping[str, Any], key("further lines of slurm.conf: {KillWait: 5}")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"topology {self.name}"
        check(self, where, TestbedError)
        _name("name", self.name, _NAME, "topology")
        count = sum(fabric.nodes for fabric in self.fabrics)
        refuse(
            where,
            (not self.fabrics, "no fabric", "list at least one under fabrics"),
            (count > MAX_NODES, f"{count} nodes, at most {MAX_NODES} fit", "use fewer nodes"),
            error=TestbedError,
        )
        partitions = [*dict.fromkeys(f.partition for f in self.fabrics), *(p.name for p in self.partitions)]
        known, nodes = [f.name for f in self.fabrics], [n.name for n in self.nodes]
        refuse(
            where,
            *(
                (names.count(name) > 1, f"two {kind}s are named {name!r}", "rename one")
                for kind, names in (("fabric", known), ("partition", partitions), ("node", nodes))
                for name in names
            ),
            *(
                (name not in known, f"partition {p.name} names the fabric {name!r}", nearest(name, known))
                for p in self.partitions
                for name in p.fabrics or ("",)
            ),
            error=TestbedError,
        )
        for name, value in self.slurm.items():
            is_word = not isinstance(value, bool) and _VALUE.fullmatch(str(value))
            refuse(
                where,
                (not _matches(_SETTING, name), f"{name!r} is not a setting of slurm.conf", "correct its name"),
                (str(name).lower() in RESERVED, f"slurm.{name} is the testbed's own to decide", f"remove slurm.{name}"),
                (not is_word, f"slurm.{name} is {value!r}", "write one word, without blanks and quotes"),
                error=TestbedError,
            )
        object.__setattr__(self, "slurm", {name: str(value) for name, value in self.slurm.items()})

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """All nodes, fabric after fabric: ``ib1, ib2, …, roce1, …``."""
        names = [
            (f"{fabric.prefix}{number}", fabric, position)
            for position, fabric in enumerate(self.fabrics)
            for number in range(1, fabric.nodes + 1)
        ]
        return tuple(NodeSpec(name, index, fabric, position) for index, (name, fabric, position) in enumerate(names))

    def features(self, fabric: FabricSpec) -> tuple[str, ...]:
        """The features that Slurm shows for a node of this fabric."""
        fast = self.ethernet_mbit if fabric.rdma_mbit is None else fabric.rdma_mbit
        return (
            f"nic_{fabric.nic}",
            f"nic_{rate(fast)}",
            f"eth_{rate(self.ethernet_mbit)}",
            f"fabric_{fabric.name}",
            *([f"ranks_{fabric.ranks}"] if fabric.ranks > 1 else []),
        )


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
    try:
        return make(Topology, data, "topology", TestbedError)
    except TestbedError as error:
        raise _fail(f"{error.where}: {error.what}", where, error.hint) from None


def find(path: str | Path | None) -> Path:
    """The topology file that `path` names: a file, or the name of one under slurm/testbed/; None is the default one."""
    path = Path("default" if path is None else path)
    for candidate in (path, FOLDER / path, FOLDER / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    known = [p.stem for p in FOLDER.glob("*.yaml")] if FOLDER.is_dir() else []
    raise _fail("no such topology file", str(path), nearest(path.stem, known) if known else "name a YAML file")


def text_of(path: str | Path | None) -> str:
    """Return the text of the file that `path` names (see `find`), which is a topology.

    :raises TestbedError: the file is missing, unreadable or wrong; one line.
    """
    file = find(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _fail(f"cannot be read: {error}", str(file), "name a readable YAML file") from None
    parse(text, str(file))
    return text


def read(path: str | Path | None) -> Topology:
    """The topology in a file; see `text_of`."""
    return parse(text_of(path), str(path))
