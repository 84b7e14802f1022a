"""Bytes that this process's own TCP connections sent, as the kernel counts them: whose a NIC's bytes are."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

_TCP_INFO_BYTES = 128
_BYTES_ACKED = 120  # its place in struct tcp_info of linux/tcp.h, from Linux 4.1 on


class OwnSockets:
    """`take`: local address -> bytes sent from it, and acknowledged, since the last call."""

    def __init__(self) -> None:
        self._last = _sent()

    def take(self) -> dict[str, int]:
        before, self._last = self._last, _sent()
        found: dict[str, int] = {}
        for inode, (address, sent) in self._last.items():
            found[address] = found.get(address, 0) + sent - before.get(inode, ("", 0))[1]
        return found


def _sent() -> dict[int, tuple[str, int]]:
    """Inode of each TCP connection of this process -> (local address, bytes that the other side has acknowledged)."""
    found: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                    continue
                told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if len(told) == _TCP_INFO_BYTES:
                    address = str(own.getsockname()[0]).removeprefix("::ffff:")
                    found[status.st_ino] = address, struct.unpack_from("=Q", told, _BYTES_ACKED)[0]
    return found
