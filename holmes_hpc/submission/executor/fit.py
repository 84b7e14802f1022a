"""Do the components of one job fit into the site together, and what about the site would keep them waiting?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.accounting import Qos
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import Config, Node, Partition, minutes
from holmes_hpc.submission.executor.component import ComponentRequest

MOST_SUBSETS = 4096


def beyond_limit(request: ComponentRequest, timeout_min: object, partitions: Iterable[Partition]) -> str | None:
    """Why a component would wait for ever, though Slurm takes it: its time is beyond its partitions' limits. One that
    names a QOS may be allowed to."""
    limits = {p.name: p.limit_min for p in partitions if p.limit_min is not None}
    wanted, names = minutes(timeout_min), (request.partition or "").split(",")
    if wanted is None or request.qos or not all(name in limits for name in names):
        return None
    most = max(limits[name] for name in names)
    return f"{timeout_min} min is beyond the time limit of its partition, {most:g} min" if wanted > most else None


def beyond_qos(requests: Sequence[ComponentRequest], partitions: Iterable[Partition], qos: Qos) -> str | None:
    """Why components together would wait for ever: each counts as a job, and one QOS allows fewer at a time."""
    of_partition = {p.name: p.qos for p in partitions if p.qos}
    count: Counter[str] = Counter()
    for request in requests:
        names = {request.qos or qos.default, *(of_partition.get(n, "") for n in (request.partition or "").split(","))}
        count.update(names - {""})
    for name, components in count.items():
        fewest = qos.fewest(name)
        if fewest is not None and fewest[1] < components:
            return f"{fewest[0]} of QOS {name} is {fewest[1]}, and each of {components} components counts as a job"
    return None


def eligible(request: ComponentRequest, nodes: Iterable[Node]) -> frozenset[str]:
    """Names of the nodes that could serve a component."""
    test = matcher(request.constraint)
    wanted = set((request.partition or "").split(",")) - {""}
    only = set(expand(request.nodelist)) if request.nodelist and "/" not in request.nodelist else None
    never = set(expand(request.exclude)) if request.exclude and "/" not in request.exclude else set()
    return frozenset(
        n.name
        for n in nodes
        if (not wanted or wanted & set(n.partitions))
        and (test is None or test(frozenset(n.features)))
        and n.name not in never
        and (only is None or len(only) < request.nodes or n.name in only)
    )


def check_fit(requests: Sequence[ComponentRequest], nodes: Sequence[Node]) -> None:
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
                    where=f"components {names}",
                    hint=f"use at most {len(union)} nodes, or other constraints",
                )


def warnings(
    requests: Sequence[ComponentRequest], nodes: Sequence[Node], config: Config | None, limits: Mapping[str, int]
) -> list[str]:
    """What does not forbid the job but may keep it waiting for ever, or give it other nodes than meant. `config`: None
    where Slurm did not tell; `limits`: of the user's number of jobs."""
    found: list[str] = []
    if len(requests) > 1:
        found += [what for what, _ in config.against_hetjobs()] if config is not None else []
        found += [
            f"{key} is {most}, and each of the {len(requests)} components counts as a job"
            for key, most in limits.items()
            if most < len(requests)
        ]
        for index, request in enumerate(requests):
            if not request.constraint and not request.nodelist:
                place = f"partition {request.partition}" if request.partition else "the default partition"
                found.append(f"component {index} has no constraint: it may get any node of {place}")
        for i, j in combinations(range(len(requests)), 2):
            shared = eligible(requests[i], nodes) & eligible(requests[j], nodes)
            if shared and requests[i].partition != requests[j].partition:
                found.append(
                    f"components {i} and {j} can get the same nodes ({', '.join(sorted(shared)[:3])}"
                    f"{', …' if len(shared) > 3 else ''}): partitions overlap"
                )
    return found
