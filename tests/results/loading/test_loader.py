"""The loader: what is recorded is what is in the tables, whatever became of the run; the cache never tells old news."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import make_line, make_plan, make_run

from holmes_hpc.errors import ConfigError, RecordError
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import RUN_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS, load_runs, load_stages, load_steps, read_plan
from holmes_hpc.results.columns import FAMILIES, family_values, stage_parts
from holmes_hpc.results.compare import compare
from holmes_hpc.results.loading import cache, loader
from holmes_hpc.results.loading.steps import read_steps

pytestmark = pytest.mark.integration


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree as users have: single runs, a multirun tree, runs that ended in every way."""
    make_run(tmp_path / "one", {"ib-a": 4}, steps=10)
    make_run(tmp_path / "sweep" / "0", {"ib-a": 2, "roce-a": 2}, labels={"session": "s1"})
    make_run(tmp_path / "sweep" / "1", {"ib-a": 2, "roce-a": 2}, transport="single", step_time_s=2.0, state="failed")
    make_run(tmp_path / "sweep" / "2", {"ib-a": 2, "ib-b": 2}, state=None)
    make_run(tmp_path / "sweep" / "10", {"ib-a": 2, "roce-a": 2, "eth-a": 2}, steps=0, state="timeout")
    RunDirectory.create(tmp_path / "sweep" / "11")
    (tmp_path / "sweep" / "12" / ".hydra").mkdir(parents=True)
    (tmp_path / "sweep" / "12" / ".hydra" / "overrides.yaml").write_text("- train.steps=0\n")
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {}\n")
    make_run(tmp_path / "sweep" / "13", steps=4)
    (tmp_path / "sweep" / "13" / "run.yaml").write_text("version: 99\n")
    return tmp_path


def test_every_run_has_its_row_in_order(tree: Path) -> None:
    runs = load_runs(tree)
    assert list(runs["run"]) == ["one", *(f"sweep/{i}" for i in (0, 1, 2, 10, 11, 12, 13))]
    assert list(runs["state"]) == [
        "completed",
        "completed",
        "failed",
        "unfinished",
        "timeout",
        "not-started",
        "not-started",
        "unreadable",
    ]
    assert runs.loc[2, "error"] == "rank 3: connection lost" and runs.loc[2, "failed_node"] == "roce-a1"
    assert "version 99" in runs.loc[7, "error"] and runs.loc[6, "overrides"] == ["train.steps=0"]


def test_columns_are_the_documented_ones(tree: Path) -> None:
    runs, steps = load_runs(tree), load_steps(tree)
    kinds = {str(name): str(kind) for name, kind in runs.dtypes.items()}
    assert {name: kinds.pop(name) for name in RUN_COLUMNS} == {name: kind for name, (kind, _) in RUN_COLUMNS.items()}
    for family_name, one in FAMILIES.items():
        columns = [kinds.pop(name) for name in list(kinds) if name.startswith(one.prefix)]
        assert columns or family_name in ("model_spec", "setup_tx_bytes", "header_factors")  # these runs record none
        assert one.kind is None or set(columns) <= {one.kind}
    assert not kinds
    known = {name: str(kind) for name, kind in steps.dtypes.items() if name in STEP_COLUMNS}
    assert known == {n: k for n, (k, _) in STEP_COLUMNS.items()}
    assert {c for c in steps if c not in STEP_COLUMNS} == {
        f"{d}_bytes_{k}" for d in ("tx", "rx") for k in ("ethernet", "ib-a", "ib-b", "roce-a")
    }


def test_figures_are_those_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=20)
    row = load_runs(run.path).iloc[0]
    kept = [m["step_time_s"] for m in run.metrics()][2:]
    assert row["run"] == "a" and (row["steps"], row["warmup_steps"]) == (20, 2)
    assert row["step_time_s"] == pytest.approx(np.median(kept))
    assert row["step_time_low_s"] in kept and row["step_time_low_s"] <= row["step_time_s"] <= row["step_time_high_s"]
    assert row["samples_per_s"] == pytest.approx(16 * len(kept) / sum(kept), rel=1e-6)
    assert row["compute_s"] == pytest.approx(0.7 * row["step_time_s"], rel=1e-3)
    assert family_values(row, "tx_bytes_per_step") == {"ib-a": 8.4e6, "roce-a": 8.4e6, "ethernet": 1.05e6}
    assert row["planned_bytes_ib-a"] == 8e6
    assert row["queue_s"] == 10 and row["header_factor"] == 1.05
    assert row["first_loss"] == run.metrics()[0]["loss"] and row["peak_memory_bytes"] == 812_646_403


def test_plans_and_configurations_are_columns(tree: Path) -> None:
    runs = load_runs(tree).set_index("run")
    assert list(runs["environment"][:5]) == ["IB", "hybrid", "hybrid", "2 x IB", "IB + RoCE + Ethernet"]
    assert runs.loc["sweep/10", "placement"] == "ib-a:2 roce-a:2 eth-a:2" and runs.loc["sweep/10", "nodes"] == 6
    assert runs.loc["sweep/1", "transport"] == "single" and runs.loc["sweep/0", "layers_per_stage"] == "6,6"
    assert bool(runs.loc["one", "overlap"]) and runs.loc["one", "session"] is pd.NA
    assert runs.loc["sweep/0", "session"] == "s1"
    assert list(runs["config.train.steps"][:2]) == [10, 20] and str(runs["config.train.steps"].dtype) == "Int64"


def test_steps_have_their_runs(tree: Path) -> None:
    steps = load_steps(tree)
    assert steps.groupby("run", observed=True).size().to_dict() == {
        "one": 10,
        "sweep/0": 20,
        "sweep/1": 20,
        "sweep/2": 20,
    }
    only = load_steps(tree, columns=["loss"], runs=["sweep/1"])
    assert list(only) == ["run", "step", "loss"] and set(only["run"]) == {"sweep/1"}
    assert list(only["loss"]) == [m["loss"] for m in RunDirectory(tree / "sweep" / "1").metrics()]
    assert int(steps["warmup"].sum()) == 2 * 4
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        load_steps(tree, columns=["los"])
    with pytest.raises(ConfigError, match="no run"):
        load_steps(tree, runs=["sweep/99"])


def test_stages_are_rows(tree: Path) -> None:
    stages = load_stages(tree)
    assert list(stages[stages["run"] == "sweep/0"]["stage"]) == [0, 1]
    assert stages["compute_s"].notna().all()


def test_no_such_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such directory"):
        load_runs(tmp_path / "none")
    assert load_runs(tmp_path).empty and load_steps(tmp_path).empty and load_stages(tmp_path).empty


def many(folder: Path, count: int = 12) -> None:
    for i in range(count):
        make_run(folder / str(i), steps=6, seed=i)


def test_the_cache_gives_the_same_and_reads_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path)
    runs, steps = load_runs(tmp_path), load_steps(tmp_path)
    assert (tmp_path / loader.CACHE).is_dir()
    monkeypatch.setattr(cache, "read_one", lambda *a: pytest.fail("read again"))
    pd.testing.assert_frame_equal(load_runs(tmp_path), runs)
    pd.testing.assert_frame_equal(load_steps(tmp_path), steps)
    monkeypatch.undo()
    pd.testing.assert_frame_equal(load_steps(tmp_path, cache=False), steps)


def test_a_changed_run_is_read_again_and_only_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path)
    load_runs(tmp_path)
    again: list[str] = []
    real = cache.read_one

    def spy(run: RunDirectory, key: str) -> Any:
        again.append(key)
        return real(run, key)

    monkeypatch.setattr(cache, "read_one", spy)
    RunDirectory(tmp_path / "3").append_metrics({"step": 6, "loss": 0.25, "step_time_s": 1.0})
    make_run(tmp_path / "99", steps=6)
    runs = load_runs(tmp_path).set_index("run")
    assert sorted(again) == ["3", "99"]
    assert runs.loc["3", "steps"] == 7 and runs.loc["3", "loss"] == 0.25
    steps = load_steps(tmp_path)
    assert list(steps[steps["run"] == "3"]["step"]) == list(range(7)) and sorted(again) == ["3", "99"]
    assert list(dict.fromkeys(steps["run"])) == [*map(str, range(12)), "99"]


def test_runs_that_are_gone_are_gone_and_files_do_not_pile_up(tmp_path: Path) -> None:
    many(tmp_path)
    for i in range(30):
        RunDirectory(tmp_path / "3").append_metrics({"step": 6 + i, "loss": 1.0})
        load_runs(tmp_path)
    assert len(list((tmp_path / loader.CACHE).glob("runs-*"))) <= 25
    import shutil

    shutil.rmtree(tmp_path / "5")
    assert "5" not in set(load_runs(tmp_path)["run"]) and "5" not in set(load_steps(tmp_path)["run"])


def test_a_broken_cache_is_made_again(tmp_path: Path) -> None:
    many(tmp_path)
    runs = load_runs(tmp_path)
    for path in (tmp_path / loader.CACHE).iterdir():
        path.write_bytes(b"nonsense")
    pd.testing.assert_frame_equal(load_runs(tmp_path), runs)
    for path in (tmp_path / loader.CACHE).glob("steps-*"):
        path.unlink()
    assert len(load_steps(tmp_path)) == 72


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_user_is_neither_read_nor_written(tmp_path: Path) -> None:
    runs, own = tmp_path / "runs", tmp_path / "own"
    many(runs)
    own.mkdir()
    (own / "results.parquet").touch()
    (runs / loader.CACHE).symlink_to(own)
    os.chown(runs / loader.CACHE, 54321, 54321, follow_symlinks=False)
    assert len(load_runs(runs)) == 12 and [path.name for path in own.iterdir()] == ["results.parquet"]
    (runs / loader.CACHE).unlink()
    runs.chmod(0o777)
    assert len(load_runs(runs)) == 12 and not (runs / loader.CACHE).exists()


def test_no_place_for_a_cache_is_no_obstacle(tmp_path: Path) -> None:
    many(tmp_path)
    (tmp_path / loader.CACHE).write_text("a file in its place")
    assert len(load_runs(tmp_path)) == 12 and len(load_steps(tmp_path)) == 72


# -- metrics.jsonl in every condition ---------------------------------------------------------------------------------


def test_half_lines_attempts_and_odd_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=5)
    plan = make_plan({"ib-a": 2, "roce-a": 2})
    import random

    run.append_metrics({**make_line(plan, 4, 9.0, random.Random(0), attempt=2), "loss": 0.5})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 5, "time')
    steps = load_steps(run.path)
    assert list(steps["step"]) == [0, 1, 2, 3, 4] and steps["loss"].iloc[-1] == 0.5
    assert list(steps["attempt"]) == [1, 1, 1, 1, 2]
    run.append_metrics({"step": 5, "attempt": 2, "loss": "odd", "breakdown": {"compute_s": 1}, "nic_bytes": None})
    steps = load_steps(run.path)
    assert list(steps["step"]) == [0, 1, 2, 3, 4, 5] and math.isnan(steps["loss"].iloc[-1])
    assert steps["tx_bytes_ib-a"].notna().sum() == 5


def test_older_lines_with_fewer_keys(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    for step in range(8):
        run.append_metrics({"step": step, "loss": 1.0, "step_time_s": 0.5})
    row = load_runs(run.path).iloc[0]
    assert (row["steps"], row["state"], row["step_time_s"]) == (8, "unfinished", 0.5)
    assert math.isnan(row["compute_s"]) and not [name for name in row.index if name.startswith(("stage_", "tx_bytes_"))]


def test_a_plan_is_read_by_the_directory_of_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"ib-a": 4}, steps=1)
    plan = read_plan(run)
    assert read_plan(str(run.path)) == read_plan(run.path) == plan and plan["components"][0]["nodes"] == 4
    assert read_plan(tmp_path / "none") == {}


def test_infinite_values_of_other_writers_stay_in_the_figures(tmp_path: Path) -> None:
    """Our records have null in place of an infinite value; lines of other writers may have Infinity."""
    run = make_run(tmp_path / "a", steps=4)
    line = run.metrics()[-1]
    parts = [{**stage, "compute_s": math.inf} for stage in line["breakdown"]]
    losses = enumerate((3.0, math.inf), 4)
    lines = [{**line, "step": step, "validation_loss": loss, "breakdown": parts} for step, loss in losses]
    with open(run.metrics_path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    row, steps = load_runs(run.path).iloc[0], load_steps(run.path)
    assert row["validation_loss"] == row["compute_s"] == math.inf and math.isfinite(row["step_time_s"])
    assert list(steps["validation_loss"])[4:] == [3.0, math.inf]


def test_lines_as_training_writes_them_are_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", steps=300)
    lines = run.metrics()
    monkeypatch.setattr(RunDirectory, "metrics", lambda self: pytest.fail("read line by line"))
    found = read_steps(run)
    assert len(found) == 300 and found.breakdown.shape == (len(PARTS), 2, 300) and "roce-a" in found.tx
    assert list(found.scalars["loss"]) == [line["loss"] for line in lines]


def resumed(path: Path, plan_id: str) -> RunDirectory:
    """Twelve steps of a second, then ten of two seconds, in an attempt of another job under plan `plan_id`."""
    run = make_run(path, steps=12, spread=0.0)
    first, line = run.read_run(), run.metrics()[-1]
    run.update_run(
        attempts=[
            {**first["attempts"][0], "plan_id": first["plan_id"]},
            {"attempt": 2, "started": "2025-01-01T13:00:07+00:00", "plan_id": plan_id},
        ],
        plan_id=plan_id,
        slurm={"job_id": 77, "submitted": "2025-01-01T13:00:00+00:00"},
    )
    for step in range(12, 22):
        run.append_metrics({**line, "step": step, "attempt": 2, "step_time_s": 2.0})
    return run


def test_figures_of_a_run_that_changed_its_plan_are_those_of_the_plan_it_has(tmp_path: Path) -> None:
    row = load_runs(resumed(tmp_path / "other", "0123456789ab").path).iloc[0]
    assert (row["steps"], row["earlier_steps"], row["warmup_steps"], row["step_time_s"]) == (22, 12, 2, 2.0)
    assert load_steps(tmp_path / "other")["warmup"].sum() == 14
    same = make_run(tmp_path / "same").read_run()["plan_id"]
    row = load_runs(resumed(tmp_path / "again", same).path).iloc[0]
    assert (row["earlier_steps"], row["warmup_steps"], row["step_time_s"]) == (0, 2, 1.5)


def test_what_is_of_another_kind_than_it_should_be_stops_no_loading(tmp_path: Path) -> None:
    """A first line that is no mapping; attempts that are no list."""
    line, attempts = make_run(tmp_path / "a" / "line", steps=3), make_run(tmp_path / "a" / "attempts", steps=3)
    line.metrics_path.write_text("[1]\n" + line.metrics_path.read_text())
    attempts.update_run(attempts=5)
    rows = load_runs(tmp_path / "a").set_index("run")
    assert rows.loc["line", "steps"] == 3 and rows.loc["line", "error"] == "metrics.jsonl: 1 line cannot be read"
    assert rows.loc["attempts", "state"] == "unreadable"
    times = load_steps(tmp_path / "a").groupby("run", observed=True)["step_time_s"].apply(list)
    assert list(times.index) == ["line"] and times["line"] == [m["step_time_s"] for m in line.metrics()]


def test_odd_names_and_files_that_cannot_be_read_stop_no_loading(tmp_path: Path) -> None:
    make_run(tmp_path / "²", steps=4)
    os.rename(make_run(tmp_path / "run", steps=4).path, os.fsencode(tmp_path) + b"/run-\xff")
    blocked = make_run(tmp_path / "blocked", steps=4)
    blocked.metrics_path.unlink()
    blocked.metrics_path.mkdir()
    endless = make_run(tmp_path / "endless", steps=4)
    with open(endless.metrics_path, "a") as file:
        file.write('{"step": 1e999}\n')
    rows = load_runs(tmp_path).set_index("run")
    assert sorted(rows.index) == ["blocked", "endless", "run-\\xff", "²"]
    assert rows.loc["blocked", "state"] == "unreadable" and "metrics.jsonl" in rows.loc["blocked", "error"]
    assert list(rows.loc[["endless", "run-\\xff", "²"], "steps"]) == [4, 4, 4]
    assert rows.loc["endless", "error"] == "metrics.jsonl: 1 line cannot be read"


def test_runs_with_many_columns_are_compared_without_a_warning(tree: Path) -> None:
    runs = load_runs(tree)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(110):  # pandas keeps a block for each
            runs[f"more_{number}"] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(runs)


def test_numbers_that_no_column_holds_and_parts_of_a_newer_release_stop_no_loading(tmp_path: Path) -> None:
    large, newer = (make_run(tmp_path / "a" / name, steps=3) for name in ("large", "newer"))
    large.update_run(slurm={"job_id": 10**30}, plan_id=[1])
    large.append_metrics({**large.metrics()[-1], "step": 10, "loss": 10**400})
    line = newer.metrics()[-1]
    more = [{**stage, "waiting_s": 1.0} for stage in line["breakdown"]]
    newer.append_metrics({**line, "step": line["step"] + 1, "breakdown": more})
    rows = load_runs(tmp_path / "a").set_index("run")
    assert list(rows.loc[["large", "newer"], "steps"]) == [4, 4]
    assert rows["job_id"].isna().sum() == 1 and rows.loc["large", "plan_id"] == "[1]"
    steps = read_steps(newer)
    assert list(steps.breakdown[0, :, -1]) == [stage["compute_s"] for stage in line["breakdown"]]


def test_what_would_crash_or_hang_who_reads_it_stops_no_loading(tmp_path: Path) -> None:
    """Nested too deeply for pyarrow and for libyaml, aliases that make a plan endless, and a pipe."""
    nested, laughing, pipe = (make_run(tmp_path / "a" / name, steps=3) for name in ("nested", "laughing", "pipe"))
    with open(nested.metrics_path, "a") as file:
        file.write('{"step": 9, "loss": 1.0, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    nested.result_path.write_text("[" * 100_000)
    nested.plan_path.write_text("- " * 100_000)
    more = (f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    laughing.plan_path.write_text(f"a: &a [1, 2]\n{''.join(more)}model: {{name: *i}}\n")
    pipe.metrics_path.unlink()
    os.mkfifo(pipe.metrics_path)
    rows = load_runs(tmp_path / "a").set_index("run")
    assert list(rows.loc[["nested", "laughing"], "steps"]) == [3, 3]
    assert "metrics.jsonl: 1 line cannot be read" in rows.loc["nested", "error"]
    assert "model.layers" not in rows and "Not a file" in rows.loc["pipe", "error"]


def test_steps_beyond_the_checkpoint_a_run_went_on_from_do_not_count(tmp_path: Path) -> None:
    """Twelve steps, resumed under another plan from the checkpoint of the sixth, three steps made since."""
    run = resumed(tmp_path / "a", "0123456789ab")
    lines = run.metrics()
    run.metrics_path.write_text("")
    for line in (*lines[:12], *({**lines[12], "step": step} for step in (6, 7, 8))):
        run.append_metrics(line)
    row = load_runs(run.path).iloc[0]
    assert (row["steps"], row["earlier_steps"], row["warmup_steps"], row["step_time_s"]) == (9, 6, 1, 2.0)
    assert [(m["step"], m["attempt"]) for m in run.metrics()] == [(n, 1 + (n > 5)) for n in range(9)]
    assert list(load_steps(run.path)["attempt"]) == [1] * 6 + [2] * 3


def test_a_stage_that_only_an_earlier_plan_had_is_gone(tmp_path: Path) -> None:
    run = resumed(tmp_path / "a", "0123456789ab")
    lines = run.metrics()
    run.metrics_path.write_text("")
    for line in lines:
        run.append_metrics({**line, "breakdown": line["breakdown"][:1]} if line["attempt"] == 2 else line)
    row = load_runs(run.path).iloc[0]
    assert row["compute_s"] == pytest.approx(0.7, abs=1e-3) and len(stage_parts(row)) == 1


def test_a_kind_that_carried_nothing_in_most_steps_has_a_median_of_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2)
    line = run.metrics()[-1]
    for step in range(2, 20):
        run.append_metrics({**line, "step": step, "nic_bytes": {"ethernet": {"tx": 5, "rx": 5}}})
    row = load_runs(run.path).iloc[0]
    assert family_values(row, "tx_bytes_per_step") == {"ethernet": 5.0, "ib-a": 0.0, "roce-a": 0.0}


def test_a_resumed_run_waited_for_its_latest_job(tmp_path: Path) -> None:
    row = load_runs(resumed(tmp_path / "a", "0123456789ab").path).iloc[0]
    assert row["queue_s"] == 7 and row["started"].hour == 12


def test_what_is_damaged_is_said_and_the_rest_still_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=5)
    with open(run.metrics_path, "a") as file:
        file.write("broken\n[1]\n")
    run.plan_path.unlink()
    run.result_path.write_text("{")
    row = load_runs(run.path).iloc[0]
    assert (row["steps"], row["state"]) == (5, "unfinished")
    assert row["error"] == (
        "metrics.jsonl: 2 lines cannot be read; plan.yaml cannot be read; result.json cannot be read"
    )
    assert load_runs(make_run(tmp_path / "b").path)["error"].isna().all()


values = st.one_of(st.none(), st.floats(-1e6, 1e6), st.integers(0, 10**12))
pairs = st.dictionaries(st.sampled_from(["tx", "rx"]), st.integers(0, 10**12), max_size=2)
lines = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 6)},
        optional={
            "attempt": st.integers(1, 3),
            "loss": values,
            "step_time_s": values,
            "time": values,
            "odd": st.text(max_size=3),
            "breakdown": st.lists(
                st.fixed_dictionaries({"compute_s": values}, optional={"optimizer_s": values}), max_size=3
            ),
            "nic_bytes": st.dictionaries(st.sampled_from(["ib-a", "ethernet", "x.y"]), pairs, max_size=3),
            "peak_memory_bytes": st.just([3, 7, 5]),
        },
    ),
    max_size=12,
)


def test_the_peak_is_the_most_of_any_rank_in_any_step_that_counts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    for step, attempt, peaks in ((0, 1, [1, 2]), (1, 1, [9, 4]), (1, 2, [5, 6]), (2, 2, [7, 8])):
        run.append_metrics({"step": step, "attempt": attempt, "peak_memory_bytes": peaks})
    assert read_steps(run).peak == 8  # of what counts
    run.metrics_path.write_text(
        "".join(
            json.dumps({"step": step, "attempt": step, "peak_memory_bytes": peaks}) + "\n"
            for step, peaks in ((1, [9, 4]), (2, [7, 8]))
        )
    )
    assert read_steps(run).peak == 9


def test_a_nic_kind_that_comes_later_is_not_lost(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a")
    for step, kinds in enumerate(({}, {"ib-a": {"tx": 5, "rx": 6}}, {"ethernet": {"tx": 7, "rx": 8}})):
        run.append_metrics({"step": step, "loss": 1.0, "nic_bytes": kinds})
    steps = load_steps(run.path)
    assert steps["tx_bytes_ib-a"].sum() == 5 and steps["rx_bytes_ethernet"].sum() == 8


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # how long it takes is the machine's business
@given(lines)
def test_the_arrays_are_what_the_records_own_reader_reads(
    tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, Any]]
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("lines"))
    for entry in entries:
        run.append_metrics(entry)
    found, wanted = read_steps(run), run.metrics()

    def same(values: Any, expected: list[Any]) -> None:
        np.testing.assert_array_equal(values, np.array([math.nan if v is None else v for v in expected], dtype=float))

    assert list(found.step) == [line["step"] for line in wanted]
    assert list(found.attempt) == [line.get("attempt", 1) for line in wanted]
    for name in ("loss", "step_time_s", "time"):
        same(found.scalars[name], [line.get(name) for line in wanted])
    for name in {name for line in wanted for name in line.get("nic_bytes", ())}:
        for way, values in (("tx", found.tx[name]), ("rx", found.rx[name])):
            same(
                values,
                [
                    line["nic_bytes"].get(name, {"tx": 0, "rx": 0}).get(way) if "nic_bytes" in line else None
                    for line in wanted
                ],
            )
    assert found.breakdown.shape[1] == max((len(line.get("breakdown", ())) for line in wanted), default=0)
    for stage in range(found.breakdown.shape[1]):
        stages = [dict(enumerate(line.get("breakdown", ()))).get(stage, {}) for line in wanted]
        same(found.breakdown[PARTS.index("compute_s"), stage], [parts.get("compute_s") for parts in stages])
        same(found.breakdown[PARTS.index("optimizer_s"), stage], [parts.get("optimizer_s") for parts in stages])


def test_loading_leaves_single_runs_as_they_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=3)
    before = sorted(os.listdir(run.path))
    load_runs(run.path), load_steps(run.path)
    assert sorted(os.listdir(run.path)) == before


def test_every_column_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "results.md").read_text()
    for columns in (RUN_COLUMNS, STEP_COLUMNS, STAGE_COLUMNS):
        for name, (kind, what) in columns.items():
            assert name in PARTS or f"| `{name}` | {kind} | {what} |" in text
    assert text.count(f"| {', '.join(f'`{part}`' for part in PARTS)} | float64 |") == 3
    for one in FAMILIES.values():
        assert f"| `{one.prefix}{one.keys}` | {one.kind or 'that of its values'} | {one.meaning} |" in text


def test_runs_of_several_files_come_in_order_each_with_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "RUNS_PER_PAIR", 5)
    for i in range(12):
        make_run(tmp_path / str(i), {"ib-a": 4} if i % 2 else {"roce-a": 4}, steps=3 + i, seed=i)
    load_runs(tmp_path)
    for i in (2, 7):  # these two move to a shard of their own
        RunDirectory(tmp_path / str(i)).append_metrics({"step": 99, "loss": 0.5})
    steps = load_steps(tmp_path)
    for i in range(12):
        of_run = steps[steps["run"] == str(i)]
        assert list(of_run["loss"]) == [m["loss"] for m in RunDirectory(tmp_path / str(i)).metrics()]
        assert of_run["tx_bytes_ib-a"].notna().any() == (i % 2 == 1)
    assert list(dict.fromkeys(steps["run"])) == [str(i) for i in range(12)]
