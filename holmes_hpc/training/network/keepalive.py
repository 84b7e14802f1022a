"""TCP keepalive: the kernel ends a connection if the kernel of the peer is silent."""

import socket

PROBE_S = 1  # seconds until the first probe, and between probes
PROBES = 3  # probes without an answer that end a connection
SILENCE_S = PROBE_S * (1 + PROBES)


def keep_alive(connection: socket.socket, limit_sends: bool = False) -> None:
    """Make the kernel end a connection with ETIMEDOUT if the peer's kernel is silent for SILENCE_S.

    By default, this ends only idle connections. `limit_sends`: also end a connection if the peer does not acknowledge
    the bytes that were sent. Gloo's connections cannot use this, because a peer reads nothing while it computes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S * limit_sends),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
