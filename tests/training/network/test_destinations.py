"""What a rank has sent to each fabric, and to the other ends of its pipeline edges."""

from __future__ import annotations

import numpy as np
import plans
import spawn

from holmes_hpc.fabric.nics import NodeNics
from holmes_hpc.training.network.destinations import Destinations
from holmes_hpc.training.network.nic_bytes import Connection, Traffic
from holmes_hpc.training.rank.launch import Launch

NODES = plans.node_transports()


def test_bytes_count_for_the_peers_fabric_and_seconds_for_its_edge() -> None:
    to = Destinations(plans.plan("ib-a", "roce-a"), NODES)
    traffic = Traffic(spawn.plan(), Launch(0, 1, 0, "local", "ib1", "key", True), NodeNics((), ()))
    rows = []
    for rank, peer in enumerate((2, 3, 0, 1)):
        traffic.connections = [
            Connection(f"10.0.0.{rank}", f"10.0.0.{peer}", 100 + rank, 0.5 + rank),
            Connection(f"10.0.0.{rank}", f"10.0.0.{peer}", 1000, 0.25),  # another stripe of it
            Connection(f"10.1.0.{rank}", f"10.1.0.{rank ^ 1}", 7, 9.0),  # data parallel
            Connection(f"10.0.0.{rank}", "10.9.9.9", 70, 9.0),  # a file server
        ]
        rows.append(to.row(rank, traffic))
    assert to.edge_seconds(np.array(rows)).tolist() == [0.5, 1.5, 2.5, 3.5]
    assert to.fabric_bytes(np.array(rows)) == {"ib-a": {"roce-a": 2201}, "roce-a": {"ib-a": 2205}}


def test_runs_in_one_fabric_have_no_bytes_between_fabrics() -> None:
    to = Destinations(plans.plan("ib-a"), NODES[:2])
    rows = np.array([[5.0], [6.0]])
    assert to.fabric_bytes(rows) == {} and to.edge_seconds(rows).tolist() == []
