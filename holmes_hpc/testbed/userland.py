"""Another Debian release's programs on this machine: debootstrap once, then its /usr and /etc over the machine's own.

Not a chroot proper: a process gets a mount namespace of its own in which /usr/bin, /usr/lib, … and /etc are the
release's, and everything else (the checkout, home directories, /tmp, the state directory, /proc) is the machine's,
under the same paths. The mounts go with the process, so nothing is left in the machine's mount table.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.schema import refuse
from holmes_hpc.testbed.commands import last_error, present, system_env

NATIVE = "bookworm"  # the machine's own Slurm, whatever its release is
RELEASES = (NATIVE, "trixie")
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurmdbd",
    "munge",
    "mariadb-server-core",
    "mariadb-client-core",
    "iproute2",
    "procps",
    "python3",
    "python3-venv",
    "ca-certificates",
    "g++",
    "make",
    "git",
)
# What the release's /etc must share with the machine: who users are, how names are resolved, whom the machine trusts
# and where it gets Python's packages from.
SHARED = ("passwd", "group", "hosts", "resolv.conf", "localtime", "ssl/certs/ca-certificates.crt", "pip.conf")
PARTS = ("lib", "lib64", "libexec", "share", "include", "sbin", "bin")  # libraries first: `mount` runs with newer ones

# $0 is the release's root. /usr/local stays the machine's.
_ENTER = (
    "for p in "
    + " ".join(PARTS)
    + '''; do
  if [ -d "$0/usr/$p" ] && [ -d "/usr/$p" ]; then mount --bind "$0/usr/$p" "/usr/$p" || exit 125; fi
done
mount --bind "$0/etc" /etc || exit 125
exec "$@"'''
)


def root_of(directory: Path, release: str) -> Path | None:
    """Where the release's files lie below the state directory; None for the machine's own."""
    return None if release == NATIVE else directory / release


def entering(root: Path | None, argv: Sequence[str]) -> list[str]:
    """`argv` among the release's programs; the caller's own mount namespace is changed, so it must be a private one."""
    return list(argv) if root is None else ["sh", "-c", _ENTER, str(root), *argv]


def private(root: Path | None, argv: Sequence[str]) -> list[str]:
    """`argv` among the release's programs, in a mount namespace of its own."""
    return list(argv) if root is None else ["unshare", "--mount", *entering(root, argv)]


def make(root: Path, release: str, mark: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Fetch the release: a minute or two, half a gigabyte.

    :raises TestbedError: debootstrap failed, or this machine's /bin and /lib are not below /usr.
    """
    is_merged = Path("/lib").is_symlink() and Path("/bin").is_symlink()
    merged_hint = "use a machine with merged /usr (Debian 12, Ubuntu 22.04 or later)"
    refuse(
        f"testbed --release {release}",
        (not is_merged, "/bin and /lib are not links into /usr", merged_hint),
        (not present("debootstrap"), "missing programs: debootstrap", "install it"),
        error=TestbedError,
    )
    argv = [
        "unshare",
        "--mount",
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        release,
        str(root),
    ]
    progress(f"fetching Debian {release} (half a gigabyte, a minute or two)")
    told = time.monotonic()

    def show(line: str) -> None:
        nonlocal told
        if time.monotonic() - told > 5:
            told = time.monotonic()
            progress(line.removeprefix("I: "))

    error = last_error(argv, system_env(mark), show, kill=True)
    if error is not None:
        raise TestbedError(
            f"debootstrap failed: {error}",
            where=f"testbed --release {release}",
            hint="see that the Debian mirror can be reached",
        )
    for name in SHARED:
        source, target = Path("/etc") / name, root / "etc" / name
        if source.exists():
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)


def write_wrappers(root: Path, folder: Path) -> None:
    """Slurm's client commands under their own names, and `in-release COMMAND`, as scripts in `folder`."""
    folder.mkdir(mode=0o755, exist_ok=True)
    clients = [path.name for path in (root / "usr" / "bin").iterdir() if path.name in CLIENTS]
    for name in (*clients, "in-release"):
        script = folder / name
        call = "" if name == "in-release" else f"/usr/bin/{name} "
        script.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{_ENTER}' '{root}' {call}\"$@\"\n", encoding="utf-8")
        script.chmod(0o755)


CLIENTS = frozenset(
    (
        "sacct",
        "sacctmgr",
        "salloc",
        "sattach",
        "sbatch",
        "sbcast",
        "scancel",
        "scontrol",
        "sdiag",
        "sinfo",
        "sprio",
        "squeue",
        "sreport",
        "srun",
        "sstat",
    )
)
