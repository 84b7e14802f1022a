"""Nodes, partitions, topology and configuration from `scontrol show`, in the format of Slurm 22.05 to 26.05."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from holmes_hpc.errors import SiteError
from holmes_hpc.slurm.commands import output, slurm
from holmes_hpc.slurm.hostlist import expand

_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:()]*)=")
# States in which Slurm starts no jobs on a node.
_UNUSABLE = re.compile(
    "DOWN|DRAIN(ED|ING)?|FAIL(ING)?|NOT_RESPONDING|NO_RESPOND|UNKNOWN|ERROR|(DYNAMIC_)?FUTURE|MAINT(ENANCE)?|POWERING_DOWN"
    "|BLOCKED|INVAL(ID_REG)?|REBOOT_(ISSUED|REQUESTED)"
)


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node: `count` devices of kind `name`, such as ``gpu``. `type`: empty if not specified."""

    name: str
    type: str
    count: int


@dataclass(frozen=True)
class Node:
    """A node as Slurm shows it. `features`: the active ones; `available`: all features that Slurm can activate."""

    name: str
    partitions: tuple[str, ...]
    states: tuple[str, ...]
    features: tuple[str, ...]
    available: tuple[str, ...]
    cpus: int
    memory_mib: int
    gres: tuple[Gres, ...]
    reason: str = ""
    reservation: str = ""
    architecture: str = ""

    @property
    def usable(self) -> bool:
        """True if the node takes jobs: at once, after its present job, or after it is powered up again."""
        return not any(map(_UNUSABLE.fullmatch, self.states))

    @property
    def gpus(self) -> int:
        return self.gpus_of(None)

    def gpus_of(self, gres_type: str | None) -> int:
        """Return the node's number of GPUs of type `gres_type`; of all types if `gres_type` is None."""
        return sum(g.count for g in self.gres if g.name == "gpu" and gres_type in (None, g.type))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(g.type for g in self.gres if g.name == "gpu" and g.count))


@dataclass(frozen=True)
class Partition:
    """A partition as Slurm shows it. `up`: whether it accepts and starts jobs; an empty `allow_*` allows all."""

    name: str
    nodes: tuple[str, ...]
    default: bool
    up: bool
    max_time: str = ""
    max_nodes: str = ""
    priority: int = 1
    qos: str = ""
    allow_groups: tuple[str, ...] = ()
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    preempt_mode: str = ""
    root_only: bool = False
    hidden: bool = False

    @property
    def node_limit(self) -> float:
        """The largest number of nodes of one job; infinity if there is no limit."""
        return int(self.max_nodes) if self.max_nodes.isdecimal() else float("inf")

    @property
    def time_limit_min(self) -> float | None:
        """The time limit in minutes; None if there is none."""
        return minutes(self.max_time)


@dataclass(frozen=True)
class Config:
    """The output of `scontrol show config`, with Slurm's keys."""

    values: dict[str, str]

    def get(self, key: str) -> str:
        return self.values.get(key, "")

    def options(self, key: str) -> tuple[str, ...]:
        """Return the comma-separated options of a key such as SchedulerParameters."""
        value = self.get(key)
        return tuple(o.strip() for o in value.split(",") if o.strip()) if value != "(null)" else ()

    @property
    def cluster(self) -> str:
        """The cluster's name, without control characters."""
        return "".join(filter(str.isprintable, self.get("ClusterName"))) or "slurm"

    @cached_property
    def version(self) -> tuple[int, int] | None:
        """The version, (22, 5) for Slurm 22.05."""
        match = re.match(r"(\d+)\.(\d+)", self.get("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else None

    def hetjob_obstacles(self) -> Iterator[tuple[str, str]]:
        """Yield (problem, fix) for each setting of the scheduler that prevents heterogeneous jobs."""
        scheduler = self.get("SchedulerType")
        if scheduler != "sched/backfill":
            problem = f"SchedulerType is {scheduler or 'unknown'}: only sched/backfill starts heterogeneous jobs"
            yield problem, "set SchedulerType=sched/backfill"
        if "disable_hetjob_steps" in self.options("SchedulerParameters"):
            problem = "SchedulerParameters has disable_hetjob_steps: no step can span the components of a job"
            yield problem, "remove disable_hetjob_steps"


@dataclass(frozen=True)
class Topology:
    """Slurm's topology. `trees`: node -> the top switch of its tree; `blocks`: node -> its block."""

    trees: dict[str, str]
    blocks: dict[str, str]


def parse_record(line: str) -> dict[str, str]:
    """Parse a line of `scontrol -o show`: `Key=value` pairs, whose values may have spaces. The first value of a key
    counts, because free text that may look like pairs (Reason, Comment) comes last."""
    record: dict[str, str] = {}
    _, *pairs = _KEY.split(line)
    for key, value in zip(pairs[::2], map(str.strip, pairs[1::2]), strict=True):
        record.setdefault(key, "" if value == "(null)" else value)
    return record


def _require_record(line: str, key: str, entity: str) -> dict[str, str]:
    """Parse a line of `scontrol -o show`. `entity`: node or partition. Raise SiteError if it lacks `key`."""
    record = parse_record(line)
    if key not in record:
        hint = "report this line with the output of `scontrol --version`"
        raise SiteError(f"{line[:60]!r} is not a {entity}", where=f"scontrol show {entity}", hint=hint)
    return record


def parse_states(text: str) -> tuple[str, ...]:
    """Parse ``IDLE*+DRAIN``; the mark * becomes the state NOT_RESPONDING."""
    matches = [re.fullmatch(r"(.*?)([*~#!%$@^-]*)", part, re.DOTALL) for part in text.split("+")]
    states = [s for match in matches if match for s in (match[1].upper(), "NOT_RESPONDING" if "*" in match[2] else "")]
    return tuple(dict.fromkeys(s for s in states if s))


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Parse ``gpu:a100:4(S:0-1),shard:8``; a missing count is 1."""
    resources = []
    for item in re.split(r",(?![^(]*\))", text):
        parts = re.sub(r"\(.*?\)", "", item).strip().split(":")
        if not parts[0]:
            continue
        count_match = re.fullmatch(r"(\d+)([KMG]?)", parts[-1]) if len(parts) > 1 else None
        count = int(count_match[1]) * 1024 ** " KMG".index(count_match[2] or " ") if count_match else 1  # 1024 for K
        type_parts = parts[1:-1] if count_match else parts[1:]
        resources.append(Gres(parts[0], ":".join(type_parts), count))
    return tuple(resources)


def parse_node(line: str) -> Node:
    """Parse a node's line of `scontrol show node -o`."""
    record = _require_record(line, "NodeName", "node")
    available = _split(record.get("AvailableFeatures", record.get("Features", "")))
    active = _split(record["ActiveFeatures"]) if "ActiveFeatures" in record else available
    return Node(
        record["NodeName"],
        partitions=_split(record.get("Partitions", "")),
        states=parse_states(record.get("State", "UNKNOWN")),
        features=active,
        available=available,
        cpus=_int(record.get("CPUEfctv") or record.get("CPUTot")),
        memory_mib=_int(record.get("RealMemory")),
        gres=parse_gres(record.get("Gres", "")),
        reason=record.get("Reason", ""),
        reservation=record.get("ReservationName", ""),
        architecture=record.get("Arch", ""),
    )


def parse_partition(line: str) -> Partition:
    """Parse a partition's line of `scontrol show partition -o`."""
    record = _require_record(line, "PartitionName", "partition")
    return Partition(
        record["PartitionName"],
        nodes=tuple(expand(record.get("Nodes", ""))),
        default=record.get("Default") == "YES",
        up=record.get("State", "UP") == "UP",
        max_time=record.get("MaxTime", ""),
        max_nodes=record.get("MaxNodes", ""),
        priority=_int(record.get("PriorityTier")),
        qos=record.get("QoS", "").replace("N/A", ""),
        allow_groups=_split(record.get("AllowGroups", ""), "ALL"),
        allow_accounts=_split(record.get("AllowAccounts", ""), "ALL"),
        deny_accounts=_split(record.get("DenyAccounts", ""), "NONE"),
        allow_qos=_split(record.get("AllowQos", ""), "ALL"),
        deny_qos=_split(record.get("DenyQos", ""), "NONE"),
        preempt_mode=record.get("PreemptMode", ""),
        root_only=record.get("RootOnly") == "YES",
        hidden=record.get("Hidden") == "YES",
    )


def parse_topology(text: str) -> Topology:
    """Return the top switch and block of each node in `scontrol show topology`. A switch lists all nodes below it."""
    trees: dict[str, str] = {}
    blocks: dict[str, str] = {}
    records = [parse_record(line) for line in _records(text, "SwitchName=") + _records(text, "BlockName=")]
    for record in sorted(records, key=lambda r: -_int(r.get("Level"))):  # the top switches first
        names, name = (trees, record["SwitchName"]) if "SwitchName" in record else (blocks, record["BlockName"])
        for node in expand(record.get("Nodes", "")):
            names.setdefault(node, name)
    return Topology(trees, blocks)


def parse_config(text: str) -> Config:
    """Parse `scontrol show config`: lines of `Key = value`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return Config({key.strip(): value.strip() for key, _, value in pairs})


def minutes(text: object) -> float | None:
    """Convert a time limit of Slurm (``90``, ``90:00``, ``1:30:00``, ``1-12``) to minutes; None for others."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(text).strip(), re.ASCII)
    if match is None:
        return None
    days, numbers = match.group(1), [int(n) for n in match.groups()[1:] if n is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # minutes, or minutes and seconds, without hours
    hours, minute_part, seconds = [*numbers, 0, 0][:3]
    return 1440 * int(days or 0) + 60 * hours + minute_part + seconds / 60


def read_nodes() -> list[Node]:
    """Return all nodes of this Slurm, usable or not, in its order."""
    return [parse_node(line) for line in _records(output("scontrol", "show", "node", "-o"), "NodeName=")]


def read_node(name: str) -> Node | None:
    """Return the node called `name`; None if Slurm does not know it."""
    return next((n for n in read_nodes() if n.name == name), None)


def read_partitions() -> list[Partition]:
    return [parse_partition(line) for line in _records(output("scontrol", "show", "partition", "-o"), "PartitionName=")]


def read_config() -> Config:
    return parse_config(output("scontrol", "show", "config"))


def read_topology() -> Topology:
    """Return the topology; an empty one if Slurm has none."""
    return parse_topology(slurm("scontrol", "show", "topology").out)


def _records(text: str, start: str) -> list[str]:
    """Return the lines of `text` that start with `start`."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


def _split(text: str, default: str = "") -> tuple[str, ...]:
    """Return the words of a comma-separated list; none if the text is `default`, Slurm's word for an unset list."""
    return tuple(w for w in text.split(",") if w) if text != default else ()


def _int(text: str | None) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else 0
