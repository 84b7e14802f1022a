"""The daemons of a testbed: their files and commands, their start, and checks that they answer."""

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError
from holmes_hpc.tables import read_table
from holmes_hpc.testbed import slurm_prefix, slurmconf, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH, Show, run, sparsely, system_env
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.processes import MARK, SERVERS
from holmes_hpc.testbed.record import write_private
from holmes_hpc.testbed.slurmconf import Paths

# Set a node's hostname ($0) and /etc/hosts ($1), then run the command (other arguments). `ip netns exec` has already
# created a private mount namespace, with a /sys that shows this namespace's NICs.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
# auth/slurm's sockets have fixed paths below /run ($0). The testbed mounts its own folder ($1) there for its daemons
# and their jobs, to stay separate from another Slurm.
BIND_SOCKETS = 'mkdir -p "$0" "$1" && mount --bind "$1" "$0" && shift && exec "$@"'
PROGRESS_S = 5.0  # between two progress lines
COMMANDS: dict[str, list[str]] = read_table(__file__)


@dataclass(frozen=True)
class Testbed:
    """One testbed: its files, network and ports. `password`: of the database; `userland`: folder with the programs of
    another Debian release, None for this machine's; `prefix`: of a Slurm that `make install` installed, None for
    Debian's packages; `auth`: Slurm's auth plugin, munge or slurm."""

    paths: Paths
    wiring: Wiring
    ports: dict[str, int]
    password: str
    userland: Path | None = None
    prefix: Path | None = None
    auth: str = slurmconf.MUNGE

    @property
    def mark(self) -> dict[str, str]:
        """The environment variable by which the testbed's processes are found."""
        return {MARK: str(self.paths.root)}

    def env(self, daemon: str = "slurmctld") -> dict[str, str]:
        """Return the variables for Slurm's commands. `daemon`: which daemon issues the credentials of auth/slurm."""
        variables = {"SLURM_CONF": str(self.paths.slurm_conf)}
        if self.prefix is not None:
            variables["PATH"] = f"{slurm_prefix.program_path(self.prefix)}:{SYSTEM_PATH}"
        if self.auth == slurmconf.SLURM:
            variables["SLURM_SACK_SOCKET"] = str(self.paths.sack_folder(daemon) / "sack.socket")
        return variables

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the daemons that run outside the nodes. Each comes after the daemons that it needs."""
        return tuple(name for name in SERVERS if name != "munged" or self.auth == slurmconf.MUNGE)

    def slurm(self, argv: Sequence[str], timeout_s: float = 30, daemon: str = "slurmctld") -> str:
        """Run one of Slurm's commands and return its output. `daemon`: see :meth:`env`."""
        return run(userland.private_command(self.userland, argv), env=self.env(daemon), timeout_s=timeout_s)


def node_command(testbed: Testbed, node: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` on a node: in its network namespace, with its hostname and /etc/hosts."""
    command = ["sh", "-c", ENTER, node, str(testbed.paths.hosts), *_with_socket_folder(testbed, "slurm", node, argv)]
    in_namespace = ["ip", "netns", "exec", testbed.wiring.namespace(node), "unshare", "--uts"]
    return [*in_namespace, *userland.enter_command(testbed.userland, command)]


def _with_socket_folder(testbed: Testbed, name: str, daemon: str, argv: Sequence[str]) -> list[str]:
    """Return `argv`, with the socket folder of `daemon` at /run/`name` for auth/slurm, in a private mount namespace."""
    if testbed.auth == slurmconf.MUNGE:
        return list(argv)
    return ["sh", "-c", BIND_SOCKETS, f"/run/{name}", str(testbed.paths.sack_folder(daemon)), *argv]


def cgroup_plugin(version: str) -> str:
    """Return the CgroupPlugin without control groups, because a node's own /sys has none. `version`: ``slurm-wlm
    22.05.8``. Slurm before 23.11 lacks `disabled`, but its `cgroup/v1` does nothing unless another plugin uses it."""
    return "disabled" if slurm_prefix.parse_release(version) >= (23, 11) else "cgroup/v1"


def write_files(testbed: Testbed) -> None:
    """Create the testbed's folders, and write its configuration files and keys."""
    paths = testbed.paths
    plugin = cgroup_plugin(testbed.slurm(["slurmd", "-V"]))
    for folder in (paths.etc, paths.run, paths.log, paths.spool, paths.save):
        folder.mkdir(mode=0o755, exist_ok=True)
    for node in testbed.wiring.topology.nodes:
        (paths.spool / node.name).mkdir(mode=0o755, exist_ok=True)
    conf = slurmconf.slurm_conf(paths, testbed.wiring, testbed.ports, testbed.auth)
    paths.slurm_conf.write_text(conf, encoding="utf-8")
    (paths.etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    paths.hosts.write_text(testbed.wiring.hosts(), encoding="utf-8")
    accounting = slurmconf.slurmdbd_conf(paths, testbed.wiring, testbed.ports, testbed.password, testbed.auth)
    write_private(paths.etc / "slurmdbd.conf", accounting.encode())
    # MariaDB runs this SQL at each start: it creates Slurm's user and grants its rights.
    user = f"CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '{testbed.password}';\n"
    sql = f"{user}GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
    write_private(paths.etc / "database.sql", sql.encode())
    key, mode = (paths.munge_key, 0o400) if testbed.auth == slurmconf.MUNGE else (paths.slurm_key, 0o600)
    if not key.exists():
        write_private(key, secrets.token_bytes(128), mode)


def _command(testbed: Testbed, name: str) -> list[str]:
    return [word.format(paths=testbed.paths, ports=testbed.ports) for word in COMMANDS[name]]


def create_database(testbed: Testbed) -> None:
    """Create the folder of the database with MariaDB's own tables. This takes about a second."""
    run(userland.private_command(testbed.userland, _command(testbed, "install_database")), env=testbed.mark)


@dataclass(frozen=True)
class Daemon:
    """A daemon to start. `argv`: its command line; `answers`: function that returns whether the daemon is ready."""

    name: str
    argv: Sequence[str]
    answers: Callable[[], bool]


def _listens(address: str | tuple[str, int]) -> bool:
    """Return whether a server accepts connections at `address`: the path of a socket, or (IP address, port)."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)
        return True
    return False


def server_daemon(testbed: Testbed, name: str) -> Daemon:
    """Return the daemon `name` of :attr:`Testbed.servers`.
    slurmdbd and slurmctld listen at the machine's address on the management network."""
    addresses: dict[str, str | tuple[str, int]] = {
        "munged": str(testbed.paths.munge_socket),
        "mariadbd": ("127.0.0.1", testbed.ports["database"]),
        "slurmdbd": (testbed.wiring.gateway, testbed.ports["slurmdbd"]),
        "slurmctld": (testbed.wiring.gateway, testbed.ports["slurmctld"]),
    }
    argv = _command(testbed, name)
    if name.startswith("slurm") and testbed.auth == slurmconf.SLURM:
        argv = ["unshare", "--mount", *_with_socket_folder(testbed, name, name, argv)]
    return Daemon(name, userland.private_command(testbed.userland, argv), partial(_listens, addresses[name]))


def slurmd_daemon(testbed: Testbed, node: str) -> Daemon:
    argv = node_command(testbed, node, ["slurmd", "-D", "-N", node, "-f", str(testbed.paths.slurm_conf)])
    # The controller's list of nodes shows whether slurmd answers. slurmd would log a test connection as an error.
    return Daemon(f"slurmd.{node}", argv, lambda: True)


_CHILDREN: list[subprocess.Popen[bytes]] = []  # the daemons go on when this program ends


def reap() -> None:
    """Reap daemons that have exited, so that no zombies remain while this program runs."""
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


def start(daemons: Iterable[Daemon], testbed: Testbed, timeout_s: float, progress: Show) -> Callable[[], None]:
    """Start all daemons and wait until each answers. Return a function that checks whether all are still alive.
    `progress`: called with a line about a daemon that does not answer yet. Raise TestbedError if a daemon dies or does
    not answer within `timeout_s`. The returned function raises TestbedError if a daemon has died."""
    paths = testbed.paths
    started = []
    for daemon in daemons:
        options: Any = {"cwd": paths.run, "start_new_session": True, "umask": 0o022}
        options["env"] = system_env({**testbed.env(), **testbed.mark})
        with (paths.log / f"{daemon.name}.out").open("wb") as out:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(daemon.argv, **streams, **options)
        started.append((daemon, process))
        _CHILDREN.append(process)

    def check_alive() -> None:
        for daemon, process in started:
            if process.poll() is not None:
                raise _daemon_error(daemon, paths, f"ended with exit code {process.returncode}")

    start_time, show = time.monotonic(), sparsely(progress, PROGRESS_S)
    for daemon, _ in started:
        while not daemon.answers():
            check_alive()
            if (waited_s := time.monotonic() - start_time) > timeout_s:
                raise _daemon_error(daemon, paths, f"no answer within {timeout_s:g} s")
            show(f"waiting for {daemon.name} to answer, {waited_s:.0f} s of at most {timeout_s:g}")
            time.sleep(0.05)
    return check_alive


def _daemon_error(daemon: Daemon, paths: Paths, problem: str) -> TestbedError:
    """Return the error for `problem`. It quotes the last error line of the daemon's log, which `down` removes."""
    message = ""
    for path in (paths.log / f"{daemon.name}.out", paths.log / f"{daemon.name}.log"):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            message = next((x for x in reversed(lines) if "error" in x.lower()), lines[-1] if lines else message)
    hint = "correct the cause, then run `holmes testbed up` again"
    return TestbedError(f"{problem}: {message}" if message else problem, where=daemon.name, hint=hint)
