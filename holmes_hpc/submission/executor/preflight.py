"""Before sbatch: is each component possible, and do they fit together? Asked of each alone, with ``--test-only``.

An infeasible component never reaches a controller as part of a heterogeneous job: before Slurm 24.11 that can crash it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holmes_hpc.errors import SiteError, SubmissionError, nearest
from holmes_hpc.slurm.accounting import Qos, read_job_limits, read_qos
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.scontrol import Config, Node, Partition, read_config, read_nodes, read_partitions
from holmes_hpc.submission.executor.component import ComponentRequest, with_options
from holmes_hpc.submission.executor.fit import beyond_limit, beyond_qos, check_fit, warnings

CACHE_S = 300
_cache: dict[tuple[str, ...], tuple[float, Feasibility]] = {}
_facts: dict[str, tuple[float, Any]] = {}
_said: set[str] = set()
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Feasibility:
    """What ``sbatch --test-only`` said. `start`: when it could start, as Slurm writes it (local time)."""

    ok: bool
    reason: str
    start: str = ""
    nodes: str = ""


_STARTS = re.compile(r"[Jj]ob \d+ to start at (\S+)(?: a)? using (\d+) processors on (?:nodes )?(\S+)")


def parse_answer(code: int, err: str, reason: str = "") -> Feasibility:
    """Read the answer of ``sbatch --test-only`` (it comes on stderr)."""
    match = _STARTS.search(err)
    if code == 0 and match:
        return Feasibility(True, "", match.group(1), match.group(3))
    return Feasibility(code == 0, reason if code else "")


def try_component(request: ComponentRequest, *, timeout_min: object = None, use_cache: bool = True) -> Feasibility:
    """Ask Slurm about one component as a job of its own; the answer for an identical one is kept for five minutes.
    SubmissionError: there is no answer."""
    arguments = request.arguments()
    if timeout_min is not None:
        arguments.append(f"--time={timeout_min}")
    key = tuple(arguments)
    known = _cache.get(key)
    if use_cache and known and time.monotonic() - known[0] < CACHE_S:
        return known[1]
    answer = patient(["sbatch", "--test-only", *arguments, "--wrap=:"])
    if answer.away:  # says nothing about the component
        raise SubmissionError(
            answer.reason,
            where="sbatch --test-only",
            hint="wait until the controller answers (`scontrol ping`), then submit again",
        )
    found = _cache[key] = (time.monotonic(), parse_answer(answer.code, answer.err, answer.reason))
    return found[1]


def check_components(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError for the first component that cannot be, with Slurm's reason and what could be instead."""
    for index, request in enumerate(requests):
        found = try_component(request, timeout_min=timeout_min)
        if not found.ok:
            raise SubmissionError(
                found.reason or "Slurm refuses it",
                where=f"component {index} ({in_words(request)})",
                hint=feasible_instead(request, timeout_min=timeout_min),
            )
        beyond = beyond_limit(request, timeout_min, _partitions())
        if beyond:
            raise SubmissionError(
                beyond,
                where=f"component {index} ({in_words(request)})",
                hint="shorten it, or name a QOS that allows more",
            )
    if len(requests) > 1:
        check_fit(requests, _nodes())
        config: Config | None = _kept("config", read_config)
        why = None
        if config is not None and config.limits_enforced:
            why = beyond_qos(requests, _partitions(), _kept("qos", read_qos) or Qos({}))
        if why:
            raise SubmissionError(why, where="job", hint="it would wait for ever: use another QOS, or fewer components")


def preflight(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> list[str]:
    """Raise SubmissionError for what cannot be; warnings about what may go wrong come back, one line each."""
    check_components(requests, timeout_min=timeout_min)
    if len(requests) < 2:
        return []
    config: Config | None = _kept("config", read_config)
    return warnings(requests, _nodes(), config, _kept("job limits", read_job_limits) or {})


def preflight_aloud(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """As :func:`preflight`; each warning is logged, once in this process."""
    for line in preflight(requests, timeout_min=timeout_min):
        if line not in _said:
            _said.add(line)
            log.warning(f"holmes: warning: {line}")


def _kept(what: str, read: Callable[[], Any]) -> Any:
    """A fact about the site, kept as long as the tests of components; None where Slurm does not tell it."""
    known = _facts.get(what)
    if known is None or time.monotonic() - known[0] > CACHE_S:
        fact = None
        with contextlib.suppress(SiteError, SubmissionError):
            fact = read()
        known = _facts[what] = (time.monotonic(), fact)
    return known[1]


def _nodes() -> list[Node]:
    return _kept("nodes", read_nodes) or []


def _partitions() -> list[Partition]:
    return _kept("partitions", read_partitions) or []


def forget() -> None:
    """Ask Slurm anew from here on."""
    _cache.clear()
    _facts.clear()
    _said.clear()


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
        if getattr(request, key) is not None and works(with_options(one, **{key: None})):
            own = " (slurm.share=false leaves it to Slurm)" if key in ("mem", "cpus_per_task") else ""
            return f"it would be possible without {key}={getattr(request, key)}{own}"
    return "look at `sinfo -o '%P %a %l %D %t %f %G'`"
