"""What run.yaml says of the networks that a run used; GPUs that cannot be used (mocks: no GPU has been near this)."""

import json
import os
import time
from dataclasses import asdict
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
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, NetworkError, PlanError, RecordError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import local_site
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.records.owner import LockOwner, hold_lock
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.training import session
from holmes_hpc.training.network.interfaces import NodeTransports, check_addresses
from holmes_hpc.training.rank import cuda_check
from holmes_hpc.training.rank.cuda_check import GIB, CudaFacts
from holmes_hpc.training.rank.launch import Launch, job_nodes


def node(name: str, environment: dict[str, str]) -> NodeTransports:
    return NodeTransports(name, "ib-a", {"tcp": ("eth0", "10.0.0.1", 24)}, environment, False)


def group(kind: str, ranks: list[int], interface: str | None) -> dict[str, object]:
    return {"kind": kind, "ranks": ranks, "transport": "x", "interface": interface}


@pytest.mark.parametrize("cuda", [False, True])
def test_every_group_is_recorded_once_with_its_nic_on_each_of_its_nodes(cuda: bool) -> None:
    hca = [{"NCCL_IB_HCA": f"=mlx5_{i}:1", "NCCL_SOCKET_IFNAME": "=eth0"} if cuda else {} for i in range(2)]
    nodes = [node("ib1", hca[0]), node("ib1", hca[0]), node("ib2", hca[1]), node("ib2", hca[1])]
    fast, slow, none = ("IB", "Socket", None) if cuda else ("ib0", "eth0", "lo")
    groups = [
        ("world", [0, 1, 2, 3], slow),
        ("tp", [0, 1], none),
        ("tp", [2, 3], none),
        ("dp", [0, 2], fast),
        ("dp", [1, 3], fast),
    ]
    store = dist.HashStore()
    ranks = [
        SimpleNamespace(
            launch=SimpleNamespace(rank=rank, world_size=4),
            nodes=nodes,
            store=store,
            cpus="",
            groups=SimpleNamespace(records=[group(*g) for g in groups if rank in g[1]]),
        )
        for rank in range(4)
    ]
    for rank in ranks:
        session.tell_groups(rank)
    found = {(g["kind"], *g["ranks"]): g["interfaces"] for g in session._groups(ranks[0])}
    fast_nics = {"mlx5_0:1": "ib1", "mlx5_1:1": "ib2"} if cuda else {"ib0": "ib[1-2]"}
    local = "local" if cuda else "lo"
    assert found == {
        ("world", 0, 1, 2, 3): {"eth0": "ib[1-2]"},
        ("tp", 0, 1): {local: "ib1"},
        ("tp", 2, 3): {local: "ib2"},
        ("dp", 0, 2): fast_nics,
        ("dp", 1, 3): fast_nics,
    }


def test_rank_0_takes_no_directory_in_which_another_attempt_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OWNER_WAIT_S", 0.0)
    run = RunDirectory.create(tmp_path / "run")
    rank_exit, this = SimpleNamespace(attempt=None), Launch(0, 2, 0, "srun", "ib1", "slurm-42-0-0", False)
    with hold_lock(run.path / session.OWNER, LockOwner("an attempt", "u", "ib7", 1, "41", time.time())):
        for state, ended in ((None, False), (JobState("RUNNING"), False), (JobState("FAILED"), True)):
            monkeypatch.setattr(session, "ending_state", lambda job, state=state: state)
            if ended:  # of a node that died: the file server has not noticed yet
                os.close(session._own(this, run, rank_exit))
            else:
                with pytest.raises(RecordError, match=r"it is in use by an attempt of u on ib7 .*job 41"):
                    session._own(this, run, rank_exit)
    assert rank_exit.attempt == session.NO_ATTEMPT and run.read_run()["attempts"] == []
    run.write_exit(0, "failed", "taken", attempt=session.NO_ATTEMPT)
    run.start_attempt()
    assert run.read_exits() == []  # nothing of it is taken for the attempt that lives
    tmp_path.chmod(0o777)
    with pytest.raises(RecordError, match="can be written by everybody"):
        session._own(this, run, rank_exit)
    tmp_path.chmod(0o755)


def test_ranks_name_nodes_of_the_job_and_addresses_of_their_own() -> None:
    def named(name: str, address: str) -> NodeTransports:
        return NodeTransports(name, "ib-a", {"tcp": ("eth0", address, 24)}, {}, False)

    good = [named("ib1", "10.0.0.1"), named("ib1", "10.0.0.1"), named("roce1", "10.0.0.2")]
    job = job_nodes(
        {
            "SLURM_JOB_NODELIST": "ib[1-2]",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "ib[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "roce1",
        }
    )
    check_addresses(good, job)
    apart = [NodeTransports(n, n, {"rdma": ("ib0", "10.1.0.1", 24)}, {}, False) for n in ("ib1", "ib2")]
    check_addresses(apart, job)  # two fabrics without a link between them
    for bad, says in (
        (named("evil", "10.0.0.9"), "rank 3 on evil: this node is not in the job"),
        (named("ib2", "127.0.0.1"), "which other nodes cannot reach"),
        (named("ib2", "10.0.0.1"), "which is also ib1's"),
        (named("ib2", "evil.example"), "cannot reach"),
    ):
        with pytest.raises(NetworkError, match=says):
            check_addresses([*good, bad], job)


def on_gpus() -> Plan:
    return fixed_plan(named("gpt_3_6b"), Batch(64, 1, 1024), two_clusters(1), PlanOptions(tp=1, pp=2, dp=8), Costs())


def own(one_host: bool) -> Any:
    return SimpleNamespace(rank=0, one_host=one_host)


@pytest.mark.parametrize(
    ("cuda", "wanted", "facts", "one_host", "says"),
    [
        (False, "auto", CudaFacts("13.0", 12040), True, "the NVIDIA driver knows CUDA up to 12.4"),  # else: on CPUs
        (True, "cuda", CudaFacts("13.0", 13000, 1, False), True, "this torch has no NCCL"),
        (False, "auto", CudaFacts("13.0", 0), True, None),  # a machine without GPUs
        (False, "auto", CudaFacts("13.0", 0), False, "no CUDA device, nor an NVIDIA driver"),  # a cluster's nodes
        (False, "auto", CudaFacts(None), False, "this torch is built for CPUs"),
        (True, "auto", CudaFacts("13.0", 13000, 8), False, None),
    ],
)
def test_a_gpu_that_cannot_be_used_ends_the_run_before_the_ranks_meet(
    cuda: bool, wanted: str, facts: CudaFacts, one_host: bool, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_check, "gather", lambda: facts)
    if says is None:
        assert session._check_cuda(on_gpus(), own(one_host), cuda, TrainConfig(device=wanted)) == []
    else:
        with pytest.raises(ConfigError, match=says):
            session._check_cuda(on_gpus(), own(one_host), cuda, TrainConfig(device=wanted))


def test_a_plan_of_cpus_never_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_check, "gather", lambda: pytest.fail("asked"))
    plan = fixed_plan(named("gpt_tiny"), Batch(8, 1, 32), local_site(1, "cpu"), PlanOptions(tp=1, pp=1, dp=1), Costs())
    for made, device in ((plan, "auto"), (on_gpus(), "cpu")):
        assert session._check_cuda(made, own(False), False, TrainConfig(device=device)) == []


def test_ranks_on_gpus_and_ranks_on_cpus_do_not_meet() -> None:
    """Each would wait for the other in groups of its own kind."""
    there = SimpleNamespace(rank=1, world_size=2)

    def with_rank_0() -> dist.Store:
        store, node = dist.HashStore(), asdict(NodeTransports("n0", "ib-a", {}, {}, False))
        store.set("node/0", json.dumps({"node": node, "device": "a GPU"}))
        store.add("node/count", 1)
        return store

    here = NodeTransports("n1", "ib-a", {}, {}, False)
    with pytest.raises(ConfigError, match=r"rank 0 has a GPU \(node n0\), rank 1 a CPU \(node n1\)"):
        session._exchange(there, with_rank_0(), here, False)
    assert [n.node for n in session._exchange(there, with_rank_0(), here, True)] == ["n0", "n1"]


def test_every_rank_hears_whose_gpu_has_its_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_gpus()

    def with_the_others(rank_0: str = "null") -> dist.Store:
        store = dist.HashStore()
        for rank in range(plan.world_size):
            store.set(f"memory/{rank}", "null" if rank else rank_0)
        store.add("memory/count", plan.world_size - 1)
        return store

    here = SimpleNamespace(rank=0, world_size=plan.world_size, node="ib1")
    for free in (79 * GIB, 2 * GIB):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 * GIB))
        if free > 70 * GIB:
            session._check_memory(plan, here, torch.device("cuda", 3), with_the_others())
    store = with_the_others()
    with pytest.raises(PlanError, match=r"GPU 3 of node ib1: 2.0 of 80.0 GiB are free, the plan needs"):
        session._check_memory(plan, here, torch.device("cuda", 3), store)
    here.rank = 1  # whose own memory is free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    with pytest.raises(PlanError, match="GPU 3 of node ib1"):
        session._check_memory(plan, here, torch.device("cuda", 0), with_the_others(store.get("memory/0").decode()))
