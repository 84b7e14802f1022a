"""The daemons of a testbed: how each is started, and how one knows that it answers."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import slurm_prefix, slurmconf, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH, run, system_env
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.processes import MARK, SERVERS
from holmes_hpc.testbed.record import write_private
from holmes_hpc.testbed.slurmconf import Places

# In a node: $0 is its name, $1 its hosts file; a hostname and an /etc/hosts of its own, then the command. By then
# `ip netns exec` has made a private mount namespace, with a /sys that shows this namespace's NICs.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
# auth/slurm's sockets have fixed places below /run ($0), which a testbed covers with a folder of its own ($1) for its
# daemons and their jobs, so that it meets no other Slurm's.
COVER = 'mkdir -p "$0" "$1" && mount --bind "$1" "$0" && shift && exec "$@"'


TELL_S = 5.0  # between two lines about a daemon that is waited for


@dataclass(frozen=True)
class Bed:
    """One testbed: its files, its network, its ports."""

    places: Places
    wiring: Wiring
    ports: dict[str, int]
    password: str
    userland: Path | None = None  # the root of another release's programs; None: the machine's own
    prefix: Path | None = None  # where Slurm was installed by its `make install`; None: among the other programs
    auth: str = slurmconf.MUNGE

    @property
    def mark(self) -> dict[str, str]:
        """By this, what the testbed starts is found again."""
        return {MARK: str(self.places.root)}

    def env(self, daemon: str = "slurmctld") -> dict[str, str]:
        """What Slurm's commands need to speak to this testbed, with the credentials of auth/slurm asked of `daemon`."""
        made = {"SLURM_CONF": str(self.places.slurm_conf)}
        if self.prefix is not None:
            made["PATH"] = f"{slurm_prefix.path_of(self.prefix)}:{SYSTEM_PATH}"
        if self.auth == slurmconf.SLURM:
            made["SLURM_SACK_SOCKET"] = str(self.places.sack(daemon) / "sack.socket")
        return made

    @property
    def servers(self) -> tuple[str, ...]:
        """The daemons beside the nodes' own, in the order in which they need each other."""
        return tuple(name for name in SERVERS if name != "munged" or self.auth == slurmconf.MUNGE)

    def slurm(self, argv: Sequence[str], timeout_s: float = 30, by: str = "slurmctld") -> str:
        """The output of one of Slurm's commands. `by`: see :meth:`env`."""
        return run(userland.private(self.userland, argv), env=self.env(by), timeout_s=timeout_s)


def within(bed: Bed, node: str, argv: Sequence[str]) -> list[str]:
    """`argv` as it runs on a node."""
    inner = ["sh", "-c", ENTER, node, str(bed.places.hosts), *_covered(bed, "slurm", node, argv)]
    return [
        "ip",
        "netns",
        "exec",
        bed.wiring.namespace(node),
        "unshare",
        "--uts",
        *userland.entering(bed.userland, inner),
    ]


def _covered(bed: Bed, name: str, daemon: str, argv: Sequence[str]) -> list[str]:
    """`argv` with /run/`name` being a folder of the testbed, where auth/slurm is used: in a private mount namespace."""
    if bed.auth == slurmconf.MUNGE:
        return list(argv)
    return ["sh", "-c", COVER, f"/run/{name}", str(bed.places.sack(daemon)), *argv]


def cgroup_plugin(version: str) -> str:
    """The plugin for a Slurm that is to leave control groups alone. `version` as in ``slurm-wlm 22.05.8``.

    A node sees a /sys of its own, without control groups, whatever the machine mounts. Older Slurms know `disabled` but
    do not start with it, nor with `cgroup/v2`; their v1 plugin touches nothing until something else asks it to.
    """
    return "disabled" if slurm_prefix.release_of(version) >= (23, 11) else "cgroup/v1"


def write_files(bed: Bed) -> None:
    """Configuration, keys and folders."""
    places = bed.places
    plugin = cgroup_plugin(bed.slurm(["slurmd", "-V"]))
    for folder in (places.etc, places.run, places.log, places.spool, places.save):
        folder.mkdir(mode=0o755, exist_ok=True)
    for node in bed.wiring.topology.nodes:
        (places.spool / node.name).mkdir(mode=0o755, exist_ok=True)
    places.slurm_conf.write_text(slurmconf.slurm_conf(places, bed.wiring, bed.ports, bed.auth), encoding="utf-8")
    (places.etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    places.hosts.write_text(bed.wiring.hosts(), encoding="utf-8")
    accounting = slurmconf.slurmdbd_conf(places, bed.wiring, bed.ports, bed.password, bed.auth)
    write_private(places.etc / "slurmdbd.conf", accounting.encode())
    write_private(places.etc / "database.sql", slurmconf.database_sql(bed.password).encode())
    key, mode = (places.munge_key, 0o400) if bed.auth == slurmconf.MUNGE else (places.slurm_key, 0o600)
    if not key.exists():
        write_private(key, secrets.token_bytes(128), mode)


def make_database(bed: Bed) -> None:
    """MariaDB's own tables: about a second."""
    places = bed.places
    run(
        userland.private(
            bed.userland,
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={places.database}",
                "--user=root",
                "--skip-test-db",
                "--auth-root-authentication-method=socket",
                f"--tmpdir={places.run}",
            ],
        ),
        env=bed.mark,
    )


@dataclass(frozen=True)
class Daemon:
    """One daemon: `answers` is asked until it is true, or until the process has died. `entered`: `argv` itself enters
    the release's programs."""

    name: str
    argv: tuple[str, ...]
    answers: Callable[[], bool]
    entered: bool = False


def _listens(address: str | tuple[str, int]) -> bool:
    """Whether somebody takes connections at a path, or at an address and a port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)
        return True
    return False


def server(bed: Bed, name: str) -> Daemon:
    """Return the daemon `name` of :attr:`Bed.servers`. slurmdbd and slurmctld listen at the machine's address on the
    management network."""
    places, ports, gateway = bed.places, bed.ports, bed.wiring.gateway
    rows: dict[str, tuple[Sequence[str], str | tuple[str, int]]] = {
        "munged": (
            (
                "munged",
                "--foreground",
                "--force",  # the directory may lie below one that only root enters, such as a test's temporary one
                f"--key-file={places.munge_key}",
                f"--socket={places.munge_socket}",
                f"--pid-file={places.run}/munged.pid",
                f"--log-file={places.log}/munged.log",
                f"--seed-file={places.run}/munged.seed",
                "--num-threads=4",
            ),
            str(places.munge_socket),
        ),
        "mariadbd": (
            (
                "mariadbd",
                "--no-defaults",
                "--user=root",
                f"--datadir={places.database}",
                f"--socket={places.database_socket}",
                f"--port={ports['database']}",
                "--bind-address=127.0.0.1",
                f"--pid-file={places.run}/mariadbd.pid",
                f"--tmpdir={places.run}",
                "--skip-name-resolve",
                f"--init-file={places.etc}/database.sql",
                "--innodb-buffer-pool-size=64M",
                "--innodb-log-file-size=16M",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-lock-wait-timeout=900",
                "--performance-schema=off",
            ),
            ("127.0.0.1", ports["database"]),
        ),
        "slurmdbd": (("slurmdbd", "-D"), (gateway, ports["slurmdbd"])),
        "slurmctld": (("slurmctld", "-D", "-f", str(places.slurm_conf)), (gateway, ports["slurmctld"])),
    }
    argv, address = rows[name]
    if name.startswith("slurm") and bed.auth == slurmconf.SLURM:
        argv = ["unshare", "--mount", *_covered(bed, name, name, argv)]
    return Daemon(name, tuple(argv), partial(_listens, address))


def slurmd(bed: Bed, node: str) -> Daemon:
    argv = within(bed, node, ["slurmd", "-D", "-N", node, "-f", str(bed.places.slurm_conf)])
    # That it answers is seen in the controller's list of nodes; a mere connection would be an error in its log.
    return Daemon(f"slurmd.{node}", tuple(argv), lambda: True, entered=True)


_CHILDREN: list[subprocess.Popen[bytes]] = []  # they outlive this program, unless it takes the testbed down itself


def reap() -> None:
    """Forget the children that have ended, so that no zombie stays in a long-lived program."""
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


def start(daemons: Iterable[Daemon], bed: Bed, timeout_s: float, progress: Callable[[str], None]) -> Callable[[], None]:
    """Start all, then wait until each answers; the result, called later, raises when one has died since.

    :param progress: is told now and then who has not answered yet.
    :raises TestbedError: one died or stays silent; with the last line of what it said.
    """
    places = bed.places
    started = []
    for daemon in daemons:
        argv = daemon.argv if daemon.entered else userland.private(bed.userland, daemon.argv)
        with (places.log / f"{daemon.name}.out").open("wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=places.run,
                start_new_session=True,
                umask=0o022,
                env=system_env({**bed.env(), **bed.mark}),
            )
        started.append((daemon, process))
        _CHILDREN.append(process)
    began = told = time.monotonic()
    deadline = began + timeout_s
    for daemon, process in started:
        while not daemon.answers():
            _refuse_ended(daemon, process, places)
            if time.monotonic() > deadline:
                raise _silent(daemon, places, f"no answer within {timeout_s:g} s")
            if (now := time.monotonic()) - told > TELL_S:
                told = now
                progress(f"waiting for {daemon.name} to answer, {now - began:.0f} s of at most {timeout_s:g}")
            time.sleep(0.05)

    def watch() -> None:
        for daemon, process in started:
            _refuse_ended(daemon, process, places)

    return watch


def _refuse_ended(daemon: Daemon, process: subprocess.Popen[bytes], places: Places) -> None:
    if process.poll() is not None:
        raise _silent(daemon, places, f"ended with exit code {process.returncode}")


def _silent(daemon: Daemon, places: Places, what: str) -> TestbedError:
    """What happened, with the daemon's last words: its log is removed with the testbed."""
    said = ""
    for path in (places.log / f"{daemon.name}.out", places.log / f"{daemon.name}.log"):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else said)
    return TestbedError(f"{what}: {said}" if said else what, where=daemon.name, hint="correct that, then `up` again")
