"""The watch of the next node, over loopback addresses that stand for nodes. Silence itself: tests/faults."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_hpc.training.network import peer_watch
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.keepalive import SILENCE_S, keep_alive
from holmes_hpc.training.network.peer_watch import PeerWatch, watch_next_nodes


def watches(fabrics: str) -> list[PeerWatch]:
    """Return the watches of nodes n0, n1, … with an RDMA NIC each, in fabrics of one letter."""
    nodes = [
        NodeTransports(f"n{i}", fabric, {"tcp": ("lo", f"127.0.3.{i + 1}")}, {}, False)
        for i, fabric in enumerate(fabrics)
    ]
    for i, node in enumerate(nodes):
        node.interfaces["rdma"] = ("lo", f"127.0.4.{i + 1}")  # type: ignore[index]
    store = dist.HashStore()
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda rank: watch_next_nodes(rank, nodes, store), range(len(nodes))))


def watched(watch: PeerWatch) -> dict[str, tuple[str, str]]:
    return {kind: (peer.node, previous.node) for kind, peer, previous, _ in watch._watched}


def test_each_node_watches_the_next_one_of_all_and_of_its_fabric() -> None:
    a, b, c, d = map(watched, watches("iirx"))
    assert a == {"tcp": ("n1", "n3"), "rdma": ("n1", "n1")} and b == {"tcp": ("n2", "n0"), "rdma": ("n0", "n0")}
    assert c == {"tcp": ("n3", "n1")} and d == {"tcp": ("n0", "n2")}  # alone in their fabrics


def test_a_closed_connection_is_no_silence() -> None:
    first, second = watches("ii")
    assert first.find_silence() is None
    for listener in second._listeners.values():
        listener.close()
    assert first.find_silence() is None


@pytest.mark.parametrize(
    ("answers", "problem"),
    [(True, f"node n1 has not answered for {SILENCE_S} s over lo"), (False, "neither n1 nor n2 answers over lo")],
)
def test_silence_names_the_peer_or_this_node(answers: bool, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's error on the connection is simulated."""
    watch = watches("irx")[0]
    kind, peer, before, _ = watch._watched[0]
    silent = SimpleNamespace(getsockopt=lambda *_: errno.ETIMEDOUT)
    monkeypatch.setattr(watch, "_watched", [(kind, peer, before, silent)])
    if not answers:
        monkeypatch.setattr(peer_watch, "bound_socket", lambda *_: (_ for _ in ()).throw(TimeoutError()))
    error = watch.find_silence()
    assert error is not None and error.what == problem and error.where == "node n0"


@pytest.mark.parametrize("limit_sends", [False, True])
def test_only_the_stores_connections_limit_sends(limit_sends: bool) -> None:
    with socket.socket() as connection:
        keep_alive(connection, limit_sends)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == (1000 * SILENCE_S if limit_sends else 0)
