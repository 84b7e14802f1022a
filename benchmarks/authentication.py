"""Measure the time that ranks need to authenticate and connect to rank 0's store, and to connect without it.

    python benchmarks/authentication.py [--ranks 8 512] [--repeat 3]

All ranks are threads of one process, connect over loopback and start at once. So the figures include the work of all
ranks on this machine's CPUs. A real network adds three round trips per connection.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

from holmes_hpc.training.network import authentication
from holmes_hpc.training.network.filtered_listener import FilteredListener, listening_socket

LOOPBACK = "127.0.0.1"


def connect_all_s(ranks: int, connect: Callable[[], socket.socket]) -> float:
    """Return the seconds until every rank is connected."""
    connections: list[socket.socket] = []
    barrier = threading.Barrier(ranks + 1)

    def rank() -> None:
        barrier.wait()
        connections.append(connect())

    threads = [threading.Thread(target=rank) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - start
    assert len(connections) == ranks
    for connection in connections:
        connection.close()
    return elapsed_s


def measure(ranks: int) -> tuple[float, float]:
    """Return the seconds to connect (with authentication, without)."""
    with listening_socket(LOOPBACK) as plain_listener:
        port = int(plain_listener.getsockname()[1])
        plain = connect_all_s(ranks, lambda: socket.create_connection((LOOPBACK, port)))
    secret = authentication.new_secret()
    listener = FilteredListener(LOOPBACK, authentication.packet_key(secret))
    server = authentication.AuthenticationServer(LOOPBACK, secret, listener)
    try:
        authenticated = connect_all_s(
            ranks, lambda: authentication.connect(LOOPBACK, server.port, server.secret, timeout_s=60)
        )
    finally:
        server.close()
        listener.close()
    return authenticated, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians of {arguments.repeat} (and the slowest)")
    for ranks in arguments.ranks:
        measurements = [measure(ranks) for _ in range(arguments.repeat)]
        authenticated, plain = ([pair[i] for pair in measurements] for i in (0, 1))
        print(
            f"{ranks} ranks: with authentication {statistics.median(authenticated):.3f} s ({max(authenticated):.3f}), "
            f"without {statistics.median(plain):.3f} s ({max(plain):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
