"""What admission to rank 0's store costs: ranks that prove the run's secret and connect, beside some that only connect.

    python benchmarks/authentication.py [--ranks 8 512] [--repeat 3]

All ranks are threads of one process on this machine's loopback interface, and all start at once, so the figures hold
the work of all of them on its CPUs; a cluster's network adds its round trips (three a connection).
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

HERE = "127.0.0.1"


def at_once(ranks: int, connect: Callable[[], socket.socket]) -> float:
    """Seconds until every rank is connected."""
    held: list[socket.socket] = []
    barrier = threading.Barrier(ranks + 1)

    def rank() -> None:
        barrier.wait()
        held.append(connect())

    threads = [threading.Thread(target=rank) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    assert len(held) == ranks
    for connection in held:
        connection.close()
    return took


def measure(ranks: int) -> tuple[float, float]:
    """(with admission, a connection alone), in seconds."""
    with listening_socket(HERE) as open_to_all:
        port = int(open_to_all.getsockname()[1])
        plain = at_once(ranks, lambda: socket.create_connection((HERE, port)))
    listener = FilteredListener(HERE)
    server = authentication.AuthenticationServer(HERE, authentication.new_secret(), listener)
    try:
        admitted = at_once(ranks, lambda: authentication.connect(HERE, server.port, server.secret, timeout_s=60))
    finally:
        server.close()
        listener.close()
    return admitted, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians of {asked.repeat} (and the slowest)")
    for ranks in asked.ranks:
        both = [measure(ranks) for _ in range(asked.repeat)]
        admitted, plain = ([pair[i] for pair in both] for i in (0, 1))
        print(
            f"{ranks} ranks: admitted and connected after {statistics.median(admitted):.3f} s ({max(admitted):.3f}), "
            f"connected without admission after {statistics.median(plain):.3f} s ({max(plain):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
