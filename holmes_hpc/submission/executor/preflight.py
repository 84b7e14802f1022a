"""Checks before sbatch: each component by itself (``--test-only``), all components together, and site settings.

An infeasible component must not be submitted in a heterogeneous job: before Slurm 24.11 it can crash the controller.
"""

import contextlib
import functools
import logging
import math
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar, cast

from holmes_hpc.errors import SiteError, SubmissionError, nearest
from holmes_hpc.slurm.accounting import Qos, read_job_limits, read_qos
from holmes_hpc.slurm.commands import Answer, slurm_with_retries
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import Config, Node, Partition, minutes, read_config, read_nodes, read_partitions
from holmes_hpc.submission.executor.component import ComponentRequest

CACHE_S = 300  # seconds for which answers of Slurm are reused
TIME_LIMIT_HINT = "request less time, or name a QOS that allows more"
MAX_SUBSETS = 4096  # of components; if there are more, check_fit checks nothing
T = TypeVar("T")
_cache: dict[object, tuple[float, Any]] = {}
log = logging.getLogger(__name__)
# Conditions that may make a component infeasible, in the order in which feasible_change tries to remove them.
_CONDITIONS = (
    *("constraint", "nodelist", "gres", "gpus_per_node", "mem", "mem_per_cpu", "cpus_per_task", "exclusive"),
    *("reservation", "qos", "account"),
)
_STARTS = re.compile(r"[Jj]ob \d+ to start at (\S+)(?: a)? using ")


def start_time(answer: Answer) -> str:
    """Return the start time in an answer of ``sbatch --test-only``, as Slurm writes it (local time); "" without one."""
    match = _STARTS.search(answer.err) if answer.ok else None
    return match[1] if match else ""


def try_component(request: ComponentRequest, *, timeout_min: object = None) -> Answer:
    """Return the answer of ``sbatch --test-only`` for a job with only this component. It is cached for CACHE_S.
    `timeout_min`: its time limit, in minutes or in Slurm's format. Raise SubmissionError if Slurm does not answer."""
    arguments = [*request.arguments(), *([] if timeout_min is None else [f"--time={timeout_min}"])]
    return _cached(tuple(arguments), lambda: _test_job(arguments))


def _test_job(arguments: Sequence[str]) -> Answer:
    answer = slurm_with_retries(["sbatch", "--test-only", *arguments, "--wrap=:"])
    if answer.is_unreachable:  # the component itself may be feasible
        hint = "wait until the controller answers (`scontrol ping`), then submit again"
        raise SubmissionError(answer.reason, where="sbatch --test-only", hint=hint)
    return answer


def check_each(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError if Slurm cannot start one of the components in a job by itself.
    The error has Slurm's reason and, as a hint, a change that makes the component feasible."""
    for index, request in enumerate(requests):
        answer = try_component(request, timeout_min=timeout_min)
        if not answer.ok:
            hint = feasible_change(request, timeout_min=timeout_min)
            raise SubmissionError(answer.reason, where=describe(index, request), hint=hint)


def check_components(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError if Slurm could never start one of the components, or all of them in one job."""
    check_each(requests, timeout_min=timeout_min)
    partitions = _site_fact(read_partitions) or []
    for index, request in enumerate(requests):
        if error := time_limit_error(request, timeout_min, partitions):
            raise SubmissionError(error, where=describe(index, request), hint=TIME_LIMIT_HINT)
    if len(requests) > 1:
        check_fit(requests, _site_fact(read_nodes) or [])
        config = _site_fact(read_config)
        enforced = () if config is None else config.options("AccountingStorageEnforce")
        if not {"limits", "safe", "all"}.isdisjoint(enforced):
            qos = _site_fact(read_qos) or Qos({})
            if error := qos_error(requests, partitions, qos):
                raise SubmissionError(error, where="job", hint="use another QOS, or fewer components")


def preflight(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError if a job of these components cannot start (see :func:`check_components`).
    Log the warnings of :func:`find_warnings`, each once in this process."""
    check_components(requests, timeout_min=timeout_min)
    if len(requests) > 1:
        nodes, limits = _site_fact(read_nodes) or [], _site_fact(read_job_limits) or {}
        for line in find_warnings(requests, nodes, _site_fact(read_config), limits):
            _warn(line)


@functools.cache
def _warn(line: str) -> None:
    log.warning(f"holmes: warning: {line}")


def _cached(key: object, read: Callable[[], Any], *silenced: type[Exception]) -> Any:
    """Return ``read()``, or None if it raises one of the exceptions `silenced`; cached under `key` for CACHE_S."""
    since, value = _cache.get(key, (-math.inf, None))
    if time.monotonic() - since > CACHE_S:
        value = None
        with contextlib.suppress(*silenced):
            value = read()
        _cache[key] = time.monotonic(), value
    return value


def _site_fact(read: Callable[[], T]) -> T | None:
    """Return the fact about the site that `read` returns, cached; None if Slurm does not report it."""
    return _cached(read, read, SiteError, SubmissionError)


def clear_cache() -> None:
    """Forget all answers of Slurm and which warnings were logged."""
    _cache.clear()
    _warn.cache_clear()


def describe(index: int, request: ComponentRequest) -> str:
    """Return a short text for a component: ``component 0 (4 nodes of ib [nic_ib])``."""
    partition = f" of {request.partition}" if request.partition else ""
    features = f" [{request.constraint}]" if request.constraint else ""
    return f"component {index} ({request.nodes} node{'s' * (request.nodes > 1)}{partition}{features})"


def feasible_change(request: ComponentRequest, *, timeout_min: object = None) -> str:
    """Return a hint on what makes a request feasible: less time, fewer nodes, another partition, no condition."""

    def is_feasible(candidate: ComponentRequest) -> bool:
        return try_component(candidate, timeout_min=timeout_min).ok

    if timeout_min is not None and try_component(request).ok:
        return f"it would be possible with a shorter time limit than {timeout_min}"
    fewer = range(1, request.nodes)
    if count := bisect(fewer, False, key=lambda nodes: not is_feasible(replace(request, nodes=nodes))):
        return f"at most {count} node{'s' * (count > 1)} can be allocated like this"
    one_node = replace(request, nodes=1)
    partitions = [p.name for p in _site_fact(read_partitions) or []]
    if request.partition and partitions and not set(request.partition.split(",")) <= set(partitions):
        return f"no such partition: {nearest(request.partition, partitions)}"
    for key in _CONDITIONS:
        if getattr(request, key) is not None and is_feasible(replace(one_node, **{key: cast(Any, None)})):
            note = f" (slurm.share=false leaves {key} to Slurm)" if key in ("mem", "cpus_per_task") else ""
            return f"it would be possible without {key}={getattr(request, key)}{note}"
    return "look at `sinfo -o '%P %a %l %D %t %f %G'`"


def time_limit_error(request: ComponentRequest, timeout_min: object, partitions: Iterable[Partition]) -> str | None:
    """Return an error message if the job's time limit exceeds that of all its partitions; None otherwise.
    Slurm accepts such a job but never starts it. A request with a QOS is not checked, because the QOS may allow it."""
    limits = {p.name: p.time_limit_min for p in partitions if p.time_limit_min is not None}
    timeout, names = minutes(timeout_min), (request.partition or "").split(",")
    if timeout is None or request.qos or not all(name in limits for name in names):
        return None
    limit = max(limits[name] for name in names)
    return f"{timeout:g} min exceeds the partition's time limit of {limit:g} min" if timeout > limit else None


def qos_error(requests: Sequence[ComponentRequest], partitions: Iterable[Partition], qos: Qos) -> str | None:
    """Return an error message if more components use a QOS than it allows jobs (such a job never starts), else None."""
    partition_qos = {p.name: p.qos for p in partitions if p.qos}
    count: Counter[str] = Counter()
    for request in requests:
        names = {request.qos or qos.default, *(partition_qos.get(n, "") for n in (request.partition or "").split(","))}
        count.update(names - {""})
    for name, components in count.items():
        key, limit = min(qos.limits.get(name, {}).items(), key=lambda pair: pair[1], default=("", math.inf))
        if limit < components:
            problem = f"{key} of QOS {name} is {limit}, and each of {components} components counts as a job"
            return f"the job would never start: {problem}"
    return None


def eligible_nodes(request: ComponentRequest, nodes: Iterable[Node]) -> frozenset[str]:
    """Return the names of the nodes that satisfy a component's conditions."""
    has_features = matcher(request.constraint)
    partitions = set((request.partition or "").split(",")) - {""}
    node_list = set(expand(request.nodelist)) if request.nodelist and "/" not in request.nodelist else None
    excluded = set(expand(request.exclude)) if request.exclude and "/" not in request.exclude else set()
    gpu_type, is_short_list = _gpu_type(request), node_list is not None and len(node_list) < request.nodes

    def is_eligible(n: Node) -> bool:
        is_listed = node_list is None or is_short_list or n.name in node_list  # Slurm adds nodes to a short list
        is_in_partition = not partitions or bool(partitions & set(n.partitions))
        meets_constraint = has_features(frozenset(n.features))
        has_gpus = not gpu_type or gpu_type in n.gpu_types
        return is_in_partition and meets_constraint and n.name not in excluded and has_gpus and is_listed

    return frozenset(n.name for n in nodes if is_eligible(n))


def _gpu_type(request: ComponentRequest) -> str:
    """Return the GPU type in ``--gpus-per-node=TYPE:N``; empty without one."""
    return str(request.gpus_per_node or "").rpartition(":")[0]


def check_fit(requests: Sequence[ComponentRequest], nodes: Sequence[Node]) -> None:
    """Raise SubmissionError if the site has too few eligible nodes for all components together.
    Components share no nodes. By Hall's theorem they fit if every subset of components has enough eligible nodes."""
    if not nodes or len(requests) < 2 or 2 ** len(requests) > MAX_SUBSETS:
        return
    eligible = [eligible_nodes(r, nodes) for r in requests]
    if any(len(names) < r.nodes for names, r in zip(eligible, requests, strict=True)):
        return  # each component passed by itself, so Slurm has nodes that this list lacks
    for size in range(2, len(requests) + 1):
        for subset in combinations(range(len(requests)), size):
            union = frozenset[str]().union(*(eligible[i] for i in subset))
            num_nodes = sum(requests[i].nodes for i in subset)
            problem = f"they need {num_nodes} nodes together, but only {len(union)} satisfy their conditions"
            hint = f"use at most {len(union)} nodes, or other constraints"
            where = f"components {' and '.join(map(str, subset))}"
            SubmissionError.refuse(where, (num_nodes > len(union), problem, hint))


def shortages(requests: Sequence[ComponentRequest]) -> Iterator[str]:
    """Yield a line for each component for which this Slurm has too few nodes, and one if too few for all together."""
    nodes = _site_fact(read_nodes) or []
    for index, request in enumerate(requests if nodes else ()):
        if (count := len(eligible_nodes(request, nodes))) < request.nodes:
            yield f"{describe(index, request)}: {count} nodes of this Slurm satisfy its conditions"
    try:
        check_fit(requests, nodes)
    except SubmissionError as e:
        yield str(e)


def find_warnings(
    requests: Sequence[ComponentRequest], nodes: Sequence[Node], config: Config | None, limits: Mapping[str, int]
) -> Iterator[str]:
    """Yield warnings about a heterogeneous job that may never start, or may get unintended nodes.
    `config`: None if Slurm does not report it; `limits`: {name: number} of the limits on the user's jobs."""
    if len(requests) < 2:
        return
    yield from (problem for problem, _ in (config.hetjob_obstacles() if config is not None else ()))
    for key, limit in limits.items():
        if limit < len(requests):
            yield f"{key} is {limit}, and each of the {len(requests)} components counts as a job"
    for index, request in enumerate(requests):
        if not request.constraint and not request.nodelist and not _gpu_type(request):
            partition = f"partition {request.partition}" if request.partition else "the default partition"
            yield f"component {index} has no constraint: it may get any node of {partition}"
    for (i, one), (j, other) in combinations(enumerate(requests), 2):
        names = sorted(eligible_nodes(one, nodes) & eligible_nodes(other, nodes))
        if names and one.partition != other.partition:
            excerpt = ", ".join(names[:3]) + ", …" * (len(names) > 3)
            yield f"components {i} and {j} can get the same nodes ({excerpt}): partitions overlap"
