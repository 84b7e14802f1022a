"""The run directory: what is written comes back, nothing is half-written, the right writer has the last word."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import RecordError, RunFailed
from holmes_hpc.records import files
from holmes_hpc.records.find import find_run, name_of, run_directories
from holmes_hpc.records.logs import follow_logs, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import VERSION, parse_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(
        tmp_path / "a", "version: 1\n", {"train": {"steps": 3}}, ["train.steps=3"], plan_id="abc", slurm={"job_id": 7}
    )


def test_a_new_run_reads_back(run: RunDirectory) -> None:
    data = run.read_run()
    assert (data["version"], data["name"], data["plan_id"]) == (VERSION, "a", "abc")
    assert data["overrides"] == ["train.steps=3"]
    assert run.config == {"train": {"steps": 3}}
    assert run.plan_path.read_text() == "version: 1\n"
    assert run.log_path(3) == run.path / "logs" / "rank-3.txt" and run.logs.is_dir()
    assert run.attempt == 0 and run.metrics() == [] and run.read_result() is None


def test_a_directory_with_a_run_is_not_taken_again(run: RunDirectory) -> None:
    with pytest.raises(RecordError, match="already holds a run"):
        RunDirectory.create(run.path)


def test_run_yaml_has_no_aliases_and_no_python_tags(tmp_path: Path) -> None:
    shared = [1, 2]
    run = RunDirectory.create(tmp_path / "b", None, {"x": shared, "y": shared, "p": tmp_path, "t": (1, 2)})
    assert "&" not in run.run_path.read_text() and "!!" not in run.run_path.read_text()
    assert run.config == {"x": [1, 2], "y": [1, 2], "p": str(tmp_path), "t": [1, 2]}


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_any_configuration_survives(tmp_path_factory: pytest.TempPathFactory, config: dict[str, object]) -> None:
    run = RunDirectory.create(tmp_path_factory.mktemp("c") / "run", None, config)
    assert run.config == config


def _bump(path: str, key: str) -> None:
    for i in range(10):
        RunDirectory(path).update_run(**{f"{key}{i}": i})


@pytest.mark.integration
def test_writers_do_not_lose_each_others_updates(run: RunDirectory) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_bump, args=(str(run.path), k)) for k in "xyz"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    data = run.read_run()
    assert all(data[f"{k}{i}"] == i for k in "xyz" for i in range(10))
    assert not [p.name for p in run.path.iterdir() if p.name.startswith(".run.yaml")]


def test_metrics_later_attempt_wins_and_order_is_by_step(run: RunDirectory) -> None:
    for attempt, step, loss in ((1, 0, 5.0), (1, 1, 4.0), (1, 2, 3.5), (2, 1, 3.9), (2, 2, 3.4)):
        run.append_metrics({"step": step, "loss": loss, "attempt": attempt})
    assert [(m["step"], m["loss"]) for m in run.metrics()] == [(0, 5.0), (1, 3.9), (2, 3.4)]


def test_a_second_line_of_a_step_adds_to_the_first(run: RunDirectory) -> None:
    run.append_metrics({"step": 3, "loss": 4.0, "attempt": 1})
    run.append_metrics({"step": 3, "validation_loss": 4.5, "attempt": 1})
    assert run.metrics() == [{"step": 3, "loss": 4.0, "attempt": 1, "validation_loss": 4.5}]


def test_an_earlier_attempt_never_wins_by_coming_later(run: RunDirectory) -> None:
    run.append_metrics({"step": 1, "loss": 1.0, "attempt": 2})
    run.append_metrics({"step": 1, "loss": 2.0, "attempt": 1})
    assert run.metrics()[0]["loss"] == 1.0


def test_a_half_written_line_spoils_only_itself(run: RunDirectory) -> None:
    run.append_metrics({"step": 0, "loss": 1.0})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 1, "lo')
    assert [m["step"] for m in run.metrics()] == [0]
    run.append_metrics({"step": 1, "loss": 0.5})
    assert [m["step"] for m in run.metrics()] == [0, 1]


def test_metrics_are_strict_json(run: RunDirectory) -> None:
    run.append_metrics({"step": 0, "loss": float("nan"), "grad_norm": float("inf"), "nic_bytes": {"ib-a": {"tx": 1}}})

    def no_constants(name: str) -> None:
        raise AssertionError(name)

    (line,) = run.metrics_path.read_text().splitlines()
    assert json.loads(line, parse_constant=no_constants)["loss"] is None


def test_losses_keep_every_bit_and_times_seven_digits(run: RunDirectory) -> None:
    third = 1 / 3
    run.append_metrics(
        {
            "step": 0,
            "time": 1.7e9 + third,
            "step_time_s": third,
            "loss": third,
            "grad_norm": third * 2,
            "breakdown": [{"compute_s": third}],
            "model_tflops_per_gpu": third * 1e-9,
        }
    )
    (line,) = run.metrics()
    assert (line["loss"], line["grad_norm"]) == (third, third * 2)
    assert (line["step_time_s"], line["time"]) == (0.3333333, 1700000000.333)
    assert line["breakdown"] == [{"compute_s": 0.3333333}] and line["model_tflops_per_gpu"] == 3.333333e-10


def test_a_step_without_number_is_refused(run: RunDirectory) -> None:
    with pytest.raises(RecordError, match="step"):
        run.append_metrics({"loss": 1.0})


def test_full_disk_leaves_no_half_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append_metrics({"step": 0})
    before = run.metrics_path.read_bytes()
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    run.append_metrics({"step": 1, "loss": 1.0})
    monkeypatch.undo()
    assert run.metrics_path.read_bytes() == before and run.metrics_file.waiting
    run.append_metrics({"step": 2})
    assert [line["step"] for line in run.metrics()] == [0, 1, 2] and not run.metrics_file.waiting


def test_full_disk_keeps_the_old_run_yaml(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, listing = run.run_path.read_bytes(), sorted(os.listdir(run.path))
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunFailed, match="free some space"):
        run.update_run(device="cpu")
    assert run.run_path.read_bytes() == before
    assert sorted(set(os.listdir(run.path)) - {".lock"}) == listing


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system of one page")
def test_a_really_full_disk(tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        run = RunDirectory.create(disk / "run")
        ballast, warnings, step = disk / "ballast", list[str](), 0
        ballast.write_bytes(bytes(20_000))
        while not run.metrics_file.waiting:
            run.append_metrics({"step": step, "text": "x" * 200}, warn=warnings.append)
            step += 1
        run.append_metrics({"step": step}, warn=warnings.append)
        assert run.metrics_path.read_bytes().endswith(b"}\n")
        written = len(run.metrics())
        assert [m["step"] for m in run.metrics()] == list(range(written)) and written < step
        ballast.unlink()
        run.metrics_file.finish()
        assert [m["step"] for m in run.metrics()] == list(range(step + 1))
        assert len(warnings) == 1 and "No space left on device; lines wait in memory" in warnings[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_result_precedence(run: RunDirectory) -> None:
    assert run.write_result({"state": "timeout", "error": "a"}, writer="follower")
    assert run.write_result({"state": "failed", "failed_rank": 2, "exit_code": 9}, writer="batch")
    assert not run.write_result({"state": "cancelled"}, writer="follower")
    assert not run.write_result({"state": "completed"}, writer="batch")
    result = run.read_result()
    assert result is not None and (result["state"], result["failed_rank"], result["exit_code"]) == ("failed", 2, 9)
    assert result["log_tail"] == [] and result["writer"] == "batch"


def test_of_equal_writers_the_one_that_saw_more_steps_counts(run: RunDirectory) -> None:
    for step, counts in ((3, True), (4, True), (4, False), (3, False)):
        assert run.write_result({"state": "cancelled", "final": {"step": step}}, writer="follower") is counts


def test_a_new_attempt_sets_result_and_exits_aside(run: RunDirectory) -> None:
    assert run.start_attempt({"job_id": 7}) == 1
    run.write_exit(1, "failed", "RuntimeError: x", "n1")
    run.write_result({"state": "failed"})
    assert run.read_result() is not None and len(run.read_exits()) == 1
    assert run.start_attempt({"job_id": 9}) == 2
    assert run.read_result() is None and run.read_exits() == []
    run.write_exit(1, "completed", host="n1")
    assert run.write_result({"state": "completed"}, writer="follower")
    result = run.read_result()
    assert result is not None and result["attempt"] == 2 and result["exit_code"] == 0
    assert [(e["rank"], e["state"]) for e in run.read_exits()] == [(1, "completed")]


def test_exits_come_in_order_of_time(run: RunDirectory) -> None:
    run.write_exit(0, "failed", "connection lost", time=20.0)
    run.write_exit(3, "failed", "out of memory", "n4", time=10.0)
    assert [(e["rank"], e["host"]) for e in run.read_exits()] == [(3, "n4"), (0, os.uname().nodename)]
    assert [e["rank"] for e in run.read_exits("n4")] == [3]


def test_exits_of_a_node_share_a_file_and_the_last_of_a_rank_counts(run: RunDirectory) -> None:
    run.write_exit(1, "failed", "first", "n1", time=1.0)
    run.write_exit(2, "preempted", None, "n1", time=2.0)
    run.write_exit(1, "failed", "second", "n1", time=3.0)
    (run.exits / "n2.jsonl").write_text('{"rank": 6, "state": ["x"], "attempt": 1}\n{"rank": 8, "attempt": 1}\n')
    with (run.exits / "n1.jsonl").open("a") as file:
        file.write('{"rank": 5, "state": "fail')  # written at this moment
    (run.exits / "rank-7.json").write_text('{"rank": 7, "state": "completed", "attempt": 1, "time": 2.5}\n')
    assert [(e["rank"], e.get("error")) for e in run.read_exits()] == [(2, None), (7, None), (1, "second")]
    assert sorted(path.name for path in run.exits.iterdir()) == ["n1.jsonl", "n2.jsonl", "rank-7.json"]


def test_broken_json_says_nothing(run: RunDirectory) -> None:
    run.result_path.write_text('{"state": "comp')
    (run.exits / "n0.jsonl").write_text("")
    assert run.read_result() is None and run.read_exits() == []
    assert run.write_result({"state": "completed"}, writer="follower")


def test_newer_versions_are_refused_and_older_are_completed() -> None:
    with pytest.raises(RecordError, match="version 2"):
        parse_run("version: 2\nname: x\n")
    data = parse_run("name: x\nslurm: null\n")
    assert (data["attempts"], data["slurm"], data["config"]) == ([], {}, {})


def test_run_yaml_is_never_executed(run: RunDirectory) -> None:
    run.run_path.write_text("config: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(RecordError, match="not YAML"):
        run.read_run()


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_what_is_not_a_record_is_one_clear_line(run: RunDirectory, text: str) -> None:
    run.run_path.write_text(text)
    with pytest.raises(RecordError) as caught:
        run.read_run()
    assert "\n" not in str(caught.value) and "run.yaml" in str(caught.value)


def test_find_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs"
    first = RunDirectory.create(root / "one", slurm={"job_id": 12}, created="2024-01-01T00:00:00+00:00")
    again = RunDirectory.create(root / "sweep" / "0", slurm={"job_id": 12}, created="2025-01-01T00:00:00+00:00")
    again.start_attempt({"job_id": 15})
    (root / "broken").mkdir()
    (root / "broken" / "run.yaml").write_text("a: [")
    assert find_run(first.path).path == first.path
    assert find_run("one", root).path == first.path
    assert find_run("sweep/0", root).path == again.path
    assert [name_of(run, root) for run in (first, again, RunDirectory(tmp_path / "x"))] == ["one", "sweep/0", "x"]
    assert find_run("12", root).path == again.path and find_run("15", root).path == again.path
    monkeypatch.setenv("HOLMES_RUNS", str(root))
    assert find_run("one").path == first.path
    with pytest.raises(RecordError, match="did you mean 'one'"):
        find_run("onee")
    with pytest.raises(RecordError, match="no such run"):
        find_run("99")
    RunDirectory.create(root / "other" / "0")
    assert find_run("0", root / "sweep").path == again.path
    (root / "a").mkdir()
    RunDirectory.create(root / "a" / "twin")
    RunDirectory.create(root / "b" / "twin")
    with pytest.raises(RecordError, match="2 runs have that name"):
        find_run("twin")


def test_runs_are_not_looked_for_in_checkpoints(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "x" / "0")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "run.yaml").write_text("version: 1\n")
    assert [r.name for r in run_directories(tmp_path)] == ["0"]


def test_tail_gives_whole_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == []
    path.write_text("".join(f"line {i}\n" for i in range(5000)))
    assert tail(path, 3) == ["line 4997", "line 4998", "line 4999"]
    path.write_bytes(b"\xff\xfe bad\nlast")
    assert tail(path, 1) == ["last"]


def test_follow_gives_every_line_once(run: RunDirectory) -> None:
    run.log_path(0).write_text("a\nb")
    calls = iter([False, False, True])
    run.log_path(1).write_text("late\nunfinished")

    def done() -> bool:
        with open(run.log_path(0), "a") as file:
            file.write("c\n")
        return next(calls)

    lines = list(follow_logs(run, done, poll_s=0))
    assert [line for rank, line in lines if rank == 0] == ["a", "bc", "c", "c"]
    assert [line for rank, line in lines if rank == 1] == ["late", "unfinished"]


def test_the_schema_on_disk_is_plain_yaml(run: RunDirectory) -> None:
    assert yaml.safe_load(run.run_path.read_text())["version"] == VERSION
