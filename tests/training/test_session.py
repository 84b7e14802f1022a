"""The session of a rank: recorded networks, the lock of the run directory, and GPU checks (with mocks, no GPU)."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sites import two_clusters

from holmes_hpc.config.model import Batch, Experts, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, HolmesError, NetworkError, RecordError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import local_site
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.records.locks import LockOwner, hold_lock
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.training import session
from holmes_hpc.training.network import rank_facts
from holmes_hpc.training.network.interfaces import NodeTransports, check_addresses
from holmes_hpc.training.rank import cuda_check
from holmes_hpc.training.rank.cuda_check import GIB, CudaFacts
from holmes_hpc.training.rank.launch import Launch, job_nodes


def node(name: str, environment: dict[str, str]) -> NodeTransports:
    return NodeTransports(name, "ib-a", {"tcp": ("eth0", "10.0.0.1")}, environment, False)


def group(kind: str, ranks: list[int], interface: str | None) -> dict[str, object]:
    return {"kind": kind, "ranks": ranks, "transport": "x", "interface": interface}


@pytest.mark.parametrize("cuda", [False, True])
def test_every_group_is_recorded_once_with_its_nic_on_each_of_its_nodes(cuda: bool) -> None:
    hca = [{"NCCL_IB_HCA": f"=mlx5_{i}:1", "NCCL_SOCKET_IFNAME": "=eth0"} if cuda else {} for i in range(2)]
    nodes = [node("ib1", hca[0]), node("ib1", hca[0]), node("ib2", hca[1]), node("ib2", hca[1])]
    rdma, tcp, loopback = ("IB", "Socket", None) if cuda else ("ib0", "eth0", "lo")
    groups = [
        ("world", [0, 1, 2, 3], tcp),
        ("tp", [0, 1], loopback),
        ("tp", [2, 3], loopback),
        ("dp", [0, 2], rdma),
        ("dp", [1, 3], rdma),
    ]
    store = dist.HashStore()
    ranks = [
        SimpleNamespace(
            launch=SimpleNamespace(rank=rank, world_size=4),
            node_of_rank=nodes,
            store=store,
            cpus="",
            groups=SimpleNamespace(records=[group(*g) for g in groups if rank in g[1]]),
        )
        for rank in range(4)
    ]
    for rank in ranks:
        session.publish_groups(rank)
    interfaces = {(g["kind"], *g["ranks"]): g["interfaces"] for g in session._describe_groups(ranks[0])}
    rdma_nics = {"mlx5_0:1": "ib1", "mlx5_1:1": "ib2"} if cuda else {"ib0": "ib[1-2]"}
    local = "local" if cuda else "lo"
    assert interfaces == {
        ("world", 0, 1, 2, 3): {"eth0": "ib[1-2]"},
        ("tp", 0, 1): {local: "ib1"},
        ("tp", 2, 3): {local: "ib2"},
        ("dp", 0, 2): rdma_nics,
        ("dp", 1, 3): rdma_nics,
    }


def test_rank_0_cannot_lock_a_run_directory_that_another_attempt_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOCK_WAIT_S", 0.0)
    run = RunDirectory.create(tmp_path / "run")
    rank_exit, launch = SimpleNamespace(attempt=None), Launch(0, 2, 0, "srun", "ib1", "slurm-42-0-0", False)
    with hold_lock(run.path / session.TRAINING_LOCK, LockOwner("an attempt", "u", "ib7", 1, "41", time.time())):
        for state, has_ended in ((None, False), (JobState("RUNNING"), False), (JobState("FAILED"), True)):
            monkeypatch.setattr(session, "ending_state", lambda job, state=state: state)
            if has_ended:  # the owner's node died, and the file server still holds the lock
                os.close(session._lock_run(launch, run, rank_exit))
            else:
                with pytest.raises(RecordError, match=r"in use by an attempt of u on ib7 .*job 41"):
                    session._lock_run(launch, run, rank_exit)
    assert rank_exit.attempt == session.NO_ATTEMPT and run.read_run()["attempts"] == []
    run.write_exit(0, "failed", "locked", attempt=session.NO_ATTEMPT)
    run.start_attempt()
    assert run.read_exits() == []  # that record does not count for the running attempt
    tmp_path.chmod(0o777)
    with pytest.raises(RecordError, match="can be written by everybody"):
        session._lock_run(launch, run, rank_exit)
    tmp_path.chmod(0o755)


def test_a_node_outside_the_job_or_an_address_used_twice_is_refused() -> None:
    def transports(name: str, address: str) -> NodeTransports:
        return NodeTransports(name, "ib-a", {"tcp": ("eth0", address)}, {}, False)

    good = [transports("ib1", "10.0.0.1"), transports("ib1", "10.0.0.1"), transports("roce1", "10.0.0.2")]
    job = job_nodes(
        {
            "SLURM_JOB_NODELIST": "ib[1-2]",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "ib[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "roce1",
        }
    )
    check_addresses(good, job)
    apart = [NodeTransports(n, n, {"rdma": ("ib0", "10.1.0.1")}, {}, False) for n in ("ib1", "ib2")]
    check_addresses(apart, job)  # two fabrics without a link between them
    for bad, pattern in (
        (transports("evil", "10.0.0.9"), "rank 3 on evil: this node is not in the job"),
        (transports("ib2", "127.0.0.1"), "which other nodes cannot reach"),
        (transports("ib2", "10.0.0.1"), "which is also ib1's"),
        (transports("ib2", "evil.example"), "cannot reach"),
    ):
        with pytest.raises(NetworkError, match=pattern):
            check_addresses([*good, bad], job)


def on_gpus() -> Plan:
    return fixed_plan(named("gpt_3_6b"), Batch(64, 1, 1024), two_clusters(1), PlanOptions(tp=1, pp=2, dp=8), Costs())


def rank_0(one_host: bool) -> Any:
    return SimpleNamespace(rank=0, one_host=one_host)


@pytest.mark.parametrize(
    ("cuda", "device", "facts", "one_host", "pattern"),
    [
        (False, "auto", CudaFacts("13.0", 12040), True, "the NVIDIA driver supports CUDA up to 12.4"),  # not: on CPUs
        (True, "cuda", CudaFacts("13.0", 13000, 1, False), True, "this torch has no NCCL"),
        (False, "auto", CudaFacts("13.0", 0), True, None),  # a machine without GPUs
        (False, "auto", CudaFacts("13.0", 0), False, "no CUDA device and no NVIDIA driver"),  # a cluster's nodes
        (False, "auto", CudaFacts(None), False, "this torch is built for CPUs"),
        (True, "auto", CudaFacts("13.0", 13000, 8), False, None),
    ],
)
def test_an_unusable_gpu_ends_the_run_before_the_ranks_meet(
    cuda: bool, device: str, facts: CudaFacts, one_host: bool, pattern: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_check, "collect_facts", lambda: facts)
    if pattern is None:
        assert session._check_cuda(on_gpus(), rank_0(one_host), cuda, TrainConfig(device=device)) == []
    else:
        with pytest.raises(ConfigError, match=pattern):
            session._check_cuda(on_gpus(), rank_0(one_host), cuda, TrainConfig(device=device))


def test_a_run_on_cpus_never_queries_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_check, "collect_facts", lambda: pytest.fail("queried"))
    cpu_plan = fixed_plan(
        named("gpt_tiny"), Batch(8, 1, 32), local_site(1, "cpu"), PlanOptions(tp=1, pp=1, dp=1), Costs()
    )
    for plan, device in ((cpu_plan, "auto"), (on_gpus(), "cpu")):
        assert session._check_cuda(plan, rank_0(False), False, TrainConfig(device=device)) == []


def together(ranks: int, call: Callable[[int, dist.Store], Any]) -> list[Any]:
    """Return the result of `call(rank, store)` of each rank, or its HolmesError. The ranks are threads."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return call(rank, store)
        except HolmesError as e:
            return e

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("nodes", [[(0, 1), (2, 3)], [(0, 1, 2, 3)], [(0,), (1, 2, 3)]])
def test_ranks_on_gpus_and_ranks_on_cpus_refuse_to_meet(nodes: list[tuple[int, ...]]) -> None:
    """Otherwise each would wait for the other in groups of its own kind."""

    def exchange(on_gpu: list[bool]) -> list[Any]:
        def call(rank: int, store: dist.Store) -> Any:
            node = NodeTransports(f"n{rank // 2}", "ib-a", {"tcp": ("eth0", f"10.0.0.{rank // 2}")}, {}, False)
            launch: Any = SimpleNamespace(rank=rank, world_size=4)
            return rank_facts.exchange_transports(
                launch, store, node, on_gpu[rank], dict(zip("ab", nodes, strict=False))
            )

        return together(4, call)

    for result in exchange([True, True, True, False]):
        assert "rank 0 has a GPU (node n0), rank 3 has a CPU (node n1)" in str(result)
    for result in exchange([True] * 4):
        assert [n.node for n in result] == ["n0", "n0", "n1", "n1"]


def test_every_rank_reports_the_gpu_without_enough_free_memory_or_with_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = on_gpus()

    def check(uuids: str, free_of: dict[int, int]) -> set[str]:
        def call(rank: int, store: dist.Store) -> None:
            launch: Any = SimpleNamespace(rank=rank, node=f"ib{rank // 8}")
            rank_facts.check_gpus(
                plan, launch, torch.device("cuda", rank), store, {"ib0": range(8), "ib1": range(8, 16)}
            )

        free = lambda d: (free_of.get(d.index, 79) * GIB, 80 * GIB)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=uuids[d.index]))
        return set(map(str, together(16, call)))

    assert check("0123456789abcdef", {}) == {"None"}
    assert check("0123456701234567", {}) == {"None"}  # on two nodes
    (problem,) = check("0123456789abcdef", {3: 2, 9: 1})
    assert problem.startswith("GPU 3 of node ib0: 2.0 of 80.0 GiB are free, the plan needs")
    (problem,) = check("0123456789abcdee", {})
    assert problem.startswith("node ib1: ranks 14 and 15 have the same GPU; start one task per GPU")


def test_fp8_needs_the_width_of_experts_not_that_of_a_dense_layer() -> None:
    experts = Experts(16, top_k=2, ffn=512, shared=256)
    model = ModelSpec("moe", 8, hidden=1024, heads=8, vocab=32000, ffn=4099, kv_heads=8, experts=experts)
    plan = fixed_plan(model, Batch(128, 1, 1024), two_clusters(2), PlanOptions(tp=2, pp=2, dp=8), Costs())
    widths = session._fp8_sizes(plan, 0)
    assert widths["width of an expert"] == 512 and widths["model.experts.shared on a rank"] == 128
    assert 4099 not in widths.values() and 4099 // 2 not in widths.values()
    model = replace(model, ffn=4096, experts=replace(experts, first_dense=1))
    plan = fixed_plan(model, Batch(128, 1, 1024), two_clusters(2), PlanOptions(tp=2, pp=2, dp=8), Costs())
    assert session._fp8_sizes(plan, 0)["model.ffn on a rank"] == 2048
