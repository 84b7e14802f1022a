"""A Slurm that lies elsewhere than Debian's packages put theirs: below the prefix that its `make install` filled."""

from __future__ import annotations

import re
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed.commands import run
from holmes_hpc.testbed.slurmconf import MUNGE, SLURM

OLDEST, NEWEST = (22, 5), (26, 5)  # the releases that this project was tried with, and their likes between
RANGE = "22.05 to 26.05"
PROGRAMS = (
    "sbin/slurmctld",
    "sbin/slurmd",
    "sbin/slurmdbd",
    "bin/srun",
    "bin/sbatch",
    "bin/sinfo",
    "bin/sacct",
    "bin/sacctmgr",
    "bin/scontrol",
    "bin/squeue",
    "bin/scancel",
)
# From here on one munged takes a launch's credential for a replay when a second node's slurmd shows it, unless Slurm
# was configured with --enable-multiple-slurmd (Debian's is); and from here on commands can be told where auth/slurm's
# socket is.
DISTRUSTS = (25, 5)


def path_of(prefix: Path) -> str:
    """The folders of its programs, as PATH has them."""
    return f"{prefix}/bin:{prefix}/sbin"


def release_of(version: str) -> tuple[int, int]:
    """(22, 5) of ``slurm-wlm 22.05.8``; (0, 0) where it says none."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check(prefix: Path) -> str:
    """Its version (``slurm 26.05.3``). TestbedError for a folder without Slurm, or with one out of range."""
    lacking = [name for name in PROGRAMS if not (prefix / name).is_file()]
    if lacking:
        raise TestbedError(
            f"holds no {lacking[0]}",
            where=f"--slurm {prefix}",
            hint="give the folder that Slurm was configured with as --prefix, after its `make install`",
        )
    version = run([str(prefix / "sbin/slurmd"), "-V"]).strip()
    if not OLDEST <= release_of(version) <= NEWEST:
        raise TestbedError(f"is {version}", where=f"--slurm {prefix}", hint=f"give a Slurm of {RANGE}")
    return version


def auth_of(prefix: Path, version: str) -> str:
    """By what the daemons of this Slurm trust each other. TestbedError where it has nothing that would do."""
    built = {path.stem for path in prefix.glob("lib*/**/auth_*.so")}
    if release_of(version) >= DISTRUSTS and "auth_slurm" in built:
        return SLURM
    if "auth_munge" in built:
        return MUNGE
    raise TestbedError(
        f"{version} was built without auth/slurm and without auth/munge",
        where=f"--slurm {prefix}",
        hint="install libjwt-dev (or libmunge-dev), configure it again and build it",
    )
