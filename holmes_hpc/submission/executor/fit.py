"""Do the components of one job fit into the site together, and what about the site would keep them waiting?"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.submission.executor.component import ComponentRequest

_TOKEN = re.compile(r"\s*([&|()!]|[\w.:+@/-]+)")
MOST_SUBSETS = 4096


@dataclass(frozen=True)
class SiteNode:
    """A node as sinfo shows it: the partitions it is in, the features it has."""

    name: str
    partitions: frozenset[str]
    features: frozenset[str]


def read_nodes() -> list[SiteNode]:
    """All nodes, from one sinfo."""
    answer = patient(["sinfo", "--noheader", "--Node", "--format=%N|%R|%b"], patience_s=10)
    partitions: dict[str, set[str]] = {}
    features: dict[str, frozenset[str]] = {}
    for line in answer.out.splitlines() if answer.ok else ():
        name, partition, named = (line.strip().split("|", 2) + ["", ""])[:3]
        partitions.setdefault(name, set()).add(partition)
        features[name] = frozenset(f for f in named.split(",") if f and f != "(null)")
    return [SiteNode(name, frozenset(held), features[name]) for name, held in partitions.items()]


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


def read_time_limits() -> dict[str, float]:
    """The partitions that have a time limit, and how many minutes it is."""
    answer = patient(["sinfo", "--noheader", "--format=%R|%l"], patience_s=10)
    pairs = (line.strip().partition("|") for line in answer.out.splitlines()) if answer.ok else ()
    return {name: most for name, _, text in pairs if (most := minutes(text)) is not None}


def beyond_limit(request: ComponentRequest, timeout_min: object, limits: Mapping[str, float]) -> str | None:
    """Why a component would wait for ever, though Slurm takes it: its time is beyond its partitions' limits. One that
    names a QOS may be allowed to."""
    wanted, names = minutes(timeout_min), (request.partition or "").split(",")
    if wanted is None or request.qos or not all(name in limits for name in names):
        return None
    most = max(limits[name] for name in names)
    return f"{timeout_min} min is beyond the time limit of its partition, {most:g} min" if wanted > most else None


def matcher(constraint: str | None) -> Callable[[frozenset[str]], bool] | None:
    """A constraint of features, ``&``, ``|``, ``!`` and round brackets as a test of a node's features; None for what
    has counts or square brackets, which only Slurm can judge."""
    text = (constraint or "").strip()
    if not text:
        return lambda features: True
    if re.search(r"[\[\]*,]", text):
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return None

    def either(at: int) -> tuple[Callable[[frozenset[str]], bool], int]:
        left, at = both(at)
        while at < len(tokens) and tokens[at] == "|":
            first = left
            second, at = both(at + 1)
            left = _or(first, second)
        return left, at

    def both(at: int) -> tuple[Callable[[frozenset[str]], bool], int]:
        left, at = one(at)
        while at < len(tokens) and tokens[at] == "&":
            first = left
            second, at = one(at + 1)
            left = _and(first, second)
        return left, at

    def one(at: int) -> tuple[Callable[[frozenset[str]], bool], int]:
        token = tokens[at]
        if token == "!":
            inner, at = one(at + 1)
            return (lambda features: not inner(features)), at
        if token == "(":
            inner, at = either(at + 1)
            if tokens[at] != ")":
                raise ValueError(text)
            return inner, at + 1
        if token in "&|)":
            raise ValueError(text)
        return (lambda features: token in features), at + 1

    try:
        test, end = either(0)
    except (IndexError, ValueError):
        return None
    return test if end == len(tokens) else None


def _or(a: Callable[[frozenset[str]], bool], b: Callable[[frozenset[str]], bool]) -> Callable[[frozenset[str]], bool]:
    return lambda features: a(features) or b(features)


def _and(a: Callable[[frozenset[str]], bool], b: Callable[[frozenset[str]], bool]) -> Callable[[frozenset[str]], bool]:
    return lambda features: a(features) and b(features)


def eligible(request: ComponentRequest, nodes: Iterable[SiteNode]) -> frozenset[str]:
    """Names of the nodes that could serve a component."""
    test = matcher(request.constraint)
    wanted = set((request.partition or "").split(",")) - {""}
    only = set(expand(request.nodelist)) if request.nodelist and "/" not in request.nodelist else None
    never = set(expand(request.exclude)) if request.exclude and "/" not in request.exclude else set()
    return frozenset(n.name for n in nodes if (not wanted or wanted & n.partitions)
                     and (test is None or test(n.features)) and n.name not in never
                     and (only is None or len(only) < request.nodes or n.name in only))


def check_fit(requests: Sequence[ComponentRequest], nodes: Sequence[SiteNode]) -> None:
    """Raise SubmissionError when components together want more nodes than those that could serve them (each component
    gets nodes of its own). By Hall's theorem it is enough that no set of components lacks nodes."""
    if not nodes or len(requests) < 2 or 2 ** len(requests) > MOST_SUBSETS:
        return
    sets = [eligible(r, nodes) for r in requests]
    if any(len(found) < r.nodes for found, r in zip(sets, requests, strict=True)):
        return  # each passed alone, so Slurm knows nodes that this picture lacks
    for size in range(2, len(requests) + 1):
        for chosen in combinations(range(len(requests)), size):
            union = frozenset[str]().union(*(sets[i] for i in chosen))
            wanted = sum(requests[i].nodes for i in chosen)
            if wanted > len(union):
                names = " and ".join(str(i) for i in chosen)
                raise SubmissionError(
                    f"they want {wanted} nodes together and share the {len(union)} that could serve them",
                    where=f"components {names}", hint=f"use at most {len(union)} nodes, or other constraints")


def warnings(requests: Sequence[ComponentRequest], nodes: Sequence[SiteNode], config: Mapping[str, str],
             limits: Mapping[str, int]) -> list[str]:
    """What does not forbid the job but may keep it waiting for ever, or give it other nodes than meant."""
    found = []
    if len(requests) > 1:
        scheduler = config.get("SchedulerType", "")
        if scheduler and scheduler != "sched/backfill":
            found.append(f"SchedulerType is {scheduler}: only sched/backfill starts heterogeneous jobs")
        if "disable_hetjob_steps" in config.get("SchedulerParameters", ""):
            found.append("the site sets disable_hetjob_steps: a step cannot span the components of this job")
        for key, most in limits.items():
            if most < len(requests):
                found.append(f"{key} is {most}, and each of the {len(requests)} components counts as a job")
        for index, request in enumerate(requests):
            if not request.constraint and not request.nodelist:
                place = f"partition {request.partition}" if request.partition else "the default partition"
                found.append(f"component {index} has no constraint: it may get any node of {place}")
        for i, j in combinations(range(len(requests)), 2):
            shared = eligible(requests[i], nodes) & eligible(requests[j], nodes)
            if shared and requests[i].partition != requests[j].partition:
                found.append(f"components {i} and {j} can get the same nodes ({', '.join(sorted(shared)[:3])}"
                             f"{', …' if len(shared) > 3 else ''}): partitions overlap")
    return found


def read_config() -> dict[str, str]:
    """The controller's configuration (``scontrol show config``)."""
    answer = patient(["scontrol", "show", "config"], patience_s=10)
    pairs = (line.split("=", 1) for line in answer.out.splitlines() if "=" in line) if answer.ok else ()
    return {k.strip(): v.strip() for k, v in pairs}


def read_limits() -> dict[str, int]:
    """Limits on the number of this user's jobs, where the site's accounting sets any."""
    names = ("MaxJobs", "MaxSubmit", "GrpJobs", "GrpSubmit")
    answer = patient(["sacctmgr", "--noheader", "--parsable2", "show", "association", "where",
                      f"user={getpass.getuser()}", "format=" + ",".join(names)], patience_s=0, timeout_s=10)
    least: dict[str, int] = {}
    for line in answer.out.splitlines() if answer.ok else ():
        for name, text in zip(names, line.split("|"), strict=False):
            if text.isdigit():
                least[name] = min(int(text), least.get(name, int(text)))
    return least
