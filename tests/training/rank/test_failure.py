"""Failed runs: a dead or hanging rank, bad input, a full disk. Each ends all ranks with one line and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spawn
import thorough
import torch
import torch.distributed as dist

from holmes_hpc.config.elastic import ElasticConfig
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.network.interfaces import NodeTransports, links_of_rank
from holmes_hpc.training.rank import failure
from holmes_hpc.training.rank.failure import RankExit
from holmes_hpc.training.rank.launch import Launch

SLOW = {"steps": 500, "pace_layer_ms": 5}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (dist.DistNetworkError("Failed to recv"), "Connection lost: rank 0 on its node failed: its store is down"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_joins_after_rank_0_has_failed_logs_one_line(
    error: RuntimeError, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> bool:
        raise dist.DistNetworkError("Failed to recv")

    run = RunDirectory.create(tmp_path / "run")
    late = RankExit(run, Launch(3, 4, 0, "srun", "roce2", "slurm-1-0-0", False))
    late.attempt, late._store = run.start_attempt(), SimpleNamespace(check=fail)
    assert late.record_failure(error) == 1
    assert run.read_exits()[0]["error"].startswith(line)
    output = "".join(capfd.readouterr())
    assert line in output and (output.count("\n") == 1) is isinstance(error, dist.DistError), output


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Timed out waiting 120000ms for recv operation to complete"),
            "another rank did not answer within train.net_timeout_s .* a network drops packets: check",
        ),
        (dist.DistBackendError("NCCL error: ncclRemoteError"), "NCCL lost its connection .*ncclRemoteError.* check"),
    ],
)
def test_a_silent_network_is_named_with_its_nics_and_nodes(error: RuntimeError, message: str, tmp_path: Path) -> None:
    nodes = [NodeTransports(n, "ib-a", {}, {"NCCL_IB_HCA": "=mlx5_0:1"}, False) for n in ("ib1", "ib2", "ib3", "roce1")]
    groups = [
        {"ranks": [0, 1, 2, 3], "transport": "tcp over ethernet", "interface": "eth0"},
        {"ranks": [0, 1, 2], "transport": "rdma over ib (ib-a)", "interface": "IB"},
    ]
    run = RunDirectory.create(tmp_path / "run")
    rank_exit = RankExit(run, Launch(0, 4, 0, "srun", "ib1", "slurm-1-0-0", False))
    rank_exit.attempt, rank_exit.describe_links = run.start_attempt(), partial(links_of_rank, groups, nodes, 0)
    assert rank_exit.record_failure(error) == 1
    links = r"eth0 \(tcp over ethernet\) to ib\[2-3\],roce1 and mlx5_0:1 \(rdma over ib \(ib-a\)\) to ib\[2-3\]"
    assert re.search(f"rank 0 on ib1: {message} {links}", run.read_exits()[0]["error"]), run.read_exits()
    assert links_of_rank(groups, nodes[:1] * 4, 0) == ""  # all on one node


@pytest.mark.integration
@pytest.mark.parametrize("victim", thorough.all_but([0, 3], 3))
def test_a_killed_rank_ends_all_ranks(victim: int, tmp_path: Path) -> None:
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
def test_a_hang_dumps_the_stacks_of_all_ranks(tmp_path: Path) -> None:
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
        assert "holmes_hpc/training/loop.py" in stacks  # in a step, or (rank 0) after one


def block_writers(path: Path) -> int:
    """Replace `path` by a full pipe, so that its next writer hangs. Return the pipe's descriptor."""
    pipe = path.with_suffix(".pipe")
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(handle, bytes(4096))
    pipe.replace(path)
    return handle


@pytest.mark.integration
@pytest.mark.parametrize(
    "layout", thorough.all_but([{"pp": 2, "dp": 2}, {"pp": 3, "schedule": "ahead"}], {"pp": 3, "schedule": "ahead"})
)
def test_a_collective_that_times_out_dumps_the_stacks_of_all_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    """As in the defaults, a collective's timeout is a fifth of the watchdog's."""
    run = spawn.begin(
        tmp_path / "run", spawn.plan(**layout), {"train": {**SLOW, "trace": True, "watchdog_s": 40, "net_timeout_s": 8}}
    )
    run.wait_for_step(2)
    handle = block_writers(run.run.trace_path(1))
    ended = run.finish()
    os.close(handle)
    assert set(ended.codes) == {1}, ended.output
    errors = [e["error"] for e in ended.run.read_exits()]
    assert any("did not answer within train.net_timeout_s" in e for e in errors), errors
    for rank in range(len(ended.codes)):
        assert "stacks of all threads" in ended.log(rank), ended.log(rank)
    assert "append_line" in ended.log(1) and "append_line" not in ended.log(0)  # where rank 1 hangs


@pytest.mark.integration
@pytest.mark.parametrize("layout", thorough.all_but([{"dp": 2}, {"pp": 2}], {"dp": 2}))
def test_only_the_slowed_rank_is_reported_as_slow(layout: dict[str, Any], tmp_path: Path) -> None:
    """The rank gets a fifth of its CPU time, as if other processes ran there. Its stage has a replica, or none."""
    plan = spawn.plan(**layout, batch=replace(spawn.BATCH, global_size=2))
    run = spawn.begin(tmp_path / "run", plan, {"train": {"steps": 45}})
    run.wait_for_step(1)
    warning = f"warning: node {socket.gethostname()}: rank 1 computes"
    end = time.monotonic() + spawn.LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # the rank has ended; its output is written a little later
        while time.monotonic() < end and warning not in run.outputs[0].read_text() and len(run.run.metrics()) < 42:
            run.kill(1, signal.SIGSTOP)
            time.sleep(0.04)
            run.kill(1, signal.SIGCONT)
            time.sleep(0.01)
    ended = run.finish()
    assert set(ended.codes) == {0}, ended.output
    assert warning in ended.output[0], ended.output[0]
    assert "computes" not in ended.output[0].partition(warning)[0]  # no other rank before it


def assert_exit_2(ended: spawn.FinishedRun, pattern: str) -> None:
    assert set(ended.codes) == {2}, (ended.codes, ended.output)
    assert re.search(pattern, ended.output[0]), ended.output[0]
    assert "Traceback" not in "".join(ended.output)
    assert len([line for line in ended.output[0].splitlines() if "failed:" in line]) == 1


@pytest.mark.integration
def test_a_plan_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), ranks=2)
    assert_exit_2(ended, r"2 ranks started, the plan has 4; start 4 ranks")


@pytest.mark.integration
def test_a_plan_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("stages: [1")
    assert_exit_2(spawn.train(tmp_path / "run", path, ranks=2), r"plan.yaml: not YAML")


@pytest.mark.integration
def test_missing_data_is_refused(tmp_path: Path) -> None:
    data = {"kind": "indexed", "prefix": "/nowhere/data"}
    assert_exit_2(spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"data": data}), r"/nowhere/data")


@pytest.mark.integration
def test_fp16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    assert_exit_2(spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"dtype": "fp16"}}), "fp16 needs a GPU")


@pytest.mark.integration
def test_a_non_finite_gradient_norm_ends_the_run(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"lr": 1e30, "warmup_steps": 0}})
    assert set(ended.codes) == {1}, ended.output
    assert "the gradient norm is" in ended.output[0] and "Traceback" not in "".join(ended.output)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of 16 MiB."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield small
    subprocess.run(["umount", "-l", str(small)], check=True)


def fill(path: Path) -> Path:
    """Fill the disk with the file `path`."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path


@pytest.mark.integration
def test_a_full_disk_at_the_first_checkpoint_ends_with_exit_1_and_complete_lines(small: Path) -> None:
    run = spawn.begin(small / "run", spawn.plan(dp=2), {"train": {**SLOW, "checkpoint_interval": 20}})
    run.wait_for_step(2)
    fill(small / "ballast")
    ended = run.finish()
    assert set(ended.codes) == {1}, ended.output
    assert "No space left on device" in "".join(ended.output)
    assert "Traceback" not in "".join(ended.output)
    lines = (small / "run/metrics.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line) for line in lines)


@pytest.mark.integration
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_disk_that_is_full_for_some_seconds_costs_no_step(asynchronous: bool, small: Path, tmp_path: Path) -> None:
    train = {"steps": 40, "pace_layer_ms": 2, "checkpoint_interval": 10, "checkpoint_async": asynchronous}
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), {"train": {**train, "checkpoint_dir": str(small / "saved")}})
    run.run.metrics_path.symlink_to(small / "metrics.jsonl")  # the log stays on a disk with space
    run.wait_for_step(14)
    ballast, last_step = fill(small / "ballast"), run.run.metrics()[-1]["step"]
    run.wait_for_line("training goes on")
    run.wait_for_line("No space left on device; lines wait in memory")
    assert last_step <= run.run.metrics()[-1]["step"] < 40
    ballast.unlink()
    ended = run.finish()
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("step") == list(range(1, 41)) and run.run.attempt == 1
    log = ended.log(0)
    assert "No space left on device; free some space" in log and "lines written after" in log
    assert list((small / "saved").glob("*/step-00000040/holmes.json"))


@pytest.mark.integration
def test_with_a_copy_in_memory_even_the_first_save_may_fail(small: Path, tmp_path: Path) -> None:
    train = {"steps": 40, "pace_layer_ms": 3, "checkpoint_interval": 10, "checkpoint_dir": str(small / "saved")}
    slots = {rank: [tmp_path / f"{rank}-{letter}" for letter in "abcd"] for rank in range(2)}
    for path in (path for paths in slots.values() for path in paths):
        path.touch()
    environment = {rank: {"HOLMES_COPY_SLOTS": ":".join(map(str, paths))} for rank, paths in slots.items()}
    config = {"train": train, "elastic": ElasticConfig(copy_every=2)}
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), config, environment=environment)
    run.wait_for_step(6)
    ballast = fill(small / "ballast")
    run.wait_for_step(14)
    ballast.unlink()
    ended = run.finish()
    assert set(ended.codes) == {0} and ended.column("step") == list(range(1, 41)), ended.output
    assert "No space left on device; free some space, then run it again; training goes on" in ended.log(0)
    assert "step 20: checkpoint of" in ended.log(0) and not list((small / "saved").glob("*10*"))


def test_a_failure_has_reached_the_store_when_the_rank_may_end(tmp_path: Path) -> None:
    """A client of TCPStore does not wait for an answer to `set`, and a thread of the rank forwards it."""

    class Store:
        def __init__(self) -> None:
            self.sent, self.values = dict[str, str](), dict[str, str]()

        def set(self, key: str, value: str) -> None:
            self.sent[key] = value

        def check(self, keys: list[str]) -> bool:
            self.values.update(self.sent)
            return all(key in self.values for key in keys)

    rank_exit = RankExit(RunDirectory(tmp_path), Launch(1, 2, 1, "local", "n1", "key", True))
    rank_exit._store = store = Store()
    rank_exit._publish(OSError("no space"), hung=False)
    assert [json.loads(text)["error"] for text in store.values.values()] == ["OSError: no space"]


@pytest.mark.integration
def test_a_full_disk_while_tracing_is_reported_in_one_line(tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), {"train": {**SLOW, "trace": True}})
    run.wait_for_step(2)
    trace = run.run.trace_path(1)
    trace.unlink()
    trace.symlink_to("/dev/full")
    ended = run.finish()
    assert set(ended.codes) == {1} and "No space left on device" in ended.log(1), ended.output
    assert "Traceback" not in "".join(ended.output)


@pytest.mark.integration
def test_a_rank_without_rank_0_times_out(tmp_path: Path) -> None:
    run = spawn.begin(tmp_path / "run", spawn.plan(dp=2), {"train": {"net_timeout_s": 2}}, absent=(0,))
    ended = run.finish()
    assert ended.codes == [1] and "rank 0 did not publish" in ended.log(1), ended.output


@pytest.mark.integration
def test_ranks_meet_at_the_rendezvous_of_the_launcher(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(dp=2), rendezvous="env")
    assert ended.codes == [0, 0], ended.output


@pytest.mark.integration
def test_bf16_trains(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"dtype": "bf16", "steps": 4}})
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss")[-1] < ended.column("loss")[0] - 0.1


@pytest.mark.integration
def test_validation_losses_match_one_process_and_share_the_line_of_their_step(tmp_path: Path) -> None:
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, dp=2), {"train": {"eval_interval": 2, "steps": 4}})
    one = spawn.train(tmp_path / "one", spawn.plan(), {"train": {"eval_interval": 2, "steps": 4}})
    assert set(ended.codes) == {0}, ended.output
    values = [line.get("validation_loss") for line in ended.run.metrics()]
    assert values[0] is None and values[1] > 0
    assert values[1::2] == pytest.approx([line["validation_loss"] for line in one.run.metrics()[1::2]], rel=1e-5)
    assert ended.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert len(ended.run.metrics_path.read_text().splitlines()) == 4  # one line a step
    tokens = ended.run.config["train"]["eval_steps"] * spawn.plan().batch.tokens
    assert f"step 2: validation loss {values[1]:.4f} over {tokens:,} tokens" in ended.log(0)


@pytest.mark.integration
def test_a_run_records_hosts_versions_and_breakdowns(tmp_path: Path) -> None:
    plan = spawn.plan(pp=2, dp=2)
    ended = spawn.train(tmp_path / "run", plan)
    record = ended.run.read_run()
    assert record["plan_id"] == plan.id and record["device"] == "cpu" and record["pace_layer_ms"] is None
    assert len(record["hosts"]) == 4 and record["versions"]["torch"] and record["attempts"][0]["attempt"] == 1
    (of_ranks,) = map(json.loads, (ended.run.path / "ranks.jsonl").read_text().splitlines())
    assert [len(of_ranks[key]) for key in ("compute_s", "peak_memory_bytes")] == [4, 4] and of_ranks["step"] == 1
    for line in ended.run.metrics():
        assert [len(line["breakdown"]), len(line["peak_memory_bytes"])] == [2, 2]
        for stage in line["breakdown"]:
            assert sum(stage.values()) == pytest.approx(line["step_time_s"], rel=0.2)
            assert stage["compute_s"] > 0 and stage["grad_sync_s"] > 0
    for rank in (1, 2, 3):
        line = re.search(r"step 1: .*", ended.log(rank))
        assert line is not None
        step_s, *parts = map(float, re.findall(r"\d+\.\d{3}", line[0]))
        assert sum(parts) == pytest.approx(step_s, abs=0.01)  # by the rank's clock
    assert {e["state"] for e in ended.run.read_exits()} == {"completed"}
    assert not list(ended.run.path.glob("rendezvous-*"))


def test_plan_ids_differ_between_plans() -> None:
    plan = spawn.plan(pp=2, dp=2)
    assert plan.id != replace(plan, bucket_bytes=1).id and Plan.from_dict(plan.to_dict()).id == plan.id


@pytest.mark.integration
def test_tensorboard_gets_the_losses_of_the_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ended = spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"tensorboard": True}})
    assert set(ended.codes) == {0}, ended.output
    events = accumulator.EventAccumulator(str(ended.run.path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(ended.column("loss"), rel=1e-6)
    assert {"breakdown/0/compute_s", "step_time_s"} <= set(events.Tags()["scalars"])


@pytest.mark.integration
def test_a_logger_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    assert_exit_2(spawn.train(tmp_path / "run", spawn.plan(dp=2), {"train": {"wandb": "p"}}), "wandb is not installed")


def test_the_watchdogs_dump_has_nccls_flight_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = import_module("torch._C._distributed_c10d")
    monkeypatch.setattr(library, "_dump_nccl_trace", lambda: b"recorded", raising=False)
    run = RunDirectory.create(tmp_path / "run")
    RankExit(run, Launch(3, 4, 0, "srun", "roce2", "slurm-1-0-0", False)).dump_stacks()
    assert (run.trace / "nccl_trace_rank_3").read_bytes() == b"recorded"
    monkeypatch.delattr(library, "_dump_nccl_trace")  # on a CPU, torch has none
    RankExit(run, Launch(1, 4, 0, "srun", "ib2", "slurm-1-0-0", False)).dump_stacks()
    assert len(list(run.trace.iterdir())) == 1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_rank_that_fails_on_a_gpu_ends_without_destructors(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's would wait for ever."""
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(failure.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(SystemExit) as ended:
        failure.exit_failed(7)
    assert ended.value.code == 7 and registered == ([(failure.end_process, 7)] if on_gpu else [])
