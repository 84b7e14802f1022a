"""Nodes, partitions and configuration as `scontrol show` tells them. Slurm 22.05 to 24.11 write them alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from holmes_hpc.errors import SiteError
from holmes_hpc.slurm.commands import output
from holmes_hpc.slurm.hostlist import expand

_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:()]*)=")
# A node in one of these states takes no new job; the trailing mark * (not responding) says the same.
UNUSABLE = frozenset(
    (
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "UNKNOWN",
        "ERROR",
        "FUTURE",
        "MAINT",
        "INVALID_REG",
        "INVAL",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
    )
)


@dataclass(frozen=True)
class Gres:
    """`count` devices of a GRES such as ``gpu``; `type` is empty where Slurm knows none."""

    name: str
    type: str
    count: int


@dataclass(frozen=True)
class Node:
    """A node as Slurm shows it. `features`: the active ones; `available`: those Slurm could activate."""

    name: str
    partitions: tuple[str, ...]
    states: tuple[str, ...]
    features: tuple[str, ...]
    available: tuple[str, ...]
    cpus: int
    memory_mib: int
    gres: tuple[Gres, ...]
    address: str = ""
    version: str = ""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """It would take a job, now or when its present one ends."""
        return not any(s in UNUSABLE for s in self.states)

    @property
    def gpus(self) -> int:
        return sum(g.count for g in self.gres if g.name == "gpu")

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(g.type for g in self.gres if g.name == "gpu" and g.count))


@dataclass(frozen=True)
class Partition:
    """A partition as Slurm shows it. `up`: it accepts and starts jobs."""

    name: str
    nodes: tuple[str, ...]
    default: bool
    up: bool
    max_time: str = ""
    max_nodes: str = ""
    priority: int = 1
    qos: str = ""

    @property
    def limit_min(self) -> float | None:
        """Its time limit in minutes, None where there is none."""
        return minutes(self.max_time)


@dataclass(frozen=True)
class Config:
    """`scontrol show config`, keys as Slurm writes them."""

    values: dict[str, str]

    def get(self, key: str) -> str:
        return self.values.get(key, "")

    def options(self, key: str) -> tuple[str, ...]:
        """The comma-separated options of a key such as SchedulerParameters."""
        value = self.get(key)
        return tuple(o.strip() for o in value.split(",") if o.strip()) if value != "(null)" else ()

    @property
    def cluster(self) -> str:
        return self.get("ClusterName") or "slurm"

    @cached_property
    def version(self) -> tuple[int, int] | None:
        """(22, 5) for Slurm 22.05."""
        match = re.match(r"(\d+)\.(\d+)", self.get("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else None

    @property
    def limits_enforced(self) -> bool:
        """Whether limits of associations and QOS hold."""
        return not {"limits", "safe", "all"}.isdisjoint(self.options("AccountingStorageEnforce"))

    def against_hetjobs(self) -> list[tuple[str, str]]:
        """What of the scheduler's settings lets no heterogeneous job run, each with what to do."""
        scheduler = self.get("SchedulerType")
        found = (
            (
                scheduler != "sched/backfill",
                f"SchedulerType is {scheduler or 'unknown'}: only sched/backfill starts heterogeneous jobs",
                "set SchedulerType=sched/backfill",
            ),
            (
                "disable_hetjob_steps" in self.options("SchedulerParameters"),
                "SchedulerParameters has disable_hetjob_steps: no step can span the components of a job",
                "remove disable_hetjob_steps",
            ),
        )
        return [(what, fix) for is_so, what, fix in found if is_so]


def parse_record(line: str) -> dict[str, str]:
    """One line of `scontrol -o show`: `Key=value` pairs whose values may hold spaces. A key's first value counts, for
    free text (Reason, Comment) comes last and may hold anything."""
    record: dict[str, str] = {}
    _, *pairs = _KEY.split(line)
    for key, value in zip(pairs[::2], map(str.strip, pairs[1::2]), strict=True):
        record.setdefault(key, "" if value == "(null)" else value)
    return record


def _shown(line: str, key: str, what: str) -> dict[str, str]:
    """Return the record in a line of `scontrol show WHAT -o`. SiteError for one without `key`."""
    record = parse_record(line)
    if key not in record:
        raise SiteError(
            f"{line[:60]!r} is not a {what}", where=f"scontrol show {what}", hint="report it with `scontrol --version`"
        )
    return record


def parse_gres(text: str) -> tuple[Gres, ...]:
    """``gpu:a100:4(S:0-1),shard:8`` as data; a count without a number is 1."""
    found = []
    for item in re.split(r",(?![^(]*\))", text):
        parts = re.sub(r"\(.*?\)", "", item).strip().split(":")
        if not parts[0]:
            continue
        last = re.fullmatch(r"(\d+)([KMG]?)", parts[-1]) if len(parts) > 1 else None
        count = int(last[1]) * 1024 ** " KMG".index(last[2] or " ") if last else 1
        kind = parts[1:-1] if last else parts[1:]
        found.append(Gres(parts[0], ":".join(kind), count))
    return tuple(found)


def parse_states(text: str) -> tuple[str, ...]:
    """``IDLE*+DRAIN`` as its words; the marks of a state become words of their own."""
    words = [re.fullmatch(r"(.*?)([*~#!%$@^-]*)", word, re.DOTALL) for word in text.split("+")]
    states = [s for word in words if word for s in (word[1].upper(), "NOT_RESPONDING" if "*" in word[2] else "")]
    return tuple(dict.fromkeys(s for s in states if s))


def parse_node(line: str) -> Node:
    """A node from its line of `scontrol show node -o`."""
    record = _shown(line, "NodeName", "node")
    available = _words(record.get("AvailableFeatures", record.get("Features", "")))
    active = _words(record["ActiveFeatures"]) if "ActiveFeatures" in record else available
    return Node(
        record["NodeName"],
        partitions=_words(record.get("Partitions", "")),
        states=parse_states(record.get("State", "UNKNOWN")),
        features=active,
        available=available,
        cpus=_int(record.get("CPUEfctv") or record.get("CPUTot")),
        memory_mib=_int(record.get("RealMemory")),
        gres=parse_gres(record.get("Gres", "")),
        address=record.get("NodeAddr", ""),
        version=record.get("Version", ""),
        reason=record.get("Reason", ""),
    )


def parse_partition(line: str) -> Partition:
    """A partition from its line of `scontrol show partition -o`."""
    record = _shown(line, "PartitionName", "partition")
    return Partition(
        record["PartitionName"],
        nodes=tuple(expand(record.get("Nodes", ""))),
        default=record.get("Default") == "YES",
        up=record.get("State", "UP") == "UP",
        max_time=record.get("MaxTime", ""),
        max_nodes=record.get("MaxNodes", ""),
        priority=_int(record.get("PriorityTier")),
        qos=record.get("QoS", "").replace("N/A", ""),
    )


def parse_config(text: str) -> Config:
    """`scontrol show config`: lines of `Key = value`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return Config({key.strip(): value.strip() for key, _, value in pairs})


def minutes(text: object) -> float | None:
    """A time as Slurm reads and writes it (``90``, ``90:00``, ``1:30:00``, ``1-12``); None for ``infinite``."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(text).strip(), re.ASCII)
    if match is None:
        return None
    days, numbers = match.group(1), [int(n) for n in match.groups()[1:] if n is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, rest, seconds = [*numbers, 0, 0][:3]
    return 1440 * int(days or 0) + 60 * hours + rest + seconds / 60


def read_nodes() -> list[Node]:
    """All nodes of this Slurm, usable or not, in its order."""
    return [parse_node(line) for line in _records(output("scontrol", "show", "node", "-o"), "NodeName=")]


def read_node(name: str) -> Node | None:
    """One node, None where Slurm does not know it."""
    return next((n for n in read_nodes() if n.name == name), None)


def read_partitions() -> list[Partition]:
    return [parse_partition(line) for line in _records(output("scontrol", "show", "partition", "-o"), "PartitionName=")]


def read_config() -> Config:
    return parse_config(output("scontrol", "show", "config"))


def _records(text: str, start: str) -> list[str]:
    """The lines of a command's output that are records."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


def _words(text: str) -> tuple[str, ...]:
    return tuple(w for w in text.split(",") if w)


def _int(text: str | None) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else 0
