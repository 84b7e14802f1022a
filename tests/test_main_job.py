"""The main job on the testbed: one GPT over three NIC types in one heterogeneous job, and what its record says."""

import json
from pathlib import Path

import pytest
from whole_jobs import holmes

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory

STEPS = 12
TRAIN = [f"train.steps={STEPS}", "train.lr=2e-3", "plan.schedule=1f1b"]
THREE = ["plan.nodes={ib-a: 2, roce-a: 2, eth-a: 2}", "plan.pp=3", "train.pace_layer_ms=5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def text(runs) -> str:
    prefix = runs / "data" / "stdlib"
    done = holmes("data", "prepare", "--stdlib", "-o", str(prefix))
    assert done.returncode == 0, done.stderr
    return str(prefix)


@pytest.fixture(scope="module")
def three(testbed, runs, text) -> RunDirectory:
    """2 InfiniBand + 2 RoCE + 2 Ethernet-only nodes, three components, three stages."""
    done = holmes("run", "name=three", *THREE, *TRAIN, "data=indexed", f"data.prefix={text}", HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunDirectory(runs / "three")


@pytest.mark.slurm
def test_one_heterogeneous_job_with_a_stage_per_fabric(three):
    plan = Plan.read(three.plan_path)
    assert sorted(c.partition for c in plan.components) == ["eth", "ib", "roce"]
    assert plan.parallel.dp == 2 and plan.parallel.pp == 3
    for group in plan.transports():
        fabrics = {plan.places[r].pool for r in group.ranks}
        if group.kind == "dp":
            assert len({plan.places[r].node for r in group.ranks}) == 2  # on different nodes
            assert group.transport.kind == ("tcp" if fabrics == {"eth-a"} else "rdma")
        if group.kind == "edge":
            assert group.transport.kind == "tcp"
    hosts = three.read_run()["hosts"]
    for rank, host in enumerate(hosts):
        assert host.startswith(plan.places[rank].pool.split("-")[0]), hosts


@pytest.mark.slurm
def test_bytes_counted_are_the_bytes_planned(three):
    plan = Plan.read(three.plan_path)
    assert plan.predicted is not None
    factors = three.read_run()["traffic"]["header_factors"]
    steps = [line for line in three.metrics() if line["step"] > 2]
    assert set(plan.predicted.nic_bytes_per_step) == {"ib-a", "roce-a", "ethernet"}
    for kind, planned in plan.predicted.nic_bytes_per_step.items():
        counted = sum(line["nic_bytes"][kind]["tx"] for line in steps) / len(steps) / factors[kind]
        print(f"{kind}: {counted / planned - 1:+.2%} of the planned bytes")
        assert counted == pytest.approx(planned, rel=0.05), kind
    assert three.read_run()["traffic"]["setup"]["ethernet"]["tx"] > 0


@pytest.mark.slurm
def test_loss_is_that_of_one_process_and_falls(three, runs, text):
    plan = Plan.read(three.plan_path)
    done = holmes(
        "run",
        "launcher=local",
        "name=one",
        *TRAIN,
        f"batch.micro_size={plan.batch.micro_size}",
        "data=indexed",
        f"data.prefix={text}",
        HOLMES_RUNS=str(runs),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    alone = [line["loss"] for line in RunDirectory(runs / "one").metrics()]
    together = [line["loss"] for line in three.metrics()]
    assert len(alone) == len(together) == STEPS
    assert together == pytest.approx(alone, rel=1e-4)
    assert together[0] - together[-1] >= 0.5


@pytest.mark.slurm
def test_report_has_a_row_for_every_nic_kind_and_for_control_traffic(three):
    done = holmes("report", str(three.path))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    for word in ("ib-a", "roce-a", "ethernet", "rendezvous and control", "emulated compute"):
        assert word in done.stdout, word
    found = json.loads(holmes("report", str(three.path), "--json").stdout)
    assert found


POOLS = """name: pools
ethernet_gbps: 0.05
gpu: {name: cpu, peak_tflops: 0.05, memory_gib: 4, intra_node_gbps: 40}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 0.4, partition: ib, gres: false, gpus_per_node: 1, nodes: 1}
pools:
  - {name: fast, fabric: ib-a, exclude: "ib[2-4]"}
  - {name: slow, fabric: ib-a, exclude: "ib[1,3-4]"}
"""


@pytest.mark.slurm
def test_two_pools_of_one_fabric_share_a_step_by_rdma(testbed, runs: Path) -> None:
    site = runs / "pools.yaml"
    site.write_text(POOLS)
    model = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "batch.micro_size=1"]
    pace = ["train.pace_layer_ms=10", "train.pace_factors={fast: 1, slow: 2}", "plan.pp=1"]
    words = ["--site", str(site), *model, *pace, "batch.global_size=6", "train.steps=14", "name=pools"]
    done = holmes("run", *words, HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = RunDirectory(runs / "pools")
    plan = Plan.read(run.plan_path)
    assert plan.predicted is not None and plan.strategy == "hierarchical-dp"
    assert [len(plan.order.micro_batches_of(row)) for row in (0, 1)] == [4, 2]
    assert run.read_run()["hosts"] == ["ib1", "ib2"]
    steps = [line["nic_bytes"]["ib-a"]["tx"] for line in run.metrics() if line["step"] > 2]
    counted = sum(steps) / len(steps) / run.read_run()["traffic"]["header_factors"]["ib-a"]
    assert counted == pytest.approx(plan.predicted.nic_bytes_per_step["ib-a"], rel=0.05)
