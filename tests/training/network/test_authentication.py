"""Rank 0's store answers only clients that know the run's secret."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from holmes_hpc.training.network import authentication
from holmes_hpc.training.network.authentication import AuthenticationError, AuthenticationServer, LoopbackProxy, connect
from holmes_hpc.training.network.filtered_listener import FilteredListener, filter_program, listening_socket

HERE = "127.0.0.1"
SHORT_S = 0.3


def new_server(address: str = HERE) -> AuthenticationServer:
    secret = authentication.new_secret()
    return AuthenticationServer(address, secret, FilteredListener(address, authentication.packet_key(secret)))


def refuse_filters(listener: FilteredListener, _: object) -> None:
    """Do as a kernel that filters TCP sockets only for processes with CAP_NET_ADMIN."""
    if not listener.is_signed:
        raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=["filtered", "signed"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AuthenticationServer]:
    if request.param == "signed":
        monkeypatch.setattr(FilteredListener, "admit", refuse_filters)
    started = new_server()
    listener = started.listener
    yield started
    started.close()
    listener.close()


def is_blocked(port: int) -> bool:
    """Return whether a plain client cannot even connect."""
    try:
        socket.create_connection((HERE, port), timeout=SHORT_S).close()
    except OSError:
        return True
    return False


def test_only_a_client_that_knows_the_secret_is_admitted(server: AuthenticationServer) -> None:
    assert is_blocked(server.listener.port)
    with connect(HERE, server.port, server.secret) as client:
        accepted, peer = server.listener.socket.accept()
        assert peer == client.getsockname()
        client.sendall(b"word")
        assert accepted.recv(9) == b"word" and is_blocked(server.listener.port)
        accepted.close()
    with pytest.raises(AuthenticationError, match="another process answers"):
        connect(HERE, server.port, authentication.new_secret())
    assert is_blocked(server.listener.port)


def test_a_greeting_cannot_be_replayed_and_the_server_must_authenticate_too(server: AuthenticationServer) -> None:
    greetings: list[bytes] = []
    impostor = listening_socket(HERE)

    def intercept() -> None:
        with impostor.accept()[0] as rank, socket.create_connection((HERE, server.port)) as real:
            rank.sendall(authentication._receive_exactly(real, 16))
            greetings.append(authentication._receive_exactly(rank, 50))  # it names the rank's port, not the impostor's
            rank.sendall(b"\0" * 34)

    eavesdropper = threading.Thread(target=intercept)
    eavesdropper.start()
    with pytest.raises(AuthenticationError):
        connect(HERE, impostor.getsockname()[1], server.secret)
    eavesdropper.join()
    impostor.close()
    with socket.create_connection((HERE, server.port)) as replaying:
        authentication._receive_exactly(replaying, 16)
        replaying.sendall(greetings[0])
        assert replaying.recv(1) == b""
    assert is_blocked(server.listener.port)


def test_idle_connections_and_garbage_block_nobody(server: AuthenticationServer) -> None:
    idle = [socket.create_connection((HERE, server.port)) for _ in range(300)]
    for connection in idle[:100]:
        connection.sendall(secrets.token_bytes(200))
    with connect(HERE, server.port, server.secret) as client:
        assert client.getpeername() == (HERE, server.listener.port)
    for connection in idle:
        connection.close()


def test_a_full_server_drops_the_oldest_connection(
    server: AuthenticationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._max_connections = 20
    idle = [socket.create_connection((HERE, server.port)) for _ in range(60)]
    with connect(HERE, server.port, server.secret):
        assert len(server._is_authenticated) <= 21
    for connection in idle:
        connection.close()


def test_a_full_server_keeps_an_authenticated_client_that_waits(
    server: AuthenticationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "TIMEOUT_S", 60.0)
    usual, server._max_connections, server._free_slots = server._max_connections, 16, asyncio.Semaphore(0)
    connected: list[socket.socket] = []
    rank = threading.Thread(target=lambda: connected.append(connect(HERE, server.port, server.secret, 60.0)))
    rank.start()
    while not any(list(server._is_authenticated.values())):
        time.sleep(0.01)
    idle = [socket.create_connection((HERE, server.port)) for _ in range(60)]
    assert len(idle[-1].recv(16)) == 16  # the server has accepted all of them
    server._max_connections = usual
    server.loop.call_soon_threadsafe(server._free_slots.release)
    rank.join()
    for connection in (*idle, *connected):
        connection.close()
    assert len(connected) == 1


def test_the_filter_is_attached_before_the_socket_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    listens: list[int] = []
    admit = FilteredListener.admit

    def recorded_admit(self: FilteredListener, admitted: list[tuple[bytes, int]]) -> None:
        listens.append(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        admit(self, admitted)

    monkeypatch.setattr(FilteredListener, "admit", recorded_admit)
    listener = FilteredListener(HERE, b"")
    assert set(listens) == {0} and listener.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    listener.close()


def test_a_proxy_serves_only_its_own_process(server: AuthenticationServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0_store = start_store(server)
    proxy = proxy_of(server)
    store = dist.TCPStore(proxy.address, proxy.port, 1, is_master=False, timeout=timedelta(seconds=10))
    store.set("a", "b")
    assert store.clone().get("a") == b"b"
    assert store.get("a") == b"b" and rank_0_store.get("a") == b"b" and is_blocked(server.listener.port)
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [])  # as if another process connected
    with socket.create_connection((proxy.address, proxy.port)) as connection:
        assert connection.recv(1) == b""


def proxy_of(server: AuthenticationServer, **options: Any) -> LoopbackProxy:
    return LoopbackProxy(lambda: connect(HERE, server.port, server.secret), **options)


def start_store(server: AuthenticationServer) -> dist.TCPStore:
    proxy = proxy_of(server, own_port=server.listener.port)
    return dist.TCPStore(
        proxy.address,
        server.listener.port,
        1,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=os.dup(server.listener.socket.fileno()),
    )


def test_a_client_without_the_secret_reads_and_writes_nothing(server: AuthenticationServer) -> None:
    store = start_store(server)
    store.set("word", "ours")
    for port in (server.port, server.listener.port):
        with pytest.raises(RuntimeError):
            dist.TCPStore(HERE, port, 1, is_master=False, timeout=timedelta(seconds=SHORT_S)).set("word", "theirs")
    assert store.get("word") == b"ours"


OTHER_PROCESS = """
import socket, sys
with socket.create_connection(sys.argv[1].split()) as proxy:
    try:
        proxy.sendall(b"x" * 100)
        sys.exit(proxy.recv(1) != b"")
    except OSError:
        sys.exit(0)
"""


@pytest.mark.integration
def test_a_proxy_answers_no_other_process_of_this_machine(server: AuthenticationServer) -> None:
    proxy = proxy_of(server)
    command = [sys.executable, "-S", "-c", OTHER_PROCESS, f"{proxy.address} {proxy.port}"]
    subprocess.run(command, check=True, timeout=60)


def test_the_filter_supports_ipv4_and_ipv6() -> None:
    ipv4, ipv6 = (filter_program([(address, 5)]) for address in (b"\x7f\0\0\1", bytes(15) + b"\1"))
    assert (len(ipv4) // 8, len(ipv6) // 8) == (6, 12)
    addresses = Path("/proc/net/if_inet6")
    if addresses.exists() and "00000000000000000000000000000001" in addresses.read_text():
        server = new_server("::1")
        with connect("::1", server.port, server.secret) as client:
            assert server.listener.socket.accept()[1][1] == client.getsockname()[1]
        server.close()
        server.listener.close()


def test_64_clients_are_admitted_together(server: AuthenticationServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connections, updates, admit = list[Any](), list[int](), server.listener.admit
    monkeypatch.setattr(server.listener, "admit", lambda admitted: (updates.append(len(admitted)), admit(admitted)))
    ranks = [
        threading.Thread(target=lambda: connections.append(connect(HERE, server.port, server.secret)))
        for _ in range(64)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(connections) == 64
    assert len(updates) < 64 and max(updates) > 1, "the filter must not be compiled once per client"
    for connection in connections:
        connection.close()


def test_signed_packets_pass_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilteredListener, "admit", refuse_filters)
    test_the_filter_supports_ipv4_and_ipv6()


STORE = """
import sys
from pathlib import Path
from holmes_hpc.training.network.rendezvous import host_store, join_store
from holmes_hpc.training.rank.launch import Launch

run_dir = Path(sys.argv[1])
ranks = [Launch(rank, 2, rank, "srun", "here", "1", one_host=True) for rank in (0, 1)]
store = host_store(run_dir, ranks[0], "127.0.0.1", 0, 20)
store.set("word", "ours")
client = join_store(run_dir, ranks[1], 20)
print(client.get("word"))
"""
PLAIN_USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
READS_ALL = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # Python may be in root's home


@pytest.mark.integration
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_ranks_of_a_plain_user_meet(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    command = [*PLAIN_USER, *READS_ALL, sys.executable, "-c", STORE, str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("b'ours'\n", 0), result.stderr
