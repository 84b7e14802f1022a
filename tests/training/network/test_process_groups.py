"""Gloo groups and their interface, and NCCL's options.

The CPU build of torch has no ProcessGroupNCCL: there a stand-in shows the options, but not that NCCL accepts them.
"""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
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
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.training.network import process_groups
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.process_groups import Groups, device, nccl_options

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
        replace(two_clusters().pools[0], name=t.fabric, nic=t.nic) for t, _ in NAMES if t.fabric is not None and t.nic
    ),
)


def test_nccl_options_are_new_objects_with_the_transports_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(net_name=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    for transport, name in [*NAMES, (LOCAL, None)]:
        first, second = nccl_options(transport, SITE), nccl_options(transport, SITE)
        assert first.config.net_name == second.config.net_name == name
        assert first is not second and first.config is not second.config
        assert not first.is_high_priority_stream and nccl_options(transport, SITE, urgent=True).is_high_priority_stream


def test_a_fabric_may_name_its_nccl_network() -> None:
    site = two_clusters()
    ib, roce = site.pools
    site = replace(site, pools=(replace(ib, nccl_net="IBext_v11"), roce))
    assert [site.nccl_network(f.nic, f.name) for f in site.pools] == ["IBext_v11", "IB"]
    assert site.nccl_network(TCP.nic) == "Socket" and site.nccl_network(LOCAL.nic) is None


def test_only_edges_have_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fixed_plan(named("gpt_3_6b"), Batch(64, 1, 1024), two_clusters(2), PlanOptions(tp=1, pp=2, dp=16), Costs())
    new_groups: list[tuple[str, Any]] = []
    monkeypatch.setattr(process_groups, "nccl_options", lambda transport, site, urgent=False: urgent)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **kw: new_groups.append((kw["group_desc"], kw["pg_options"])))
    groups = Groups(plan, NodeTransports("n1", "ib-a", {}, {}, False), 0, True, 10.0, 10.0)
    groups.edge(next(g for g in plan.transports() if g.kind == "edge"))
    groups.new(range(16), "dp")
    assert new_groups == [("edge 0-1", True), ("dp", False)]


@pytest.mark.nccl
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no ProcessGroupNCCL")
@pytest.mark.parametrize(("transport", "name"), NAMES)
def test_nccls_own_options_accept_the_network_name(transport: Transport, name: str) -> None:
    first, second = nccl_options(transport, SITE), nccl_options(transport, SITE)
    assert first.config.net_name == name and first is not second
    assert nccl_options(transport, SITE, urgent=True).is_high_priority_stream
    assert not first.is_high_priority_stream
    second.config.net_name = "other"
    assert first.config.net_name == name


@pytest.mark.parametrize(
    ("cuda", "gloo", "interface"),
    [
        (False, False, "ib0"),  # CPU ranks: gloo uses the fabric's NIC
        (False, True, "ib0"),
        (True, True, "eth0"),  # host memory beside GPUs
    ],
)
def test_groups_use_the_interface_of_the_plans_transport(
    cuda: bool, gloo: bool, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = fixed_plan(
        named("gpt_3_6b"),
        Batch(64, 1, 1024),
        two_clusters(2),
        PlanOptions(tp=1, pp=2, dp=8, nodes={"ib-a": 2}),
        Costs(),
    )
    node = NodeTransports("n1", "ib-a", {"tcp": ("eth0", "10.1.0.1"), "rdma": ("ib0", "10.2.0.1")}, {}, False)
    options: list[dict[str, str]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **kw: options.append(kw["pg_options"]))
    groups = Groups(plan, node, 0, cuda, 10.0, 10.0)
    groups.new([0, 8], "pair", gloo=gloo)
    transport = str(plan.transport_of([0, 8], host_memory=cuda and gloo))
    assert options == [{"interface": interface}]
    assert groups.records == [{"kind": "pair", "ranks": [0, 8], "transport": transport, "interface": interface}]


@pytest.mark.parametrize(("visible", "numbers"), [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0])])
def test_a_rank_uses_its_own_gpu_also_if_slurm_hides_the_others(
    visible: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    assert [device(local, cuda=True).index for local in range(4)] == numbers == devices
    assert device(3, cuda=False).type == "cpu"


@pytest.mark.integration
@pytest.mark.thorough
def test_concurrent_gathers_do_not_crash_the_process(tmp_path: Path) -> None:
    """In torch 2.13 all threads of a group write the name of its last collective without a lock."""
    script = Path(__file__).parents[2] / "support" / "gather_rounds.py"
    process = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "meet"), "2000"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.integration
def test_a_large_gloo_group_connects_only_the_pairs_that_it_needs() -> None:
    """All pairs of 72 ranks would need over 5,000 sockets. The ranks are threads of this process."""
    ranks, store, results = 72, dist.HashStore(), dict[int, tuple[float, float]]()
    groups = []

    def use(rank: int) -> None:
        options = SimpleNamespace(store=store, group_rank=rank, group_size=ranks, timeout=timedelta(seconds=60))
        group = process_groups._create_gloo(options, {"interface": "lo"})
        total, first = torch.tensor([1.0]), torch.tensor([float(rank)])
        group.allreduce([total]).wait()
        group.broadcast([first], dist.BroadcastOptions()).wait()
        gathered = [[torch.empty(1) for _ in range(ranks)]] if rank == 0 else []
        group.gather(gathered, [torch.tensor([float(rank)])], dist.GatherOptions()).wait()
        if rank == 0:
            assert [float(t) for t in gathered[0]] == list(range(ranks))
        results[rank] = float(total), float(first)
        groups.append(group)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=use, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(ranks), (ranks, 0.0))
    assert len(os.listdir("/proc/self/fd")) - before < 30 * ranks
