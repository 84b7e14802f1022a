"""A Slurm installed by `make install` below a prefix, instead of Debian's packages.

This module can also build Slurm from its source, a folder or a tarball. Later testbeds reuse the build.
"""

import hashlib
import os
import re
import shutil
import tarfile
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import packages
from holmes_hpc.testbed.commands import Show, run, run_showing, sparsely, system_env
from holmes_hpc.testbed.record import locked
from holmes_hpc.testbed.slurmconf import MUNGE, SLURM

OLDEST, NEWEST = (22, 5), (26, 5)  # the range of tested releases
RANGE = "22.05 to 26.05"
_CLIENTS = ("srun", "sbatch", "sinfo", "sacct", "sacctmgr", "scontrol", "squeue", "scancel")
PROGRAMS = ("sbin/slurmctld", "sbin/slurmd", "sbin/slurmdbd", *(f"bin/{name}" for name in _CLIENTS))
# The first release for which the testbed prefers auth/slurm. All nodes share one munged. From this release on, the
# second node rejects a launch's munge credential as a replay, unless Slurm was built with --enable-multiple-slurmd, as
# Debian's is. It is also the first release whose commands accept another path for auth/slurm's socket.
AUTH_SLURM_SINCE = (25, 5)


def program_path(prefix: Path) -> str:
    """Return the folders with the programs of the Slurm at `prefix`, as part of PATH."""
    return f"{prefix}/bin:{prefix}/sbin"


def parse_release(version: str) -> tuple[int, int]:
    """Return (22, 5) for ``slurm-wlm 22.05.8``; (0, 0) if there is no number."""
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_prefix(prefix: Path) -> str:
    """Return the version (``slurm 26.05.3``) of the Slurm at `prefix`.
    Raise TestbedError if there is none, or if its release is not tested."""
    missing = [name for name in PROGRAMS if not (prefix / name).is_file()]
    if missing:
        hint = "give the directory that Slurm's `./configure --prefix` named, after `make install`"
        raise TestbedError(f"contains no {missing[0]}", where=f"--slurm {prefix}", hint=hint)
    version = run([str(prefix / "sbin/slurmd"), "-V"]).strip()
    if not OLDEST <= parse_release(version) <= NEWEST:
        raise TestbedError(f"this is {version}", where=f"--slurm {prefix}", hint=f"give a Slurm of {RANGE}")
    return version


def auth_plugin(prefix: Path, version: str) -> str:
    """Return the auth plugin for the daemons of this Slurm, munge or slurm. Raise TestbedError if it has neither."""
    plugins = {path.stem for path in prefix.glob("lib*/**/auth_*.so")}
    if parse_release(version) >= AUTH_SLURM_SINCE and "auth_slurm" in plugins:
        return SLURM
    if "auth_munge" in plugins:
        return MUNGE
    problem = f"{version} was built without auth/slurm and without auth/munge"
    hint = "install libjwt-dev (or libmunge-dev), configure it again and build it"
    raise TestbedError(problem, where=f"--slurm {prefix}", hint=hint)


# Options of configure. The first lets one munged serve the daemons of several nodes; the others omit unused parts.
OPTIONS = ("--enable-multiple-slurmd", "--disable-debug", "--disable-x11", "--disable-slurmrestd")
FLAGS = "-O1 -g0 -pipe"
PROGRESS_S = 8  # between two progress lines
MARKER = "built"  # file that shows a complete build


def cache_folder() -> Path:
    """Return the folder of all builds: ``holmes/slurm`` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holmes" / "slurm"


def build(source: Path, progress: Show) -> Path:
    """Build Slurm from `source`, a folder or a tarball, unless an earlier build is in the cache. Return its prefix. A
    build takes some minutes on all cores, and 200 MB. Raise TestbedError, with the log's last line, if it fails."""
    source = source.absolute()
    if not source.exists():
        raise TestbedError("does not exist", where=f"--slurm-source {source}", hint="give a folder or a tarball")
    folder = cache_folder() / _digest(source)
    with locked(folder, create=True):
        if not (folder / MARKER).exists():
            _build(source, folder, progress)
    return folder / "slurm"


def _build(source: Path, folder: Path, progress: Show) -> None:
    """Build Slurm from `source`, install it into slurm/ in `folder`, and finally create the file MARKER."""
    unpacked, work, prefix, log = folder / "source", folder / "build", folder / "slurm", folder / "build.log"
    for leftover in (unpacked, work, prefix):
        shutil.rmtree(leftover, ignore_errors=True)
    configure = _unpack(source, unpacked) / "configure"
    packages.install(packages.BUILD, progress)
    work.mkdir()
    show_progress = sparsely(lambda line: progress(f"building Slurm: {line[:80]}"), PROGRESS_S)
    steps = {
        "configure": [str(configure), f"--prefix={prefix}", f"--sysconfdir={prefix}/etc", *OPTIONS, f"CFLAGS={FLAGS}"],
        "make": ["make", f"-j{len(os.sched_getaffinity(0))}"],
        "make install": ["make", "install"],
    }
    with log.open("w", encoding="utf-8") as out:

        def show(line: str) -> None:
            out.write(f"{line}\n")
            show_progress(line)

        for name, argv in steps.items():
            if (error := run_showing(argv, system_env(), show, kill=True, cwd=work)) is not None:
                where = f"--slurm-source {source}"
                raise TestbedError(f"{name} failed: {error or 'no output'}", where=where, hint=f"see {log}")
    shutil.rmtree(work)
    shutil.rmtree(unpacked, ignore_errors=True)
    (folder / MARKER).touch()


def _digest(source: Path) -> str:
    """Return a hash of the names and contents of the source's files."""
    digest = hashlib.sha256()
    paths = [source] if source.is_file() else sorted(source.rglob("*"))
    for path in (p for p in paths if p.is_file() and ".git" not in p.parts):
        digest.update(str(path.relative_to(source)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _unpack(source: Path, target: Path) -> Path:
    """Return the folder of Slurm's source, unpacked into `target` from a tarball. Raise TestbedError without one."""
    where = f"--slurm-source {source}"
    tree = source
    if source.is_file():
        hint = "give slurm-VERSION.tar.bz2 or .tar.gz"
        refused = TestbedError.instead_of(tarfile.TarError, OSError, where=where, hint=hint, what="not a tarball:")
        with refused, tarfile.open(source) as archive:
            archive.extractall(target, filter="data")
        tree = next((path.parent for path in sorted(target.glob("*/configure"))), target)
    if not (tree / "configure").is_file() or not (tree / "META").is_file():
        hint = "give the folder, or the tarball, of a release of Slurm's source"
        raise TestbedError("contains no Slurm (configure, META)", where=where, hint=hint)
    return tree
