"""What the site's accounting (sacctmgr) allows a user."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass

from holmes_hpc.slurm.commands import patient

_OF_USER = ("MaxJobs", "MaxSubmit", "GrpJobs", "GrpSubmit")
_OF_QOS = ("MaxJobsPU", "MaxJobsPA", "GrpJobs", "MaxSubmitPU", "MaxSubmitPA", "GrpSubmit")


@dataclass(frozen=True)
class Qos:
    """Limits on numbers of jobs, by QOS (name -> limit -> number); `default`: the user's own QOS, empty where none is
    set."""

    limits: dict[str, dict[str, int]]
    default: str = ""

    def fewest(self, name: str) -> tuple[str, int] | None:
        """The tightest limit of a QOS."""
        return min(self.limits.get(name, {}).items(), key=lambda pair: pair[1], default=None)


def read_job_limits() -> dict[str, int]:
    """Limits on the number of this user's jobs, where the site's accounting sets any."""
    least: dict[str, int] = {}
    for row in _shown("association", *_OF_USER):
        least |= {name: min(limit, least.get(name, limit)) for name, limit in _numbers(_OF_USER, row).items()}
    return least


def read_qos() -> Qos:
    """The site's QOS as far as they limit numbers of jobs; nothing where the accounting does not answer."""
    limits = {name: _numbers(_OF_QOS, texts) for name, *texts in _shown("qos", "Name", *_OF_QOS)}
    return Qos(limits, next((row[0] for row in _shown("association", "DefaultQOS") if row[0]), ""))


def _shown(what: str, *fields: str) -> list[list[str]]:
    """Return what sacctmgr shows of all QOS or this user's associations; nothing where it does not answer at once."""
    of_user = ["where", f"user={getpass.getuser()}"] if what == "association" else []
    words = ["sacctmgr", "--noheader", "--parsable2", "show", what, *of_user, f"format={','.join(fields)}"]
    answer = patient(words, patience_s=0, timeout_s=10)
    return [line.split("|") for line in answer.out.splitlines()] if answer.ok else []


def _numbers(names: Sequence[str], texts: Sequence[str]) -> dict[str, int]:
    """Return the limits that are set, by name."""
    return {name: int(text) for name, text in zip(names, texts, strict=False) if text.isdecimal()}
