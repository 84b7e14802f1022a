"""What somebody else wrote is read, or is an error like any other: nothing crashes, hangs or fills the memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from holmes_hpc.errors import HolmesError, RecordError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import read_json, read_yaml
from holmes_hpc.records.find import find_run
from holmes_hpc.records.logs import GrowingFile, follow_logs, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import MAX_LEVELS, MAX_TEXT_BYTES, from_json, from_yaml
from holmes_hpc.submission.executor.watcher import read_exit_record

DEEP = 100_000  # levels, at which libyaml and pyarrow end the process
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 200, "nested more than 100 levels deep, line 1, column 101"),
        ("[" * DEEP, "nested more than 100 levels|maximum nesting depth"),  # PyYAML's or, from 6.0.4, libyaml's limit
        ("{a: " * DEEP, "nested more than 100 levels"),
        ("- " * DEEP, "nested more than 100 levels"),
        ("created: 2025-13-45\n", "month must be in 1..12"),
        (f"version: {'9' * 5000}\n", "a number of 5000 digits, line 1, column 10"),
        (f"version: 0x{'f' * 5000}\n", "a number of 5002 digits"),
        (LAUGHS, r"aliases repeat more than 100000 values, line 5"),
        ("config: {a: 1, a: 2}\n", "key 'a' is there twice, line 1, column 16"),
        ("config: &a {b: *a}\n", r"alias 'a' has no anchor before it, line 1, column 16"),
    ],
    ids=["brackets", "many brackets", "braces", "dashes", "date", "number", "hexadecimal", "laughs", "twice", "circle"],
)
def test_yaml_that_is_none(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=why):
        from_yaml(text)
    run = RunDirectory(tmp_path)
    for path in (run.run_path, run.plan_path):
        path.write_text(text)
    for read in (run.read_run, lambda: Plan.read(run.plan_path), lambda: read_yaml(run.run_path)):
        with pytest.raises(HolmesError, match=why) as said:
            read()
        assert "\n" not in str(said.value)


def test_yaml_with_aliases_and_some_levels() -> None:
    assert from_yaml("a: &x {b: [1, 2]}\nc: {<<: *x, d: *x}\n") == {
        "a": {"b": [1, 2]},
        "c": {"b": [1, 2], "d": {"b": [1, 2]}},
    }
    assert from_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}\n")["c"] == {"b": 2}
    assert from_yaml("[" * MAX_LEVELS + "]" * MAX_LEVELS)
    assert from_yaml("") is None


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP, '{"a":' * DEEP, '["]]]]",' * DEEP, "[" * 101 + "]" * 101, "9" * 5000, ('["∰' * DEEP).encode("utf-16")],
)
def test_json_that_is_none(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_json(text)


def test_json_with_many_brackets_beside_each_other() -> None:
    assert from_json("[" + ",".join(['["[[", {}]'] * 1000) + "]") == [["[[", {}]] * 1000


def test_records_of_nested_json_say_nothing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.append_metrics({"step": 1, "loss": 2.0})
    for path in (run.result_path, run.exits / "n1.jsonl"):
        path.write_text("[" * DEEP)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 2, "loss": 1.0, "x": ' + "[" * DEEP + "]" * DEEP + "}\n")
    assert run.read_result() is None and run.read_exits() == []
    assert [line["step"] for line in run.metrics()] == [1]
    assert run.write_result({"state": "failed"})


@pytest.mark.parametrize(
    "odd", ['{"attempt": "x"}', '{"attempt": 1, "final": [1]}', '{"attempt": 1, "final": {"step": "x"}}']
)
def test_a_result_that_is_none_is_replaced(odd: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.result_path.write_text(odd)
    assert run.write_result({"state": "failed"})


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.run_path.unlink()
    for path in (run.metrics_path, run.result_path, run.run_path, run.log_path(0)):
        os.mkfifo(path)
    reads: list[Callable[[], object]] = [run.metrics, run.read_run]
    for read in reads:
        with pytest.raises(RecordError, match="Not a file; restore the file"):
            read()
    assert tail(run.log_path(0)) == [] and list(GrowingFile(run.log_path(0)).lines()) == []
    run.run_path.unlink()
    run.run_path.write_text("version: 1\n")
    assert run.read_result() is None


def test_names_and_ids_of_odd_digits(tmp_path: Path) -> None:
    """`²` is a digit to str.isdigit, and no number."""
    run = RunDirectory.create(tmp_path / "run", slurm={"job_id": "²", "job_ids": ["9" * 5000, 41]})
    (run.logs / "rank-².txt").write_text("x\n")
    assert find_run("41", tmp_path).name == "run"
    assert list(follow_logs(run, lambda: True)) == []


@pytest.mark.parametrize("name", ["pipe", "zero", "large", "deep", "wide", "list"])
def test_a_configuration_file_that_never_ends_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "zero":
        path.symlink_to("/dev/zero")
    elif name == "large":
        path.touch()
        os.truncate(path, MAX_TEXT_BYTES + 1)
    else:
        path.write_text({"deep": "[" * DEEP, "wide": f"[{'0,' * (1 << 20)}]"}.get(name, "[]"))
    read_object = partial(read_json, error=RecordError, hint="correct it")
    readers: list[Callable[[Path], object]] = [read_object, read_yaml, Plan.read, read_vocabulary]
    for read in readers:
        with pytest.raises(HolmesError, match=f"{path}: ") as error:
            read(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert read_exit_record(path) is None


def test_metrics_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.metrics_path.touch()
    os.truncate(run.metrics_path, 1 << 37)  # without a byte on the disk
    with pytest.raises(RecordError, match="at most"):
        run.metrics()
