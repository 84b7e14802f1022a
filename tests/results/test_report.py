"""The report: what is printed are the record's figures; the page is whole, quiet and legible."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_runs import MODEL, make_plan, make_run

from holmes_hpc.errors import RecordError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import compare, html_report, load_runs, tables
from holmes_hpc.results.html_report import write_html
from holmes_hpc.results.report import Report, _one_run_answer, load_report

pytestmark = pytest.mark.integration


def cells_of(made: Report, title: str) -> list[dict[str, str]]:
    """Return the rows of the table whose title starts with `title`, as mappings."""
    table = next(t for t in made.tables() if t.title.startswith(title))
    assert all(len(row) == len(table.columns) for row in table.rows)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_throughput_of_one_run(one: Report) -> None:
    rows = {row["figure"]: row for row in cells_of(one, "Throughput")}
    step = rows["step time, s (median)"]
    assert step["measured"] == f"{one.run['step_time_s']:.3g}".ljust(4, "0")[:4] or step["measured"] == "1.00"
    assert step["predicted"] == "0.970" and step["error of prediction"].startswith("-")
    assert " to " in step["95% interval"]
    assert one.tables()[0].caption == (
        "18 steps after 2 warm-up steps; emulated compute: 30 ms per layer forward, twice that backward"
    )


def test_attempts_show_what_each_one_loaded_and_what_it_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=20)
    last = run.metrics()[-1]
    for step in range(18, 25):
        run.append_metrics({**last, "step": step, "attempt": 2, "time": last["time"] + 5 + step - 18})
    first = {"nodes": "ib[1-2]", "loaded": "nothing", "first_step": 0, "ended": "node lost", "lost": ["ib2"]}
    run.update_attempt(1, **first)
    run.start_attempt({"nodes": "ib[1,3]", "loaded": "copy in memory", "first_step": 18})
    made = load_report([run.path])
    rows = [list(row.values()) for row in cells_of(made, "Attempts of a")]
    assert rows[0] == ["1", "ib[1-2]", "nothing", "0", "0", "–", "node lost: ib2"]
    assert rows[1] == ["2", "ib[1,3]", "copy in memory", "18", "2", "5.00", "–"]
    assert 0 < made.run["goodput"] <= 1
    figures = {row["figure"]: row["measured"] for row in cells_of(made, "Throughput")}
    assert figures["seconds in steps that were not repeated"].endswith("%")


def test_bytes_planned_and_counted(one: Report) -> None:
    rows = cells_of(one, "Bytes sent")
    assert [row["network"] for row in rows] == [
        "ib-a (IB)",
        "roce-a (RoCE)",
        "Ethernet, all nodes",
        "rendezvous and control, once",
    ]
    assert rows[0]["planned"] == "8.00 MB" and rows[0]["counted"] == "8.40 MB" and rows[0]["header factor"] == "1.050"
    assert rows[0]["counted / factor"] == "8.00 MB" and rows[0]["difference"] == "+0.0%"
    assert rows[3]["counted"] == "170.00 kB"


def test_each_kind_has_its_own_header_factor(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update_run(traffic={"setup": {}, "header_factor": 1.0, "header_factors": {"ib-a": 1.05, "ethernet": 2.1}})
    found = {row["kind"]: row for row in load_report([run.path]).to_dict()["traffic"]}
    assert found["ib-a"]["difference_percent"] == pytest.approx(0.0)
    assert found["ethernet"]["difference_percent"] == pytest.approx(-50.0)
    assert found["roce-a"]["difference_percent"] == pytest.approx(5.0)


def test_traffic_on_a_kind_that_was_not_planned_shows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=6)
    for step in range(6):
        run.append_metrics(
            {"step": step, "attempt": 1, "nic_bytes": {"ib-a": {"tx": 8_400_000, "rx": 0}, "stray": {"tx": 5, "rx": 5}}}
        )
    rows = {row["network"]: row for row in cells_of(load_report([run.path]), "Bytes sent")}
    assert rows["stray"]["planned"] == "none" and rows["stray"]["counted"] == "5 B"
    assert rows["roce-a (RoCE)"]["counted"] == "0 B" and rows["roce-a (RoCE)"]["difference"] == "-100.0%"


def test_stages_name_their_fabrics_and_parts_add_up(one: Report) -> None:
    rows = cells_of(one, "Step time by stage")
    assert [row["fabric"] for row in rows] == ["ib-a (IB)", "roce-a (RoCE)"] and rows[0]["layers"] == "6"
    shares = [int(cell.split()[1].rstrip("%")) for cell in list(rows[0].values())[3:]]
    assert 98 <= sum(shares) <= 102 and shares[0] == 70
    longer_step = tables.stages({**one.run, "step_time_s": 2 * one.run["step_time_s"]}, one.plan)
    assert longer_step.rows[0][3].split()[1] == "35%"  # of the step, although the parts add up to half of it


def test_transports_of_the_plan(one: Report) -> None:
    rows = cells_of(one, "Transport of each")
    data_parallel = [(row["transport"], row["fabric"]) for row in rows if row["groups"] == "data parallel"]
    assert data_parallel == [("TCP on IB", "ib-a"), ("TCP on RoCE", "roce-a")]  # the ranks were CPUs


def test_transports_of_a_run_on_gpus(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update_run(device="cuda")
    rows = cells_of(load_report([run.path]), "Transport of each")
    assert {row["transport"] for row in rows if row["groups"] == "data parallel"} == {"RDMA on IB", "RDMA on RoCE"}


def test_a_failed_run_says_so_first(tmp_path: Path) -> None:
    made = load_report([make_run(tmp_path / "a", state="failed").path])
    assert made.tables()[0].title == "a did not complete"
    assert ["rank", "3 on roce-a1"] in made.tables()[0].rows
    nothing = load_report([make_run(tmp_path / "b", steps=0, state="cancelled").path])
    assert nothing.answer() == ["b is cancelled: no steps are recorded."]
    assert [t.title for t in nothing.tables()] == ["b did not complete", "Transport of each process group"]


def test_warnings_of_rank_0_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    stamp = "2026-01-01 00:00:00.000"
    run.log_path(0).write_text(f"{stamp} warning: node a: slow; check it\n{stamp} no warning: fine\n")
    assert load_report([run.path]).answer()[-1] == f"Rank 0 logged 1 warning in {run.log_path(0)}."


def test_damaged_records_of_a_completed_run_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.plan_path.write_text("[")
    assert load_report([run.path]).answer()[2] == "Damaged records: plan.yaml cannot be read."
    run.metrics_path.write_bytes(b"\0" * 5000)
    run.write_result({"state": "completed", "final": {"step": 20}})
    assert "metrics.jsonl has no readable step" in load_report([run.path]).answer()[-1]


def test_the_answer_names_placement_factor_and_reason(sweep: Path) -> None:
    said = load_report([sweep]).answer()
    assert said[0].startswith("Fastest: IB, ib-a:4, holmes with") and "emulated compute" in said[0]
    base = re.escape("hybrid, ib-a:2 roce-a:2, one transport (as plain Megatron-LM)")  # the slowest on four nodes
    assert re.match(rf"That is 2\.[01]\d times {base} \(95% interval .*, 6 pairs\)\.", said[1])
    assert said[2].startswith("Why: compute takes")


def test_a_busy_machine_explains_no_speed_up(tmp_path: Path) -> None:
    make_run(tmp_path / "fast", {"ib-a": 4})
    slow = make_run(tmp_path / "slow", step_time_s=6.0)
    assert load_report([tmp_path]).answer()[2].startswith("Why: ")
    slow.plan_path.write_text(make_plan({"ib-a": 2, "roce-a": 2}, "holmes", 1.0, MODEL.hidden).to_yaml())
    assert load_report([tmp_path]).answer()[2].startswith("The slower setting takes 6.2 times its predicted step time")


def test_one_transport_on_the_same_nodes_is_the_baseline_and_pairs_stay_in_a_session(sweep: Path) -> None:
    made = load_report([sweep])
    rows = cells_of(made, "Settings by throughput")
    hybrid = next(row for row in rows if row["environment: nodes"].startswith("hybrid") and row["system"] == "holmes")
    base = next(row for row in rows if row["#"] == hybrid["over"])
    assert base["system"] == "one transport" and base["environment: nodes"] == "hybrid: ib-a:2 roce-a:2"
    assert float(hybrid["speed-up"].split("x")[0]) == pytest.approx(2.0, abs=0.05)
    low, high = map(float, re.findall(r"[\d.]+", hybrid["speed-up"].split("(")[1]))
    assert 1.9 < low <= high < 2.1, "the slower session must not widen a ratio of pairs"


def test_half_a_run_does_not_spoil_the_whole_ones(sweep: Path) -> None:
    made = load_report([sweep])
    best = made.comparison.cells.iloc[0]
    assert best["repeats"] == 6 and best["step_time_s"] < 2
    assert [row["run"] for row in cells_of(made, "Runs that did not complete")] == ["cut-off"]


def test_a_run_named_twice_is_one_run(sweep: Path) -> None:
    once, twice = load_report([sweep]), load_report([sweep, sweep / "3", sweep / "3"])
    assert len(twice.runs) == len(once.runs) and len(twice.steps) == len(once.steps)
    assert load_report([sweep / "3", sweep / "3"]).single
    assert load_report([sweep / "3", sweep]).steps.empty  # of all or of none: a figure of some would mislead


def test_a_lead_within_the_noise_is_no_difference(tmp_path: Path) -> None:
    for i, (transport, seconds) in enumerate((("holmes", 1.0), ("single", 1.01))):
        make_run(tmp_path / str(i), transport=transport, step_time_s=seconds, spread=0.2, seed=i, steps=40)
    said = load_report([tmp_path]).answer()
    assert len(said) == 2 and said[1].endswith(": no significant difference.")
    make_run(tmp_path / "2", transport="single", step_time_s=3.0, labels={"system": "slow"})
    assert "Why:" in load_report([tmp_path / "0", tmp_path / "2"]).answer()[-1]


def test_half_a_run_does_not_win_over_whole_ones(tmp_path: Path) -> None:
    make_run(tmp_path / "quick", {"ib-a": 4}, step_time_s=0.1, state="cancelled")
    make_run(tmp_path / "whole", {"roce-a": 4}, step_time_s=1.0)
    made = load_report([tmp_path])
    assert "roce-a:4" in made.answer()[0] and len(made.comparison.cells) == 2


def test_a_run_without_a_plan_or_steps_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "whole")
    bare = make_run(tmp_path / "bare")
    bare.plan_path.unlink()
    make_run(tmp_path / "garbled").metrics_path.write_text("not a line\n")
    assert "None" not in " ".join(load_report([bare.path]).answer())
    made = load_report([tmp_path])
    assert "nan" not in str(made.tables())
    assert {row["run"] for row in cells_of(made, "Runs that did not complete")} == {"bare", "garbled"}


def test_without_sessions_the_medians_are_compared(tmp_path: Path) -> None:
    for i, (transport, seconds) in enumerate((("holmes", 1.0), ("single", 3.0))):
        make_run(tmp_path / str(i), transport=transport, step_time_s=seconds, spread=0.0)
    rows = cells_of(load_report([tmp_path]), "Settings by throughput")
    assert rows[0]["speed-up"] == "3.00x" and rows[0]["over"] == "2" and rows[1]["speed-up"] == "–"


def test_what_did_not_complete_is_nobodys_baseline_and_no_share(tmp_path: Path) -> None:
    make_run(tmp_path / "hybrid", step_time_s=1.0)
    make_run(tmp_path / "plain", transport="single", step_time_s=4.0, state="timeout")
    make_run(tmp_path / "ib", {"ib-a": 4}, step_time_s=0.1, state="cancelled")
    make_run(tmp_path / "roce", {"roce-a": 4}, step_time_s=1.2)
    made = load_report([tmp_path])
    rows = {row["system"]: row for row in cells_of(made, "Settings by throughput")}
    assert {name for name in rows if "not comp" in name} == {"holmes, not completed", "one transport, not completed"}
    assert "of mean(IB, RoCE)" not in made.tables()[0].columns
    best = made.comparison.cells[made.comparison.cells["environment"] == "hybrid"].iloc[0]
    assert best["speedup"] == pytest.approx(1.2, rel=0.02)  # over RoCE, which completed
    assert "roce-a:4" in made.answer()[1]


def test_runs_without_plans_that_differ_are_reported(tmp_path: Path) -> None:
    for rate, seconds in ((0.1, 1.0), (0.2, 3.0)):
        run = make_run(tmp_path / str(rate), step_time_s=seconds)
        run.update_run(overrides=[f"train.lr={rate}"])
        run.plan_path.unlink()
    made = load_report([tmp_path])
    write_html(made, tmp_path / "page.html")
    assert "a run without a plan" in " ".join(made.answer())
    text = re.sub("<svg.*?</svg>", "", (tmp_path / "page.html").read_text(), flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNone\b", text)


def test_settings_that_would_be_called_alike_are_told_apart(tmp_path: Path) -> None:
    for i, (hidden, pace) in enumerate(((64, 30.0), (128, 30.0), (128, 20.0))):
        make_run(tmp_path / str(i), hidden=hidden, pace_layer_ms=pace, step_time_s=1.0 + i)
    systems = [row["system"] for row in cells_of(load_report([tmp_path]), "Settings by throughput")]
    assert len(set(systems)) == 3 and systems[0] == "holmes, hidden=64 pace_layer_ms=30"


@pytest.mark.parametrize("override", ["launcher=local", "train.overlap_param_gather=false", "slurm.cpus_per_task=1"])
def test_what_changes_the_run_makes_another_setting(tmp_path: Path, override: str) -> None:
    for i, words in enumerate(([], [override])):
        make_run(tmp_path / str(i)).update_run(overrides=words)
    cells = load_report([tmp_path]).comparison.cells
    assert sorted(cells["varied"]) == ["", override] and list(cells["repeats"]) == [1, 1]


def test_what_did_other_work_and_was_faster_is_said(tmp_path: Path) -> None:
    for i, (hidden, seconds) in enumerate(((64, 2.0), (64, 2.2), (32, 1.0))):
        run = make_run(tmp_path / f"run-{i}", hidden=hidden, step_time_s=seconds, seed=i)
        run.update_run(overrides=[f"train.lr={i}"])
    said = load_report([tmp_path]).answer()[0]
    assert said.startswith("Fastest for the same work: ") and "(run run-0)" in said
    assert "1 setting with more samples/s did other work" in said


def test_settings_are_ranked_by_loss_on_request(tmp_path: Path) -> None:
    for i, steps in enumerate((20, 40, 30)):  # made-up losses fall with the steps
        run = make_run(tmp_path / f"run-{i}", steps=steps, seed=i, step_time_s=1.0 + i)
        run.update_run(overrides=[f"train.lr={i}"])
    made = load_report([tmp_path], by="loss")
    told = [what for _, what in html_report._facts(made)]
    assert (
        told
        == ["lowest loss: run-1, train.lr=1", "highest: run-0, train.lr=0", "samples/s, the fastest: run-0, train.lr=0"]
        and made.bars() == []
    )
    rows = cells_of(made, "Settings by loss")
    assert [row["run"] for row in rows] == ["run-1", "run-2", "run-0"]
    assert made.answer()[0].startswith("Lowest loss: run-1, train.lr=1 with 3.5")
    assert "all: environment: nodes hybrid: ib-a:2 roce-a:2, layers 6,6" in made.tables()[0].caption
    assert compare.labels(made.comparison.cells) == [f"run-{i}, train.lr={i}" for i in (1, 2, 0)]


def test_errors_of_predictions_have_one_sign(tmp_path: Path) -> None:
    for i, seconds in enumerate((1.0, 2.0)):
        make_run(tmp_path / str(i), step_time_s=seconds, spread=0.0).update_run(overrides=[f"train.lr={i}"])
    made = load_report([tmp_path])
    assert [row["predicted"] for row in cells_of(made, "Settings by")] == ["-3.0%", "-3.0%"]
    one = load_report([tmp_path / "0"])
    rows = {row["figure"]: row["error of prediction"] for row in cells_of(one, "Throughput")}
    assert rows["step time, s (median)"] == "-3.0%" and rows["samples/s (harmonic mean)"] == ""
    assert any("(3.0% less than measured)" in said for said in one.answer())


def test_different_work_is_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", step_time_s=1.0)
    make_run(tmp_path / "b", step_time_s=2.0, pace_layer_ms=None)
    made = load_report([tmp_path])
    assert list(made.comparison.cells["baseline"].isna()) == [True, True]
    assert len(made.answer()) == 1


def test_runs_that_differ_in_an_override_are_no_repeats(tmp_path: Path) -> None:
    for i, rate in enumerate((0.1, 0.1, 0.2)):
        run = make_run(tmp_path / str(i), seed=i)
        run.update_run(overrides=[f"train.lr={rate}", f"name=run-{i}", f"train.seed={i}", "plan.nodes={ib-a: 2}"])
    made = load_report([tmp_path])
    cells = made.comparison.cells
    assert sorted(zip(cells["varied"], cells["repeats"], strict=True)) == [("train.lr=0.1", 2), ("train.lr=0.2", 1)]
    assert {row["system"] for row in cells_of(made, "Settings")} == {"holmes, train.lr=0.1", "holmes, train.lr=0.2"}


def test_a_label_does_not_hide_what_the_baseline_is(tmp_path: Path) -> None:
    for i, (label, transport, placement, seconds) in enumerate(
        (
            ("holmes", "holmes", None, 1.0),
            ("Megatron-LM, overlap", "single", None, 1.5),
            ("without uneven layers", "holmes", None, 2.0),
            ("holmes", "holmes", {"eth-a": 4}, 3.0),
        )
    ):
        make_run(
            tmp_path / str(i), placement, transport=transport, step_time_s=seconds, spread=0.0, labels={"system": label}
        )
    rows = {
        (row["system"], row["environment: nodes"]): row
        for row in cells_of(load_report([tmp_path]), "Settings by throughput")
    }
    hybrid = "hybrid: ib-a:2 roce-a:2"
    assert rows["holmes", hybrid]["speed-up"] == "1.50x" and rows["holmes", hybrid]["over"] == "2"
    assert rows["Megatron-LM, overlap", hybrid]["#"] == "2" and rows["without uneven layers", hybrid]["over"] == "2"


def test_models_of_one_name_and_different_sizes_are_neither_repeats_nor_compared(tmp_path: Path) -> None:
    for i, hidden in enumerate((64, 128, 128)):
        run = make_run(tmp_path / str(i), hidden=hidden, seed=i)
        run.update_run(overrides=[f"model.hidden={hidden}", "model=gpt_tiny", f"name=run-{i}"])
    made = load_report([tmp_path])
    cells = made.comparison.cells
    assert sorted(zip(cells["varied"], cells["repeats"], strict=True)) == [
        ("model.hidden=128", 2),
        ("model.hidden=64", 1),
    ]
    assert cells["baseline"].isna().all()
    for run in range(3):  # and when a plan file brought the sizes
        RunDirectory(tmp_path / str(run)).update_run(overrides=[f"plan_file={run}.yaml"])
    assert sorted(load_report([tmp_path]).comparison.cells["repeats"]) == [1, 2]


def test_what_a_label_does_not_say_still_makes_a_setting(tmp_path: Path) -> None:
    for i in range(2):
        make_run(
            tmp_path / str(i),
            labels={"system": "mine"},
            config={"train": {"overlap_grad_reduce": bool(i), "overlap_param_gather": True}},
        )
    assert list(load_report([tmp_path]).comparison.cells["repeats"]) == [1, 1]


def test_shares_of_the_homogeneous_mean_and_of_linear_scaling(tmp_path: Path) -> None:
    """Twice the nodes have twice the batch here: the same step time would be linear."""
    for i, (placement, seconds) in enumerate(
        (
            ({"ib-a": 4}, 1.0),
            ({"roce-a": 4}, 2.0),
            ({"ib-a": 2, "roce-a": 2}, 1.6),
            ({"ib-a": 8}, 1.25),
            ({"ib-a": 4, "roce-a": 4}, 2.0),
        )
    ):
        make_run(tmp_path / str(i), placement, step_time_s=seconds, spread=0.0)
    rows = {row["environment: nodes"]: row for row in cells_of(load_report([tmp_path]), "Settings by throughput")}
    assert rows["hybrid: ib-a:2 roce-a:2"]["of mean(IB, RoCE)"] == "83.3%"  # 1/1.6 against the mean of 1 and 1/2
    assert rows["hybrid: ib-a:4 roce-a:4"]["of mean(IB, RoCE)"] == "–"  # no RoCE on 8 nodes
    assert rows["IB: ib-a:8"]["of linear"] == "80.0%" and rows["IB: ib-a:4"]["of linear"] == "100.0%"
    assert rows["RoCE: roce-a:4"]["of linear"] == "–" == rows["IB: ib-a:4"]["of mean(IB, RoCE)"]
    data = load_report([tmp_path]).to_dict()
    assert [c["of_mean"] for c in data["cells"] if c["placement"] == "ib-a:2 roce-a:2"] == [pytest.approx(5 / 6)]


def test_json_has_maps_of_each_run_and_nulls_of_its_configuration(tmp_path: Path) -> None:
    for i, train in enumerate(({"steps": 5, "wandb": None}, {"steps": 5, "lr": 0.1})):
        make_run(
            tmp_path / str(i), {"ib-a": 2 + 2 * i}, labels={"system": str(i)}, config={"train": train, "name": None}
        )
    data = load_report([tmp_path]).to_dict()
    runs = {run["run"]: run for run in data["runs"]}
    assert runs["0"]["config"]["train"] == {"steps": 5, "wandb": None, "lr": None}
    assert runs["1"]["config"]["train"]["lr"] == 0.1 and runs["1"]["config"]["name"] is None
    assert runs["1"]["labels"] == {"system": "1"} and runs["1"]["tx_bytes_per_step"]["ib-a"] == 16.8e6
    assert not {"config", "labels", "rx_bytes_per_step"} & data["cells"][0].keys()
    assert [cell["tx_bytes_per_step"] for cell in data["cells"]] == [
        runs[cell["names"]]["tx_bytes_per_step"] for cell in data["cells"]
    ]
    assert all(cell["stage_breakdown"] == runs[cell["names"]]["stage_breakdown"] for cell in data["cells"])


def test_shares_that_cannot_be_told_have_no_column(tmp_path: Path) -> None:
    for i in range(2):
        make_run(tmp_path / str(i), {"ib-a": 2 + 2 * i}, pace_layer_ms=10.0 * (1 + i))
    assert not {"of linear", "of mean(IB, RoCE)"} & set(cells_of(load_report([tmp_path]), "Settings by")[0])


def test_intervals_over_runs(sweep: Path) -> None:
    cells = compare.compare(load_runs(sweep)).cells
    assert (cells["samples_low"] <= cells["samples_per_s"]).all()
    assert (cells["step_time_low_s"] <= cells["step_time_s"]).all()
    assert (cells["step_time_s"] <= cells["step_time_high_s"]).all()


def test_runs_from_several_places(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        make_run(tmp_path / folder / "0", step_time_s=1.0)
    made = load_report([tmp_path / "x", tmp_path / "y"])
    assert list(made.runs["run"]) == ["x/0", "y/0"]
    same = load_report([tmp_path / "x" / "0", tmp_path / "y" / "0"])
    assert len(set(same.runs["run"])) == 2 and len(same.steps) == 40


def test_nothing_to_report_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no runs found"):
        load_report([tmp_path])
    with pytest.raises(RecordError, match="no such directory"):
        load_report([tmp_path / "none"])


def test_json_is_strict_and_has_numbers(one: Report, sweep: Path) -> None:
    for made in (one, load_report([sweep])):
        data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
        assert isinstance(data["answer"], list) and data["runs"]
    single = one.to_dict()
    assert single["traffic"][0]["planned_bytes"] == 8e6 and len(single["stages"]) == 2
    assert single["runs"][0]["step_time_s"] == one.run["step_time_s"] and single["runs"][0]["job_id"] == 41


def test_every_table_names_the_pace(sweep: Path, one: Report, tmp_path: Path) -> None:
    for made in (one, load_report([sweep])):
        for table in made.tables():
            if not table.title.startswith(("Runs that did not", "a did not")):
                assert "emulated compute: 30 ms" in table.caption, table.title
    unpaced = load_report([make_run(tmp_path / "unpaced", pace_layer_ms=None).path])
    assert all("real compute" in table.caption for table in unpaced.tables())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1,234"),
        (0.00123456, "0.00123"),
        (0, "0"),
        (float("nan"), "–"),
        (None, "–"),
        (pd.NA, "–"),
        (1.0, "1.00"),
        (99.96, "100.0"),
    ],
)
def test_numbers_for_people(value: Any, text: str) -> None:
    assert tables.format_number(value) == text


def test_a_run_directory_is_not_changed_by_reporting(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "a").path)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    write_html(load_report([run.path]), tmp_path / "page.html")
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_the_measured_timeline_of_one_run_only(tmp_path: Path, sweep: Path) -> None:
    run = make_run(tmp_path / "a", steps=4)
    with pytest.raises(RecordError, match=r"train\.trace=true"):
        load_report([run.path]).write_trace(tmp_path / "trace.json")
    run.trace_path(0).write_text(
        json.dumps(
            {
                "step": 0,
                "stage": 0,
                "kind": "forward",
                "micro_batch": 0,
                "chunk": 0,
                "start_s": 1.0,
                "end_s": 2.0,
                "held": 1,
            }
        )
        + "\n"
    )
    load_report([run.path]).write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["dur"] for e in events if e["ph"] == "X"] == [1e6]
    with pytest.raises(RecordError, match="name one run"):
        load_report([sweep]).write_trace(tmp_path / "trace.json")


def test_a_plan_that_cannot_be_simulated_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=4)
    run.trace_path(0).write_text(
        json.dumps(
            {
                "step": 0,
                "stage": 0,
                "kind": "forward",
                "micro_batch": 0,
                "chunk": 0,
                "start_s": 1.0,
                "end_s": 2.0,
                "held": 1,
            }
        )
        + "\n"
    )
    made = load_report([run.path], simulate=lambda plan: [])
    write_html(made, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Pipeline, measured" in text and "Pipeline, simulated" not in text


def test_a_machine_that_does_not_keep_the_emulated_pace_is_named(one: Report) -> None:
    assert not any("Emulated computing" in sentence for sentence in one.answer())
    predicted = {"breakdown": {"compute_s": one.run["compute_s"] / 1.5}}
    sentences = _one_run_answer(one.run, {**one.plan, "predicted": predicted})
    assert any("Emulated compute took 1.50 times the planned time" in sentence for sentence in sentences)


def test_few_steps_are_no_proof(tmp_path: Path) -> None:
    for transport, seconds in (("holmes", 0.3), ("single", 0.4)):
        make_run(tmp_path / transport, transport=transport, step_time_s=seconds, steps=5)
    assert load_report([tmp_path]).answer()[-1] == "There are too few steps to rule out chance."
