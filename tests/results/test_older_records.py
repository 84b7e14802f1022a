"""Run directories that an older release wrote: read, with what they lack said in one line."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_runs import make_run
from typer.testing import CliRunner

from holmes_hpc.cli import load
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs, load_steps
from holmes_hpc.results.html_report import render_html
from holmes_hpc.results.report import load_report

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STARTED: dict[str, Any] = {"components": [], "versions": {}, "git_commit": None, "nics": []}  # the rest is made up


def older(path: Path, without_run: tuple[str, ...] = (), without_line: tuple[str, ...] = (), **options: Any) -> Path:
    """Write a run whose run.yaml and metrics.jsonl lack these fields (`breakdown.X`: that part)."""
    run = make_run(path, **options)
    record = {**yaml.safe_load(run.run_path.read_text()), **STARTED}
    run.run_path.write_text(yaml.safe_dump({k: v for k, v in record.items() if k not in without_run}))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for line in lines:
        for name in without_line:
            holders = line["breakdown"] if name.startswith("breakdown.") else [line]
            for holder in holders:
                del holder[name.removeprefix("breakdown.")]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_of_today_lacks_nothing(tmp_path: Path) -> None:
    path = older(tmp_path / "a")
    assert load_runs(path)["missing"].isna().all() and load_report([path]).missing() is None


def test_fields_that_are_missing_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = older(tmp_path / "a", ("device", "traffic"), ("grad_norm", "breakdown.other_s", "nic_bytes"))
    row = load_runs(path).iloc[0]
    assert row["missing"] == "run.yaml: device, traffic; metrics.jsonl: grad_norm, nic_bytes, breakdown.other_s"
    assert (row["state"], row["steps"]) == ("completed", 20) and row["compute_s"] > 0
    assert load_steps(path)["grad_norm"].isna().all() and load_steps(path)["loss"].notna().all()


@pytest.mark.parametrize("field", ["created", "plan_id", "config", "hosts", "pace_layer_ms", "attempts"])
def test_any_field_of_run_yaml_may_be_missing(tmp_path: Path, field: str) -> None:
    path = older(tmp_path / "a", (field,))
    made = load_report([path])
    assert made.missing() == f"fields not recorded by an older release: run.yaml: {field} (1 run)"
    assert made.tables() and render_html(made)


def test_what_can_be_told_without_the_record_is_not_missing(tmp_path: Path) -> None:
    path = older(tmp_path / "a", ("name", "version", "overrides"))
    assert load_report([path]).missing() is None and RunDirectory(path).read_run()["name"] == "a"


@pytest.mark.parametrize(
    "field",
    [
        "time",
        "loss",
        "learning_rate",
        "tokens_per_s",
        "breakdown",
        "peak_memory_bytes",
        "hardware_tflops_per_gpu",
        "samples_per_s",
        "step_time_s",
    ],
)
def test_any_field_of_a_line_may_be_missing(tmp_path: Path, field: str) -> None:
    made = load_report([older(tmp_path / "a", without_line=(field,))])
    assert made.missing() == f"fields not recorded by an older release: metrics.jsonl: {field} (1 run)"
    assert made.tables() and render_html(made) and json.dumps(made.to_dict(), allow_nan=False)


def test_of_many_runs_it_is_one_line(tmp_path: Path) -> None:
    for i in range(4):
        older(tmp_path / str(i), ("nics",) if i < 3 else ("device",), seed=i)
    said = CliRunner().invoke(load("report"), ["report", str(tmp_path)])
    assert said.exit_code == 0
    lines = [line for line in said.stderr.splitlines() if line]
    assert lines == ["fields not recorded by an older release: run.yaml: nics (3 runs); run.yaml: device (1 run)"]


def test_a_run_that_made_no_step_lacks_nothing(tmp_path: Path) -> None:
    assert load_runs(make_run(tmp_path / "a", steps=0, state="failed").path)["missing"].isna().all()


def test_the_evaluations_own_records_are_still_read(tmp_path: Path) -> None:
    """Of the release that made benchmarks/results/evaluation-tables.md."""
    with tarfile.open(ROOT / "benchmarks" / "results" / "evaluation-tables" / "runs.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    runs = load_runs(tmp_path, cache=False)
    assert len(runs) == 356 and set(runs["state"]) == {"completed"} and runs["step_time_s"].notna().all()
