"""The kernel's byte counters of this process's own TCP connections."""

from __future__ import annotations

import contextlib
import socket
import time

import spawn

from holmes_hpc.fabric.nics import NodeNics
from holmes_hpc.training.network.nic_bytes import Connection, Traffic
from holmes_hpc.training.rank.launch import Launch


def open_traffic() -> Traffic:
    return Traffic(spawn.plan(), Launch(0, 1, 0, "srun", "ib1", "key", one_host=False), NodeNics((), ()))


def take(traffic: Traffic) -> list[Connection]:
    traffic.take()
    return traffic.connections


def test_bytes_count_for_the_local_address_of_their_connection() -> None:
    with (
        socket.create_server(("127.0.0.3", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as sender,
        server.accept()[0] as receiver,
    ):
        traffic = open_traffic()
        sender.sendall(bytes(100_000))
        unread = 100_000
        while unread:
            unread -= len(receiver.recv(unread))
        sent, busy_s, start = 0, 0.0, time.perf_counter()
        while sent < 100_000:  # until all bytes are acknowledged
            counted = {c.local: c for c in take(traffic)}
            assert not counted["127.0.0.3"].bytes and counted["127.0.0.2"].remote == "127.0.0.3"
            sent, busy_s = sent + counted["127.0.0.2"].bytes, busy_s + counted["127.0.0.2"].busy_s
            time.sleep(0.001)
        assert sent == 100_000 and 0 <= busy_s < 1 + time.perf_counter() - start
        assert not any(c.bytes for c in take(traffic))


def test_time_while_the_receiver_takes_no_data_is_not_busy() -> None:
    with (
        socket.create_server(("127.0.0.3", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as sender,
        server.accept()[0],
    ):
        traffic = open_traffic()
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))  # until all buffers are full
        time.sleep(0.5)
        (counted,) = (c for c in take(traffic) if c.local == "127.0.0.2")
        assert counted.bytes > 0 and counted.busy_s < 0.25
