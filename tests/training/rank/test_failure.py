"""How runs end: a dead or hanging rank, bad input, a full disk. One line, the right exit code, nobody left waiting."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spawn
import torch.distributed as dist

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.failure import RankExit
from holmes_hpc.training.rank.launch import Launch

SLOW = {"steps": 500, "pace_layer_ms": 5}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (dist.DistNetworkError("Failed to recv"), "Connection lost: rank 0 on its node failed: its store is gone"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_comes_when_rank_0_has_given_up_says_one_line(
    error: RuntimeError, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(_: list[str]) -> bool:
        raise dist.DistNetworkError("Failed to recv")

    run = RunDirectory.create(tmp_path / "run")
    late = RankExit(run, Launch(3, 4, 0, "srun", "roce2", "slurm-1-0-0", False))
    late.attempt, late._store = run.start_attempt(), SimpleNamespace(check=gone)
    assert late.failed(error) == 1
    assert run.read_exits()[0]["error"].startswith(line)
    said = "".join(capfd.readouterr())
    assert line in said and (said.count("\n") == 1) is isinstance(error, dist.DistError), said


@pytest.mark.integration
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_all(victim: int, tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": SLOW})
    run.wait_for_step(2)
    run.kill(victim)
    ended = run.finish()
    others = [rank for rank in range(4) if rank != victim]
    assert [ended.codes[r] for r in others] == [1, 1, 1] and ended.codes[victim] == -9, ended.output
    records = {e["rank"]: e for e in ended.run.read_exits()}
    assert sorted(records) == others and {e["state"] for e in records.values()} == {"failed"}
    assert all("\n" not in e["error"] and e["host"] for e in records.values())


@pytest.mark.integration
def test_a_hang_is_shown_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {**SLOW, "watchdog_s": 8}})
    run.wait_for_step(2)
    run.kill(2, signal.SIGSTOP)
    end = time.monotonic() + spawn.LIMIT_S
    while time.monotonic() < end and len(run.run.read_exits()) < 3:
        time.sleep(0.1)
    run.kill(2, signal.SIGKILL)
    ended = run.finish()
    assert [ended.codes[r] for r in (0, 1, 3)] == [1, 1, 1], ended.output
    assert any(re.search(r"step \d+ takes longer than 8 s", e["error"]) for e in ended.run.read_exits())
    for rank in (0, 1, 3):
        stacks = ended.log(rank).partition("stacks of all threads")[2]
        assert "holmes_hpc/training/loop.py" in stacks  # in a step, or (rank 0) in what follows one


def stick(path: Path) -> int:
    """Make `path` a file whose next writer never comes back: a pipe that is full."""
    pipe = path.with_suffix(".pipe")
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(handle, bytes(4096))
    pipe.replace(path)
    return handle


@pytest.mark.integration
@pytest.mark.parametrize("layout", [{"pp": 2, "dp": 2}, {"pp": 3, "schedule": "ahead"}])
def test_a_hang_that_the_others_wait_for_in_a_collective_is_shown_too(layout: dict[str, Any], tmp_path: Path) -> None:
    """As shipped: a collective's time-out is a fifth of the watchdog's."""
    run = spawn.begin(
        tmp_path / "run", spawn.plan(**layout), {"train": {**SLOW, "trace": True, "watchdog_s": 40, "net_timeout_s": 8}}
    )
    run.wait_for_step(2)
    handle = stick(run.run.trace_path(1))
    ended = run.finish()
    os.close(handle)
    assert set(ended.codes) == {1}, ended.output
    errors = [e["error"] for e in ended.run.read_exits()]
    assert any("gave no answer within train.net_timeout_s" in e for e in errors), errors
    for rank in range(len(ended.codes)):
        assert "stacks of all threads" in ended.log(rank), ended.log(rank)
    assert "append_line" in ended.log(1) and "append_line" not in ended.log(0)  # the one that is stuck, and where


@pytest.mark.integration
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}])
def test_a_rank_that_is_slowed_down_is_named_and_no_other(layout: dict[str, Any], tmp_path: Path) -> None:
    """It gets a fifth of its time, as beside other processes; alone in its stage, and beside another rank."""
    plan = spawn.plan(**layout, batch=replace(spawn.BATCH, global_size=2))
    run = spawn.begin(tmp_path / "run", plan, {"train": {"steps": 45}})
    run.wait_for_step(1)
    warning = f"warning: node {socket.gethostname()}: rank 1 computes"
    end = time.monotonic() + spawn.LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # its steps are over: what it says is written a little later
        while time.monotonic() < end and warning not in run.outputs[0].read_text() and len(run.run.metrics()) < 42:
            run.kill(1, signal.SIGSTOP)
            time.sleep(0.04)
            run.kill(1, signal.SIGCONT)
            time.sleep(0.01)
    ended = run.finish()
    assert set(ended.codes) == {0}, ended.output
    assert warning in ended.output[0], ended.output[0]
    assert "computes" not in ended.output[0].partition(warning)[0]  # nobody else before it


def one_line_and_2(ended: spawn.FinishedRun, pattern: str) -> None:
    assert set(ended.codes) == {2}, (ended.codes, ended.output)
    assert re.search(pattern, ended.output[0]), ended.output[0]
    assert "Traceback" not in "".join(ended.output)
    assert len([line for line in ended.output[0].splitlines() if "failed:" in line]) == 1


@pytest.mark.integration
def test_a_plan_for_another_number_of_ranks(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), ranks=2)
    one_line_and_2(ended, r"2 ranks were started, the plan is for 4; start 4 ranks")


@pytest.mark.integration
def test_a_plan_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("stages: [1")
    one_line_and_2(spawn.train(tmp_path / "run", path, ranks=2), r"plan.yaml: not YAML")


@pytest.mark.integration
def test_data_that_is_not_there(tmp_path: Path) -> None:
    data = {"kind": "indexed", "prefix": "/nowhere/data"}
    one_line_and_2(spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"data": data}), r"/nowhere/data")


@pytest.mark.integration
def test_fp16_on_a_cpu(tmp_path: Path) -> None:
    one_line_and_2(spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"dtype": "fp16"}}), "fp16 needs a GPU")


@pytest.mark.integration
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"lr": 1e30, "warmup_steps": 0}})
    assert set(ended.codes) == {1}, ended.output
    assert "the gradient norm is" in ended.output[0] and "Traceback" not in "".join(ended.output)


@pytest.mark.integration
def test_a_full_disk_ends_with_1_and_whole_lines(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        run = spawn.begin(small / "run", spawn.plan(dp=2), {"train": {**SLOW, "checkpoint_interval": 3}})
        ended = run.finish()
        assert set(ended.codes) == {1}, ended.output
        assert "No space left on device" in "".join(ended.output)
        assert "Traceback" not in "".join(ended.output)
        lines = (small / "run/metrics.jsonl").read_text().splitlines()
        assert lines and all(json.loads(line) for line in lines)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.integration
def test_a_full_disk_while_tracing_is_one_line(tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), {"train": {**SLOW, "trace": True}})
    run.wait_for_step(2)
    trace = run.run.trace_path(1)
    trace.unlink()
    trace.symlink_to("/dev/full")
    ended = run.finish()
    assert set(ended.codes) == {1} and "No space left on device" in ended.log(1), ended.output
    assert "Traceback" not in "".join(ended.output)


@pytest.mark.integration
def test_a_rank_whose_rank_0_never_comes(tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), {"train": {"net_timeout_s": 2}}, absent=(0,))
    ended = run.finish()
    assert ended.codes == [1] and "rank 0 did not publish" in ended.log(1), ended.output


@pytest.mark.integration
def test_launchers_rendezvous(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(dp=2), rendezvous="env")
    assert ended.codes == [0, 0], ended.output


@pytest.mark.integration
def test_bf16_trains(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"dtype": "bf16", "steps": 8}})
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss")[-1] < ended.column("loss")[0] - 0.1


@pytest.mark.integration
def test_validation(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"eval_interval": 2, "steps": 4}})
    one = spawn.train(tmp_path / "one", spawn.plan(), {"train": {"eval_interval": 2, "steps": 4}})
    assert set(ended.codes) == {0}, ended.output
    values = [line.get("validation_loss") for line in ended.run.metrics()]
    assert values[0] is None and values[1] > 0
    assert values[1::2] == pytest.approx([line["validation_loss"] for line in one.run.metrics()[1::2]], rel=1e-5)
    assert ended.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert len(ended.run.metrics_path.read_text().splitlines()) == 4  # one line a step


@pytest.mark.integration
def test_the_record_of_a_run(tmp_path: Path) -> None:
    plan = spawn.plan(pp=2, dp=2)
    ended = spawn.train(tmp_path / "run", plan)
    record = ended.run.read_run()
    assert record["plan_id"] == plan.id and record["device"] == "cpu" and record["pace_layer_ms"] is None
    assert len(record["hosts"]) == 4 and record["versions"]["torch"] and record["attempts"][0]["attempt"] == 1
    for line in ended.run.metrics():
        assert [len(line["breakdown"]), len(line["peak_memory_bytes"])] == [2, 4]
        for stage in line["breakdown"]:
            assert sum(stage.values()) == pytest.approx(line["step_time_s"], rel=0.2)
            assert stage["compute_s"] > 0 and stage["grad_sync_s"] > 0
    for rank in (1, 2, 3):
        found = re.search(r"step 1: .*", ended.log(rank))
        assert found is not None
        took, *parts = map(float, re.findall(r"\d+\.\d{3}", found[0]))
        assert sum(parts) == pytest.approx(took, abs=0.01)  # of its own clock
    assert {e["state"] for e in ended.run.read_exits()} == {"completed"}
    assert not list(ended.run.path.glob("rendezvous-*"))


def test_plans_are_told_apart() -> None:
    plan = spawn.plan(pp=2, dp=2)
    assert plan.id != replace(plan, bucket_bytes=1).id and Plan.from_dict(plan.to_dict()).id == plan.id


@pytest.mark.integration
def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ended = spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"tensorboard": True}})
    assert set(ended.codes) == {0}, ended.output
    events = accumulator.EventAccumulator(str(ended.run.path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(ended.column("loss"), rel=1e-6)
    assert {"breakdown/0/compute_s", "step_time_s"} <= set(events.Tags()["scalars"])


@pytest.mark.integration
def test_a_logger_that_is_not_installed(tmp_path: Path) -> None:
    one_line_and_2(spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"wandb": "p"}}), "wandb is not installed")
