"""The kernel's keepalive, by which a connection ends if the peer's kernel is silent."""

import socket

PROBE_S = 1  # until the first probe, and between probes
PROBES = 3  # without an answer
SILENCE_S = PROBE_S * (1 + PROBES)


def keep_alive(connection: socket.socket, limit_sends: bool = False) -> None:
    """Make the kernel end a connection with ETIMEDOUT if the peer's kernel is silent for SILENCE_S.

    By default, this ends only idle connections. `limit_sends`: also those whose bytes the peer does not acknowledge.
    That would end gloo's transfers to a peer that computes and does not read meanwhile."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S * limit_sends),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
