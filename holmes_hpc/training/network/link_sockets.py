"""Sockets between nodes: the link server, connections to many link servers in parallel, and samples of bandwidth."""

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holmes_hpc.errors import NetworkError
from holmes_hpc.records.untrusted import from_json
from holmes_hpc.training.network.link_diagnosis import Endpoint

MAX_CONNECTIONS = 256  # at a time, each in a thread; the usual limit of open files is 1,024
HEADER_BYTES = 1024
CHUNK_BYTES = 1 << 18
WARM_UP = 0.2  # share of a sample's time that does not count, because of TCP's slow start and traffic shapers
PATIENCE = 4  # a sample in which nothing arrives ends after this many times its length
MAX_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Reply:
    """A peer's answer. `skew_s`: its clock minus this node's, in seconds; `failure`: why it is not valid, or ""."""

    skew_s: float = 0.0
    failure: str = ""


def bound_socket(
    interface: str, address: str, peer: tuple[str, int] | None = None, timeout_s: float | None = None
) -> socket.socket:
    """Return a TCP socket that uses only this interface, whatever the routes are; with a `peer`, a connection to it.
    Gloo and NCCL follow the routes, and would use another network without an error."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(PermissionError):  # kernels before 5.7 require CAP_NET_RAW
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        bound.bind((address, 0))
        if peer is not None:
            bound.settimeout(timeout_s)
            bound.connect(peer)
    except OSError:
        bound.close()
        raise
    return bound


class LinkServer(contextlib.ExitStack):
    """The link servers of this node, one on each NIC. `nics`: transport kind -> NIC; `ports`: transport kind -> port.

    They answer only clients that know `token`. Raise NetworkError if an address cannot be used.
    """

    def __init__(self, node: str, token: str, nics: Mapping[str, Endpoint]) -> None:
        super().__init__()
        self._node, self._token = node, token
        self.ports: dict[str, int] = {}
        for kind, nic in nics.items():
            try:
                listener = bound_socket(nic.interface, nic.address)
                self.callback(_close, listener)
                listener.listen(1024)
            except OSError as e:
                self.close()
                problem = f"cannot listen on {nic.text}: {e.strerror}"
                hint = f"check that {nic.interface} is up and has that address"
                raise NetworkError(problem, where=f"node {node}", hint=hint) from e
            self.ports[kind] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="link-server").start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="link-answer").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(MAX_SAMPLE_S)
            request = from_json(_read_line(connection))
            if not isinstance(request, dict) or request.get("token") != self._token:
                return
            connection.sendall(_json_line({"node": self._node, "clock": time.time()}))
            seconds = min(float(request.get("seconds", 0)), MAX_SAMPLE_S)
            if seconds > 0:
                connection.sendall(_json_line({"gbps": _received_gbps(connection, seconds)}))


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept
    listener.close()


def _received_gbps(connection: socket.socket, seconds: float) -> float:
    """Receive for `seconds` from the first byte on. Return the rate after the warm-up in Gb/s, 0 if nothing arrived.

    If nothing arrives after the warm-up, continue for up to PATIENCE times `seconds`, because the link may be very
    slow, or the machine too busy to run this thread."""
    buffer = bytearray(CHUNK_BYTES)
    connection.recv_into(buffer)
    start = time.monotonic()
    warm_up_end, end, latest_end = start + WARM_UP * seconds, start + seconds, start + PATIENCE * seconds
    counted_bytes, count_start, now = 0, None, start
    while now < end or (counted_bytes == 0 and now < latest_end):
        connection.settimeout(max(0.001, (end if now < end else latest_end) - now))
        received = None
        with contextlib.suppress(TimeoutError):
            received = connection.recv_into(buffer)
        now = time.monotonic()
        if received == 0:  # the sender has closed
            break
        if count_start is not None:
            counted_bytes += received or 0
        elif received and now >= warm_up_end:
            count_start = now  # the bytes of this read do not count, because they arrived earlier
    return counted_bytes * 8 / 1e9 / (max(now, end) - count_start) if count_start is not None and counted_bytes else 0.0


def _json_line(data: dict[str, object]) -> bytes:
    return json.dumps(data).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    """Read one line and no byte after it. Return less than a line if the other side closes."""
    return connection.makefile("rb", buffering=0).readline(HEADER_BYTES)


def reach(source: Endpoint, targets: Mapping[str, Endpoint], token: str, timeout_s: float) -> dict[str, Reply]:
    """Connect from `source` to all `targets` (node -> its link server) in parallel. Return node -> its reply."""
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        replies = pool.map(lambda node: _reach_target(source, node, targets[node], token, timeout_s), targets)
        return dict(zip(targets, replies, strict=True))


def _reach_target(source: Endpoint, node: str, target: Endpoint, token: str, timeout_s: float) -> Reply:
    deadline, text = time.monotonic() + timeout_s, b""
    try:
        with bound_socket(source.interface, source.address, (target.address, target.port), timeout_s) as connection:
            connection.sendall(_json_line({"token": token}))
            sent_at = time.time()
            while not text.endswith(b"\n") and len(text) < HEADER_BYTES:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not (received := connection.recv(HEADER_BYTES)):
                    break
                text += received
            return _parse_reply(node, text, sent_at)
    except TimeoutError:
        return Reply(failure=f"no answer in {timeout_s:g} s")
    except OSError as e:
        return Reply(failure=os.strerror(e.errno) if e.errno else "connection closed")


def _parse_reply(node: str, text: bytes, sent_at: float) -> Reply:
    try:
        answer = from_json(text)
        name, clock = str(answer["node"]), float(answer["clock"])
    except (ValueError, KeyError, TypeError):
        return Reply(failure="another program answers there")
    if name != node:
        return Reply(failure=f"node {name} answers there: two nodes have this address")
    return Reply(clock - (sent_at + time.time()) / 2)


def sample(source: Endpoint, target: Endpoint, token: str, seconds: float) -> float | None:
    """Send to `target` for `seconds`. Return the Gb/s that the target measured, None on a failure."""
    try:
        with bound_socket(source.interface, source.address) as s:
            s.settimeout(PATIENCE * seconds + 2)
            # A small buffer: a slow link must not be busy with this sample when the next one starts.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
            s.connect((target.address, target.port))
            s.sendall(_json_line({"token": token, "seconds": seconds}))
            _read_line(s)  # the target's name and clock
            _send_until_answer(s, seconds)
            gbps = float(json.loads(_read_line(s))["gbps"])
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing drops queued bytes
            return gbps
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _send_until_answer(s: socket.socket, seconds: float) -> None:
    """Send until the receiver answers, for at most PATIENCE times `seconds` plus one second."""
    block, deadline = memoryview(bytes(CHUNK_BYTES)), time.monotonic() + PATIENCE * seconds + 1
    s.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (timeout_s := deadline - time.monotonic()) > 0:
            ready = selector.select(timeout_s)
            if any(events & selectors.EVENT_READ for _, events in ready):
                break
            try:
                with contextlib.suppress(BlockingIOError):
                    s.send(block)
            except ConnectionError:  # the receiver has answered and closed; its answer can still be read
                break
    s.settimeout(2)
