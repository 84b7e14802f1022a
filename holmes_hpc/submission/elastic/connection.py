"""The messages between agents and coordinator: JSON over TCP, for processes that know the run's secret.

The coordinator publishes its address and a secret in a file that only the run's user may read. Both sides of a
connection prove that they know the secret. Afterwards they exchange data in clear text.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NamedTuple

from msgspec import ValidationError, convert

from holmes_hpc import __version__
from holmes_hpc.commit import git_commit
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.ownership import is_own
from holmes_hpc.submission.elastic.claims import attempt_path

OWNER_ONLY = 0o600
MAX_BYTES = 1 << 16  # of a message
WATCH_S = 1.5
CODE = "HOLMES_CODE"


def code_version() -> str:
    """Return the version and commit of this process's code. A coordinator that an agent starts has the agent's."""
    return os.environ.get(CODE) or os.environ.setdefault(CODE, " ".join(filter(None, (__version__, git_commit()))))


class Order(NamedTuple):
    """The answer to a :class:`Beat`. `start`: number of the ranks' latest start; `first_rank`, `ranks`: first rank and
    number of ranks on the agent's node in that start; `hosts`: a host list for each component of the plan; `is_go`:
    start the ranks now; `is_stop`: let the ranks save and end after a step; `is_end`: the run is over."""

    start: int
    first_rank: int = 0
    ranks: int = 0
    world_size: int = 0
    num_nodes: int = 0
    hosts: tuple[str, ...] = ()
    is_go: bool = False
    is_stop: bool = False
    is_end: bool = False


class Published(NamedTuple):
    """The published address, secret and node of a coordinator."""

    address: tuple[str, int]
    secret: str
    node: str

    @classmethod
    def read(cls, path: Path) -> "Published | None":
        """Return the coordinator that is published at `path`; None if there is none yet."""
        with contextlib.suppress(OSError, ValueError, ValidationError):
            if is_own(path, OWNER_ONLY):
                return convert(json.loads(path.read_bytes()), cls)
        return None

    def connect(self, timeout_s: float) -> Connection:
        """Return a connection to the coordinator. Raise OSError, EOFError or AuthenticationError if there is none."""
        socket.create_connection(self.address, timeout_s).close()  # Client would wait for a silent node for minutes
        return Client(self.address, "AF_INET", authkey=self.secret.encode())

    def may_live(self, timeout_s: float) -> bool:
        """Return False if the coordinator's node refuses the connection, so that no coordinator listens there."""
        with contextlib.suppress(OSError):
            try:
                socket.create_connection(self.address, timeout_s).close()
            except ConnectionRefusedError:
                return False
        return True

    def is_kept_up(self, path: Path) -> bool:
        """Return whether the coordinator still touches its file at `path`. If so, this node is cut off."""
        times = []
        for _ in range(2):
            time.sleep(WATCH_S)  # before the first look, so that a coordinator that is cut off has noticed that
            with contextlib.suppress(OSError), path.open() as file:  # file servers show changes only to a new open
                times.append(os.fstat(file.fileno()).st_mtime_ns)
        return len(set(times)) == 2 and self.read(path) == self


def published_path(folder: Path) -> Path:
    """Return the path of the file, in the folder of submissions, that this attempt's coordinator publishes."""
    return attempt_path(folder, "coordinator.json")


def listen(address: str, path: Path, node: str) -> tuple[Listener, bytes]:
    """Listen on `address` of `node`, and publish that and a secret at `path`. Return the listener and the secret."""
    listener = Listener((address, 0), "AF_INET", backlog=128)
    published = Published((address, int(listener.address[1])), secrets.token_hex(32), node)
    write_whole(path, json.dumps(published) + "\n", OWNER_ONLY)
    return listener, published.secret.encode()
