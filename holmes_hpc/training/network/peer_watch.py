"""The watch of the next node: an idle TCP connection over each NIC in use, on which the kernel sends keepalive probes.

A node that loses its power or its network closes no connection, so its peers would wait for `train.net_timeout_s`. Each
node therefore watches the next node, in a ring of all nodes over Ethernet and in a ring of its fabric's nodes over RDMA
NICs. The watched node's kernel answers the probes, so a stopped or busy process does not make its node look silent.
"""

import errno
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from holmes_hpc.errors import NetworkError
from holmes_hpc.training.network.exchange import exchange
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.keepalive import SILENCE_S, keep_alive
from holmes_hpc.training.network.link_sockets import bound_socket
from holmes_hpc.training.rank.log import log_line

CONNECT_S = 3.0  # limit of a first connection
ANSWER_S = 0.5  # limit of a connection that shows whether a node answers
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Listener(NamedTuple):
    """The address and port at which other nodes connect to `node`."""

    node: str
    address: str
    port: int


class PeerWatch:
    """The connections from `node` to the next node of each ring.

    `ports`: transport kind -> the port to which the previous node connects. This process never accepts the connection:
    it stays in the listener's queue, where the kernel answers probes."""

    def __init__(self, node: NodeTransports) -> None:
        self._node = node
        self._listeners = {kind: bound_socket(*nic) for kind, nic in node.interfaces.items()}
        for listener in self._listeners.values():
            listener.listen(2)
        self.ports = {kind: listener.getsockname()[1] for kind, listener in self._listeners.items()}
        self._watched: list[tuple[str, Listener, Listener, socket.socket]] = []

    def connect(self, kind: str, peer: Listener, previous: Listener) -> None:
        """Watch node `peer` over this node's NIC of `kind`. `previous`: the listener of the node that watches this one.
        Raise OSError if `peer` does not answer."""
        connection = bound_socket(*self._node.interfaces[kind], (peer.address, peer.port), CONNECT_S)
        keep_alive(connection)
        self._watched.append((kind, peer, previous, connection))

    def find_silence(self) -> NetworkError | None:
        """Return an error if a watched node is silent, else None. A connection that its peer closes is no error."""
        for kind, peer, previous, connection in self._watched:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENT:
                interface = self._node.interfaces[kind][0]
                if peer != previous and not self._answers(kind, previous):
                    problem = f"neither {peer.node} nor {previous.node} answers over {interface}"
                    hint = f"check the cable of {interface} and the switch behind it"
                else:
                    problem = f"node {peer.node} has not answered for {SILENCE_S} s over {interface}"
                    hint = f"check that {peer.node} runs (`sinfo -n {peer.node}`), and the network between both nodes"
                return NetworkError(problem, where=f"node {self._node.node}", hint=hint)
        return None

    def _answers(self, kind: str, peer: Listener) -> bool:
        try:
            bound_socket(*self._node.interfaces[kind], (peer.address, peer.port), ANSWER_S).close()
        except OSError as e:
            return e.errno == errno.ECONNREFUSED  # its kernel runs
        return True


def watch_next_nodes(rank: int, nodes: Sequence[NodeTransports], store: Any) -> PeerWatch:
    """Return the watch of the next node in each ring. The first rank of every node calls it. `nodes`: by rank."""
    node, by_name = nodes[rank], {n.node: n for n in nodes}
    watch = PeerWatch(node)
    ports = exchange(store, "watch", node.node, list(by_name), watch.ports, kind="nodes")
    ports_of_node = dict(zip(by_name, ports, strict=True))
    for kind in watch.ports:
        ring = [n for n in by_name.values() if kind in n.interfaces and (kind == "tcp" or n.fabric == node.fabric)]
        listeners = [Listener(n.node, n.interfaces[kind][1], ports_of_node[n.node][kind]) for n in ring]
        index = [n.node for n in ring].index(node.node)
        peer, previous = listeners[(index + 1) % len(ring)], listeners[index - 1]
        if len(ring) > 1:
            try:
                watch.connect(kind, peer, previous)
            except OSError as e:
                log_line(f"warning: node {peer.node} is not watched over {node.interfaces[kind][0]}: {e.strerror or e}")
    return watch
