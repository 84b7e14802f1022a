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
import hmac
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from holmes_hpc.training.network.door import Door, connections, end_of, listening, own_inodes, packed

SECRET_BYTES = 32
PATIENCE_S = 5.0  # for a greeting, and for a relay's connection
LINGER_S = 0.3  # the door stays open for a port that has connected: its last packet of three may be under way
_NONCE, _MAC = 16, 32
_GREETING = _NONCE + 2 + _MAC
_ANSWER = 2 + _MAC
_OWN_MACHINE = "127.0.0.2"  # of the loopback interface, and not where a store of ranks of one machine listens


class Refused(OSError):
    """The gate did not prove that it knows the secret, or did not take our proof."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def _mac(secret: bytes, who: bytes, parts: Iterable[bytes]) -> bytes:
    return hmac.digest(secret, who + b"".join(len(p).to_bytes(2, "big") + p for p in parts), "sha256")


# -- the gate: rank 0's side ---------------------------------------------------------------------------------------


@dataclass
class _Visitor:
    """A connection to the gate. `proved`: it knows the secret; `port`: which it was let in for, None before that."""

    connection: socket.socket
    address: bytes
    nonce: bytes
    until: float
    said: bytes = b""
    proved: bool = False
    port: int | None = None


@dataclass
class Gate:
    """Listens on `address`, and opens `door` for those that know `secret`. Stops with :meth:`close`."""

    address: str
    secret: bytes
    door: Door
    _visitors: dict[int, _Visitor] = field(default_factory=dict)
    _admitted: dict[tuple[bytes, int], float] = field(default_factory=dict)  # -> until when the door is open for it
    _closed: bool = False

    def __post_init__(self) -> None:
        self._listener = listening(self.address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._most = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._listener:
                    self._accept()
                elif (visitor := self._visitors.get(key.fd)) is not None:
                    self._read(visitor)
            self._open()
            for visitor in [v for v in self._visitors.values() if v.until < time.monotonic()]:
                self._leave(visitor)
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
            visitor = _Visitor(connection, packed(peer[0]), secrets.token_bytes(_NONCE), time.monotonic() + PATIENCE_S)
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
            theirs, port = visitor.said[:_NONCE], visitor.said[_NONCE : _NONCE + 2]
            want = _mac(self.secret, b"rank", (visitor.nonce, theirs, port, visitor.address, packed(self.address)))
            if hmac.compare_digest(want, visitor.said[-_MAC:]):
                visitor.proved = True
            else:
                self._leave(visitor)

    def _open(self) -> None:
        """Let in those that have proved themselves, as many as the filter holds."""
        now = time.monotonic()
        before = len(self._admitted)
        self._admitted = {who: until for who, until in self._admitted.items() if until > now}
        waiting = [v for v in self._visitors.values() if v.proved and v.port is None]
        turn = waiting[: max(0, self.door.room - len(self._admitted))]
        for visitor in turn:
            visitor.port, visitor.until = int.from_bytes(visitor.said[_NONCE : _NONCE + 2], "big"), now + PATIENCE_S
            if visitor.port:  # 0: it only wants to know whether this gate is the right one
                self._admitted[visitor.address, visitor.port] = now + PATIENCE_S
        if turn or len(self._admitted) != before:
            self.door.admit(list(self._admitted))
        for visitor in turn:
            port = self.door.port.to_bytes(2, "big")
            self._send(visitor, port + _mac(self.secret, b"gate", (visitor.said[:_NONCE], visitor.nonce, port)))
            if not visitor.port:
                self._leave(visitor)

    def _send(self, visitor: _Visitor, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, or reads nothing: it is dropped in time
            visitor.connection.send(data)

    def _drop_oldest(self) -> None:
        if self._visitors:
            self._leave(min(self._visitors.values(), key=lambda visitor: (visitor.proved, visitor.until)))

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
    proof = _mac(secret, b"rank", (theirs, own, number, packed(gate.getsockname()[0]), packed(address)))
    gate.sendall(own + number + proof)
    answer = _exactly(gate, _ANSWER)
    if not hmac.compare_digest(_mac(secret, b"gate", (own, theirs, answer[:2])), answer[2:]):
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
    `address`:`port`. It lives as long as the process. `own_port`: which port that is, 0: any."""

    def __init__(self, address: str, port: int, secret: bytes, own_port: int = 0) -> None:
        self._to, self.address = (address, port, secret), _OWN_MACHINE
        self._listener = listening(self.address, own_port)
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
        theirs, here = end_of(*peer), end_of(self.address, self.port)
        own = own_inodes()
        return any(inode in own for inode, local, remote in connections() if local == theirs and remote == here)


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until there are no more, and say so to the other side."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
