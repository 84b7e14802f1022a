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

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterable
from typing import Any

import psutil

from holmes_hpc.training.network.filtered_listener import BACKLOG, Door, listening, packed

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


class Gate:
    """Listens on `address`, and opens `door` for those that know `secret`. Stops with :meth:`close`."""

    def __init__(self, address: str, secret: bytes, door: Door) -> None:
        self.address, self.secret, self.door = address, secret, door
        self._listener = listening(address)
        self.port = int(self._listener.getsockname()[1])
        self._most = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._has_proved: dict[asyncio.StreamWriter, bool] = {}  # of each connection, the oldest first
        self._admitted: set[tuple[bytes, int]] = set()
        self._room = asyncio.Semaphore(door.room)
        self._closed = False
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="rendezvous gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        with contextlib.closing(await asyncio.start_server(self._visit, sock=self._listener, backlog=BACKLOG)):
            while not self._closed:
                await asyncio.sleep(0.2)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Of too many the oldest that has not proved itself is dropped."""
        if len(self._has_proved) >= self._most:
            oldest = min(self._has_proved, key=lambda connection: self._has_proved[connection])
            del self._has_proved[oldest]
            oldest.close()
        self._has_proved[writer] = False
        try:
            # it left, was silent too long, or the gate closes
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                await self._let_in(reader, writer)
        finally:
            self._has_proved.pop(writer, None)
            writer.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Open the door for the port that this connection names, once it has proved that it knows the secret."""
        nonce, address = secrets.token_bytes(_NONCE), packed(writer.get_extra_info("peername")[0])
        writer.write(nonce)
        greeting = await asyncio.wait_for(reader.readexactly(_GREETING), PATIENCE_S)
        theirs, own_port, proof = greeting[:_NONCE], greeting[_NONCE:-_MAC], greeting[-_MAC:]
        expected = _mac(self.secret, b"rank", (nonce, theirs, own_port, address, packed(self.address)))
        if not hmac.compare_digest(expected, proof):
            return
        self._has_proved[writer] = True
        port, source = self.door.port.to_bytes(2, "big"), (address, int.from_bytes(own_port, "big"))
        answer = port + _mac(self.secret, b"gate", (theirs, nonce, port))
        if source[1] == 0:  # it only wants to know whether this gate is the right one
            writer.write(answer)
            return
        async with self._room:
            try:
                self._admitted.add(source)
                self.door.admit(self._admitted)
                writer.write(answer)
                await asyncio.wait_for(reader.read(1), PATIENCE_S)  # it has connected, or given up
                await asyncio.sleep(LINGER_S)
            finally:
                self._admitted.discard(source)
                self.door.admit(self._admitted)


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
    data = connection.makefile("rb").read(count)
    if len(data) < count:
        raise Refused("another process answers there")
    return data


def connect(address: str, port: int, secret: bytes, timeout_s: float = PATIENCE_S) -> socket.socket:
    """Return a connection to the store whose gate is at `address`:`port`."""
    with contextlib.ExitStack() as on_error:
        made = on_error.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        made.settimeout(timeout_s)
        with socket.create_connection((address, port), timeout=timeout_s) as gate:
            made.bind((gate.getsockname()[0], 0))
            made.connect((address, _greet(gate, address, secret, made.getsockname()[1])))
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_error.pop_all()
    return made


class Relay(socketserver.ThreadingTCPServer):
    """A port on the loopback interface behind which this process, and no other, finds the store whose gate is at
    `address`:`port`. It lives as long as the process. `own_port`: which port that is, 0: any."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, address: str, port: int, secret: bytes, own_port: int = 0) -> None:
        super().__init__((_OWN_MACHINE, own_port), socketserver.BaseRequestHandler)
        self._to, (self.address, self.port) = (address, port, secret), self.socket.getsockname()
        threading.Thread(target=self.serve_forever, name="rendezvous relay", daemon=True).start()

    def verify_request(self, _: Any, peer: Any) -> bool:
        """Return whether a connection is this process's own."""
        connections = psutil.Process().net_connections("tcp")
        # TCPStore reaches IPv4 addresses through IPv6 sockets
        ends = [[(end.ip.removeprefix("::ffff:"), end.port) for end in (c.laddr, c.raddr) if end] for c in connections]
        return [peer, (self.address, self.port)] in ends

    def finish_request(self, own: Any, _: Any) -> None:
        """Pass bytes between a connection, in a thread of its own, and the store."""
        with contextlib.suppress(OSError), connect(*self._to) as store:  # TCPStore says in its own words what is wrong
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(store, own), name="rendezvous relay", daemon=True)
            back.start()
            _pump(own, store)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until there are no more, and say so to the other side."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
