"""What the site's accounting (sacctmgr) allows a user."""

from __future__ import annotations

import getpass

from holmes_hpc.slurm.commands import patient


def read_job_limits() -> dict[str, int]:
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
