"""What the site's accounting (sacctmgr) allows a user."""

from __future__ import annotations

import getpass
from dataclasses import dataclass

from holmes_hpc.slurm.commands import patient

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
    names = ("MaxJobs", "MaxSubmit", "GrpJobs", "GrpSubmit")
    answer = patient(
        [
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            "association",
            "where",
            f"user={getpass.getuser()}",
            "format=" + ",".join(names),
        ],
        patience_s=0,
        timeout_s=10,
    )
    least: dict[str, int] = {}
    for line in answer.out.splitlines() if answer.ok else ():
        for name, text in zip(names, line.split("|"), strict=False):
            if text.isdecimal():
                least[name] = min(int(text), least.get(name, int(text)))
    return least


def read_qos() -> Qos:
    """The site's QOS as far as they limit numbers of jobs; nothing where the accounting does not answer."""

    def rows(*words: str) -> list[list[str]]:
        answer = patient(["sacctmgr", "--noheader", "--parsable2", "show", *words], patience_s=0, timeout_s=10)
        return [line.split("|") for line in answer.out.splitlines()] if answer.ok else []

    limits = {
        name: {key: int(text) for key, text in zip(_OF_QOS, texts, strict=False) if text.isdecimal()}
        for name, *texts in rows("qos", "format=" + ",".join(("Name", *_OF_QOS)))
    }
    own = [row[0] for row in rows("association", "where", f"user={getpass.getuser()}", "format=DefaultQOS") if row[0]]
    return Qos(limits, own[0] if own else "")
