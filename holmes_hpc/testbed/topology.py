"""The topology of a testbed: fabrics, nodes, rates and partitions, read from YAML and checked."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from holmes_hpc.errors import Case, TestbedError, nearest
from holmes_hpc.schema import Checked, key, make
from holmes_hpc.tables import read_table

FOLDER = Path(__file__).parent / "topologies"  # in the repository slurm/testbed
NICS = ("ib", "roce", "ethernet")
PREEMPT = ("off", "requeue", "cancel")
MAX_NODES = 200  # one /24 per network
PRIORITY = 10  # priority of the fabrics' partitions, which can preempt a partition of lower priority

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_PREFIX = re.compile(r"[a-z][a-z0-9-]{0,5}")  # an interface name (at most 15 characters) is prefix, number, "-mgmt0"
_SETTING = re.compile(r"[A-Za-z]+")
_VALUE = re.compile(r"[^\s#\"'\\]{1,400}")
SLURM_CONF: dict[str, Any] = read_table(str(Path(__file__).with_name("slurmconf.py")))
RESERVED = frozenset(key.lower() for key in (*SLURM_CONF["own"], *SLURM_CONF["also_reserved"]))


def format_rate(mbit: float) -> str:
    """Return a rate as written in features: 400 Mbit/s is ``0.4g``, 25000 is ``25g``."""
    return f"{mbit / 1000:.6f}".rstrip("0").rstrip(".") + "g"


def _odd_name(key: str, value: str, pattern: re.Pattern[str], where: str) -> Case:
    """Return the case that the name `value` does not match its pattern."""
    return not pattern.fullmatch(value), f"{key} is {value!r}", f"write a text that matches {pattern.pattern}", where


@dataclass(frozen=True)
class FabricSpec(Checked, where="fabric {0.name}", error=TestbedError):
    """A fabric: nodes that one bridge connects."""

    name: Annotated[str, key("name of the fabric")]
    nic: Annotated[str, key("type of its fast NIC", one_of=NICS)]
    partition: Annotated[str, key("Slurm partition of its nodes")]
    nodes: Annotated[int, key("number of nodes", ge=1, lt=10**7)]
    prefix: Annotated[str, key("prefix of its nodes' names; default: the partition's name in lower case")] = ""
    rdma_mbit: Annotated[float | None, key("rate of its RDMA NIC, if any", unit="Mbit/s", gt=0, lt=10**7)] = None
    ranks: Annotated[int, key("ranks per node", ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prefix", self.prefix or self.partition.lower())

    def _mistakes(self) -> Iterator[Case]:
        where = f"fabric {self.name}"
        yield _odd_name("name", self.name, _NAME, "a fabric")
        yield _odd_name("partition", self.partition, _NAME, where)
        yield _odd_name("prefix", self.prefix or self.partition.lower(), _PREFIX, where)
        has_rdma, has_rate = self.nic != "ethernet", self.rdma_mbit is not None
        yield has_rate and not has_rdma, "an Ethernet-only fabric has rdma_mbit", "remove rdma_mbit, or set nic"
        yield has_rdma and not has_rate, "rdma_mbit is missing", "give the rate of its RDMA NIC in Mbit/s"

    @property
    def interface(self) -> str | None:
        """The interface name of the RDMA NIC in its nodes: ``ib0``, ``roce0`` or None."""
        return None if self.nic == "ethernet" else f"{self.nic}0"


@dataclass(frozen=True)
class PartitionSpec(Checked, where="partition {0.name}", error=TestbedError):
    """A Slurm partition in addition to the fabrics' own partitions, with nodes of one or more fabrics."""

    name: Annotated[str, key("name of the partition")]
    fabrics: Annotated[tuple[str, ...], key("fabrics whose nodes it has: [ib-a]")]
    nodes: Annotated[tuple[str, ...], key("only these nodes of the fabrics: [ib1, ib2]; none named: all")] = ()
    priority: Annotated[int, key("partitions of higher priority can preempt its jobs", ge=1, lt=10**7)] = PRIORITY
    preempt: Annotated[str, key("preemption mode of its jobs", one_of=PREEMPT)] = "off"
    grace_s: Annotated[int, key("time from the signal to the end of a preempted job", unit="s", ge=0, le=3600)] = 0

    def __post_init__(self) -> None:
        if self.preempt is False:
            object.__setattr__(self, "preempt", "off")  # YAML reads a bare off as false
        super().__post_init__()

    def _mistakes(self) -> Iterator[Case]:
        yield _odd_name("name", self.name, _NAME, "a partition")


@dataclass(frozen=True)
class NodeSpec:
    """One node. `index`: its position among all nodes, from 0; `fabric_index`: the position of its fabric."""

    name: str
    index: int
    fabric: FabricSpec
    fabric_index: int


@dataclass(frozen=True)
class Topology(Checked, where="topology {0.name}", error=TestbedError):
    """The topology of a testbed, as its YAML file describes it."""

    name: Annotated[str, key("name of the topology")]
    ethernet_mbit: Annotated[float, key("every node's Ethernet rate", unit="Mbit/s", gt=0, lt=10**7)]
    fabrics: Annotated[tuple[FabricSpec, ...], key("fabrics, at least one")]
    partitions: Annotated[tuple[PartitionSpec, ...], key("further partitions over the fabrics' nodes")] = ()
    cpus_per_node: Annotated[int, key("CPUs per node in slurm.conf", ge=1, lt=10**7)] = 8
    memory_mib: Annotated[int, key("memory per node in slurm.conf", unit="MiB", ge=1, lt=10**7)] = 16384
    slurm: Annotated[Mapping[str, Any], key("further lines of slurm.conf: {KillWait: 5}")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "slurm", {name: str(value) for name, value in self.slurm.items()})

    def _mistakes(self) -> Iterator[Case]:
        yield _odd_name("name", self.name, _NAME, "topology")
        count = sum(fabric.nodes for fabric in self.fabrics)
        yield not self.fabrics, "no fabric", "list at least one under fabrics"
        yield count > MAX_NODES, f"{count} nodes, at most {MAX_NODES} fit", "use fewer nodes"
        partitions = [*dict.fromkeys(f.partition for f in self.fabrics), *(p.name for p in self.partitions)]
        fabrics, nodes = [f.name for f in self.fabrics], [n.name for n in self.nodes]
        for kind, names in (("fabric", fabrics), ("partition", partitions), ("node", nodes)):
            duplicate = next((name for name in names if names.count(name) > 1), None)
            yield duplicate is not None, f"two {kind}s are named {duplicate!r}", "rename one"
        for p in self.partitions:
            for name in p.fabrics or ("",):
                problem = f"partition {p.name} names the fabric {name!r}"
                yield name not in fabrics, problem, nearest(name, fabrics)
        for name, value in self.slurm.items():
            is_valid = not isinstance(value, bool) and _VALUE.fullmatch(str(value))
            yield not _SETTING.fullmatch(name), f"{name!r} is not a setting of slurm.conf", "correct its name"
            is_reserved = name.lower() in RESERVED
            yield is_reserved, f"slurm.{name} is set by the testbed itself", f"remove slurm.{name}"
            yield not is_valid, f"slurm.{name} is {value!r}", "write one word, without blanks and quotes"

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """All nodes in order of their fabrics: ``ib1, ib2, …, roce1, …``."""
        nodes: list[NodeSpec] = []
        for position, fabric in enumerate(self.fabrics):
            for number in range(1, fabric.nodes + 1):
                nodes.append(NodeSpec(f"{fabric.prefix}{number}", len(nodes), fabric, position))
        return tuple(nodes)

    def features(self, fabric: FabricSpec) -> tuple[str, ...]:
        """Return the Slurm features of this fabric's nodes."""
        nic_rate, ethernet_rate = map(format_rate, (fabric.rdma_mbit or self.ethernet_mbit, self.ethernet_mbit))
        ranks = [f"ranks_{fabric.ranks}"] if fabric.ranks > 1 else []
        return (f"nic_{fabric.nic}", f"nic_{nic_rate}", f"eth_{ethernet_rate}", f"fabric_{fabric.name}", *ranks)


def parse(text: str, where: str) -> Topology:
    """Return the topology in a YAML text. Raise TestbedError if it is invalid. `where`: the text's file, for errors."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        position = f" in line {line + 1}" if line is not None else ""
        hint = "correct it; slurm/testbed/default.yaml is an example"
        raise TestbedError(f"not YAML{position}", where=where, hint=hint) from None
    if not isinstance(data, dict):
        raise TestbedError("it has no keys with values", where=where, hint="slurm/testbed/default.yaml is an example")
    try:
        return make(Topology, data, "topology", TestbedError)
    except TestbedError as error:
        raise TestbedError(f"{error.where}: {error.what}", where=where, hint=error.hint) from None


def find_file(path: str | Path | None) -> Path:
    """Return the path of a topology file. `path`: a file, or a name under slurm/testbed/; None: the default topology.
    Raise TestbedError if there is no such file."""
    path = Path("default" if path is None else path)
    for candidate in (path, FOLDER / path, FOLDER / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    names = [p.stem for p in FOLDER.glob("*.yaml")] if FOLDER.is_dir() else []
    hint = nearest(path.stem, names) if names else "give a YAML file"
    raise TestbedError("no such topology file", where=str(path), hint=hint)


def read_text(path: str | Path | None) -> str:
    """Return the text of the topology file for `path` (see :func:`find_file`).
    Raise TestbedError if the file is missing or unreadable, or if its topology is invalid."""
    file = find_file(path)
    unreadable = (OSError, UnicodeDecodeError)
    with TestbedError.instead_of(*unreadable, where=file, hint="give a readable YAML file", what="cannot be read:"):
        text = file.read_text(encoding="utf-8")
    parse(text, str(file))
    return text


def read(path: str | Path | None) -> Topology:
    """Return the topology in the file for `path` (see :func:`find_file`)."""
    return parse(read_text(path), str(path))
