"""The daemons of a testbed: their commands, their start, and checks that they answer."""

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
from holmes_hpc.testbed.slurmconf import Paths

# Give a node its own hostname ($0) and /etc/hosts ($1), then run the command. `ip netns exec` has already created a
# private mount namespace, with a /sys that shows this namespace's NICs.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
# auth/slurm's sockets have fixed paths below /run ($0). The testbed mounts its own folder ($1) there for its daemons
# and their jobs, to stay separate from another Slurm.
BIND_SOCKETS = 'mkdir -p "$0" "$1" && mount --bind "$1" "$0" && shift && exec "$@"'


PROGRESS_S = 5.0  # between two progress lines


@dataclass(frozen=True)
class Testbed:
    """One testbed: its files, its network and its ports.

    `userland`: root of another Debian release's programs, None for the machine's own; `prefix`: of a Slurm installed by
    `make install`, None for a packaged one.
    """

    paths: Paths
    wiring: Wiring
    ports: dict[str, int]
    password: str
    userland: Path | None = None
    prefix: Path | None = None
    auth: str = slurmconf.MUNGE

    @property
    def mark(self) -> dict[str, str]:
        """The variable that marks the testbed's processes."""
        return {MARK: str(self.paths.root)}

    def env(self, daemon: str = "slurmctld") -> dict[str, str]:
        """Return the variables for Slurm's commands. `daemon`: the one that issues auth/slurm's credentials."""
        variables = {"SLURM_CONF": str(self.paths.slurm_conf)}
        if self.prefix is not None:
            variables["PATH"] = f"{slurm_prefix.program_path(self.prefix)}:{SYSTEM_PATH}"
        if self.auth == slurmconf.SLURM:
            variables["SLURM_SACK_SOCKET"] = str(self.paths.sack_folder(daemon) / "sack.socket")
        return variables

    @property
    def servers(self) -> tuple[str, ...]:
        """The daemons outside the nodes, in the order of their dependencies."""
        return tuple(name for name in SERVERS if name != "munged" or self.auth == slurmconf.MUNGE)

    def slurm(self, argv: Sequence[str], timeout_s: float = 30, daemon: str = "slurmctld") -> str:
        """Run one of Slurm's commands and return its output. `daemon`: see :meth:`env`."""
        return run(userland.private_command(self.userland, argv), env=self.env(daemon), timeout_s=timeout_s)


def node_command(testbed: Testbed, node: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` on a node."""
    command = ["sh", "-c", ENTER, node, str(testbed.paths.hosts), *_with_socket_folder(testbed, "slurm", node, argv)]
    return [
        "ip",
        "netns",
        "exec",
        testbed.wiring.namespace(node),
        "unshare",
        "--uts",
        *userland.enter_command(testbed.userland, command),
    ]


def _with_socket_folder(testbed: Testbed, name: str, daemon: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` with the testbed's folder at /run/`name`, if it uses auth/slurm.
    The mount namespace must be private."""
    if testbed.auth == slurmconf.MUNGE:
        return list(argv)
    return ["sh", "-c", BIND_SOCKETS, f"/run/{name}", str(testbed.paths.sack_folder(daemon)), *argv]


def cgroup_plugin(version: str) -> str:
    """Return the cgroup plugin with which Slurm ignores control groups. `version`: as in ``slurm-wlm 22.05.8``.
    A node's own /sys has no control groups. Older Slurms do not start with `disabled` or `cgroup/v2`; their v1 plugin
    does nothing unless another plugin uses it."""
    return "disabled" if slurm_prefix.parse_release(version) >= (23, 11) else "cgroup/v1"


def write_files(testbed: Testbed) -> None:
    """Write configuration files and keys, and create the folders."""
    paths = testbed.paths
    plugin = cgroup_plugin(testbed.slurm(["slurmd", "-V"]))
    for folder in (paths.etc, paths.run, paths.log, paths.spool, paths.save):
        folder.mkdir(mode=0o755, exist_ok=True)
    for node in testbed.wiring.topology.nodes:
        (paths.spool / node.name).mkdir(mode=0o755, exist_ok=True)
    paths.slurm_conf.write_text(
        slurmconf.slurm_conf(paths, testbed.wiring, testbed.ports, testbed.auth), encoding="utf-8"
    )
    (paths.etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    paths.hosts.write_text(testbed.wiring.hosts(), encoding="utf-8")
    accounting = slurmconf.slurmdbd_conf(paths, testbed.wiring, testbed.ports, testbed.password, testbed.auth)
    write_private(paths.etc / "slurmdbd.conf", accounting.encode())
    write_private(paths.etc / "database.sql", slurmconf.database_sql(testbed.password).encode())
    key, mode = (paths.munge_key, 0o400) if testbed.auth == slurmconf.MUNGE else (paths.slurm_key, 0o600)
    if not key.exists():
        write_private(key, secrets.token_bytes(128), mode)


def create_database(testbed: Testbed) -> None:
    """Create MariaDB's own tables, in about a second."""
    paths = testbed.paths
    run(
        userland.private_command(
            testbed.userland,
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={paths.database}",
                "--user=root",
                "--skip-test-db",
                "--auth-root-authentication-method=socket",
                f"--tmpdir={paths.run}",
            ],
        ),
        env=testbed.mark,
    )


@dataclass(frozen=True)
class Daemon:
    """One daemon. `answers`: returns whether it is ready; `enters_release`: `argv` itself enters the release's
    programs."""

    name: str
    argv: tuple[str, ...]
    answers: Callable[[], bool]
    enters_release: bool = False


def _listens(address: str | tuple[str, int]) -> bool:
    """Return whether a server accepts connections at a path, or at an address and port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)
        return True
    return False


def server_daemon(testbed: Testbed, name: str) -> Daemon:
    """Return the daemon `name` of :attr:`Testbed.servers`.
    slurmdbd and slurmctld listen at the machine's address on the management network."""
    paths, ports, gateway = testbed.paths, testbed.ports, testbed.wiring.gateway
    rows: dict[str, tuple[Sequence[str], str | tuple[str, int]]] = {
        "munged": (
            (
                "munged",
                "--foreground",
                "--force",  # the directory may be below one that only root can enter, such as a test's temporary one
                f"--key-file={paths.munge_key}",
                f"--socket={paths.munge_socket}",
                f"--pid-file={paths.run}/munged.pid",
                f"--log-file={paths.log}/munged.log",
                f"--seed-file={paths.run}/munged.seed",
                "--num-threads=4",
            ),
            str(paths.munge_socket),
        ),
        "mariadbd": (
            (
                "mariadbd",
                "--no-defaults",
                "--user=root",
                f"--datadir={paths.database}",
                f"--socket={paths.database_socket}",
                f"--port={ports['database']}",
                "--bind-address=127.0.0.1",
                f"--pid-file={paths.run}/mariadbd.pid",
                f"--tmpdir={paths.run}",
                "--skip-name-resolve",
                f"--init-file={paths.etc}/database.sql",
                "--innodb-buffer-pool-size=64M",
                "--innodb-log-file-size=16M",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-lock-wait-timeout=900",
                "--performance-schema=off",
            ),
            ("127.0.0.1", ports["database"]),
        ),
        "slurmdbd": (("slurmdbd", "-D"), (gateway, ports["slurmdbd"])),
        "slurmctld": (("slurmctld", "-D", "-f", str(paths.slurm_conf)), (gateway, ports["slurmctld"])),
    }
    argv, address = rows[name]
    if name.startswith("slurm") and testbed.auth == slurmconf.SLURM:
        argv = ["unshare", "--mount", *_with_socket_folder(testbed, name, name, argv)]
    return Daemon(name, tuple(argv), partial(_listens, address))


def slurmd_daemon(testbed: Testbed, node: str) -> Daemon:
    argv = node_command(testbed, node, ["slurmd", "-D", "-N", node, "-f", str(testbed.paths.slurm_conf)])
    # The controller's list of nodes shows whether it answers. A test connection would be an error in its log.
    return Daemon(f"slurmd.{node}", tuple(argv), lambda: True, enters_release=True)


_CHILDREN: list[subprocess.Popen[bytes]] = []  # daemons outlive this program, unless it removes the testbed itself


def reap() -> None:
    """Reap ended daemons, so that no zombies stay in a long-lived program."""
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


def start(
    daemons: Iterable[Daemon], testbed: Testbed, timeout_s: float, progress: Callable[[str], None]
) -> Callable[[], None]:
    """Start all daemons and wait until each answers. Return a function that raises if one has died since.

    :param progress: called with a line about a daemon that does not answer yet.
    :raises TestbedError: a daemon died or does not answer; with the last line of its output.
    """
    paths = testbed.paths
    started = []
    for daemon in daemons:
        argv = daemon.argv if daemon.enters_release else userland.private_command(testbed.userland, daemon.argv)
        with (paths.log / f"{daemon.name}.out").open("wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=paths.run,
                start_new_session=True,
                umask=0o022,
                env=system_env({**testbed.env(), **testbed.mark}),
            )
        started.append((daemon, process))
        _CHILDREN.append(process)
    start_time = last_progress = time.monotonic()
    deadline = start_time + timeout_s
    for daemon, process in started:
        while not daemon.answers():
            _raise_if_ended(daemon, process, paths)
            if time.monotonic() > deadline:
                raise _daemon_error(daemon, paths, f"no answer within {timeout_s:g} s")
            if (now := time.monotonic()) - last_progress > PROGRESS_S:
                last_progress = now
                progress(f"waiting for {daemon.name} to answer, {now - start_time:.0f} s of at most {timeout_s:g}")
            time.sleep(0.05)

    def check_alive() -> None:
        for daemon, process in started:
            _raise_if_ended(daemon, process, paths)

    return check_alive


def _raise_if_ended(daemon: Daemon, process: subprocess.Popen[bytes], paths: Paths) -> None:
    if process.poll() is not None:
        raise _daemon_error(daemon, paths, f"ended with exit code {process.returncode}")


def _daemon_error(daemon: Daemon, paths: Paths, problem: str) -> TestbedError:
    """Return the error for `problem`, with the daemon's last error line, because `down` removes its log."""
    message = ""
    for path in (paths.log / f"{daemon.name}.out", paths.log / f"{daemon.name}.log"):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            message = next((x for x in reversed(lines) if "error" in x.lower()), lines[-1] if lines else message)
    hint = "correct that, then `up` again"
    return TestbedError(f"{problem}: {message}" if message else problem, where=daemon.name, hint=hint)
