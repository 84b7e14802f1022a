"""A listening socket that lets in chosen addresses and ports alone: a socket filter drops what else comes."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from functools import lru_cache

_MOST_INSTRUCTIONS = 4096  # of a filter
_SO_ATTACH_FILTER = 26
BACKLOG = 1024
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of linux/filter.h; offsets without it count from the TCP header
_ALL = 0xFFFFFFFF


def packed(address: str) -> bytes:
    """Return an IPv4 or IPv6 address as packets hold it."""
    return ipaddress.ip_address(address.partition("%")[0]).packed


@lru_cache(1024)
def _passing(address: bytes, port: int) -> bytes:
    """Return the instructions that pass packets from one address and port, and else go on behind them."""
    at = 12 if len(address) == 4 else 8
    words = struct.unpack(f">{len(address) // 4}I", address)
    tests = [(_LOAD_HALF, 0, port), *((_LOAD_WORD, _NETWORK_HEADER + at + 4 * i, word) for i, word in enumerate(words))]
    code = b""
    for index, (load, offset, value) in enumerate(tests):
        to_next = 2 * (len(tests) - index - 1) + 1  # over the other tests and the return
        code += struct.pack("HBBIHBBI", load, 0, 0, offset, _JUMP_EQUAL, 0, to_next, value)
    return code + struct.pack("HBBI", _RETURN, 0, 0, _ALL)


def filter_program(admitted: Iterable[tuple[bytes, int]]) -> bytes:
    """Return a classic BPF program that passes packets from these (address, port) and drops all others."""
    return b"".join(_passing(*source) for source in admitted) + struct.pack("HBBI", _RETURN, 0, 0, 0)


class Door:
    """A listening socket on `address` that drops what does not come from an admitted (address, port)."""

    def __init__(self, address: str) -> None:
        family, kind, _, _, end = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.socket = socket.socket(family, kind)
        self.socket.bind(end)
        self.address, self.port = address, int(self.socket.getsockname()[1])
        one = (packed(address), 1)
        self.room = (_MOST_INSTRUCTIONS - 1) // (len(filter_program([one])) // 8 - 1)
        while not self._holds([one] * self.room):  # the kernel gives a socket little memory for its options
            if self.room == 1:
                raise OSError(errno.ENOMEM, "no memory for a socket filter (net.core.optmem_max)")
            self.room //= 2
        self.admit([])
        self.socket.listen(BACKLOG)  # nobody has come before it was shut

    def _holds(self, admitted: list[tuple[bytes, int]]) -> bool:
        """Return whether a filter of this size can be put in the place of another one: for a moment there are two."""
        try:
            for _ in range(2):
                self.admit(admitted)
        except OSError as e:
            if e.errno != errno.ENOMEM:
                raise
            return False
        return True

    def admit(self, admitted: Iterable[tuple[bytes, int]]) -> None:
        """Let these, and only these, connect from now on; connections that stand are not touched."""
        program = filter_program(admitted)
        buffer = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

    def close(self) -> None:
        self.socket.close()


def listening(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on this address alone, a name or a number. OSError where there can be none."""
    family, _, _, _, end = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(end, family=family, backlog=BACKLOG)
