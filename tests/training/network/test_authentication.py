"""The store of rank 0 answers those who know the run's secret, and nobody else."""

from __future__ import annotations

import asyncio
import os
import secrets
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
from holmes_hpc.training.network.authentication import Gate, Refused, Relay, connect, prove
from holmes_hpc.training.network.filtered_listener import Door, filter_program, listening

HERE = "127.0.0.1"
SHORT_S = 0.3


@pytest.fixture
def gate() -> Iterator[Gate]:
    shut = Door(HERE)
    made = Gate(HERE, authentication.new_secret(), shut)
    yield made
    made.close()
    shut.close()


def shut_out(port: int) -> bool:
    """Whether a plain client cannot even connect."""
    try:
        socket.create_connection((HERE, port), timeout=SHORT_S).close()
    except OSError:
        return True
    return False


def test_who_knows_the_secret_is_let_in_and_nobody_else(gate: Gate) -> None:
    assert shut_out(gate.door.port)
    with connect(HERE, gate.port, gate.secret) as own:
        theirs, peer = gate.door.socket.accept()
        assert peer == own.getsockname()
        own.sendall(b"word")
        assert theirs.recv(9) == b"word" and shut_out(gate.door.port)
        theirs.close()
    with pytest.raises(Refused, match="another process answers"):
        connect(HERE, gate.port, authentication.new_secret())
    with pytest.raises(Refused, match="another process answers"):
        prove(HERE, gate.port, b"")
    prove(HERE, gate.port, gate.secret)
    assert shut_out(gate.door.port)


def test_a_greeting_cannot_be_replayed_and_a_gate_must_prove_itself_too(gate: Gate) -> None:
    heard: list[bytes] = []
    between = listening(HERE)

    def listen() -> None:
        with between.accept()[0] as rank, socket.create_connection((HERE, gate.port)) as real:
            rank.sendall(authentication._exactly(real, 16))
            heard.append(authentication._exactly(rank, 50))  # whoever passes it on is at another port
            rank.sendall(b"\0" * 34)

    eavesdropper = threading.Thread(target=listen)
    eavesdropper.start()
    with pytest.raises(Refused):
        connect(HERE, between.getsockname()[1], gate.secret)
    eavesdropper.join()
    between.close()
    with socket.create_connection((HERE, gate.port)) as replaying:
        authentication._exactly(replaying, 16)
        replaying.sendall(heard[0])
        assert replaying.recv(1) == b""
    assert shut_out(gate.door.port)


def test_idle_connections_and_garbage_keep_nobody_out(gate: Gate) -> None:
    idle = [socket.create_connection((HERE, gate.port)) for _ in range(300)]
    for connection in idle[:100]:
        connection.sendall(secrets.token_bytes(200))
    with connect(HERE, gate.port, gate.secret) as own:
        assert own.getpeername() == (HERE, gate.door.port)
    for connection in idle:
        connection.close()


def test_a_flood_drops_the_oldest(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate._most = 20
    idle = [socket.create_connection((HERE, gate.port)) for _ in range(60)]
    with connect(HERE, gate.port, gate.secret):
        assert len(gate._has_proved) <= 21
    for connection in idle:
        connection.close()


def test_a_flood_does_not_drop_who_has_proved_itself_and_waits(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "PATIENCE_S", 60.0)
    most, gate._most, gate._room = gate._most, 16, asyncio.Semaphore(0)
    let_in: list[socket.socket] = []
    rank = threading.Thread(target=lambda: let_in.append(connect(HERE, gate.port, gate.secret, 60.0)))
    rank.start()
    while not any(list(gate._has_proved.values())):
        time.sleep(0.01)
    idle = [socket.create_connection((HERE, gate.port)) for _ in range(60)]
    assert len(idle[-1].recv(16)) == 16  # all of them have come in
    gate._most = most
    gate.loop.call_soon_threadsafe(gate._room.release)
    rank.join()
    for connection in (*idle, *let_in):
        connection.close()
    assert len(let_in) == 1


def test_a_door_is_shut_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    listens: list[int] = []
    admit = Door.admit

    def seen(self: Door, admitted: list[tuple[bytes, int]]) -> None:
        listens.append(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        admit(self, admitted)

    monkeypatch.setattr(Door, "admit", seen)
    made = Door(HERE)
    assert set(listens) == {0} and made.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    made.close()


def test_a_relay_serves_its_own_process_alone(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(gate)
    relay = Relay(HERE, gate.port, gate.secret)
    store = dist.TCPStore(relay.address, relay.port, 1, is_master=False, timeout=timedelta(seconds=10))
    store.set("a", "b")
    assert store.clone().get("a") == b"b"
    assert store.get("a") == b"b" and server.get("a") == b"b" and shut_out(gate.door.port)
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [])  # as another process looks to it
    with socket.create_connection((relay.address, relay.port)) as stranger:
        assert stranger.recv(1) == b""


def serve(gate: Gate) -> dist.TCPStore:
    own = Relay(HERE, gate.port, gate.secret, gate.door.port)
    return dist.TCPStore(
        own.address,
        gate.door.port,
        1,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=os.dup(gate.door.socket.fileno()),
    )


def test_without_the_secret_nothing_is_read_set_or_deleted(gate: Gate) -> None:
    server = serve(gate)
    server.set("word", "ours")
    for port in (gate.port, gate.door.port):
        with pytest.raises(RuntimeError):
            dist.TCPStore(HERE, port, 1, is_master=False, timeout=timedelta(seconds=SHORT_S)).set("word", "theirs")
    assert server.get("word") == b"ours"


STRANGER = """
import socket, sys
with socket.create_connection(sys.argv[1].split()) as relay:
    try:
        relay.sendall(b"x" * 100)
        sys.exit(relay.recv(1) != b"")
    except OSError:
        sys.exit(0)
"""


@pytest.mark.integration
def test_another_process_of_this_machine_gets_nothing_of_a_ranks_relay(gate: Gate) -> None:
    relay = Relay(HERE, gate.port, gate.secret)
    subprocess.run([sys.executable, "-S", "-c", STRANGER, f"{relay.address} {relay.port}"], check=True, timeout=60)


def test_the_filter_takes_both_kinds_of_addresses() -> None:
    four, six = (filter_program([(packed, 5)]) for packed in (b"\x7f\0\0\1", bytes(15) + b"\1"))
    assert (len(four) // 8, len(six) // 8) == (6, 12)
    addresses = Path("/proc/net/if_inet6")
    if addresses.exists() and "00000000000000000000000000000001" in addresses.read_text():
        shut = Door("::1")
        made = Gate("::1", b"s" * 32, shut)
        with connect("::1", made.port, b"s" * 32) as own:
            assert shut.socket.accept()[1][1] == own.getsockname()[1]
        made.close()
        shut.close()


def test_many_are_let_in_at_a_time(gate: Gate) -> None:
    held: list[Any] = []
    ranks = [threading.Thread(target=lambda: held.append(connect(HERE, gate.port, gate.secret))) for _ in range(64)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(held) == 64
    for connection in held:
        connection.close()
