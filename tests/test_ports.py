from __future__ import annotations

import socket

from spawn import first_ephemeral

from holmes_hpc.ports import free_port


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port([port], "127.0.0.1") is None
        found = free_port([port, *range(20000, first_ephemeral())], "127.0.0.1")
        assert found is not None and 20000 <= found < first_ephemeral()
