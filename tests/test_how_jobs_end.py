"""Jobs on the testbed that are disturbed, resumed or never submitted: what is said, and what is left."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import thorough
from whole_jobs import HOLMES, LIMIT_S, holmes, process_of, wait_for

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs

SMALL = ["model.layers=4", "model.hidden=64", "model.ffn=160"]  # what ends a job has nothing to do with its size


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slurm
@pytest.mark.parametrize("rank", thorough.all_but([0, 3], 3))
def test_a_killed_rank_ends_the_job_and_is_named(testbed, runs, rank):
    name = f"killed-{rank}"
    follower = subprocess.Popen(
        [
            HOLMES,
            "run",
            f"name={name}",
            *SMALL,
            "plan.nodes={ib-a: 2, roce-a: 2}",
            "plan.pp=2",
            "train.steps=2000",
            "train.pace_layer_ms=5",
            "train.watchdog_s=9000",
            "train.net_timeout_s=3000",
        ],  # no time-out helps
        env={**os.environ, "HOLMES_RUNS": str(runs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
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
@pytest.mark.thorough  # other layouts continue in tests/training/checkpoint
def test_a_run_goes_on_under_another_plan_on_other_nodes(testbed, runs, tmp_path):
    """Trained on 2 InfiniBand and 2 RoCE nodes, then on 4 InfiniBand nodes: the losses of one process all the way."""
    train = [*SMALL, "train.lr=2e-3", "train.lr_decay_steps=12", "train.checkpoint_interval=3"]
    done = holmes(
        "run",
        "name=moved",
        "plan.nodes={ib-a: 2, roce-a: 2}",
        "plan.pp=2",
        "train.steps=6",
        *train,
        HOLMES_RUNS=str(runs),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    four = str(tmp_path / "four-ib.yaml")
    micro = Plan.read(runs / "moved" / "plan.yaml").batch.micro_size
    assert (
        holmes("plan", *SMALL, "plan.nodes={ib-a: 4}", "plan.pp=2", f"batch.micro_size={micro}", "-o", four).returncode
        == 0
    )
    done = holmes("resume", "moved", "train.steps=12", "--plan", four, HOLMES_RUNS=str(runs))
    assert done.returncode == 0 and "expected start: " in done.stderr, done.stdout[-3000:] + done.stderr[-3000:]
    done = holmes(
        "run",
        "launcher=local",
        "name=unmoved",
        "train.steps=12",
        f"batch.micro_size={micro}",
        *train,
        HOLMES_RUNS=str(runs),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    moved, alone = RunDirectory(runs / "moved"), RunDirectory(runs / "unmoved").metrics()
    assert sorted(moved.read_run()["hosts"]) == ["ib1", "ib2", "ib3", "ib4"]
    assert [line["attempt"] for line in moved.metrics()] == [1] * 6 + [2] * 6
    assert [line["loss"] for line in moved.metrics()] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    row = load_runs(moved.path).iloc[0]  # its figures are those of the four InfiniBand nodes
    assert (row["placement"], row["earlier_steps"], row["steps"]) == ("ib-a:4", 6, 12) and row["queue_s"] >= 0
    again = holmes("resume", "moved", HOLMES_RUNS=str(runs))
    assert again.returncode == 2 and "the run has made all of its 12 steps; to train further: holmes" in again.stderr


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.nodes={ib-a: 2, roce-a: 9}"], ["roce-a", "9", "4"]),
        (["plan.nodes={ib-a: 2, mars: 2}"], ["mars"]),
        (["plan.nodes={ib-a: 2}", "slurm.pools={mars: {mem: 1G}}"], ["mars"]),
        (["plan.nodes={ib-a: 2}", "slurm.mem=9999G"], ["mem=9999G"]),
        (["plan.nodes={ib-a: 2, roce-a: 2}", "plan.tp=3"], ["TP 3"]),
    ],
)
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
    for old, new, words in (
        ("partition: ib\n", "partition: gone\n", ["partition", "gone"]),
        ("nic_ib&fabric_ib-a", "nic_ib&fabric_gone", ["fabric_gone"]),
        ("ib-a", "ib-x", ["ib-x"]),
    ):
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
            [HOLMES, "run", "launcher=local", f"run_dir={disk}/run", *SMALL, "plan.dp=2", "train.steps=5000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
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
