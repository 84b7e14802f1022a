"""A gloo group's thread, and NCCL's options. torch's CPU build has no ProcessGroupNCCL: there the decision is tested
with a stand-in, and that NCCL takes it is not shown."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sites import two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.planning.search.best import given_plan
from holmes_hpc.training.network import process_groups
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.process_groups import Groups, check_devices, device, nccl_options

NAMES = [
    (TCP, "Socket"),
    (Transport("rdma", NicType.IB, "a"), "IB"),
    (Transport("rdma", NicType.ROCE, "b"), "IB"),
    (Transport("rdma", NicType.EFA, "c"), "Libfabric"),
    (Transport("rdma", NicType.SLINGSHOT, "d"), "AWS Libfabric"),
    (Transport("rdma", NicType.OMNIPATH, "e"), "PSM2"),
]
SITE = Site(
    "five",
    tuple(
        replace(two_clusters().fabrics[0], name=t.fabric, nic=t.nic) for t, _ in NAMES if t.fabric is not None and t.nic
    ),
)


def test_options_are_fresh_and_name_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(net_name=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    for transport, name in [*NAMES, (LOCAL, None)]:
        one, two = nccl_options(transport, SITE), nccl_options(transport, SITE)
        assert one.config.net_name == two.config.net_name == name and one is not two and one.config is not two.config
        assert not one.is_high_priority_stream and nccl_options(transport, SITE, urgent=True).is_high_priority_stream


def test_a_fabric_may_name_another_network_of_nccl() -> None:
    site = two_clusters()
    ib, roce = site.fabrics
    own = replace(site, fabrics=(replace(ib, nccl_net="IBext_v11"), roce))
    assert [own.nccl_network(f.nic, f.name) for f in own.fabrics] == ["IBext_v11", "IB"]
    assert own.nccl_network(TCP.nic) == "Socket" and own.nccl_network(LOCAL.nic) is None


def test_edges_have_streams_of_high_priority_and_others_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = given_plan(named("gpt_3_6b"), Batch(64, 1, 1024), two_clusters(2), PlanOptions(tp=1, pp=2, dp=16), Costs())
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(process_groups, "nccl_options", lambda transport, site, urgent=False: urgent)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: asked.append((how["group_desc"], how["pg_options"])))
    made = Groups(plan, NodeTransports("n1", "ib-a", {}, {}, False), 0, True, 10.0, 10.0)
    made.edge(next(g for g in plan.transports() if g.kind == "edge"))
    made.new(range(16), "dp")
    assert asked == [("edge 0-1", True), ("dp", False)]


@pytest.mark.nccl
@pytest.mark.skipif(not dist.is_nccl_available(), reason="not shown here: this torch has no ProcessGroupNCCL")
@pytest.mark.parametrize(("transport", "name"), NAMES)
def test_nccl_takes_the_name(transport: Transport, name: str) -> None:
    one, two = nccl_options(transport, SITE), nccl_options(transport, SITE)
    assert one.config.net_name == name and one is not two
    assert nccl_options(transport, SITE, urgent=True).is_high_priority_stream and not one.is_high_priority_stream
    two.config.net_name = "other"
    assert one.config.net_name == name


@pytest.mark.parametrize(
    ("cuda", "gloo", "interface"),
    [
        (False, False, "ib0"),  # CPU ranks: gloo takes the fabric's NIC
        (False, True, "ib0"),
        (True, True, "eth0"),  # host memory beside GPUs
    ],
)
def test_groups_are_made_on_the_network_that_the_plan_says(
    cuda: bool, gloo: bool, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = given_plan(
        named("gpt_3_6b"),
        Batch(64, 1, 1024),
        two_clusters(2),
        PlanOptions(tp=1, pp=2, dp=8, nodes={"ib-a": 2}),
        Costs(),
    )
    node = NodeTransports(
        "n1",
        "ib-a",
        {"local": ("lo", "127.0.0.1", 8), "tcp": ("eth0", "10.1.0.1", 24), "rdma": ("ib0", "10.2.0.1", 24)},
        {},
        False,
    )
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: asked.append(how["pg_options"]))
    made = Groups(plan, node, 0, cuda, 10.0, 10.0)
    made.new([0, 8], "pair", gloo=gloo)
    said = plan.transport_of([0, 8], host_memory=cuda and gloo)
    assert asked == [{"interface": interface}]
    assert made.made == [{"kind": "pair", "ranks": [0, 8], "transport": str(said), "interface": interface}]


@pytest.mark.parametrize(("shown", "numbers"), [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0])])
def test_a_rank_takes_its_own_gpu_also_where_it_is_shown_no_other(
    shown: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    assert [device(local, cuda=True).index for local in range(4)] == numbers == made
    assert device(3, cuda=False).type == "cpu"


def test_two_ranks_with_one_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [SimpleNamespace(node=name) for name in ("a", "a", "b", "b")]

    def meet(uuids: list[str]) -> None:
        store = dist.HashStore()
        for rank, uuid in enumerate(uuids):
            store.set(f"device/{rank}", json.dumps(uuid))
        store.add("device/count", len(uuids) - 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=uuids[3]))
        check_devices(torch.device("cuda", 0), 3, store, nodes)  # type: ignore[arg-type]

    meet(["x", "y", "x", "y"])
    with pytest.raises(PlanError, match=r"node b: ranks 2 and 3 have the same GPU; start no more.*gpus-per-node"):
        meet(["x", "y", "z", "z"])


@pytest.mark.integration
def test_gathers_in_flight_leave_the_process_whole(tmp_path: Path) -> None:
    """torch 2.13 writes the name of a group's last collective from all of the group's threads, without a lock."""
    script = Path(__file__).parents[2] / "support" / "gather_rounds.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meet"), "2000"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
