"""The programs of another Debian release, fetched by debootstrap and mounted over this machine's /usr and /etc.

It is not a chroot. A process gets a private mount namespace in which /usr/bin, /usr/lib, … and /etc are the release's.
Everything else (the checkout, home directories, /tmp, the state directory, /proc) is the machine's, at the same paths.
The mounts end with the process, so the machine's mount table stays unchanged.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import packages
from holmes_hpc.testbed.commands import Show, is_installed, run_showing, sparsely, system_env

NATIVE = "bookworm"  # stands for the machine's own Slurm, whatever its release is
RELEASES = (NATIVE, "trixie")
# Files copied from the machine's /etc into the release's: users, name resolution, certificates, Python's package index.
SHARED_FILES = ("passwd", "group", "hosts", "resolv.conf", "localtime", "ssl/certs/ca-certificates.crt", "pip.conf")
PARTS = ("lib", "lib64", "libexec", "share", "include", "sbin", "bin")  # libraries first: later `mount`s use them

CLIENTS = "sacct sacctmgr salloc sattach sbatch sbcast scancel scontrol sdiag sinfo sprio squeue sreport srun sstat"

# $0 is the release's root. /usr/local stays the machine's.
_ENTER = f'''for p in {" ".join(PARTS)}; do
  if [ -d "$0/usr/$p" ] && [ -d "/usr/$p" ]; then mount --bind "$0/usr/$p" "/usr/$p" || exit 125; fi
done
mount --bind "$0/etc" /etc || exit 125
exec "$@"'''


def enter_command(root: Path | None, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` with the programs of the release in `root`; `argv` itself if `root` is None.
    The command must run in a private mount namespace."""
    return list(argv) if root is None else ["sh", "-c", _ENTER, str(root), *argv]


def private_command(root: Path | None, argv: Sequence[str]) -> list[str]:
    """Return :func:`enter_command` in a private mount namespace; `argv` itself if `root` is None."""
    return list(argv) if root is None else ["unshare", "--mount", *enter_command(root, argv)]


def create(root: Path, release: str, mark: Mapping[str, str], progress: Show) -> None:
    """Fetch a Debian release into `root`. It takes a minute or two and half a gigabyte. `mark`: see Testbed.mark.
    Raise TestbedError if debootstrap is missing or fails, or if this machine's /bin and /lib are not below /usr."""
    is_merged = Path("/lib").is_symlink() and Path("/bin").is_symlink()
    merged_hint = "use a machine with merged /usr (Debian 12, Ubuntu 22.04 or later)"
    TestbedError.refuse(
        f"testbed --release {release}",
        (not is_merged, "/bin and /lib are not links into /usr", merged_hint),
        (not is_installed("debootstrap"), "debootstrap is not installed", "install it"),
    )
    include = f"--include={','.join(packages.TABLE['release'])}"
    argv = ["unshare", "--mount", "debootstrap", "--variant=minbase", include, release, str(root)]
    progress(f"fetching Debian {release} (half a gigabyte, a minute or two)")
    show = sparsely(lambda line: progress(line.removeprefix("I: ")), 5)
    error = run_showing(argv, system_env(mark), show, kill=True)
    if error is not None:
        hint = "check that the Debian mirror can be reached"
        raise TestbedError(f"debootstrap failed: {error}", where=f"testbed --release {release}", hint=hint)
    for name in SHARED_FILES:
        source, target = Path("/etc") / name, root / "etc" / name
        if source.exists():
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)


def write_wrappers(root: Path, folder: Path) -> None:
    """Write scripts into `folder` that run programs of the Debian release in `root`.
    Each of Slurm's client commands gets a script of its name; `in-release COMMAND` runs any program."""
    folder.mkdir(mode=0o755, exist_ok=True)
    clients = [path.name for path in (root / "usr" / "bin").iterdir() if path.name in CLIENTS.split()]
    for name in (*clients, "in-release"):
        script = folder / name
        command = '"$@"' if name == "in-release" else f'/usr/bin/{name} "$@"'
        script.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{_ENTER}' '{root}' {command}\n", encoding="utf-8")
        script.chmod(0o755)
