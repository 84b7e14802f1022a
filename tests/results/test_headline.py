"""The sentence and the chart a comparison of NIC environments begins with, over made-up runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

from holmes_hpc import console
from holmes_hpc.results import compare
from holmes_hpc.results.report import load_report
from holmes_hpc.testbed.topology import read

PLACES = {"hybrid": ({"ib-a": 2, "roce-a": 2}, 1.25), "ib": ({"ib-a": 4}, 1.0), "roce": ({"roce-a": 4}, 4.0)}


def make(folder: Path) -> None:
    for name, (placement, seconds) in PLACES.items():
        make_run(folder / name, placement, step_time_s=seconds, spread=0.0)
    make_run(folder / "plain", PLACES["hybrid"][0], step_time_s=2.5, spread=0.0, transport="single")


def test_hybrid_is_held_against_homogeneous_clusters_and_plain_megatron(tmp_path: Path) -> None:
    """Rates of 0.8 against the mean of 1 and 0.25, and against 0.4; step times predicted at 0.97 of theirs."""
    make(tmp_path)
    report = load_report([tmp_path])
    assert report.answer()[0] == (
        "Hybrid (ib-a:2 roce-a:2) is 128% of the mean of InfiniBand and RoCE alone and 2.00 times plain Megatron-LM "
        "(one transport for all groups) on the same nodes. Step times were predicted within 3.0%."
    )
    rates = [rate for _, rate in report.bars()]
    assert rates == sorted(rates, reverse=True) and len(rates) == 4


def test_without_both_fabrics_alone_nothing_is_said(tmp_path: Path) -> None:
    make(tmp_path)
    assert not any(said.startswith("Hybrid") for said in load_report([tmp_path / "hybrid", tmp_path / "ib"]).answer())
    assert load_report([tmp_path / "ib"]).bars() == []


def test_bars_are_in_proportion_and_fit(capsys: pytest.CaptureFixture[str]) -> None:
    console.bars("samples/s", [("one", 50.0), ("two", 25.0), ("three " * 12, 12.5)])
    lines = capsys.readouterr().out.splitlines()
    drawn = [sum(c in "█#" for c in line) for line in lines if "█" in line or "#" in line]
    assert drawn[0] == pytest.approx(2 * drawn[1], abs=1) and drawn[1] == pytest.approx(2 * drawn[2], abs=1)
    assert max(map(len, lines)) <= console.WIDTH


def test_the_demos_networks_are_the_evaluations() -> None:
    def rates(name: str) -> dict[str, float | None]:
        return {f.name: f.rdma_mbit for f in read(name).fabrics if f.name != "ib-b"}

    assert rates("demo") == rates("evaluation") and read("demo").ethernet_mbit == read("evaluation").ethernet_mbit


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["mine-0", "mine-1", "mine-2"], "mine-[0-2]"),
        (["a/b-1", "a/b-7"], "a/b-[1,7]"),
        (["mine-0"], "mine-0"),
        (["0", "1"], "0, 1"),
        (["mine-0", "yours-1"], "mine-0, yours-1"),
        (["a b-1", "a b-2"], "a b-1, a b-2"),
        (["a", "b", "c", "d"], "a, b, +2"),
    ],
)
def test_numbered_repeats_are_named_in_one_word(names: list[str], told: str) -> None:
    assert compare.names_text(names) == told
