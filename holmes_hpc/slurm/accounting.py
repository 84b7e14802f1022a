"""The limits and the associations that the site's accounting (sacctmgr) has for a user."""

import contextlib
import getpass
from collections.abc import Sequence
from dataclasses import dataclass

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import slurm_with_retries

_USER_LIMITS = ("MaxJobs", "MaxSubmit", "GrpJobs", "GrpSubmit")
_QOS_LIMITS = ("MaxJobsPU", "MaxJobsPA", "GrpJobs", "MaxSubmitPU", "MaxSubmitPA", "GrpSubmit")


@dataclass(frozen=True)
class Qos:
    """The limits on numbers of jobs, {QOS: {name of the limit: number}}, and the user's default QOS, or ""."""

    limits: dict[str, dict[str, int]]
    default: str = ""


@dataclass(frozen=True)
class Association:
    """An account that this user may charge. `accounts`: the account, then its parents if known; `qos`: the QOS that its
    jobs may use, the default first; `partition`: the only partition to which it applies; empty: all partitions."""

    accounts: tuple[str, ...]
    qos: tuple[str, ...] = ()
    partition: str = ""


def read_associations() -> tuple[Association, ...]:
    """Return this user's associations, from Slurm 23.11 on with parent accounts; empty without an answer."""
    fields = ("Account", "QOS", "DefaultQOS", "Partition")
    rows = _show("association", *fields, "Lineage") or _show("association", *fields)
    associations = []
    for account, qos, default, partition, *lineage in rows:
        accounts = dict.fromkeys((account, *filter(None, "".join(lineage).split("/"))))
        names = dict.fromkeys(filter(None, (default, *qos.split(","))))
        associations.append(Association(tuple(accounts), tuple(names), partition))
    return tuple(associations)


def read_job_limits() -> dict[str, int]:
    """Return {name: number} of the limits on this user's jobs; empty if the accounting does not answer."""
    limits: dict[str, int] = {}
    for row in _show("association", *_USER_LIMITS):
        limits |= {name: min(limit, limits.get(name, limit)) for name, limit in _numbers(_USER_LIMITS, row).items()}
    return limits


def read_qos() -> Qos:
    """Return the site's QOS with their limits on numbers of jobs; empty if the accounting does not answer."""
    limits = {name: _numbers(_QOS_LIMITS, texts) for name, *texts in _show("qos", "Name", *_QOS_LIMITS)}
    return Qos(limits, next((row[0] for row in _show("association", "DefaultQOS") if row[0]), ""))


def _show(entity: str, *fields: str) -> list[list[str]]:
    """Return sacctmgr's rows for all QOS or for this user's associations; empty if sacctmgr fails or takes too long."""
    with contextlib.suppress(SubmissionError, KeyError, OSError):  # no sacctmgr, or a user without a name
        user_filter = ["where", f"user={getpass.getuser()}"] if entity == "association" else []
        command = ["sacctmgr", "--noheader", "--parsable2", "show", entity, *user_filter, f"format={','.join(fields)}"]
        answer = slurm_with_retries(command, patience_s=0, timeout_s=10)
        if answer.ok:
            return [row for line in answer.out.splitlines() if len(row := line.split("|")) == len(fields)]
    return []


def _numbers(names: Sequence[str], texts: Sequence[str]) -> dict[str, int]:
    """Return {name: number} of the limits that are set. `texts`: sacctmgr's cells, in the order of `names`."""
    return {name: int(text) for name, text in zip(names, texts, strict=False) if text.isdecimal()}
