"""A listening socket that lets in chosen addresses and ports alone: a socket filter drops what else comes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from pathlib import Path

_MOST_INSTRUCTIONS = 4096  # of a filter
_SO_ATTACH_FILTER = 26
_BACKLOG = 1024
_MAPPED = "0" * 16 + f"{socket.htonl(0xFFFF):08X}"  # ::ffff:0:0 as /proc/net/tcp6 writes it
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of linux/filter.h; offsets without it count from the TCP header
_ALL = 0xFFFFFFFF


def packed(address: str) -> bytes:
    """An IPv4 or IPv6 address as packets hold it."""
    return ipaddress.ip_address(address.partition("%")[0]).packed


def filter_program(admitted: list[tuple[bytes, int]]) -> bytes:
    """A classic BPF program that passes packets from these (address, port) and drops all others."""
    code = []
    for address, port in admitted:
        at = 12 if len(address) == 4 else 8
        words = struct.unpack(f">{len(address) // 4}I", address)
        tests = [
            (_LOAD_HALF, 0, port),
            *((_LOAD_WORD, _NETWORK_HEADER + at + 4 * i, word) for i, word in enumerate(words)),
        ]
        for index, (load, offset, value) in enumerate(tests):
            to_next = 2 * (len(tests) - index - 1) + 1  # over the other tests and the return
            code += [struct.pack("HBBI", load, 0, 0, offset), struct.pack("HBBI", _JUMP_EQUAL, 0, to_next, value)]
        code.append(struct.pack("HBBI", _RETURN, 0, 0, _ALL))
    return b"".join([*code, struct.pack("HBBI", _RETURN, 0, 0, 0)])


class Door:
    """A listening socket on `address` that drops what does not come from an admitted (address, port)."""

    def __init__(self, address: str) -> None:
        self.socket = _bound(address)
        self.address, self.port = address, int(self.socket.getsockname()[1])
        one = (packed(address), 1)
        self.room = (_MOST_INSTRUCTIONS - 1) // (len(filter_program([one])) // 8 - 1)
        while not self._holds([one] * self.room):  # the kernel gives a socket little memory for its options
            if self.room == 1:
                raise OSError(errno.ENOMEM, "no memory for a socket filter (net.core.optmem_max)")
            self.room //= 2
        self.admit([])
        self.socket.listen(_BACKLOG)  # nobody has come before it was shut

    def _holds(self, admitted: list[tuple[bytes, int]]) -> bool:
        """Whether a filter of this size can be put in the place of another one: for a moment there are two."""
        try:
            for _ in range(2):
                self.admit(admitted)
        except OSError as e:
            if e.errno != errno.ENOMEM:
                raise
            return False
        return True

    def admit(self, admitted: list[tuple[bytes, int]]) -> None:
        """From now on these, and only these, may connect; connections that stand are not touched."""
        program = filter_program(admitted)
        buffer = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

    def close(self) -> None:
        self.socket.close()


def listening(address: str, port: int = 0) -> socket.socket:
    """A listening socket on this address alone, a name or a number; OSError where it cannot be."""
    made = _bound(address, port)
    try:
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _bound(address: str, port: int = 0) -> socket.socket:
    """A socket that has its address and does not listen yet."""
    family, kind, _, _, end = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    try:
        if port:  # one that is told, which an earlier process may just have left
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(end)
    except OSError:
        made.close()
        raise
    return made


def own_inodes() -> set[int]:
    """The sockets of this process."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def end_of(address: str, port: int) -> str:
    """An address and a port as /proc/net/tcp writes them."""
    number = packed(address)
    words = struct.unpack(f"={len(number) // 4}I", number)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def connections() -> list[tuple[int, str, str]]:
    """(inode, local end, remote end) of this machine's TCP connections. TCPStore reaches IPv4 addresses through IPv6
    sockets: those ends are given as IPv4's."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            rows = Path("/proc/self/net", name).read_text(encoding="ascii").splitlines()[1:]
            found += [
                (int(cells[9]), cells[1].removeprefix(_MAPPED), cells[2].removeprefix(_MAPPED))
                for cells in (row.split() for row in rows)
            ]
    return found
