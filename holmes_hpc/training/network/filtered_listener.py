"""A listening socket that accepts only chosen addresses and ports: a socket filter drops all other packets.

Some kernels (seen with Linux 6.18) allow a filter on a TCP socket only to processes with CAP_NET_ADMIN. Packets are
signed instead (TCP-MD5, RFC 2385): the kernel drops all packets that are not signed with the listener's key.
"""

import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from functools import lru_cache

_MAX_INSTRUCTIONS = 4096  # of a filter
_SO_ATTACH_FILTER, _TCP_MD5SIG_EXT = 26, 32
BACKLOG = 4096
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of linux/filter.h; offsets without it count from the TCP header
_ALL = 0xFFFFFFFF


def packed_address(address: str) -> bytes:
    """Return an IPv4 or IPv6 address in network byte order."""
    return ipaddress.ip_address(address.partition("%")[0]).packed


@lru_cache(1024)
def _accept_instructions(address: bytes, port: int) -> bytes:
    """Return BPF instructions that accept a packet from one address and port. Any other packet skips them."""
    address_offset = 12 if len(address) == 4 else 8  # of the source address in an IPv4 or IPv6 header
    address_words = struct.unpack(f">{len(address) // 4}I", address)
    conditions = [
        (_LOAD_HALF, 0, port),  # the source port is the first field of the TCP header
        *((_LOAD_WORD, _NETWORK_HEADER + address_offset + 4 * i, word) for i, word in enumerate(address_words)),
    ]
    code = b""  # of struct sock_filter: code, instructions to skip if true, and if false, operand
    for index, (load, offset, value) in enumerate(conditions):
        skipped = 2 * (len(conditions) - index - 1) + 1  # instructions: the remaining conditions, and the return
        code += struct.pack("HBBIHBBI", load, 0, 0, offset, _JUMP_EQUAL, 0, skipped, value)
    return code + struct.pack("HBBI", _RETURN, 0, 0, _ALL)


def filter_program(admitted: Iterable[tuple[bytes, int]]) -> bytes:
    """Return a classic BPF program that accepts packets from these (address, port) and drops all others."""
    return b"".join(_accept_instructions(*source) for source in admitted) + struct.pack("HBBI", _RETURN, 0, 0, 0)


def sign_packets(connection: socket.socket, key: bytes) -> None:
    """Make the kernel sign all packets of a TCP socket with `key`, and drop received packets without this signature."""
    any_address = struct.pack("H126x", connection.family)
    is_prefix, prefix_bits, interface = 1, 0, 0
    option = any_address + struct.pack("BBHi80s", is_prefix, prefix_bits, len(key), interface, key)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)


class FilteredListener:
    """A listening socket on `address` that drops packets from all but the admitted (address, port).

    `capacity`: the most (address, port) that can be admitted at a time; `is_signed`: the kernel refuses filters, and
    drops the packets that are not signed with `key` instead.
    """

    is_signed = False

    def __init__(self, address: str, key: bytes) -> None:
        family, kind, _, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.socket = socket.socket(family, kind)
        try:
            self.admit([])
        except PermissionError:
            sign_packets(self.socket, key)
            self.is_signed = True
        self.socket.bind(socket_address)
        self.address, self.port = address, int(self.socket.getsockname()[1])
        source = (packed_address(address), 1)  # any address of this length, for the size of a filter
        self.capacity = (_MAX_INSTRUCTIONS - 1) // (len(filter_program([source])) // 8 - 1)
        while not self._has_memory_for([source] * self.capacity):  # the kernel limits a socket's option memory
            if self.capacity == 1:
                raise OSError(errno.ENOMEM, "no memory for a socket filter (net.core.optmem_max)")
            self.capacity //= 2
        self.admit([])
        self.socket.listen(BACKLOG)  # last, so that no connection precedes the filter

    def _has_memory_for(self, admitted: list[tuple[bytes, int]]) -> bool:
        """Return whether the kernel has memory for two filters of this size: one replaces the other."""
        try:
            for _ in range(2):
                self.admit(admitted)
        except OSError as e:
            if e.errno != errno.ENOMEM:
                raise
            return False
        return True

    def admit(self, admitted: Iterable[tuple[bytes, int]]) -> None:
        """Admit exactly these (address, port) from now on. Established connections are not affected."""
        if self.is_signed:
            return
        program = filter_program(admitted)
        buffer = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

    def close(self) -> None:
        self.socket.close()


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on this address only (name or number). Raise OSError if it cannot be bound."""
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(socket_address, family=family, backlog=BACKLOG)
