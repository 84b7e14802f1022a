"""How the ranks meet: a key-value store in rank 0, whose address and secret stand in the run directory.

The file is named after this start of the run, and only the user who runs it may read it; so neither a file of an
earlier start nor somebody else's is ever followed, and the store admits nobody who cannot read it (authentication.py).
A launcher's own rendezvous (torchrun's MASTER_ADDR) is used where there is one; it has no secret, and rank 0 says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from holmes_hpc.errors import HolmesError, NetworkError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.ownership import is_own
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network import authentication
from holmes_hpc.training.network.filtered_listener import Door, listening
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import say

POLL_S = 0.05
REACH_S = 20.0  # from rank 0's word to a connection: it listens when it publishes its address
OWN_ALONE = 0o600
DOORS = 10  # tried for one whose port is free where the relay listens
_held: list[object] = []  # what serves others for as long as this process lives


@dataclass(frozen=True)
class Meeting:
    """Where the gate of rank 0's store is, and the secret that it asks for (hexadecimal). `attempt`: the number of this
    start in the run's record, below 0 where it is none. `error`: why there is no store (and with which exit code the
    ranks end)."""

    address: str
    port: int
    secret: str
    attempt: int
    host: str
    pid: int
    error: str = ""
    exit_code: int = 1


def meeting_path(run_dir: Path, launch: Launch) -> Path:
    return run_dir / f"rendezvous-{re.sub(r'[^A-Za-z0-9.-]', '_', launch.key)}.json"


def host_store(run_dir: Path, launch: Launch, address: str, attempt: int, timeout_s: float) -> dist.TCPStore:
    """Start the store, on rank 0, on this node's `address` and publish it. NetworkError when the address cannot be
    used."""
    where, secret = f"rendezvous on {launch.node}", authentication.new_secret()
    try:
        door, gate, relay = _served(address, secret)
        listener = os.dup(door.socket.fileno())
        store = _store(relay.address, door.port, launch, timeout_s, is_master=True, listener=listener)
    except (OSError, RuntimeError) as e:
        raise NetworkError(
            f"cannot serve on {address}: {_why(e)}",
            where=where,
            hint="give the node's Ethernet interface an address that the other nodes reach; the kernel "
            "must be Linux, with socket filters",
        ) from e
    _held.extend((door, gate, relay))
    for old in run_dir.glob("rendezvous-*.json"):  # of starts that were killed: there is one at a time
        with contextlib.suppress(OSError):
            old.unlink()
    meeting = Meeting(address, port=gate.port, secret=secret.hex(), attempt=attempt, host=launch.node, pid=os.getpid())
    write_whole(meeting_path(run_dir, launch), json.dumps(asdict(meeting)) + "\n", OWN_ALONE)
    return store


def _served(address: str, secret: bytes) -> tuple[Door, authentication.Gate, authentication.Relay]:
    """The store's door and gate, and a relay at the door's port: the store is a client of itself. Another program may
    have that port where the relay listens; then there is another door."""
    for tries_left in reversed(range(DOORS)):
        door = Door(address)
        gate = authentication.Gate(address, secret, door)
        try:
            return door, gate, authentication.Relay(address, gate.port, secret, door.port)
        except OSError as e:
            gate.close()
            door.socket.close()
            if e.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def _store(
    address: str, port: int, launch: Launch, timeout_s: float, *, is_master: bool, listener: int | None = None
) -> dist.TCPStore:
    return dist.TCPStore(
        address,
        port,
        launch.world_size,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
    )


def cancel(run_dir: Path, launch: Launch, attempt: int, error: str, exit_code: int) -> None:
    """Tell the other ranks, on rank 0, that it failed before it could start the store, so that they do not wait."""
    with contextlib.suppress(HolmesError, OSError):
        meeting = Meeting(
            "", port=0, secret="", attempt=attempt, host=launch.node, pid=os.getpid(), error=error, exit_code=exit_code
        )
        write_whole(meeting_path(run_dir, launch), json.dumps(asdict(meeting)) + "\n", OWN_ALONE)


def read_meeting(path: Path) -> Meeting | None:
    """Return the published store, or None while there is none that this user alone may read and write."""
    if not is_own(path, OWN_ALONE):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Meeting)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def join_store(
    run_dir: Path, launch: Launch, timeout_s: float, interface: str = "", known: Callable[[int], None] = lambda _: None
) -> dist.TCPStore:
    """Return, on the other ranks, the store that rank 0 published. `interface`: for messages; `known`: is told the
    number of this attempt.

    NetworkError when rank 0 published nothing in time (it died, or the run directory is not shared), or when its
    address cannot be reached from here.
    """
    path, end = meeting_path(run_dir, launch), time.monotonic() + timeout_s
    meeting, problem = None, ""
    while time.monotonic() < end:
        meeting = read_meeting(path)
        if meeting is not None:
            known(meeting.attempt)
            if meeting.error:
                error = HolmesError if meeting.exit_code == 2 else NetworkError
                raise error(f"Connection refused: rank 0 failed: {meeting.error}", where=f"rendezvous on {launch.node}")
            end = end if problem else min(end, time.monotonic() + REACH_S)
            try:
                secret = bytes.fromhex(meeting.secret)
                # tried first, for TCPStore waits long for what it cannot reach, and does not say why
                authentication.prove(meeting.address, meeting.port, secret, min(5.0, timeout_s))
                relay = authentication.Relay(meeting.address, meeting.port, secret)
                _held.append(relay)
                return _store(relay.address, relay.port, launch, timeout_s, is_master=False)
            except (OSError, RuntimeError, ValueError) as e:  # not there yet, or no longer: the file may be replaced
                problem = _why(e)
        time.sleep(POLL_S)
    where = f"rank {launch.rank} on {launch.node}"
    if meeting is None:
        raise NetworkError(
            f"rank 0 did not publish {path} within {timeout_s:.0f} s",
            where=where,
            hint="look at the log of rank 0; the run directory must be on a file system all nodes share",
        )
    over = f" over {interface}" if interface else ""
    raise NetworkError(
        f"rank 0's store at {meeting.address}:{meeting.port} on {meeting.host} cannot be reached{over} "
        f"within {min(REACH_S, timeout_s):.0f} s ({problem})",
        where=where,
        hint="check the Ethernet interfaces of both nodes, their subnet and firewalls between them",
    )


def launcher_store(launch: Launch, timeout_s: float) -> dist.TCPStore:
    """The store that torchrun provides; without its agent rank 0 is the host of one at MASTER_ADDR:MASTER_PORT. Rank 0
    warns where others than this machine's users reach it."""
    assert launch.address is not None and launch.port is not None
    own = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # of one machine: not on all interfaces; else the name may mean another address to the other nodes
        listener = listening(launch.address, launch.port) if own and launch.one_host else None
        if launch.rank == 0 and listener is None:
            say(
                f"warning: the ranks meet in torchrun's store ({launch.address}:{launch.port}), which asks for no "
                "secret: whoever reaches it can change or end this run; start the ranks with srun where others share "
                "the network (docs/security.md)"
            )
        handle = None if listener is None else listener.detach()
        return _store(launch.address, launch.port, launch, timeout_s, is_master=own, listener=handle)
    except (OSError, RuntimeError) as e:
        what = "listen on" if own else "reach"
        raise NetworkError(
            f"cannot {what} {launch.address}:{launch.port}: {_why(e)}",
            where=f"rank {launch.rank} on {launch.node}",
            hint="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs",
        ) from e


def exchange(
    store: dist.Store,
    name: str,
    own: Any,
    everyone: Sequence[Any],
    value: Any,
    *,
    where: str = "rendezvous",
    kind: str = "ranks",
    timeout_s: float | None = None,
) -> list[Any]:
    """Return the `value` of `everyone` (ranks, or nodes, of which this is `own`) as plain data. All call it.
    NetworkError names who is absent, or is the one that was put in the place of the values.

    The last one puts all values into one entry, so that N ranks make N reads, not N².
    """
    store.set(f"{name}/{own}", msgspec.json.encode(value).decode())
    if store.add(f"{name}/count", 1) == len(everyone):
        texts = store.multi_get([f"{name}/{other}" for other in everyone])
        store.set(f"{name}/all", json.dumps([json.loads(text) for text in texts]))
    limit = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
    try:
        store.wait([f"{name}/all"], *limit)
    except (RuntimeError, TimeoutError) as e:
        absent = compress(str(other) for other in everyone if not store.check([f"{name}/{other}"]))
        who = f"{kind} {absent} did not come" if absent else "the store did not answer"
        raise NetworkError(
            who + ("" if timeout_s is None else f" within {timeout_s:g} s"),
            where=where,
            hint="look at their logs; they started late, died, or cannot reach rank 0",
        ) from e
    found = json.loads(store.get(f"{name}/all"))
    if isinstance(found, dict):
        raise NetworkError(**found)
    return list(found)


def forget(run_dir: Path, launch: Launch) -> None:
    """Remove the published address, on rank 0 at the end."""
    with contextlib.suppress(OSError):
        meeting_path(run_dir, launch).unlink()


def _why(error: BaseException) -> str:
    known: dict[type[BaseException], str] = {TimeoutError: "no answer", ConnectionRefusedError: "nobody listens there"}
    return known.get(type(error)) or getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
