"""Authentication at rank 0's store: only processes that know the run's secret can connect.

PyTorch's TCPStore answers every client that reaches it. The store therefore gets a filtered listener: a socket on one
address, with a socket filter that drops the packets of all clients that are not admitted. An authentication server
listens on a second port. Each rank first connects to this server. Rank and server prove to each other that they know
the secret, by HMAC-SHA256 over random numbers and the addresses of both sides. A greeting therefore can be neither
replayed nor used from another address. The filter then admits the address and port from which this rank connects.

TCPStore's client cannot choose its port. In each rank it therefore connects to a proxy in its own process, on the
loopback interface. The proxy accepts connections of this process only. If the kernel refuses filters, rank and store
sign their packets with a key that is derived from the secret.

The authentication server relays no data: an admitted rank and the store exchange their data directly, in clear text.
"""

import asyncio
import contextlib
import hmac
import resource
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from holmes_hpc.training.network.filtered_listener import (
    BACKLOG,
    FilteredListener,
    listening_socket,
    packed_address,
    sign_packets,
)
from holmes_hpc.training.network.keepalive import keep_alive

SECRET_BYTES = 32
TIMEOUT_S = 5.0  # limit of a greeting, and of connecting to the store
LINGER_S = 0.3  # a port stays admitted this long after it has connected, so that its last handshake packet passes
BUSY_LINGER_S = 0.05  # the same, while other ranks wait to be admitted
UPDATE_S = 0.005  # clients that come within this time are admitted by one update of the filter
_NONCE, _MAC = 16, 32  # bytes, as in the next two lines
_GREETING = _NONCE + 2 + _MAC  # the client's nonce, its port, and the proof
_ANSWER = 3 + _MAC  # the store's port, whether its packets are signed, and the proof
# The proxy of rank 0 has the port of the store, which listens on 127.0.0.1 in a run of one node. Other ranks use
# 127.0.0.1, because torch asks for the name of the address, and only this address has one without asking a DNS server.
_PROXY_ADDRESS, _RANK_0_PROXY_ADDRESS = "127.0.0.1", "127.0.0.2"


class AuthenticationError(OSError):
    """The server did not prove that it knows the secret, or did not accept this client's proof."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def packet_key(secret: bytes) -> bytes:
    return _mac(secret, b"packets", ())


def _mac(secret: bytes, role: bytes, parts: Iterable[bytes]) -> bytes:
    return hmac.digest(secret, role + b"".join(len(p).to_bytes(2, "big") + p for p in parts), "sha256")


# -- the authentication server: rank 0's side ----------------------------------------------------------------------


class AuthenticationServer:
    """A server on `address` that makes `listener` admit clients that know `secret`. :meth:`close` stops it.
    `timeout_s`: the limit of a greeting, and of the connection to the store that follows."""

    def __init__(self, address: str, secret: bytes, listener: FilteredListener, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self.secret, self.listener, self._timeout_s = address, secret, listener, timeout_s
        self._socket = listening_socket(address)
        self.port = int(self._socket.getsockname()[1])
        self._max_connections = max(16, min(1 << 15, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._is_authenticated: dict[asyncio.StreamWriter, bool] = {}  # by connection, the oldest first
        self._admitted: set[tuple[bytes, int]] = set()
        self._update: asyncio.Future[None] | None = None  # of the listener's filter
        self._free_slots = asyncio.Semaphore(listener.capacity)
        self._closed = False
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(),), name="authentication server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        with contextlib.closing(await asyncio.start_server(self._serve_connection, sock=self._socket, backlog=BACKLOG)):
            while not self._closed:
                await asyncio.sleep(0.2)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. When the server is full, it drops the oldest unauthenticated connection."""
        if len(self._is_authenticated) >= self._max_connections:
            oldest = min(self._is_authenticated, key=lambda connection: self._is_authenticated[connection])
            del self._is_authenticated[oldest]
            oldest.close()
        self._is_authenticated[writer] = False
        try:
            # These errors mean that the client left, that it was silent too long, or that the server closes.
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                await self._authenticate(reader, writer)
        finally:
            self._is_authenticated.pop(writer, None)
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit the port that the client names, once the client has proved that it knows the secret."""
        nonce, address = secrets.token_bytes(_NONCE), packed_address(writer.get_extra_info("peername")[0])
        writer.write(nonce)
        greeting = await asyncio.wait_for(reader.readexactly(_GREETING), self._timeout_s)
        client_nonce, client_port, proof = greeting[:_NONCE], greeting[_NONCE:-_MAC], greeting[-_MAC:]
        parts = (nonce, client_nonce, client_port, address, packed_address(self.address))
        if not hmac.compare_digest(_mac(self.secret, b"rank", parts), proof):
            return
        self._is_authenticated[writer] = True
        store = struct.pack(">H?", self.listener.port, self.listener.is_signed)
        source = address, int.from_bytes(client_port, "big")
        answer = store + _mac(self.secret, b"server", (client_nonce, nonce, store))
        async with self._free_slots:
            try:
                self._admitted.add(source)
                await asyncio.shield(self._update_filter())
                writer.write(answer)
                # This ends when the client has connected or given up.
                await asyncio.wait_for(reader.read(1), self._timeout_s)
                await asyncio.sleep(BUSY_LINGER_S if self._free_slots.locked() else LINGER_S)
            finally:
                self._admitted.discard(source)
                self._update_filter()

    def _update_filter(self) -> asyncio.Future[None]:
        """Return the end of the next update of the listener's filter, which changes of a few milliseconds share: the
        kernel compiles each filter. A client that an update fails to admit cannot connect, and reports this."""

        def update(updated: asyncio.Future[None]) -> None:
            self._update = None
            with contextlib.suppress(OSError):
                self.listener.admit(self._admitted)
            updated.set_result(None)

        if self._update is None:
            self._update = self.loop.create_future()
            self.loop.call_later(UPDATE_S, update, self._update)
        return self._update


# -- the proxy: every rank's side ----------------------------------------------------------------------------------


def _greet(server: socket.socket, address: str, secret: bytes, client_port: int) -> tuple[int, bool]:
    """Prove to the server that this client knows the secret, and verify that the server does.
    Return the store's port, and whether its packets are signed. `client_port`: the local port that may connect to the
    store while `server` is open."""
    nonce, server_nonce = secrets.token_bytes(_NONCE), _receive_exactly(server, _NONCE)
    port_bytes = client_port.to_bytes(2, "big")
    parts = (server_nonce, nonce, port_bytes, packed_address(server.getsockname()[0]), packed_address(address))
    server.sendall(nonce + port_bytes + _mac(secret, b"rank", parts))
    answer = _receive_exactly(server, _ANSWER)
    if not hmac.compare_digest(_mac(secret, b"server", (nonce, server_nonce, answer[:3])), answer[3:]):
        raise AuthenticationError("another process answers there")
    store_port, is_signed = struct.unpack(">H?", answer[:3])
    return store_port, is_signed


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.makefile("rb").read(count)
    if len(data) < count:
        raise AuthenticationError("another process answers there")
    return data


def connect(address: str, port: int, secret: bytes, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Return a connection to the store whose authentication server is at `address`:`port`.
    Raise AuthenticationError if that server does not know the secret; OSError if it does not answer in time."""
    with contextlib.ExitStack() as on_error:
        store = on_error.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        store.settimeout(timeout_s)
        with socket.create_connection((address, port), timeout=timeout_s) as server:
            store.bind((server.getsockname()[0], 0))
            store_port, is_signed = _greet(server, address, secret, store.getsockname()[1])
            if is_signed:
                sign_packets(store, packet_key(secret))
            store.connect((address, store_port))
        store.settimeout(None)
        keep_alive(store, limit_sends=True)
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_error.pop_all()
    return store


class LoopbackProxy:
    """A server on the loopback interface that forwards connections of its own process, and of no other, to the store.

    `connect_store`: returns a connection to the store, or raises OSError; `connected`: such connections for the first
    clients; `own_port`: the port on which the proxy listens; 0 for any free port. One thread serves all connections.
    """

    def __init__(
        self, connect_store: Callable[[], socket.socket], connected: Iterable[socket.socket] = (), own_port: int = 0
    ) -> None:
        self._connect_store, self._connected = connect_store, list(connected)
        self._listener = listening_socket(_RANK_0_PROXY_ADDRESS if own_port else _PROXY_ADDRESS, own_port)
        self.address, self.port = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="rendezvous proxy", daemon=True).start()

    def is_own(self, peer: Any) -> bool:
        """Return whether a connection comes from this process."""
        connections = psutil.Process().net_connections("tcp")
        # TCPStore connects to IPv4 addresses with IPv6 sockets.
        ends = [[(end.ip.removeprefix("::ffff:"), end.port) for end in (c.laddr, c.raddr) if end] for c in connections]
        return [peer, (self.address, self.port)] in ends

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif self._selector.get_map().get(key.fd) == key:  # not closed since
                    self._copy(key.fileobj, key.data)

    def _accept(self) -> None:
        """Accept a connection and connect it to the store. If that fails, TCPStore reports the error itself."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as on_error:
            client, peer = self._listener.accept()
            on_error.callback(client.close)
            if self.is_own(peer):
                store = self._connected.pop() if self._connected else self._connect_store()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(client, selectors.EVENT_READ, store)
                self._selector.register(store, selectors.EVENT_READ, client)
                on_error.pop_all()

    def _copy(self, source: Any, target: socket.socket) -> None:
        """Copy the bytes that have arrived. If one end has closed its connection, close both."""
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                target.sendall(data)
                return
        for end in (source, target):
            self._selector.unregister(end)
            end.close()
