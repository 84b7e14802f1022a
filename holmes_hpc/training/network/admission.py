"""Who may speak to rank 0's store: processes that prove that they know the run's secret.

PyTorch's TCPStore answers whoever reaches it. So it gets a listening socket of ours, on one address, whose door the
kernel keeps shut (a socket filter drops every packet); a gate listens beside it. A rank proves to the gate that it
knows the secret, by HMAC-SHA256 over random numbers and addresses of both sides, so that no greeting can be replayed or
used from elsewhere; the gate proves the same to the rank. Then the door is opened for the one address and port that
this rank is about to connect from. Since TCPStore's own client takes any port, it connects through a relay in its own
process, on the loopback interface; that one admits no other process.

The gate only admits: what a rank and the store say to each other goes between them directly, in clear text.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import ipaddress
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from holmes_hpc.errors import NetworkError

SECRET_BYTES = 32
PATIENCE_S = 5.0  # for a greeting, and for a relay's connection
LINGER_S = 0.5  # the door stays open for a port that has connected: its last packet of three may be under way
_MOST_INSTRUCTIONS = 4096  # of a filter
_NONCE, _MAC = 16, 32
_GREETING = _NONCE + 2 + _MAC
_ANSWER = 2 + _MAC
_SO_ATTACH_FILTER = 26
_LOOPBACK = "127.0.0.1"
_MAPPED = "0" * 16 + f"{socket.htonl(0xFFFF):08X}"  # ::ffff:0:0 as /proc/net/tcp6 writes it


class Refused(OSError):
    """The gate did not prove that it knows the secret, or did not take our proof."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def _mac(secret: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, who + b"".join(len(p).to_bytes(2, "big") + p for p in parts), "sha256")


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address.partition("%")[0]).packed


# -- the door: a listening socket that lets in chosen ports --------------------------------------------------------

_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of linux/filter.h; offsets without it count from the TCP header
_ALL = 0xFFFFFFFF


def filter_program(admitted: list[tuple[bytes, int]]) -> bytes:
    """A classic BPF program that passes packets from these (address, port) and drops all others."""
    code = []
    for address, port in admitted:
        at = 12 if len(address) == 4 else 8
        words = struct.unpack(f">{len(address) // 4}I", address)
        tests = [(_LOAD_HALF, 0, port),
                 *((_LOAD_WORD, _NETWORK_HEADER + at + 4 * i, word) for i, word in enumerate(words))]
        for index, (load, offset, value) in enumerate(tests):
            to_next = 2 * (len(tests) - index - 1) + 1  # over the other tests and the return
            code += [struct.pack("HBBI", load, 0, 0, offset), struct.pack("HBBI", _JUMP_EQUAL, 0, to_next, value)]
        code.append(struct.pack("HBBI", _RETURN, 0, 0, _ALL))
    return b"".join([*code, struct.pack("HBBI", _RETURN, 0, 0, 0)])


class Door:
    """A listening socket on `address` that drops what does not come from an admitted (address, port)."""

    def __init__(self, address: str) -> None:
        self.socket = listening(address)
        self.address, self.port = address, int(self.socket.getsockname()[1])
        self.room = (_MOST_INSTRUCTIONS - 1) // (len(filter_program([(_packed(address), 1)])) // 8 - 1)
        self.admit([])

    def admit(self, admitted: list[tuple[bytes, int]]) -> None:
        """From now on these, and only these, may connect; connections that stand are not touched."""
        self._attach(filter_program(admitted))

    def admit_this_machine(self) -> None:
        """For a moment, whoever connects from this very address; see :meth:`only_own`."""
        own = _packed(self.address)
        passed = filter_program([(own, 0)])
        self._attach(passed[16:])  # without the test of the port, which comes first

    def _attach(self, program: bytes) -> None:
        buffer = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

    def only_own(self) -> bool:
        """Whether all that are connected are sockets of this process, on this machine."""
        own, here = _own_inodes(), _end(self.address, self.port)
        peers = [inode for inode, _, remote in _connections() if remote == here]
        return bool(peers) and own.issuperset(peers)

    def close(self) -> None:
        self.socket.close()


def listening(address: str, port: int = 0) -> socket.socket:
    """A listening socket on this address alone, a name or a number; OSError where it cannot be."""
    family, kind, _, _, end = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    try:
        if port:  # one that is told, which an earlier process may just have left
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(end)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


def _own_inodes() -> set[int]:
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _end(address: str, port: int) -> str:
    """An address and a port as /proc/net/tcp writes them."""
    packed = _packed(address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _connections() -> list[tuple[int, str, str]]:
    """(inode, local end, remote end) of this machine's TCP connections. TCPStore reaches IPv4 addresses through IPv6
    sockets: those ends are given as IPv4's."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            rows = Path("/proc/self/net", name).read_text(encoding="ascii").splitlines()[1:]
            found += [(int(cells[9]), cells[1].removeprefix(_MAPPED), cells[2].removeprefix(_MAPPED))
                      for cells in (row.split() for row in rows)]
    return found


# -- the gate: rank 0's side ---------------------------------------------------------------------------------------


@dataclass
class _Visitor:
    """A connection to the gate. `port`: which it was let in for, None before it has proved anything."""

    connection: socket.socket
    address: bytes
    nonce: bytes
    until: float
    said: bytes = b""
    port: int | None = None


@dataclass
class Gate:
    """Listens on `address`, and opens `door` for those that know `secret`. Stops with :meth:`close`."""

    address: str
    secret: bytes
    door: Door
    _visitors: dict[int, _Visitor] = field(default_factory=dict)
    _admitted: dict[tuple[bytes, int], float] = field(default_factory=dict)  # -> until when the door is open for it
    _waiting: list[tuple[_Visitor, bytes, int]] = field(default_factory=list)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._listener = listening(self.address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._most = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="rendezvous gate", daemon=True).start()

    def close(self) -> None:
        self._closed = True

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._listener:
                    self._accept()
                elif (visitor := self._visitors.get(key.fd)) is not None:
                    self._read(visitor)
            self._open()
            self._tidy()
        for visitor in list(self._visitors.values()):
            self._leave(visitor)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file left for it: the oldest visitor goes
                self._drop_oldest()
                return
            if len(self._visitors) >= self._most:
                self._drop_oldest()
            connection.setblocking(False)
            visitor = _Visitor(connection, _packed(peer[0]), secrets.token_bytes(_NONCE), time.monotonic() + PATIENCE_S)
            self._visitors[connection.fileno()] = visitor
            self._selector.register(connection, selectors.EVENT_READ)
            self._send(visitor, visitor.nonce)

    def _read(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(_GREETING + 1 - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if visitor.port is not None:  # it has connected, or given up
            self._admitted[visitor.address, visitor.port] = time.monotonic() + LINGER_S
            self._leave(visitor)
            return
        visitor.said += data
        if not data or len(visitor.said) > _GREETING:
            self._leave(visitor)
        elif len(visitor.said) == _GREETING:
            theirs, port = visitor.said[:_NONCE], visitor.said[_NONCE:_NONCE + 2]
            want = _mac(self.secret, b"rank", visitor.nonce, theirs, port, visitor.address, _packed(self.address))
            if hmac.compare_digest(want, visitor.said[-_MAC:]):
                self._waiting.append((visitor, theirs, int.from_bytes(port, "big")))
            else:
                self._leave(visitor)

    def _open(self) -> None:
        """Let in those that have proved themselves, as many as the filter holds."""
        now = time.monotonic()
        before = len(self._admitted)
        self._admitted = {who: until for who, until in self._admitted.items() if until > now}
        room = self.door.room - len(self._admitted)
        turn, self._waiting = self._waiting[:room], self._waiting[room:]
        for visitor, _, port in turn:
            if port:  # 0: it only wants to know whether this gate is the right one
                self._admitted[visitor.address, port] = now + PATIENCE_S
        if turn or len(self._admitted) != before:
            self.door.admit(list(self._admitted))
        for visitor, theirs, port in turn:
            told = self.door.port.to_bytes(2, "big")
            self._send(visitor, told + _mac(self.secret, b"gate", theirs, visitor.nonce, told))
            visitor.port, visitor.until = port, now + PATIENCE_S
            if not port:
                self._leave(visitor)

    def _send(self, visitor: _Visitor, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, or reads nothing: it is dropped in time
            visitor.connection.send(data)

    def _tidy(self) -> None:
        now = time.monotonic()
        for visitor in [v for v in self._visitors.values() if v.until < now]:
            self._leave(visitor)

    def _drop_oldest(self) -> None:
        if self._visitors:
            self._leave(min(self._visitors.values(), key=lambda visitor: visitor.until))

    def _leave(self, visitor: _Visitor) -> None:
        self._visitors.pop(visitor.connection.fileno(), None)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(visitor.connection)
        visitor.connection.close()


# -- the relay: every rank's side ----------------------------------------------------------------------------------


def prove(address: str, port: int, secret: bytes, timeout_s: float = PATIENCE_S) -> None:
    """See that the gate at `address`:`port` is there, and the right one. Refused where it is another one; OSError where
    it gives no answer."""
    with socket.create_connection((address, port), timeout=timeout_s) as gate:
        _greet(gate, address, secret, 0)


def _greet(gate: socket.socket, address: str, secret: bytes, own_port: int) -> int:
    """Prove to the gate that we know the secret; the store's port comes back, where `own_port` of this machine may
    connect as long as `gate` is open."""
    own, theirs = secrets.token_bytes(_NONCE), _exactly(gate, _NONCE)
    number = own_port.to_bytes(2, "big")
    proof = _mac(secret, b"rank", theirs, own, number, _packed(gate.getsockname()[0]), _packed(address))
    gate.sendall(own + number + proof)
    answer = _exactly(gate, _ANSWER)
    if not hmac.compare_digest(_mac(secret, b"gate", own, theirs, answer[:2]), answer[2:]):
        raise Refused("another process answers there")
    return int.from_bytes(answer[:2], "big")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := connection.recv(count - len(data))):
            raise Refused("another process answers there")
        data += piece
    return data


def connect(address: str, port: int, secret: bytes, timeout_s: float = PATIENCE_S) -> socket.socket:
    """A connection to the store whose gate is at `address`:`port`."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        with socket.create_connection((address, port), timeout=timeout_s) as gate:
            made.bind((gate.getsockname()[0], 0))
            made.connect((address, _greet(gate, address, secret, made.getsockname()[1])))
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        made.close()
        raise
    return made


class Relay:
    """A port on the loopback interface behind which this process, and no other, finds the store whose gate is at
    `address`:`port`. It lives as long as the process."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        self._to = address, port, secret
        self._listener = listening(_LOOPBACK)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="rendezvous relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, peer), name="rendezvous relay", daemon=True).start()

    def _serve(self, own: socket.socket, peer: tuple[str, int]) -> None:
        try:
            with own:
                if not self._is_own(peer):
                    return
                with connect(*self._to) as store:
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    back = threading.Thread(target=_pump, args=(store, own), name="rendezvous relay", daemon=True)
                    back.start()
                    _pump(own, store)
                    back.join()
        except OSError:
            return  # TCPStore says it in its own words: its connection is closed

    def _is_own(self, peer: tuple[str, int]) -> bool:
        theirs, here = _end(*peer), _end(_LOOPBACK, self.port)
        own = _own_inodes()
        return any(inode in own for inode, local, remote in _connections()
                   if local == theirs and remote == here)


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until there are no more, and say so to the other side."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def closed_door(address: str, where: str) -> Door:
    """A door on `address`. NetworkError where it cannot be listened on, or where the kernel has no socket filters."""
    try:
        return Door(address)
    except OSError as e:
        raise NetworkError(f"cannot listen on {address}: {e.strerror or e}", where=where,
                           hint="give the node's Ethernet interface an address that the other nodes reach; the kernel "
                                "must be Linux, with socket filters") from e
