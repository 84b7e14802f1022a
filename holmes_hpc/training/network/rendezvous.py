"""How the ranks meet: a key-value store in rank 0, whose address stands in the run directory.

The file is named after this start of the run, only the user who runs it may read it, and it holds a random word that
the store answers with; so neither a file of an earlier start nor somebody else's is ever followed. The store listens
on that one address; it asks nobody who they are (docs/security.md). A launcher's own rendezvous (torchrun's
MASTER_ADDR) is used where there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from holmes_hpc.errors import HolmesError, NetworkError
from holmes_hpc.records.files import write_whole
from holmes_hpc.training.rank.launch import Launch

POLL_S = 0.05
REACH_S = 20.0  # from rank 0's word to a connection: it listens when it publishes its address
OWN_ALONE = 0o600
_KEY = "holmes/word"


@dataclass(frozen=True)
class Meeting:
    """Where rank 0's store is. `attempt`: the number of this start in the run's record, below 0 where it is none.
    `error`: why there is no store (and with which exit code the ranks end)."""

    address: str
    port: int
    word: str
    attempt: int
    host: str
    pid: int
    error: str = ""
    exit_code: int = 1


def meeting_path(run_dir: Path, launch: Launch) -> Path:
    return run_dir / f"rendezvous-{re.sub(r'[^A-Za-z0-9.-]', '_', launch.key)}.json"


def host_store(run_dir: Path, launch: Launch, address: str, attempt: int, timeout_s: float) -> dist.Store:
    """Rank 0: start the store on this node's `address` and publish it. NetworkError when the address cannot be used."""
    word = secrets.token_hex(8)
    try:
        store = _serve(address, 0, launch.world_size, timeout_s)
    except (OSError, RuntimeError) as e:
        raise NetworkError(f"cannot listen on {address}: {_why(e)}", where=f"rendezvous on {launch.node}",
                           hint="give the node's Ethernet interface an address that the other nodes reach") from e
    store.set(_KEY, word)
    for old in run_dir.glob("rendezvous-*.json"):  # of starts that were killed: there is one at a time
        with contextlib.suppress(OSError):
            old.unlink()
    meeting = Meeting(address, store.port, word, attempt, launch.node, os.getpid())
    write_whole(meeting_path(run_dir, launch), json.dumps(asdict(meeting)) + "\n", OWN_ALONE)
    return store


def _serve(address: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """A store that listens on this address alone (by itself it takes all interfaces), a name or a number."""
    family, kind, _, _, end = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        if port:  # one that is told, which an earlier process may just have left
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(end)
        listening.listen(1024)
        return dist.TCPStore(address, listening.getsockname()[1], world_size, is_master=True, wait_for_workers=False,
                             timeout=timedelta(seconds=timeout_s), master_listen_fd=os.dup(listening.fileno()))


def cancel(run_dir: Path, launch: Launch, attempt: int, error: str, exit_code: int) -> None:
    """Rank 0, when it fails before it could start the store: the others need not wait for it."""
    with contextlib.suppress(HolmesError, OSError):
        meeting = Meeting("", 0, "", attempt, launch.node, os.getpid(), error, exit_code)
        write_whole(meeting_path(run_dir, launch), json.dumps(asdict(meeting)) + "\n", OWN_ALONE)


def read_meeting(path: Path) -> Meeting | None:
    """The published store, or None while there is none that only this user may write."""
    try:
        said = path.stat()
        if said.st_uid != os.getuid() or said.st_mode & 0o022:
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        return Meeting(str(data["address"]), int(data["port"]), str(data["word"]), int(data["attempt"]),
                       str(data["host"]), int(data["pid"]), str(data["error"]), int(data["exit_code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def join_store(run_dir: Path, launch: Launch, timeout_s: float, interface: str = "",
               known: Callable[[int], None] = lambda _: None) -> tuple[dist.Store, int]:
    """The other ranks: the store that rank 0 published, and the number of this attempt. `interface`: for messages;
    `known`: is told the number where rank 0 has failed.

    NetworkError when rank 0 published nothing in time (it died, or the run directory is not shared), or when its
    address cannot be reached from here.
    """
    path, end = meeting_path(run_dir, launch), time.monotonic() + timeout_s
    meeting, problem = None, ""
    while time.monotonic() < end:
        meeting = read_meeting(path)
        if meeting is not None and meeting.error:
            if meeting.attempt:
                known(meeting.attempt)
            error = HolmesError if meeting.exit_code == 2 else NetworkError
            raise error(f"Connection refused: rank 0 failed: {meeting.error}", where=f"rendezvous on {launch.node}")
        if meeting is not None:
            end = min(end, time.monotonic() + REACH_S) if not problem else end
            problem = problem or "no answer"
            try:
                # tried first, for TCPStore asks the name service about what it cannot reach, which may take minutes
                socket.create_connection((meeting.address, meeting.port), timeout=min(5.0, timeout_s)).close()
                store = dist.TCPStore(meeting.address, meeting.port, launch.world_size, is_master=False,
                                      timeout=timedelta(seconds=min(5.0, timeout_s)))
                if store.get(_KEY).decode() == meeting.word:
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return store, meeting.attempt
                problem = "another process answers there"
            except (OSError, RuntimeError) as e:  # not there yet, or no longer: the file may be replaced
                problem = _why(e)
        time.sleep(POLL_S)
    where = f"rank {launch.rank} on {launch.node}"
    if meeting is None:
        raise NetworkError(f"rank 0 did not publish {path} within {timeout_s:.0f} s", where=where,
                           hint="look at the log of rank 0; the run directory must be on a file system all nodes share")
    over = f" over {interface}" if interface else ""
    raise NetworkError(f"rank 0's store at {meeting.address}:{meeting.port} on {meeting.host} cannot be reached{over} "
                       f"within {min(REACH_S, timeout_s):.0f} s ({problem})", where=where,
                       hint="check the Ethernet interfaces of both nodes, their subnet and firewalls between them")


def launcher_store(launch: Launch, timeout_s: float) -> dist.Store:
    """The store that torchrun provides; without its agent rank 0 is the host of one at MASTER_ADDR:MASTER_PORT."""
    assert launch.address is not None and launch.port is not None
    own = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if own and launch.one_host:  # else the name may mean another address to the other nodes
            return _serve(launch.address, launch.port, launch.world_size, timeout_s)
        return dist.TCPStore(launch.address, launch.port, launch.world_size, is_master=own, wait_for_workers=False,
                             timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as e:
        what = "listen on" if own else "reach"
        raise NetworkError(f"cannot {what} {launch.address}:{launch.port}: {_why(e)}",
                           where=f"rank {launch.rank} on {launch.node}",
                           hint="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs") from e


def forget(run_dir: Path, launch: Launch) -> None:
    """Rank 0, at the end: remove the published address."""
    with contextlib.suppress(OSError):
        meeting_path(run_dir, launch).unlink()


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return (error.strerror or _line(error)) if isinstance(error, OSError) else _line(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
