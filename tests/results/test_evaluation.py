"""The evaluation's experiments and page, on synthetic runs; `make evaluation` makes the real runs."""

from __future__ import annotations

import tarfile
from pathlib import Path

import evaluation
import pytest
from made_runs import make_run

from holmes_hpc.config.composition import load
from holmes_hpc.results import load_runs
from holmes_hpc.testbed.topology import read

pytestmark = pytest.mark.integration

HEADERS = 1.05
PLACES = {"IB": {"ib-a": 4}, "RoCE": {"roce-a": 4}, "Ethernet": {"eth-a": 4}, "hybrid": {"ib-a": 2, "roce-a": 2}}


def samples(experiments: list[evaluation.Experiment]) -> set[evaluation.Experiment]:
    """Return an experiment per regime, nodes and stages, and one per system and per environment."""
    return set(
        {key: c for c in experiments for key in ((c.regime, c.nodes, c.stages), c.system, c.environment)}.values()
    )


@pytest.mark.parametrize(("regime", "ratio"), [("paper-like", 0.23), ("light", 0.05)])
def test_regimes_have_their_transfer_ratio(regime: str, ratio: float) -> None:
    for experiment in samples(
        [c for _, c in evaluation.parts()["full"] if c.regime == regime and c.system == "holmes"]
    ):
        settings = load(experiment.overrides)
        model, batch = settings.model, settings.batch
        sent_bytes = 4 * model.hidden * batch.sequence_length * batch.micro_size * HEADERS
        transfer_s = sent_bytes * 8 / (read("evaluation").ethernet_mbit * 1e6)
        stage_s = 3 * settings.train.pace_layer_ms / 1000 * model.layers / settings.plan.pp
        assert transfer_s / stage_s == pytest.approx(ratio, rel=0.06)
        assert experiment.transfer_ratio == pytest.approx(transfer_s / stage_s, rel=0.01)


def test_runs_have_unique_names_and_the_same_batch_per_pipeline() -> None:
    parts = evaluation.parts()
    assert set(parts["headline"]) | set(parts["pairs"]) < set(parts["full"])
    assert len({c.run_name(repeat) for repeat, c in parts["full"]}) == len(parts["full"])
    for experiment in samples([c for _, c in parts["full"]]):
        settings = load(experiment.overrides)
        batch, dp = settings.batch, experiment.nodes // experiment.stages
        micro_batches = evaluation.REGIMES[experiment.regime].micro_batches
        assert batch.global_size / batch.micro_size / dp == micro_batches
        assert (settings.train.pace_layer_ms is None) == (experiment.regime == "unpaced")


def test_the_page_has_every_experiment_and_the_share_of_the_mean(tmp_path: Path) -> None:
    planned = [(repeat, c) for repeat, c in evaluation.parts()["headline"] if c.nodes == 4]
    planned += [(repeat, evaluation.Experiment("paper-like", "hybrid", 4, "without overlap")) for repeat in range(3)]
    experiments = {c for _, c in planned}
    seconds = {"hybrid": 2.0, "IB": 1.0, "RoCE": 4.0, "Ethernet": 8.0}
    for repeat, experiment in planned:
        slower = 1 if experiment.system == "holmes" else 1.5
        make_run(
            tmp_path / "runs" / experiment.run_name(repeat),
            PLACES[experiment.environment],
            steps=8,
            seed=repeat,
            step_time_s=slower * seconds[experiment.environment],
            spread=0.0,
            labels={"session": str(repeat), "system": experiment.system},
        )
    frame = evaluation.load_measured(planned, tmp_path / "runs")
    assert len(frame) == 3 * len(experiments)
    tables = evaluation.build_tables(frame)
    goals, environments = tables[0].rows, tables[1].rows
    hybrid = next(row for row in environments if row[1] == "hybrid")
    assert hybrid[-1] == "80.0%"  # 1/2 of a sample a second against the mean of 1 and 1/4
    assert hybrid[-3] == "1.50"
    too_few_pairs = [
        ["holmes / Megatron-LM, lower bound of 95%", f"paper-like, 4, {where}", "0.98", "", "not measured"]
        for where in evaluation.ENVIRONMENTS
    ]
    assert goals == [
        ["holmes / Megatron-LM", "paper-like, 4, hybrid", "1.4", "1.500", "met"],
        *too_few_pairs,
        ["holmes / mean(IB, RoCE)", "paper-like, 4, hybrid", "0.98", "0.800", "missed"],
        ["holmes / proportional layers, minimum of 1", "paper-like, 4, hybrid", "1", "1.500", "met"],
    ]
    evaluation.write_page(frame, tables, "headline", tmp_path / "evaluation.md")
    text = (tmp_path / "evaluation.md").read_text()
    assert all(f"| {c.environment} | {c.system} |" in text for c in experiments)
    figures = {path.stem for path in (tmp_path / "evaluation").iterdir() if path.stat().st_size > 1000}
    assert figures == {"predicted", "ablation-4", "paper-like-4"}  # no scaling figure for a single number of nodes
    evaluation.pack(frame, tmp_path / "runs", tmp_path / "runs.tar.xz")
    with tarfile.open(tmp_path / "runs.tar.xz") as packed:
        packed.extractall(tmp_path / "again", filter="data")
    unpacked_rates, rates = (load_runs(path / "runs")["samples_per_s"] for path in (tmp_path / "again", tmp_path))
    assert list(unpacked_rates) == list(rates)
