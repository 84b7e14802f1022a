"""The main job on the testbed: one GPT over three NIC kinds in one heterogeneous job, and what its record says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs

HOLMES = str(Path(sys.executable).parent / "holmes")
STEPS = 20
LIMIT_S = 600  # for whatever a command here does, on a busy machine too
TRAIN = [f"train.steps={STEPS}", "train.lr=2e-3", "plan.schedule=1f1b"]
THREE = ["plan.nodes={ib-a: 2, roce-a: 2, eth-a: 2}", "plan.pp=3", "train.pace_layer_ms=5"]


def holmes(*args: str, timeout: float = LIMIT_S, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HOLMES, *args], capture_output=True, text=True, timeout=timeout, check=False,
                          env={**os.environ, **environment})


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
        fabrics = {plan.places[r].fabric for r in group.ranks}
        if group.kind == "dp":
            assert len({plan.places[r].node for r in group.ranks}) == 2  # on different nodes
            assert group.transport.kind == ("tcp" if fabrics == {"eth-a"} else "rdma")
        if group.kind == "edge":
            assert group.transport.kind == "tcp"
    hosts = three.read_run()["hosts"]
    for rank, host in enumerate(hosts):
        assert host.startswith(plan.places[rank].fabric.split("-")[0]), hosts


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
    done = holmes("run", "launcher=local", "name=one", *TRAIN, f"batch.micro_size={plan.batch.micro_size}",
                  "data=indexed", f"data.prefix={text}", HOLMES_RUNS=str(runs))
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
    for word in ("ib-a", "roce-a", "ethernet", "rendezvous and control", "paced"):
        assert word in done.stdout, word
    found = json.loads(holmes("report", str(three.path), "--json").stdout)
    assert found


@pytest.mark.slurm
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_ends_the_job_and_is_named(testbed, runs, rank, text):
    name = f"killed-{rank}"
    follower = subprocess.Popen(
        [HOLMES, "run", f"name={name}", "plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "train.steps=2000",
         "train.pace_layer_ms=5", "train.watchdog_s=9000", "train.net_timeout_s=3000"],  # no time-out helps
        env={**os.environ, "HOLMES_RUNS": str(runs)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = RunDirectory(runs / name)
    wait_for(lambda: run.exists() and len(run.metrics()) >= 3, follower)
    os.kill(process_of(run, rank), signal.SIGKILL)
    out, _ = follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 1, out
    result = json.loads((runs / name / "result.json").read_text())
    node = run.read_run()["hosts"][rank]
    assert (result["state"], result["failed_rank"], result["failed_node"]) == ("failed", rank, node)
    assert result["exit_code"] != 0 and result["log_tail"]
    assert f"rank {rank} on {node}" in out
    status = holmes("status", name, HOLMES_RUNS=str(runs))
    assert f"rank {rank} on {node}" in status.stdout, status.stdout
    job = run.read_run()["slurm"]["job_id"]
    wait_for(lambda: not subprocess.run(["squeue", "-h", "-j", str(job)], capture_output=True, text=True).stdout)


@pytest.mark.slurm
def test_a_run_goes_on_under_another_plan_on_other_nodes(testbed, runs, tmp_path):
    """Trained on 2 InfiniBand and 2 RoCE nodes, then on 4 InfiniBand nodes: the losses of one process all the way."""
    train = ["train.lr=2e-3", "train.lr_decay_steps=12", "train.checkpoint_interval=3"]
    done = holmes("run", "name=moved", "plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "train.steps=6", *train,
                  HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    four = str(tmp_path / "four-ib.yaml")
    micro = Plan.read(runs / "moved" / "plan.yaml").batch.micro_size
    assert holmes("plan", "plan.nodes={ib-a: 4}", "plan.pp=2", f"batch.micro_size={micro}", "-o", four).returncode == 0
    done = holmes("resume", "moved", "train.steps=12", "--plan", four, HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    done = holmes("run", "launcher=local", "name=unmoved", "train.steps=12", f"batch.micro_size={micro}", *train,
                  HOLMES_RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    moved, alone = RunDirectory(runs / "moved"), RunDirectory(runs / "unmoved").metrics()
    assert sorted(moved.read_run()["hosts"]) == ["ib1", "ib2", "ib3", "ib4"]
    assert [line["attempt"] for line in moved.metrics()] == [1] * 6 + [2] * 6
    assert [line["loss"] for line in moved.metrics()] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    row = load_runs(moved.path).iloc[0]  # its figures are those of the four InfiniBand nodes
    assert (row["placement"], row["earlier_steps"], row["steps"]) == ("ib-a:4", 6, 12) and row["queue_s"] >= 0
    again = holmes("resume", "moved", HOLMES_RUNS=str(runs))
    assert again.returncode == 2 and "it has made all of its 12 steps; for more: holmes resume" in again.stderr


def wait_for(condition, process=None) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def process_of(run: RunDirectory, rank: int) -> int:
    """The process id of a rank: the one whose command names the run, and whose environment says which rank."""
    job = run.read_run()["slurm"]["job_id"]
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.partition("=")[::2] for e in (proc / "environ").read_text().split("\0"))
            words = (proc / "cmdline").read_text().split("\0")
        except OSError:
            continue
        leader = environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID")
        is_rank = "python" in Path(words[0]).name and "submitit.core._submit" in words[:6] and any(
            word.startswith(str(run.path)) for word in words)  # other testbeds have jobs of the same number
        if is_rank and leader == str(job) and environment.get("SLURM_PROCID") == str(rank):
            return int(proc.name)
    raise AssertionError(f"no process of rank {rank} of job {job}")


@pytest.mark.slurm
@pytest.mark.parametrize(("overrides", "words"), [
    (["plan.nodes={ib-a: 2, roce-a: 9}"], ["roce-a", "9", "4"]),
    (["plan.nodes={ib-a: 2, mars: 2}"], ["mars"]),
    (["plan.nodes={ib-a: 2}", "slurm.fabrics={mars: {mem: 1G}}"], ["mars"]),
    (["plan.nodes={ib-a: 2}", "slurm.mem=9999G"], ["mem=9999G"]),
    (["plan.nodes={ib-a: 2, roce-a: 2}", "plan.tp=3"], ["TP 3"]),
])
def test_what_cannot_run_is_never_submitted(testbed, runs, overrides, words):
    done = holmes("run", "name=never", *overrides, HOLMES_RUNS=str(runs))
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in line, done.stderr
    assert not (runs / "never").exists()
    queue = subprocess.run(["squeue", "-h", "-t", "all", "-n", "holmes-never"], capture_output=True, text=True)
    assert not queue.stdout


@pytest.mark.slurm
def test_partition_and_constraint_and_site_of_a_plan_are_checked(testbed, runs, tmp_path):
    path = tmp_path / "plan.yaml"
    made = holmes("plan", "plan.nodes={ib-a: 2}", "-o", str(path))
    assert made.returncode == 0, made.stderr
    good = path.read_text()
    for old, new, words in (("partition: ib\n", "partition: gone\n", ["partition", "gone"]),
                            ("nic_ib&fabric_ib-a", "nic_ib&fabric_gone", ["fabric_gone"]),
                            ("ib-a", "ib-x", ["ib-x"])):
        assert old in good
        path.write_text(good.replace(old, new))
        done = holmes("submit", str(path), HOLMES_RUNS=str(runs))
        assert done.returncode == 2, done.stdout + done.stderr
        for word in words:
            assert word in done.stderr.strip().splitlines()[-1], done.stderr


@pytest.mark.slurm
def test_a_full_disk_while_logging_is_one_line_and_code_1(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        follower = subprocess.Popen(
            [HOLMES, "run", "launcher=local", f"run_dir={disk}/run", "plan.dp=2", "train.steps=5000"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        run = RunDirectory(disk / "run")
        wait_for(lambda: run.exists() and len(run.metrics()) >= 2, follower)
        ballast = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):  # somebody else fills the disk, to the last byte
            while os.write(ballast, bytes(4096)):
                pass
        os.close(ballast)
        out, _ = follower.communicate(timeout=LIMIT_S)
        assert follower.returncode == 1, out
        said = [line for line in out.splitlines() if "No space left" in line]
        assert said and "Traceback" not in out, out
        status = holmes("status", f"{disk}/run")
        assert status.returncode == 0 and "failed" in status.stdout, status.stdout + status.stderr
        assert all(line.endswith("}") for line in run.metrics_path.read_text().splitlines())  # nothing half-written
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
