"""Figures show the figures they are given, name their units, and can be told apart without colour; timelines are
true."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_runs import make_run
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from holmes_hpc.errors import RecordError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import figures, timeline
from holmes_hpc.results.html_report import write_html
from holmes_hpc.results.report import Report, load_report

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two environments on two node counts, and one transport."""
    root = tmp_path_factory.mktemp("figures")
    for i, (placement, transport) in enumerate(
        (
            ({"ib-a": 4}, "holmes"),
            ({"ib-a": 8}, "holmes"),
            ({"ib-a": 2, "roce-a": 2}, "holmes"),
            ({"ib-a": 2, "roce-a": 2}, "single"),
        )
    ):
        make_run(root / str(i), placement, transport=transport, step_time_s=1 + 0.2 * i, spread=0.0)
    return load_report([root])


def bars(figure: Figure) -> list[float]:
    return [round(float(patch.get_width()), 3) for patch in figure.axes[0].patches]


def all_figures(made: Report) -> dict[str, Figure]:
    cells, entry = made.comparison.cells, {"kind": "ib-a", "planned_bytes": 8e6, "counted_bytes": 8.4e6}
    trace = pd.DataFrame({"stage": [0, 0], "kind": ["forward", "backward"], "start_s": [0.0, 1.0], "end_s": [1.0, 3.0]})
    return {
        "throughput": figures.throughput(cells),
        "ablation": figures.ablation(cells, cells.index[0]),
        "scaling": figures.scaling(cells),
        "breakdown": figures.breakdown(["a"], [{"compute_s": 1.0}]),
        "nic_bytes": figures.nic_bytes([entry]),
        "predicted": figures.predicted_measured(made.runs),
        "loss": figures.loss(made.steps),
        "step_times": figures.step_times(made.steps),
        "timeline": figures.timeline(trace, trace),
    }


def test_every_axis_names_its_unit(made: Report) -> None:
    for name, figure in all_figures(made).items():
        axes = figure.axes[-1]  # the one that carries the shared axis
        labels = [axes.get_xlabel()] + ([axes.get_ylabel()] if axes.get_yticks().size else [])
        assert all(re.search(r", (s|samples/s|minutes|MB|%|nats)|^(step|stage|nodes)$", text) for text in labels), (
            name,
            labels,
        )


def test_every_figure_becomes_the_same_svg_again(made: Report) -> None:
    for name, figure in all_figures(made).items():
        text = figures.svg(figure)
        assert text.startswith("<svg") and text == figures.svg(all_figures(made)[name]), name


def test_figures_of_nothing_do_not_fail(tmp_path: Path) -> None:
    made = load_report([make_run(tmp_path / "a", steps=0, state="failed").path])
    for figure in (
        figures.throughput(made.comparison.cells),
        figures.scaling(made.comparison.cells),
        figures.predicted_measured(made.runs),
        figures.loss(made.steps),
        figures.step_times(made.steps),
        figures.nic_bytes([]),
        figures.breakdown([], []),
    ):
        assert figures.svg(figure)


def test_bars_are_as_long_as_their_figures(made: Report) -> None:
    cells = made.comparison.cells
    assert bars(figures.throughput(cells)) == [round(v, 3) for v in cells["samples_per_s"]]
    shares = bars(figures.ablation(cells, cells.index[-1]))
    assert shares == [round(100 * v / cells["samples_per_s"].iloc[-1], 3) for v in cells["samples_per_s"]]
    assert bars(figures.breakdown(["x"], [{"compute_s": 0.5, "pipeline_wait_s": 0.25, "grad_sync_s": None}]))[:2] == [
        0.5,
        0.25,
    ]
    assert bars(figures.nic_bytes([{"kind": "ib-a", "planned_bytes": 8e6, "counted_bytes": 8.4e6}])) == [8.0, 8.4]


def test_bars_that_are_left_out_are_said(made: Report, tmp_path: Path) -> None:
    cells = made.comparison.cells
    assert len(bars(figures.throughput(cells, max_bars=3))) == 3
    assert "the fastest 3 of 4 settings" in figures.throughput(cells, max_bars=3).axes[0].get_title()
    assert "fastest" not in figures.throughput(cells).axes[0].get_title()
    for i in range(13):
        run = make_run(tmp_path / str(i), step_time_s=1 + 0.1 * i, steps=4)
        run.update_run(overrides=[f"train.lr={i}"])
    write_html(load_report([tmp_path]), tmp_path / "page.html")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", (tmp_path / "page.html").read_text())
    assert len([c for c in captions if "the fastest 12 of 13 settings" in c]) == 2


def test_scaling_shows_only_what_ran_on_several_node_counts(made: Report) -> None:
    lines = figures.scaling(made.comparison.cells).axes[0].get_lines()
    assert len(lines) == 2 and list(lines[0].get_xdata()) == [4.0, 8.0]  # measured and linear
    assert lines[1].get_ydata()[1] == pytest.approx(2 * lines[0].get_ydata()[0])


def test_scaling_joins_no_different_work(tmp_path: Path) -> None:
    for i, (nodes, hidden) in enumerate(((4, 64), (8, 128), (8, 64))):
        make_run(tmp_path / str(i), {"ib-a": nodes}, hidden=hidden, step_time_s=1 + 0.1 * i, spread=0.0)
    first, *_ = lines = figures.scaling(load_report([tmp_path]).comparison.cells).axes[0].get_lines()
    assert len(lines) == 2 and first.get_ydata()[1] == pytest.approx(32 / 1.2)  # of hidden=64, not the fastest


def test_lines_of_different_work_have_names_of_their_own(tmp_path: Path) -> None:
    for i, (nodes, pace) in enumerate(((4, 30.0), (8, 30.0), (4, 20.0), (8, 20.0), (2, 10.0), (8, 10.0))):
        run = make_run(tmp_path / str(i), {"ib-a": nodes}, pace_layer_ms=pace, step_time_s=1 + 0.1 * i)
        if pace == 10.0:
            run.plan_path.unlink()  # nothing is known but the nodes
    figure = figures.scaling(load_report([tmp_path]).comparison.cells)
    names = [line.get_label() for line in figure.axes[0].get_lines()[::2]]
    assert len(set(names)) == 3 and "IB, holmes, model=gpt_tiny, sequence_length=64, pace_layer_ms=20" in names


def test_names_are_no_formulas_and_hide_from_no_legend(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, step_time_s=1.0 + i, labels={"system": label}).path
        for i, (name, label) in enumerate(((r"x$\y$", "a$_b_c$"), ("_under", "b")))
    ]
    made = load_report(runs)
    for figure in (figures.throughput(made.comparison.cells), figures.loss(made.steps)):
        assert "$" in figures.svg(figure)
    assert "_under" in figures.svg(figures.loss(made.steps))


def test_what_was_not_counted_has_no_bar() -> None:
    assert bars(figures.nic_bytes([{"kind": "ib-a", "planned_bytes": 8e6, "counted_bytes": None}])) == [8.0]


def test_looks_differ_without_colour() -> None:
    assert len(set(figures.HATCHES)) == len(set(figures.MARKERS)) == len(figures.COLOURS) == 8
    grey = [float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) for colour in figures.COLOURS[:3]]
    assert abs(grey[0] - grey[1]) > 0.2 and abs(grey[1] - grey[2]) > 0.1


def test_restarts_are_marked_in_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=6)
    run.append_metrics({"step": 5, "loss": 1.0, "time": 1.7e9 + 60, "attempt": 2})
    axes = figures.loss(load_report([run.path]).steps).axes[0]
    assert [line.get_xdata()[0] for line in axes.get_lines()][1:] == [5.0]


def test_labels_are_never_cut_to_the_same_text() -> None:
    shared = "hybrid, ib-a:2 roce-a:2, holmes, a setting with a long name"
    long = [f"{shared}, train.lr=0.{n} {'x' * 40} end {n}" for n in (1, 2)]
    made = figures.distinct([*long, f"{shared}, short"])
    assert len(set(made)) == 3 and max(map(len, made)) <= figures.MAX_LABEL and "end 2" in made[1]
    same = figures.distinct(["a" * 30 + str(n) + "b" * 60 for n in range(3)])
    assert len(set(same)) == 3 and max(map(len, same)) <= figures.MAX_LABEL
    assert figures.distinct(["short", "b"]) == ["short", "b"]


def test_the_time_of_a_loss_is_the_runs_own_without_its_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=6)
    run.append_metrics(
        {"step": 7, "loss": 1.0, "validation_loss": 1.5, "step_time_s": 2.0, "time": 1.7e9 + 3600, "attempt": 2}
    )
    made = load_report([run.path])
    minutes = figures.loss(made.steps, "time").axes[0].get_lines()[0].get_xdata()
    assert 0 < minutes[0] < minutes[-1] < 1 and len(minutes) == 7
    by_tokens = figures.loss(made.steps, "tokens", {str(made.runs["run"].iloc[0]): 64.0}).axes[0].get_lines()
    assert list(by_tokens[0].get_xdata()[[0, -1]]) in ([0, 64 * 7], [64, 64 * 7])
    assert list(by_tokens[1].get_ydata()) == [1.5]  # the validation's marker
    assert made.runs["validation_loss"].iloc[0] == 1.5


# -- timelines --------------------------------------------------------------------------------------------------------


def traced(path: Path, slow_step: int = 3) -> RunDirectory:
    """Two stages of two ranks; every step takes 1 s, but one 2 s, and the first two 5 s."""
    run = make_run(path, steps=8)
    for rank in range(4):
        lines, start = [], 1.7e9
        for step in range(8):
            length = 5.0 if step < 2 else 2.0 if step == slow_step else 1.0 + 0.01 * step
            stage = rank // 2
            lines += [
                {
                    "step": step,
                    "stage": stage,
                    "kind": kind,
                    "micro_batch": 0,
                    "chunk": 0,
                    "held": 1,
                    "start_s": start + at * length,
                    "end_s": start + (at + 0.4) * length,
                }
                for kind, at in (("forward", 0.0 + 0.1 * stage), ("backward", 0.6 - 0.1 * stage))
            ]
            start += 10
        run.trace_path(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_trace_reads_back_and_half_lines_do_not_matter(tmp_path: Path) -> None:
    run = traced(tmp_path / "a")
    with open(run.trace_path(0), "a") as file:
        file.write('{"step": 9, "sta')
    trace = timeline.read_trace(run)
    assert len(trace) == 4 * 16 and set(trace["rank"]) == {0, 1, 2, 3} and set(trace["stage"]) == {0, 1}


def test_what_is_no_event_in_a_trace_is_left_out(tmp_path: Path) -> None:
    run = traced(tmp_path / "a")
    good = {"step": 5, "stage": 0, "kind": "send", "start_s": 1.8e9, "end_s": 1.8e9}
    odd = [("kind", [1]), ("step", 10**30), ("stage", None), ("chunk", {}), ("start_s", 1e999), ("end_s", "x")]
    lines = [json.dumps({**good, "kind": "forward", "micro_batch": []}), "[1]", "[" * 100_000]
    lines += [json.dumps({**good, key: value}) for key, value in odd]
    with open(run.trace_path(0), "a") as file:
        file.writelines(f"{line}\n" for line in lines)
    run.trace_path(10**30).write_text(json.dumps(good))
    assert len(timeline.typical_step(timeline.read_trace(run))) > 0
    # two are of step 5, made again after 7: what rank 0 recorded from there on was in vain
    assert len(timeline.read_trace(run)) == 4 * 16 - 6 + 2
    run.trace_path(1).unlink()
    os.mkfifo(run.trace_path(1))
    with pytest.raises(RecordError, match=r"rank-1\.jsonl: Not a file"):
        timeline.read_trace(run)


def test_the_typical_step_is_of_median_length_and_starts_at_zero(tmp_path: Path) -> None:
    step = timeline.typical_step(timeline.read_trace(traced(tmp_path / "a")))
    assert set(step["step"]) == {5}  # lengths after warm-up: 1.02, 2 (step 3), 1.04, 1.05, 1.06, 1.07
    assert step["start_s"].min() == 0 and step["end_s"].max() == pytest.approx(1.05, abs=1e-5)
    assert set(step["rank"]) == {0, 2}


def test_perfetto_has_every_event_once_in_microseconds(tmp_path: Path) -> None:
    run = traced(tmp_path / "a")
    count = timeline.write_perfetto(run, tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == count == 64 and min(e["ts"] for e in spans) == 0
    assert spans[0]["name"] == "forward 0" and spans[0]["dur"] == pytest.approx(2e6)
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"measured: stage {r // 2}, rank {r}" for r in range(4)}
    by_thread: dict[tuple[int, int], float] = {}
    for e in sorted(spans, key=lambda e: e["ts"]):  # spans of one thread must not overlap
        key = (e["pid"], e["tid"])
        assert e["ts"] >= by_thread.get(key, 0) - 1e-3
        by_thread[key] = e["ts"] + e["dur"]


@pytest.mark.parametrize("first", [5, 7])
def test_a_step_that_was_made_again_is_shown_as_it_was_made_last(tmp_path: Path, first: int) -> None:
    run = traced(tmp_path / "a")
    for rank in range(4):
        again = [
            {**event, "start_s": event["start_s"] + 3600, "end_s": event["end_s"] + 3600}
            for event in map(json.loads, run.trace_path(rank).read_text().splitlines())
            if event["step"] >= first
        ]
        with open(run.trace_path(rank), "a") as file:
            file.writelines(json.dumps(event) + "\n" for event in again)
    trace = timeline.read_trace(run)
    assert len(trace) == 4 * 16 and (trace[trace["step"] >= first]["start_s"] > 1.7e9 + 3600).all()
    assert timeline.typical_step(trace)["end_s"].max() < 3


def test_without_a_trace_there_is_a_cure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(RecordError, match=r"train\.trace=true"):
        timeline.write_perfetto(run, tmp_path / "trace.json")
    assert timeline.typical_step(timeline.read_trace(run)).empty
