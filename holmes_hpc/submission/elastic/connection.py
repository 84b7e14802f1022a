"""The messages between agents and coordinator: JSON over TCP, for processes that know the run's secret.

The coordinator publishes its address and a secret in a file that only the run's user may read. Both sides of a
connection prove that they know the secret. Afterwards they exchange data in clear text.
"""

import contextlib
import json
import os
import secrets
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NamedTuple

from holmes_hpc.records.files import write_whole
from holmes_hpc.records.ownership import is_own
from holmes_hpc.submission.lifecycle.attempts import attempt_id

OWNER_ONLY = 0o600
MAX_BYTES = 1 << 16  # of a message


class Order(NamedTuple):
    """The coordinator's answer to a beat. `start`: the number of the ranks' latest start, in which the node has the
    ranks `first_rank` to `first_rank + ranks`; `hosts`: a host list for each component of the plan; `is_go`: start the
    ranks now; `is_end`: the run is over."""

    start: int
    first_rank: int = 0
    ranks: int = 0
    world_size: int = 0
    num_nodes: int = 0
    hosts: tuple[str, ...] = ()
    is_go: bool = False
    is_end: bool = False


def published_path(folder: Path) -> Path:
    """Return the path of the file that this attempt's coordinator publishes in the folder of submissions."""
    return folder / f"{attempt_id(os.environ).replace('/', '-')}_coordinator.json"


def listen(address: str, path: Path) -> tuple[Listener, bytes]:
    """Return a listener on `address`, which is published at `path`, and its secret."""
    listener, secret = Listener((address, 0), "AF_INET", backlog=128), secrets.token_hex(32)
    write_whole(path, json.dumps({"address": listener.address, "secret": secret}) + "\n", OWNER_ONLY)
    return listener, secret.encode()


def connect(path: Path) -> Connection | None:
    """Return a connection to the coordinator that is published at `path`; None if there is none yet."""
    with contextlib.suppress(OSError, ValueError):
        if is_own(path, OWNER_ONLY):
            published = json.loads(path.read_bytes())
            return Client(tuple(published["address"]), "AF_INET", authkey=published["secret"].encode())
    return None
