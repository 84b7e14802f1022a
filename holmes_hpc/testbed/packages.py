"""The Debian packages of a testbed, and their installation without starting services."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError
from holmes_hpc.tables import read_table
from holmes_hpc.testbed.commands import Show, is_installed, run_showing, succeeds, system_env

TABLE: dict[str, Any] = read_table(__file__)
_NAMES = ("nodes", "database", "munge", "debootstrap", "build")
NODES, DATABASE, MUNGE, DEBOOTSTRAP, BUILD = (TABLE[name] for name in _NAMES)
SLURM = {**MUNGE, **DATABASE, **TABLE["slurm"]}
POLICY = Path("/usr/sbin/policy-rc.d")
_BACKUP_SUFFIX = ".holmes-testbed"
_DENY = "#!/bin/sh\n# holmes testbed: no service starts while packages are installed\nexit 101\n"


def _exists(name: str) -> bool:
    """Return whether a program is installed, or for a path, whether the file exists."""
    return Path(name).exists() if name.startswith("/") else is_installed(name)


def install(programs: Mapping[str, Sequence[str]], progress: Show) -> None:
    """Install the `programs` that are missing; `down` does not remove them. `programs`: {program or file: packages}.
    `progress`: called with a line about each activity. Raise TestbedError if apt-get is missing or fails."""
    missing = [program for program in programs if not _exists(program)]
    if not missing:
        return
    if not is_installed("apt-get"):
        hint = "install them yourself, because this machine has no apt-get"
        raise TestbedError(f"missing programs: {', '.join(missing)}", where="testbed", hint=hint)

    def install_missing() -> tuple[str, str | None]:
        choices = [programs[program] for program in missing]  # the last one is the fallback
        names = sorted({next((n for n in c[:-1] if succeeds(["apt-cache", "show", n])), c[-1]) for c in choices})
        progress(f"installing {', '.join(names)}")
        return ", ".join(names), _apt(["install", "--no-install-recommends", *names], progress)

    with _services_held_back():
        names, error = install_missing()
        if error is not None:
            progress("fetching apt's package lists")
            _apt(["update"], progress)
            names, error = install_missing()
    missing = [program for program in programs if not _exists(program)]
    if error is not None or missing:
        problem = f"apt-get could not install {names}: {error or f'it has no {missing[0]}'}"
        raise TestbedError(problem, where="testbed", hint=f"install {names} yourself")


def _apt(arguments: list[str], progress: Show) -> str | None:
    """Run apt-get with `arguments`. Return None if it succeeds, else its last error."""
    env = system_env({"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"})
    env.update({key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")})

    def show(line: str) -> None:
        if line.startswith(("Setting up ", "Need to get ")):
            progress(line)

    return run_showing([*TABLE["apt"], *arguments], env, show)


@contextlib.contextmanager
def _services_held_back() -> Iterator[None]:
    """Keep packages that are installed in the block from starting services, by a temporary policy-rc.d."""
    restore_policy()
    backup = POLICY.with_name(POLICY.name + _BACKUP_SUFFIX)
    if os.path.lexists(POLICY):
        POLICY.rename(backup)
    try:
        POLICY.write_text(_DENY, encoding="utf-8")
        POLICY.chmod(0o755)
        yield
    finally:
        restore_policy()


def restore_policy() -> None:
    """Restore the machine's own policy-rc.d after `_services_held_back`, even if that block was killed earlier."""
    backup = POLICY.with_name(POLICY.name + _BACKUP_SUFFIX)
    with contextlib.suppress(OSError):
        if POLICY.is_file() and not POLICY.is_symlink() and POLICY.read_text(encoding="utf-8") == _DENY:
            POLICY.unlink()
    if os.path.lexists(backup):
        backup.rename(POLICY)
