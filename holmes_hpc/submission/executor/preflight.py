"""Before sbatch: is each component possible (asked of each alone, with ``--test-only``), do they fit into the site
together, and what about the site would keep them waiting?

An infeasible component never reaches a controller as part of a heterogeneous job: before Slurm 24.11 that can crash it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

from holmes_hpc.errors import SiteError, SubmissionError, nearest
from holmes_hpc.slurm.accounting import Qos, read_job_limits, read_qos
from holmes_hpc.slurm.commands import Answer, patient
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import Config, Node, Partition, minutes, read_config, read_nodes, read_partitions
from holmes_hpc.submission.executor.component import ComponentRequest

CACHE_S = 300
MOST_SUBSETS = 4096
_answers: dict[object, tuple[float, Any]] = {}
log = logging.getLogger(__name__)


_STARTS = re.compile(r"[Jj]ob \d+ to start at (\S+)(?: a)? using ")


def start_time(answer: Answer) -> str:
    """Return when ``sbatch --test-only`` lets a job start, as Slurm writes it (local time); empty where it does not."""
    match = _STARTS.search(answer.err) if answer.ok else None
    return match[1] if match else ""


def try_component(request: ComponentRequest, *, timeout_min: object = None) -> Answer:
    """Ask Slurm about one component as a job of its own; the answer for an identical one is kept for five minutes.
    SubmissionError: there is no answer."""
    arguments = [*request.arguments(), *([] if timeout_min is None else [f"--time={timeout_min}"])]
    return cast(Answer, _kept(tuple(arguments), lambda: _ask(arguments)))


def _ask(arguments: Sequence[str]) -> Answer:
    answer = patient(["sbatch", "--test-only", *arguments, "--wrap=:"])
    if answer.away:  # says nothing about the component
        raise SubmissionError(
            answer.reason,
            where="sbatch --test-only",
            hint="wait until the controller answers (`scontrol ping`), then submit again",
        )
    return answer


def check_components(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError for the first component that cannot be, with Slurm's reason and what could be instead."""
    for index, request in enumerate(requests):
        found, where = try_component(request, timeout_min=timeout_min), f"component {index} ({in_words(request)})"
        if not found.ok:
            raise SubmissionError(found.reason, where=where, hint=feasible_instead(request, timeout_min=timeout_min))
        if beyond := beyond_limit(request, timeout_min, _partitions()):
            raise SubmissionError(beyond, where=where, hint="shorten it, or name a QOS that allows more")
    if len(requests) > 1:
        check_fit(requests, _nodes())
        config = _config()
        if config is not None and config.limits_enforced:
            qos = _fact("qos", read_qos) or Qos({})
            if why := beyond_qos(requests, _partitions(), qos):
                raise SubmissionError(
                    why, where="job", hint="it would wait for ever: use another QOS, or fewer components"
                )


def preflight(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError for what cannot be; log, once in this process, what may go wrong."""
    check_components(requests, timeout_min=timeout_min)
    if len(requests) > 1:
        for line in warnings(requests, _nodes(), _config(), _fact("job limits", read_job_limits) or {}):
            _warn(line)


@functools.cache
def _warn(line: str) -> None:
    log.warning(f"holmes: warning: {line}")


def _kept(key: object, read: Callable[[], Any], *silenced: type[Exception]) -> Any:
    """Return what `read` returns, kept for CACHE_S; None, kept too, for one of the `silenced` exceptions."""
    since, answer = _answers.get(key, (-math.inf, None))
    if time.monotonic() - since > CACHE_S:
        answer = None
        with contextlib.suppress(*silenced):
            answer = read()
        _answers[key] = time.monotonic(), answer
    return answer


def _fact(what: str, read: Callable[[], Any]) -> Any:
    """Return a fact about the site, kept as long as the tests of components; None where Slurm does not tell it."""
    return _kept(what, read, SiteError, SubmissionError)


def _config() -> Config | None:
    return cast(Config | None, _fact("config", read_config))


def _nodes() -> list[Node]:
    return _fact("nodes", read_nodes) or []


def _partitions() -> list[Partition]:
    return _fact("partitions", read_partitions) or []


def forget() -> None:
    """Ask Slurm anew from here on."""
    _answers.clear()
    _warn.cache_clear()


def in_words(request: ComponentRequest) -> str:
    """A component in a few words: ``4 nodes of ib [nic_ib]``."""
    place = f" of {request.partition}" if request.partition else ""
    features = f" [{request.constraint}]" if request.constraint else ""
    return f"{request.nodes} node{'s' * (request.nodes > 1)}{place}{features}"


def feasible_instead(request: ComponentRequest, *, timeout_min: object = None) -> str:
    """The nearest request that Slurm would take, in words: fewer nodes, else without one of its conditions."""

    def works(candidate: ComponentRequest) -> bool:
        return try_component(candidate, timeout_min=timeout_min).ok

    if timeout_min is not None and try_component(request).ok:
        return f"it would be possible with a shorter time limit than {timeout_min}"
    low, high = 0, request.nodes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(replace(request, nodes=middle)) else (low, middle)
    if low:
        return f"at most {low} node{'s' * (low > 1)} can be had like this"
    one = replace(request, nodes=1)
    known = [p.name for p in _partitions()]
    if request.partition and known and not set(request.partition.split(",")) <= set(known):
        return f"no such partition: {nearest(request.partition, known)}"
    for key in (
        "constraint",
        "nodelist",
        "gres",
        "gpus_per_node",
        "mem",
        "mem_per_cpu",
        "cpus_per_task",
        "exclusive",
        "reservation",
        "qos",
        "account",
    ):
        if getattr(request, key) is not None and works(replace(one, **{key: cast(Any, None)})):
            own = " (slurm.share=false leaves it to Slurm)" if key in ("mem", "cpus_per_task") else ""
            return f"it would be possible without {key}={getattr(request, key)}{own}"
    return "look at `sinfo -o '%P %a %l %D %t %f %G'`"


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
    if len(requests) < 2:
        return []
    shared = {
        (i, j): sorted(eligible(requests[i], nodes) & eligible(requests[j], nodes))
        for i, j in combinations(range(len(requests)), 2)
        if requests[i].partition != requests[j].partition
    }
    return [
        *(what for what, _ in (config.against_hetjobs() if config is not None else ())),
        *(
            f"{key} is {most}, and each of the {len(requests)} components counts as a job"
            for key, most in limits.items()
            if most < len(requests)
        ),
        *(
            f"component {index} has no constraint: it may get any node of "
            + (f"partition {request.partition}" if request.partition else "the default partition")
            for index, request in enumerate(requests)
            if not request.constraint and not request.nodelist
        ),
        *(
            f"components {i} and {j} can get the same nodes ({', '.join(names[:3])}{', …' * (len(names) > 3)}):"
            " partitions overlap"
            for (i, j), names in shared.items()
            if names
        ),
    ]
