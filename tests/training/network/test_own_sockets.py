"""What the kernel says of this process's own connections."""

from __future__ import annotations

import socket
import time

from holmes_hpc.training.network.nic_bytes import OwnSockets


def test_bytes_count_for_the_address_they_left_from() -> None:
    with (
        socket.create_server(("127.0.0.3", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as own,
        server.accept()[0] as other,
    ):
        counted = OwnSockets()
        own.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(other.recv(left))
        sent = 0
        while sent < 100_000:  # until the last of it is acknowledged
            found = counted.take()
            assert not found.get("127.0.0.3")  # it only received
            sent += found["127.0.0.2"]
            time.sleep(0.001)
        assert sent == 100_000 and not any(counted.take().values())
