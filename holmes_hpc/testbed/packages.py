"""The Debian packages a testbed needs: what is missing, and installing it with its services kept from starting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed.commands import last_error, present, succeeds, system_env

# program -> packages that bring it, the first that apt knows is taken
NODES = {
    "ip": ("iproute2",),
    "tc": ("iproute2",),
    "unshare": ("util-linux",),
    "mount": ("mount",),
    "hostname": ("hostname",),
}
DATABASE = {
    "mariadbd": ("mariadb-server-core", "mariadb-server"),
    "mariadb-install-db": ("mariadb-server-core", "mariadb-server"),
    "my_print_defaults": ("mariadb-client-core", "mariadb-client"),  # mariadb-install-db calls it
}
MUNGE = {"munged": ("munge",)}
SLURM = {
    **MUNGE,
    **DATABASE,
    "slurmdbd": ("slurmdbd",),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "srun": ("slurm-client",),
    "sbatch": ("slurm-client",),
    "sinfo": ("slurm-client",),
    "sacct": ("slurm-client",),
}
POLICY = Path("/usr/sbin/policy-rc.d")
_ASIDE = ".holmes-testbed"
_DENY = "#!/bin/sh\n# holmes testbed: no service starts while packages are installed\nexit 101\n"


DEBOOTSTRAP = {"debootstrap": ("debootstrap",)}
BUILD = {
    "gcc": ("gcc",),
    "make": ("make",),
    "pkg-config": ("pkgconf", "pkg-config"),
    "mariadb_config": ("libmariadb-dev",),
    "/usr/include/json-c/json.h": ("libjson-c-dev",),
    "/usr/include/jwt.h": ("libjwt-dev",),
    "/usr/include/munge.h": ("libmunge-dev",),
    "/usr/include/http_parser.h": ("libhttp-parser-dev",),
}


def _there(name: str) -> bool:
    """Whether a program is installed; of a path, whether that file is."""
    return Path(name).exists() if name.startswith("/") else present(name)


def _package(choices: Sequence[str]) -> str:
    *earlier, last = choices
    return next((name for name in earlier if succeeds(["apt-cache", "show", name])), last)


def install(programs: Mapping[str, Sequence[str]], progress: Callable[[str], None]) -> None:
    """Install what is missing of `programs` (or files; with the packages that bring them); packages stay when the
    testbed goes.

    :raises TestbedError: no apt, or apt failed; the line names the programs that are missing.
    """
    lacking = [program for program in programs if not _there(program)]
    if not lacking:
        return
    if not present("apt-get"):
        raise TestbedError(
            f"missing programs: {', '.join(lacking)}",
            where="testbed",
            hint="install Slurm, munge and MariaDB (this machine has no apt-get to do it)",
        )
    with _no_services():
        names = sorted({_package(programs[program]) for program in lacking})
        progress(f"installing {', '.join(names)}")
        said = _apt(["install", "--no-install-recommends", *names], progress)
        if said is not None:
            progress("fetching apt's package lists")
            _apt(["update"], progress)
            names = sorted({_package(programs[program]) for program in lacking})
            said = _apt(["install", "--no-install-recommends", *names], progress)
    lacking = [program for program in programs if not _there(program)]
    if said is not None or lacking:
        raise TestbedError(
            f"apt-get could not install {', '.join(names)}: {said or 'programs still missing'}",
            where="testbed",
            hint=f"install {', '.join(names)} by hand",
        )


def _apt(arguments: list[str], progress: Callable[[str], None]) -> str | None:
    """None when it worked, else its last error."""
    argv = [
        "apt-get",
        "-q",
        "-y",
        "-o",
        "Dpkg::Use-Pty=0",
        "-o",
        "DPkg::Lock::Timeout=300",
        "-o",
        "Dpkg::Options::=--force-confdef",
        "-o",
        "Dpkg::Options::=--force-confold",
        *arguments,
    ]
    env = system_env({"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"})
    env.update({key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")})

    def show(line: str) -> None:
        if line.startswith(("Setting up ", "Need to get ")):
            progress(line)

    return last_error(argv, env, show)


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """A policy-rc.d that keeps services from starting; the machine's own is put aside and back."""
    restore_policy()
    aside = POLICY.with_name(POLICY.name + _ASIDE)
    if os.path.lexists(POLICY):
        POLICY.rename(aside)
    try:
        POLICY.write_text(_DENY, encoding="utf-8")
        POLICY.chmod(0o755)
        yield
    finally:
        restore_policy()


def restore_policy() -> None:
    """Undo `_no_services`, also that of a killed `up`; harmless when there is nothing to undo."""
    aside = POLICY.with_name(POLICY.name + _ASIDE)
    with contextlib.suppress(OSError):
        if POLICY.is_file() and not POLICY.is_symlink() and POLICY.read_text(encoding="utf-8") == _DENY:
            POLICY.unlink()
    if os.path.lexists(aside):
        aside.rename(POLICY)
