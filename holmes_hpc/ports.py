"""Free TCP ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(ports: Iterable[int], address: str) -> int | None:
    """Return the first of `ports` that can be listened on at `address`; None if all are taken."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    return None


def first_ephemeral() -> int:
    """Return the lowest port that the system may assign to outgoing connections; servers should listen below it."""
    try:
        return max(10001, int(_RANGE.read_text().split()[0]))
    except OSError:  # not Linux
        return 32768
