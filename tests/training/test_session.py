"""What run.yaml says of the networks that a run used."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_hpc.training import session
from holmes_hpc.training.network.interfaces import NodeTransports


def node(name: str, environment: dict[str, str]) -> NodeTransports:
    return NodeTransports(name, "ib-a", {"tcp": ("eth0", "10.0.0.1", 24)}, environment, False)


def group(kind: str, ranks: list[int], interface: str | None) -> dict[str, object]:
    return {"kind": kind, "ranks": ranks, "transport": "x", "interface": interface}


@pytest.mark.parametrize("cuda", [False, True])
def test_every_group_is_recorded_once_with_its_nic_on_each_of_its_nodes(cuda: bool) -> None:
    hca = [{"NCCL_IB_HCA": f"=mlx5_{i}:1", "NCCL_SOCKET_IFNAME": "=eth0"} if cuda else {} for i in range(2)]
    nodes = [node("ib1", hca[0]), node("ib1", hca[0]), node("ib2", hca[1]), node("ib2", hca[1])]
    fast, slow, none = ("IB", "Socket", None) if cuda else ("ib0", "eth0", "lo")
    groups = [("world", [0, 1, 2, 3], slow), ("tp", [0, 1], none), ("tp", [2, 3], none), ("dp", [0, 2], fast),
              ("dp", [1, 3], fast)]
    store = dist.HashStore()
    ranks = [SimpleNamespace(launch=SimpleNamespace(rank=rank, world_size=4), nodes=nodes, store=store, cpus="",
                             groups=SimpleNamespace(made=[group(*g) for g in groups if rank in g[1]]))
             for rank in range(4)]
    for rank in ranks:
        session.tell_groups(rank)
    found = {(g["kind"], *g["ranks"]): g["interfaces"] for g in session._groups(ranks[0])}
    fast_nics = {"mlx5_0:1": "ib1", "mlx5_1:1": "ib2"} if cuda else {"ib0": "ib[1-2]"}
    local = "local" if cuda else "lo"
    assert found == {("world", 0, 1, 2, 3): {"eth0": "ib[1-2]"}, ("tp", 0, 1): {local: "ib1"},
                     ("tp", 2, 3): {local: "ib2"}, ("dp", 0, 2): fast_nics, ("dp", 1, 3): fast_nics}
