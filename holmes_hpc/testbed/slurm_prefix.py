"""A Slurm that lies elsewhere than Debian's packages put theirs: below the prefix that its `make install` filled.

It may be built here from its public source, a folder or a tarball, into a folder that later testbeds find again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import packages
from holmes_hpc.testbed.commands import run, system_env
from holmes_hpc.testbed.record import locked
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


# --- building one ----------------------------------------------------------------------------------------------------

# One munged may then serve the daemons of several nodes; what a testbed has no use for is left out.
OPTIONS = ("--enable-multiple-slurmd", "--disable-debug", "--disable-x11", "--disable-slurmrestd")
FLAGS = "-O1 -g0 -pipe"
TELL_S = 8
DONE = "built"  # lies in a prefix whose build went to its end


def cache() -> Path:
    """Where what was built lies: below $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holmes" / "slurm"


def built(source: Path, progress: Callable[[str], None]) -> Path:
    """The prefix of `source`, built now or before. Some minutes of all cores, 200 MB.

    :param source: Slurm's source, unpacked or as a tarball.
    :raises TestbedError: no source, or it does not build: the last line of its log, and where the rest is.
    """
    source = source.absolute()
    if not source.exists():
        raise TestbedError("does not exist", where=f"--slurm-source {source}", hint="give a folder or a tarball")
    place = cache() / _digest(source)
    with locked(place, create=True):
        if not (place / DONE).exists():
            _build(source, place, progress)
    return place / "slurm"


def _build(source: Path, place: Path, progress: Callable[[str], None]) -> None:
    unpacked, work, prefix, log = place / "source", place / "build", place / "slurm", place / "build.log"
    for half_made in (unpacked, work, prefix):
        shutil.rmtree(half_made, ignore_errors=True)
    tree = _unpacked(source, unpacked)
    packages.install(packages.BUILD, progress)
    work.mkdir()
    with log.open("wb") as out:
        for argv in (
            [str(tree / "configure"), f"--prefix={prefix}", f"--sysconfdir={prefix}/etc", *OPTIONS, f"CFLAGS={FLAGS}"],
            ["make", f"-j{len(os.sched_getaffinity(0))}"],
            ["make", "install"],
        ):
            _step(argv, work, out=out.fileno(), log=log, where=f"--slurm-source {source}", progress=progress)
    shutil.rmtree(work)
    shutil.rmtree(unpacked, ignore_errors=True)
    (place / DONE).touch()


def _digest(source: Path) -> str:
    """Names what would be built: the same for the same files."""
    found = hashlib.sha256()
    inside = [source] if source.is_file() else sorted(source.rglob("*"))
    for path in (p for p in inside if p.is_file() and ".git" not in p.parts):
        found.update(str(path.relative_to(source)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _unpacked(source: Path, into: Path) -> Path:
    """The folder with `configure`."""
    where = f"--slurm-source {source}"
    tree = source
    if source.is_file():
        try:
            with tarfile.open(source) as archive:
                archive.extractall(into, filter="data")
        except (tarfile.TarError, OSError) as e:
            raise TestbedError(f"no tarball: {e}", where=where, hint="give slurm-VERSION.tar.bz2 or .tar.gz") from None
        tree = next((path.parent for path in sorted(into.glob("*/configure"))), into)
    if not (tree / "configure").is_file() or not (tree / "META").is_file():
        raise TestbedError(
            "holds no Slurm (configure, META)",
            where=where,
            hint="give the folder, or the tarball, of a release of Slurm's source",
        )
    return tree


def _step(argv: Sequence[str], work: Path, out: int, log: Path, where: str, progress: Callable[[str], None]) -> None:
    began, name = time.monotonic(), Path(argv[0]).name + "".join(f" {word}" for word in argv[1:] if word == "install")
    with subprocess.Popen(
        argv, cwd=work, env=system_env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    ) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TELL_S)
                    break
                progress(f"building Slurm: {name}, {time.monotonic() - began:.0f} s: {_last(log)[:80]}")
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    if process.returncode:
        raise TestbedError(f"{name} failed: {_last(log)}", where=where, hint=f"the rest is in {log}")


def _last(log: Path) -> str:
    """The last line of a log that may be long."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
