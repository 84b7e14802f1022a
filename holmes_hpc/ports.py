"""Free TCP ports."""

import contextlib
import socket
from collections.abc import Iterable


def free_port(ports: Iterable[int], address: str) -> int | None:
    """Return the first of `ports` that can be listened on at `address`; None if all are taken."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    return None
