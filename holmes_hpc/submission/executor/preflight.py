"""Before sbatch: is each component possible, and do they fit together? Asked of each alone, with ``--test-only``.

An infeasible component never reaches a controller as part of a heterogeneous job: before Slurm 24.11 that can crash it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from holmes_hpc.errors import SiteError, SubmissionError, nearest
from holmes_hpc.slurm.accounting import Qos, read_job_limits, read_qos
from holmes_hpc.slurm.commands import patient
from holmes_hpc.slurm.scontrol import Config, Node, Partition, read_config, read_nodes, read_partitions
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.fit import beyond_limit, beyond_qos, check_fit, warnings

CACHE_S = 300
_answers: dict[object, tuple[float, Any]] = {}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Feasibility:
    """What ``sbatch --test-only`` said. `start`: when it could start, as Slurm writes it (local time)."""

    ok: bool
    reason: str
    start: str = ""


_STARTS = re.compile(r"[Jj]ob \d+ to start at (\S+)(?: a)? using ")


def parse_answer(code: int, err: str, reason: str = "") -> Feasibility:
    """Read the answer of ``sbatch --test-only`` (it comes on stderr)."""
    match = _STARTS.search(err)
    if code == 0 and match:
        return Feasibility(True, "", match.group(1))
    return Feasibility(code == 0, reason if code else "")


def try_component(request: ComponentRequest, *, timeout_min: object = None) -> Feasibility:
    """Ask Slurm about one component as a job of its own; the answer for an identical one is kept for five minutes.
    SubmissionError: there is no answer."""
    arguments = request.arguments()
    if timeout_min is not None:
        arguments.append(f"--time={timeout_min}")
    return _kept(tuple(arguments), lambda: _ask(arguments))


def _ask(arguments: Sequence[str]) -> Feasibility:
    answer = patient(["sbatch", "--test-only", *arguments, "--wrap=:"])
    if answer.away:  # says nothing about the component
        raise SubmissionError(
            answer.reason,
            where="sbatch --test-only",
            hint="wait until the controller answers (`scontrol ping`), then submit again",
        )
    return parse_answer(answer.code, answer.err, answer.reason)


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
        config: Config | None = _fact("config", read_config)
        is_limited = config is not None and config.limits_enforced
        why = beyond_qos(requests, _partitions(), _fact("qos", read_qos) or Qos({})) if is_limited else None
        if why:
            raise SubmissionError(why, where="job", hint="it would wait for ever: use another QOS, or fewer components")


def preflight(requests: Sequence[ComponentRequest], *, timeout_min: object = None) -> None:
    """Raise SubmissionError for what cannot be; log, once in this process, what may go wrong."""
    check_components(requests, timeout_min=timeout_min)
    if len(requests) > 1:
        config: Config | None = _fact("config", read_config)
        for line in warnings(requests, _nodes(), config, _fact("job limits", read_job_limits) or {}):
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
    one, unset = replace(request, nodes=1), cast(Any, None)
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
        if getattr(request, key) is not None and works(replace(one, **{key: unset})):
            own = " (slurm.share=false leaves it to Slurm)" if key in ("mem", "cpus_per_task") else ""
            return f"it would be possible without {key}={getattr(request, key)}{own}"
    return "look at `sinfo -o '%P %a %l %D %t %f %G'`"
