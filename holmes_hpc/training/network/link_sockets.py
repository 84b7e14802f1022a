"""Sockets that prove a link: a server that answers and swallows, many connections at once, a short bandwidth sample."""

from __future__ import annotations

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
from holmes_hpc.training.network.link_diagnosis import Endpoint

AT_ONCE = 256  # connections at a time, each in a thread; the usual limit of open files is 1,024
HEADER_BYTES = 1024
CHUNK_BYTES = 1 << 18
WARM_UP = 0.2  # of a sample's time: TCP's slow start and a shaper's burst are over then
PATIENCE = 4  # times a sample's length, where nothing was read
LONGEST_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Reply:
    """A peer's answer: how far its clock is ahead of ours, or why it did not answer with its own name."""

    skew_s: float = 0.0
    failure: str = ""


def _bound(interface: str, address: str) -> socket.socket:
    """Return a TCP socket that uses this interface and no other, whatever the routes say (gloo and NCCL do not bind,
    and would take another network without a word)."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(PermissionError):  # kernels before 5.7 want CAP_NET_RAW
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        made.bind((address, 0))
    except OSError:
        made.close()
        raise
    return made


class LinkServer(contextlib.ExitStack):
    """Listens on this node's NICs until closed. `nics`: kind -> (interface, address); `ports`: kind -> port.

    It answers only those who know `token`. Raises NetworkError where an address cannot be used.
    """

    def __init__(self, node: str, token: str, nics: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self._node, self._token = node, token
        self.ports: dict[str, int] = {}
        for kind, (interface, address) in nics.items():
            try:
                listener = _bound(interface, address)
                self.callback(_close, listener)
                listener.listen(1024)
            except OSError as e:
                self.close()
                raise NetworkError(
                    f"cannot listen on {interface} {address}: {e.strerror}",
                    where=f"node {node}",
                    hint=f"see that {interface} is up and has that address",
                ) from e
            self.ports[kind] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="link-server").start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="link-answer").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(LONGEST_SAMPLE_S)
            asked = json.loads(_read_line(connection))
            if not isinstance(asked, dict) or asked.get("token") != self._token:
                return
            connection.sendall(_line({"node": self._node, "clock": time.time()}))
            seconds = min(float(asked.get("seconds", 0)), LONGEST_SAMPLE_S)
            if seconds > 0:
                connection.sendall(_line({"gbps": _swallow(connection, seconds)}))


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept
    listener.close()


def _swallow(connection: socket.socket, seconds: float) -> float:
    """Receive for that long; Gb/s after the warm-up. The clock starts with the first byte. Where nothing was read after
    the warm-up (a very slow link, or a busy machine that did not let this thread run) it goes on for some more."""
    buffer = bytearray(CHUNK_BYTES)
    connection.recv_into(buffer)
    start = time.monotonic()
    warm, end, latest = start + WARM_UP * seconds, start + seconds, start + PATIENCE * seconds
    counted, since, now = 0, None, start
    while now < end or (counted == 0 and now < latest):
        connection.settimeout(max(0.001, (end if now < end else latest) - now))
        received = None
        with contextlib.suppress(TimeoutError):
            received = connection.recv_into(buffer)
        now = time.monotonic()
        if received == 0:
            break
        if since is not None:
            counted += received or 0
        elif received and now >= warm:
            since = now  # the bytes of this read came before
    return counted * 8 / 1e9 / (max(now, end) - since) if since is not None and counted else 0.0


def _line(data: dict[str, object]) -> bytes:
    return json.dumps(data).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    """Read one line and no byte behind it; shorter than a line where the other side closes."""
    return connection.makefile("rb", buffering=0).readline(HEADER_BYTES)


def reach(
    source: tuple[str, str], targets: Mapping[str, Endpoint], token: str, timeout_s: float = 3.0
) -> dict[str, Reply]:
    """Try all `targets` (node -> where its server listens) at once from `source` (interface, address).

    A reply's failure is empty where the peer answered with its own name; else it is the system's message.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        replies = pool.map(lambda node: _reach_one(source, node, targets[node], token, timeout_s), targets)
        return dict(zip(targets, replies, strict=True))


def _reach_one(source: tuple[str, str], node: str, target: Endpoint, token: str, timeout_s: float) -> Reply:
    end, text = time.monotonic() + timeout_s, b""
    try:
        with _bound(*source) as connection:
            connection.settimeout(timeout_s)
            connection.connect((target.address, target.port))
            connection.sendall(_line({"token": token}))
            asked = time.time()
            while not text.endswith(b"\n") and len(text) < HEADER_BYTES:
                connection.settimeout(max(0.001, end - time.monotonic()))
                if not (more := connection.recv(HEADER_BYTES)):
                    break
                text += more
            return _understand(node, text, asked)
    except TimeoutError:
        return Reply(failure=f"no answer in {timeout_s:g} s")
    except OSError as e:
        return Reply(failure=os.strerror(e.errno) if e.errno else "connection closed")


def _understand(node: str, text: bytes, asked: float) -> Reply:
    try:
        answer = json.loads(text)
        name, clock = str(answer["node"]), float(answer["clock"])
    except (ValueError, KeyError, TypeError):
        return Reply(failure="something else answers there")
    if name != node:
        return Reply(failure=f"node {name} answers there: an address that two nodes have")
    return Reply(clock - (asked + time.time()) / 2)


def sample(source: tuple[str, str], target: Endpoint, token: str, seconds: float) -> float | None:
    """Return Gb/s that arrive at `target` within `seconds`, measured by the receiver; None where nothing did."""
    try:
        with _bound(*source) as s:
            s.settimeout(PATIENCE * seconds + 2)
            # little in flight, so that a slow link is not still busy with this sample when the next one starts
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
            s.connect((target.address, target.port))
            s.sendall(_line({"token": token, "seconds": seconds}))
            _read_line(s)
            _pour(s, seconds)
            gbps = float(json.loads(_read_line(s))["gbps"])
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # drop what is queued
            return gbps
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pour(s: socket.socket, seconds: float) -> None:
    """Send until the receiver says that it has had enough (or the time is long over)."""
    block, end = memoryview(bytes(CHUNK_BYTES)), time.monotonic() + PATIENCE * seconds + 1
    s.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (left := end - time.monotonic()) > 0:
            ready = selector.select(left)
            if any(events & selectors.EVENT_READ for _, events in ready):
                break
            try:
                with contextlib.suppress(BlockingIOError):
                    s.send(block)
            except ConnectionError:  # it closed after its answer, which is still to be read
                break
    s.settimeout(2)
