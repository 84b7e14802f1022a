"""Bytes over NICs: which NICs are counted, the header factor of a sample, and the log of NICs."""

from __future__ import annotations

import json

import spawn
from sites import two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.nics import Nic, NodeNics, RdmaPort
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.training.network.nic_bytes import NicLog, Traffic, header_factors, sample_pairs
from holmes_hpc.training.rank.launch import Launch


def test_every_nic_kind_has_a_sample_between_two_nodes() -> None:
    assert sample_pairs(spawn.plan(pp=3, dp=2)) == {"ib-0": (0, 1), "roce-1": (2, 3), "ethernet": (4, 5)}
    assert sample_pairs(spawn.plan()) == {}


def test_the_sample_of_a_data_parallel_group_across_fabrics_is_between_fabrics() -> None:
    options = PlanOptions(strategy="hierarchical-dp", tp=1, pp=1)
    plan = best_plan(named("gpt_3_6b"), Batch(768, 4, 2048), two_clusters(2), options, Costs())
    pools = {network: [plan.places[rank].pool for rank in ranks] for network, ranks in sample_pairs(plan).items()}
    assert pools == {"ib-a": ["ib-a"] * 2, "roce-a": ["roce-a"] * 2, "ethernet": ["ib-a", "roce-a"]}


class SharedTraffic:
    """Counters of NICs that carry other traffic beside the sample."""

    one_host = False

    def take(self) -> tuple[float, float, float, float, float]:
        return 3e6, 3e6, 5e6, 5e6, 0.0


def test_on_cuda_rdma_has_the_factor_1_without_a_sample(monkeypatch) -> None:
    plan, created = spawn.plan(pp=3, dp=2), []
    monkeypatch.setattr("holmes_hpc.training.network.nic_bytes._send", lambda ranks, rank, group, data: None)

    def new_group(ranks, kind):
        created.append(kind)

    factors = header_factors(plan, 0, SharedTraffic(), new_group, lambda row: [row] * plan.world_size, cuda=True)
    assert factors.pop("ethernet") > 1
    assert factors == {"ib-0": 1.0, "roce-1": 1.0} and created == ["sample ethernet"]
    assert set(header_factors(plan, 0, SharedTraffic(), new_group, lambda row: [row] * plan.world_size)) == {
        "ib-0",
        "roce-1",
        "ethernet",
    }


IB_NODE = NodeNics(
    (Nic("eth0", NicType.ETHERNET), Nic("mgmt0", NicType.ETHERNET), Nic("docker0", NicType.ETHERNET)),
    (RdmaPort("mlx5_0", 1, "ib", True, "ACTIVE", 200.0), RdmaPort("mlx5_1", 1, "ib", True, "ACTIVE", 100.0)),
)


def test_every_nic_is_counted_and_nics_outside_the_plan_are_summed_apart(monkeypatch) -> None:
    readings = iter(
        [
            {n: (0, 0) for n in ("eth0", "mgmt0", "docker0", "mlx5_0:1", "mlx5_1:1")},
            {"eth0": (1, 2), "mgmt0": (10, 20), "docker0": (0, 0), "mlx5_0:1": (100, 200), "mlx5_1:1": (1000, 0)},
        ]
    )
    monkeypatch.setattr("holmes_hpc.training.network.nic_bytes.read_counters", lambda: next(readings))
    traffic = Traffic(spawn.plan(pp=2), Launch(0, 2, 0, "srun", "ib1", "key", False), IB_NODE)
    assert traffic.take() == (1, 2, 100, 200, 1010, 0, 0)  # mlx5_1 is slower: storage, not one of NCCL's ports
    assert traffic.by_nic["mlx5_1:1"] == (1000, 0)


def test_the_nic_log_holds_every_step_and_is_written_once_a_second(tmp_path) -> None:
    log = NicLog(tmp_path / "nics", "ib1", attempt=2)
    for step in range(1, 40):
        log.add(step, {"eth0": (step, 0), "mlx5_0:1": (0, 0), "docker0": (5, 5)})
    path = tmp_path / "nics" / "ib1.jsonl"
    assert len(path.read_text().splitlines()) < 39
    log.write()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 40))
    assert lines[6] == {"step": 7, "attempt": 2, "node": "ib1", "nics": {"eth0": {"tx": 7, "rx": 0}}}
    NicLog(tmp_path / "none", "ib1", 1).add(1, {})
    assert not (tmp_path / "none").exists()
