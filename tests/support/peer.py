"""One end of a TCP connection between two nodes.

`serve ADDRESS` prints its port, then bytes and seconds; `send ADDRESS PORT BYTES` sends."""

import socket
import sys
import time


def serve(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(60)
        connection, _ = server.accept()
    with connection:
        count, buffer, start = 0, bytearray(1 << 18), time.monotonic()
        while received := connection.recv_into(buffer):
            count += received
        print(count, time.monotonic() - start, flush=True)


def send(address: str, port: int, count: int) -> None:
    with socket.create_connection((address, port), timeout=60) as connection:
        connection.sendall(bytes(count))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
