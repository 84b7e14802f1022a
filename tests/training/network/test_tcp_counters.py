"""The kernel's byte counters of this process's own TCP connections."""

from __future__ import annotations

import socket
import time

from holmes_hpc.training.network.nic_bytes import TcpCounters


def test_bytes_count_for_the_local_address_of_their_connection() -> None:
    with (
        socket.create_server(("127.0.0.3", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as sender,
        server.accept()[0] as receiver,
    ):
        counters = TcpCounters()
        sender.sendall(bytes(100_000))
        unread = 100_000
        while unread:
            unread -= len(receiver.recv(unread))
        sent = 0
        while sent < 100_000:  # until all bytes are acknowledged
            sent_from = counters.take()
            assert not sent_from.get("127.0.0.3")  # it only received
            sent += sent_from["127.0.0.2"]
            time.sleep(0.001)
        assert sent == 100_000 and not any(counters.take().values())
