"""The main job on the testbed: one GPT over three NIC types in one heterogeneous job, and what its record says."""

import json
from pathlib import Path
from statistics import fmean, median

import pytest
from whole_jobs import holmes

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory

STEPS = 12
TRAIN = [f"train.steps={STEPS}", "train.lr=2e-3", "plan.schedule=1f1b"]
THREE = ["plan.nodes={ib-a: 2, roce-a: 2, eth-a: 2}", "plan.pp=3", "train.pace_layer_ms=5"]
STEADY = 2  # the number of steps after which a run is steady


def job(runs: Path, name: str, *words: str) -> RunDirectory:
    """Return a run that has completed. `words`: of `holmes run`."""
    done = holmes("run", f"name={name}", *words, HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunDirectory(runs / name)


def sent_bytes(run: RunDirectory) -> dict[str, float]:
    """Return the payload bytes that all NICs of a kind send in a steady step."""
    factors, steps = run.read_run()["traffic"]["header_factors"], run.metrics()[STEADY:]
    return {kind: fmean(line["nic_bytes"][kind]["tx"] for line in steps) / factors[kind] for kind in factors}


def planned_bytes(run: RunDirectory) -> dict[str, float]:
    """Return the payload bytes that the plan expects all NICs of a kind to send in a step."""
    predicted = Plan.read(run.plan_path).predicted
    assert predicted is not None
    return dict(predicted.nic_bytes_per_step)


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
    return job(runs, "three", *THREE, *TRAIN, "data=indexed", f"data.prefix={text}")


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
    counted, planned = sent_bytes(three), planned_bytes(three)
    assert set(planned) == {"ib-a", "roce-a", "ethernet"}
    for kind in planned:
        print(f"{kind}: {counted[kind] / planned[kind] - 1:+.2%} of the planned bytes")
        assert counted[kind] == pytest.approx(planned[kind], rel=0.05), kind
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
    run = job(runs, "pools", "--site", str(site), *model, *pace, "batch.global_size=6", "train.steps=14")
    plan = Plan.read(run.plan_path)
    assert plan.strategy == "hierarchical-dp"
    assert [len(plan.order.micro_batches_of(row)) for row in (0, 1)] == [4, 2]
    assert run.read_run()["hosts"] == ["ib1", "ib2"]
    assert sent_bytes(run)["ib-a"] == pytest.approx(planned_bytes(run)["ib-a"], rel=0.05)


SEQUENCES = [  # keys and values are most of the bytes
    *("plan.nodes={ib-a: 2, roce-a: 2}", "plan.strategy=pipeline", "plan.pp=2", "plan.layers_per_stage=[2,2]"),
    *("plan.schedule=1f1b", "plan.recompute=none", "plan.distributed_optimizer=true", "train.pace_layer_ms=50"),
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.max_positions=1024"),
    *("batch.sequence_length=1024", "batch.global_size=8", "batch.micro_size=1", "train.steps=10"),
]


@pytest.fixture(scope="module")
def whole(testbed, runs) -> RunDirectory:
    """Whole sequences: the gradients, parameters and activations of shared ones, but no keys and values."""
    return job(runs, "whole", *SEQUENCES, "plan.dp=2", "plan.cp=1")


@pytest.mark.slurm
@pytest.mark.thorough
@pytest.mark.parametrize("comm", ["ring", "a2a"])
def test_two_nodes_of_a_fabric_share_each_sequence(testbed, runs: Path, whole: RunDirectory, comm: str) -> None:
    run = job(runs, comm, *SEQUENCES, "plan.dp=1", "plan.cp=2", f"plan.cp_comm={comm}")
    plan = Plan.read(run.plan_path)
    assert plan.predicted is not None and (plan.parallel.cp, plan.parallel.cp_comm) == (2, comm)
    planned, counted = (
        {kind: amount - of(whole)[kind] for kind, amount in of(run).items()} for of in (planned_bytes, sent_bytes)
    )
    for fabric in ("ib-a", "roce-a"):
        print(f"{comm}, {fabric}: {planned[fabric] / 1e6:.2f} MB planned, {counted[fabric] / planned[fabric] - 1:+.2%}")
        assert counted[fabric] == pytest.approx(planned[fabric], rel=0.02)
    ethernet = sent_bytes(whole)["ethernet"]
    print(f"{comm}, Ethernet: {ethernet / 1e6:.2f} MB with whole sequences, {counted['ethernet'] / ethernet:+.2%}")
    assert abs(planned["ethernet"]) < 1 and abs(counted["ethernet"]) < 0.02 * ethernet
    step_s = median(line["step_time_s"] for line in run.metrics()[STEADY:])
    print(f"{comm}: {step_s:.3f} s a step, predicted {plan.predicted.step_time_s / step_s - 1:+.1%}")
    assert plan.predicted.step_time_s == pytest.approx(step_s, rel=0.08)
