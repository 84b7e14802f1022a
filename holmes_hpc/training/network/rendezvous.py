"""Rendezvous of the ranks: a key-value store in rank 0, whose address and secret are published in the run directory.

The published file is named after this start of the run, and only the run's user may read it. So no rank uses the file
of an earlier start or of another user, and the store admits only ranks that can read the file (authentication.py).
If the launcher has its own rendezvous (torchrun's MASTER_ADDR), its store is used instead. That store has no secret,
and rank 0 warns if other machines can reach it.
"""

import contextlib
import errno
import json
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist

from holmes_hpc.errors import HolmesError, NetworkError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.ownership import is_own
from holmes_hpc.training.network import authentication
from holmes_hpc.training.network.filtered_listener import FilteredListener, listening_socket
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import log_line

POLL_S = 0.05
POLLS_PER_S = 4000  # of the run directory, by all ranks of a large run together
CONNECT_TIMEOUT_S = 20.0  # limit of connecting to a published address, where rank 0 already listens
RANKS_PER_S = 500  # ranks of a large run spread their first attempts; rank 0 can admit more
OWNER_ONLY = 0o600
PORT_TRIES = 10  # attempts to find a port that is free at the addresses of the store and of the proxy
_open_servers: list[object] = []  # must live as long as this process


@dataclass(frozen=True)
class Rendezvous:
    """The address of rank 0's authentication server, and its secret (hexadecimal).

    `attempt`: the number of this attempt in the run record, below 0 if it is not recorded; `error`: why rank 0 has no
    store, "" if it has one; `exit_code`: the exit code of all ranks after that error.
    """

    address: str
    port: int
    secret: str
    attempt: int
    host: str
    pid: int
    error: str = ""
    exit_code: int = 1


def published_path(run_dir: Path, launch: Launch) -> Path:
    return run_dir / f"rendezvous-{re.sub(r'[^A-Za-z0-9.-]', '_', launch.key)}.json"


def host_store(run_dir: Path, launch: Launch, address: str, attempt: int, timeout_s: float) -> dist.TCPStore:
    """Start the store on this node's `address` and publish it (rank 0). NetworkError if the address cannot be used."""
    secret = authentication.new_secret()
    try:
        listener, server, proxy = _start_servers(address, secret, _greeting_s(launch))
        store = _tcp_store(
            proxy.address, listener.port, launch, timeout_s, is_master=True, listen_fd=os.dup(listener.socket.fileno())
        )
    except (OSError, RuntimeError) as e:
        hint = (
            "give the node's Ethernet interface an address that the other nodes reach; the kernel must be Linux, with "
            "socket filters or TCP-MD5 signatures"
        )
        where = f"rendezvous on {launch.node}"
        raise NetworkError(f"cannot serve on {address}: {_reason(e)}", where=where, hint=hint) from e
    _open_servers.extend((listener, server, proxy))
    for old in run_dir.glob("rendezvous-*.json"):  # left by killed attempts; only one runs at a time
        with contextlib.suppress(OSError):
            old.unlink()
    published = Rendezvous(
        address, port=server.port, secret=secret.hex(), attempt=attempt, host=launch.node, pid=os.getpid()
    )
    write_whole(published_path(run_dir, launch), json.dumps(asdict(published)) + "\n", OWNER_ONLY)
    return store


def _greeting_s(launch: Launch) -> float:
    """Return the limit of a greeting. In a large run, rank 0 may be busy with those of other ranks."""
    return max(authentication.TIMEOUT_S, 2 * launch.world_size / RANKS_PER_S)


def _start_servers(
    address: str, secret: bytes, greeting_s: float
) -> tuple[FilteredListener, authentication.AuthenticationServer, authentication.LoopbackProxy]:
    """Return the store's listener, its authentication server, and a proxy with the listener's port.
    Rank 0's TCPStore uses one port number both to listen and to connect, and it connects to the proxy. If the proxy
    cannot have the listener's port, try another listener."""
    for tries_left in reversed(range(PORT_TRIES)):
        listener = FilteredListener(address, authentication.packet_key(secret))
        server = authentication.AuthenticationServer(address, secret, listener, greeting_s)
        connect = partial(authentication.connect, address, server.port, secret)
        try:
            return listener, server, authentication.LoopbackProxy(connect, own_port=listener.port)
        except OSError as e:
            server.close()
            listener.close()
            if e.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def _tcp_store(
    address: str, port: int, launch: Launch, timeout_s: float, *, is_master: bool, listen_fd: int | None = None
) -> dist.TCPStore:
    return dist.TCPStore(
        address,
        port,
        launch.world_size,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listen_fd,
    )


def publish_failure(run_dir: Path, launch: Launch, attempt: int, error: str, exit_code: int) -> None:
    """Publish that rank 0 failed before it could start the store, so that the other ranks do not wait for it."""
    with contextlib.suppress(HolmesError, OSError):
        published = Rendezvous(
            "", port=0, secret="", attempt=attempt, host=launch.node, pid=os.getpid(), error=error, exit_code=exit_code
        )
        write_whole(published_path(run_dir, launch), json.dumps(asdict(published)) + "\n", OWNER_ONLY)


def read_published(path: Path) -> Rendezvous | None:
    """Return the published rendezvous; None if there is no complete file that only this user may read and write."""
    if not is_own(path, OWNER_ONLY):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def join_store(
    run_dir: Path,
    launch: Launch,
    timeout_s: float,
    interface: str = "",
    on_attempt: Callable[[int], None] = lambda _: None,
) -> dist.TCPStore:
    """Return the store that rank 0 published. Called by the other ranks.

    `interface`: its name, for messages; `on_attempt`: called with the number of this attempt. Raise NetworkError if
    rank 0 publishes nothing in time (it died, or the run directory is not shared), or if this node cannot reach the
    published address. If rank 0 published an error, raise this error.
    """
    path, deadline = published_path(run_dir, launch), time.monotonic() + timeout_s
    spread_s = launch.world_size / RANKS_PER_S
    connect_s, greeting_s = max(CONNECT_TIMEOUT_S, 6 * spread_s), _greeting_s(launch)
    published, problem, pause_s = None, "", POLL_S
    while time.monotonic() < deadline:
        published = read_published(path)
        if published is not None:
            on_attempt(published.attempt)
            if published.error:
                error_type = HolmesError if published.exit_code == 2 else NetworkError
                problem = f"Connection refused: rank 0 failed: {published.error}"
                raise error_type(problem, where=f"rendezvous on {launch.node}")
            if not problem:  # the first attempt to connect
                deadline = min(deadline, time.monotonic() + connect_s)
                time.sleep(random.uniform(0, spread_s if spread_s > 1 else 0))
            try:
                target = published.address, published.port, bytes.fromhex(published.secret)
                connect = partial(authentication.connect, *target, min(greeting_s, timeout_s))
                # TCPStore waits long for a server that it cannot reach, and gives no reason; so connect before.
                proxy = authentication.LoopbackProxy(connect, [connect()])
                _open_servers.append(proxy)
                return _tcp_store(proxy.address, proxy.port, launch, timeout_s, is_master=False)
            except (OSError, RuntimeError, ValueError) as e:  # not started yet, or gone: rank 0 may replace the file
                problem = _reason(e)
        pause_s = max(POLL_S, min(pause_s * 1.5, launch.world_size / POLLS_PER_S))
        time.sleep(pause_s * random.uniform(0.5, 1))
    if published is None:
        what = f"rank 0 did not publish {path} within {timeout_s:.0f} s"
        hint = "look at the log of rank 0; the run directory must be on a file system that all nodes share"
    else:
        store = f"rank 0's store at {published.address}:{published.port} on {published.host}"
        over_interface = f" over {interface}" if interface else ""
        limit_s = min(connect_s, timeout_s)
        what = f"{store} cannot be reached{over_interface} within {limit_s:.0f} s ({problem})"
        hint = "check the Ethernet interfaces of both nodes, their subnet and firewalls between them"
    raise NetworkError(what, where=f"rank {launch.rank} on {launch.node}", hint=hint)


def launcher_store(launch: Launch, timeout_s: float) -> dist.TCPStore:
    """Return the store at MASTER_ADDR:MASTER_PORT, which torchrun's agent hosts, or rank 0 if there is no agent.
    Rank 0 warns if users of other machines can reach the store."""
    assert launch.address is not None and launch.port is not None
    hosts_store = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # If all ranks share a machine, listen only on this address. On several machines, listen on all interfaces:
        # other nodes may resolve the name to another address.
        listener = listening_socket(launch.address, launch.port) if hosts_store and launch.one_host else None
        if launch.rank == 0 and listener is None:
            log_line(
                f"warning: the ranks use torchrun's store ({launch.address}:{launch.port}), which asks for no "
                "secret: whoever reaches it can change or end this run; start the ranks with srun where others share "
                "the network (docs/security.md)"
            )
        listen_fd = None if listener is None else listener.detach()
        return _tcp_store(launch.address, launch.port, launch, timeout_s, is_master=hosts_store, listen_fd=listen_fd)
    except (OSError, RuntimeError) as e:
        problem = f"cannot {'listen on' if hosts_store else 'reach'} {launch.address}:{launch.port}: {_reason(e)}"
        hint = "check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
        raise NetworkError(problem, where=f"rank {launch.rank} on {launch.node}", hint=hint) from e


def _reason(error: BaseException) -> str:
    reasons: dict[type, str] = {TimeoutError: "no answer", ConnectionRefusedError: "nobody listens there"}
    return reasons.get(type(error)) or getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
