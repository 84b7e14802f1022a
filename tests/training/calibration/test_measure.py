"""Calibration by ranks of this machine, and its use by the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import spawn
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sites import A100, H100, one_fabric

from holmes_hpc.config.model import Batch
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPool
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.training.calibration import measure, networks
from holmes_hpc.training.calibration.networks import Sample

PACE_MS = 30.0  # long compared to the delays of a busy machine
BATCH = replace(spawn.BATCH, global_size=4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[spawn.FinishedRun, Calibration]:
    """Calibrate two stages of two ranks with emulated compute."""
    finished = spawn.train(
        tmp_path_factory.mktemp("measured"),
        spawn.plan(pp=2, dp=2, batch=BATCH),
        {"train": {"measure": True, "steps": 8, "pace_layer_ms": PACE_MS}},
    )
    assert set(finished.codes) == {0}, finished.output
    return finished, read_calibration(finished)


def read_calibration(finished: spawn.FinishedRun) -> Calibration:
    return Calibration.from_dict(yaml.safe_load((finished.run.path / "calibration.yaml").read_text()))


@pytest.mark.integration
def test_calibration_has_all_parts_and_the_local_network(measured: tuple[spawn.FinishedRun, Calibration]) -> None:
    calibration = measured[1]
    assert {f.fabric: [p.part for p in f.parts] for f in calibration.fabrics} == {
        "ib-0": ["layer", "embedding"],
        "roce-1": ["layer", "head"],
    }
    assert all(p.forward_s > 0 and p.backward_s > 0 and p.sequence == 16 for f in calibration.fabrics for p in f.parts)
    for fabric in calibration.fabrics:
        assert set(fabric.links) == {"local", "local.reduce_scatter", "local.all_gather"}
        assert fabric.pass_s is not None and 0 <= fabric.pass_s < 1
        assert fabric.optimizer_s is not None and fabric.optimizer_s > 0 and fabric.device == fabric.gpu == "cpu"
    assert calibration.step_s is not None and 0 < calibration.step_s < 1
    assert calibration.pace_layer_ms == PACE_MS and calibration.dtype == "fp32"
    assert Calibration.from_dict(calibration.to_dict()) == calibration


@pytest.mark.integration
def test_emulated_layer_takes_its_configured_time(measured: tuple[spawn.FinishedRun, Calibration]) -> None:
    """The upper bound is loose, but shows a time that counts twice."""
    layer = measured[1].fabrics[0].parts[0]
    assert 0.97 < layer.forward_s / (PACE_MS / 1e3) < 1.6
    assert 0.97 < layer.backward_s / (2 * PACE_MS / 1e3) < 1.6


@pytest.mark.integration
def test_predict_uses_the_measured_layer(measured: tuple[spawn.FinishedRun, Calibration]) -> None:
    plan, calibration = spawn.plan(pp=2, dp=2, batch=BATCH), measured[1]
    costs = Costs(calibration, PACE_MS)
    layer = calibration.fabrics[0].parts[0]
    layer_s = costs.layer_s(plan.model, plan.batch, 1, plan.site.pools[0])
    assert layer_s == pytest.approx((layer.forward_s, layer.backward_s))
    slower = replace(
        calibration,
        fabrics=tuple(
            replace(f, parts=tuple(replace(p, forward_s=2 * p.forward_s, backward_s=2 * p.backward_s) for p in f.parts))
            for f in calibration.fabrics
        ),
    )
    stage_s = 3 * (layer.forward_s + layer.backward_s) * plan.micro_batches  # three layers
    assert predict(plan, costs).step_time_s > stage_s
    assert predict(plan, Costs(slower, PACE_MS)).step_time_s > 2 * stage_s


@pytest.mark.integration
def test_run_record_has_measured_and_predicted_step_time(measured: tuple[spawn.FinishedRun, Calibration]) -> None:
    finished = measured[0]
    assert len(finished.run.metrics()) == 8
    record = finished.run.read_run()["calibration"]
    assert record["step_time_s"] > 0 and record["predicted_step_time_s"] > 0


def test_pairs_cover_all_networks_inside_and_between_fabrics() -> None:
    plan = spawn.plan(pp=2, dp=2, tp=2)  # an InfiniBand and a RoCE fabric, two nodes each
    pairs = networks.pairs(plan, one_host=False)
    assert {(p.link, p.pools) for p in pairs} == {
        ("local", ("ib-0",)),
        ("ib", ("ib-0",)),
        ("ethernet", ("ib-0",)),
        ("local", ("roce-1",)),
        ("roce", ("roce-1",)),
        ("ethernet", ("roce-1",)),
        ("ethernet", ("ib-0", "roce-1")),
    }
    for p in pairs:
        places = [plan.places[r] for r in p.ranks]
        assert tuple(dict.fromkeys(place.pool for place in places)) == p.pools
        assert (places[0] == places[1]) == (p.link == "local") and networks.link_name(p.transport) == p.link
    pairs_of_one_fabric = networks.pairs(spawn.plan(dp=2), one_host=False)
    assert {p.link: p.transport.kind for p in pairs_of_one_fabric} == {"ib": "rdma", "ethernet": "tcp"}


@given(st.floats(0, 1e-2), st.floats(0.1, 1.4), st.lists(st.floats(1e-6, 1e-1), min_size=2, max_size=6, unique=True))
def test_fit_reproduces_samples_of_the_model(latency: float, efficiency: float, sent: list[float]) -> None:
    samples = [
        Sample(("a",), "ib", "", 1 + i % 2, s, (1 + i % 2) * latency + s / efficiency) for i, s in enumerate(sent)
    ]
    fitted = networks.fit(samples)
    for sample in samples:
        assert networks.fitted_s(sample, fitted) == pytest.approx(sample.seconds, rel=1e-2)


def messages(fabrics: tuple[str, ...], latency: float, efficiency: float) -> list[Sample]:
    return [Sample(fabrics, "ethernet", "", 1, s, latency + s / efficiency) for s in (1e-6, 1e-2, 1e-1)]


def test_links_between_fabrics_have_their_own_rate_and_delay() -> None:
    """From b to c: a quarter of the Ethernet's rate and 20 ms. From a to b: as inside the fabrics."""
    site = Site("three", tuple(one_fabric(A100, name, 2) for name in "abc"))
    fitted = networks.fit(
        [
            *messages(("a",), 1e-3, 0.9),
            *messages(("b",), 1e-3, 0.9),
            *messages(("a", "b"), 1e-3, 0.9),
            *messages(("b", "c"), 21e-3, 0.225),
        ]
    )
    links = networks.links_of_pools(fitted)
    assert set(links) == {"a", "b"} and links["a"]["ethernet"].efficiency == pytest.approx(0.9)
    calibration = Calibration(tuple(MeasuredPool(name, A100.name, links=links[name]) for name in links))
    fabric_links = networks.links_between_fabrics(fitted, calibration, site)
    assert {link.between: (link.gbps, link.delay_ms) for link in fabric_links} == {
        ("a", "b"): (pytest.approx(25, rel=0.01), pytest.approx(0, abs=0.01)),
        ("b", "c"): (pytest.approx(25 / 4, rel=0.01), pytest.approx(20, rel=0.01)),
    }


def test_fastest_link_counts_as_ethernet_of_single_nodes() -> None:
    fitted = networks.fit([*messages(("a", "b"), 5e-3, 0.5), *messages(("b", "c"), 1e-3, 0.9)])
    links = networks.links_of_pools(fitted)
    assert set(links) == {"b", "c"} and links["b"]["ethernet"].latency_s == pytest.approx(1e-3)


def test_each_fabric_has_the_times_of_its_own_ranks() -> None:
    """An A100 and an H100 fabric have two ranks each; no median includes both."""
    gpus = {"a": A100, "h": H100}
    site = Site("two", tuple(replace(one_fabric(gpu, name, 2), gpus_per_node=1) for name, gpu in gpus.items()))
    plan = fixed_plan(spawn.MODEL, BATCH, site, PlanOptions(tp=1, pp=2, dp=2), Costs())
    ranks = [
        {
            "device": f"NVIDIA {gpu}",
            "times": [
                ["layer", 1, 16, layer_s, 2 * layer_s],
                ["layer", 2, 16, 2 * layer_s, 4 * layer_s],
                ["pass", 1, 16, layer_s / 10, layer_s / 10],
            ],
        }
        for gpu, layer_s in (("A100-SXM4-80GB", 0.02), ("A100-SXM4-80GB", 0.04), ("H100", 0.01), ("H100", 0.012))
    ]
    lines = [{"breakdown": [{"optimizer_s": s, "other_s": 0.001} for s in (0.3, 0.1)]}] * 3
    train = TrainConfig(dtype="bf16")
    calibration = measure.build_calibration(plan, ranks, {}, lines, all_reduce_s=0.002, train=train)
    assert [(f.fabric, f.gpu, f.device) for f in calibration.fabrics] == [
        ("a", "a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h", "h100-80gb", "NVIDIA H100"),
    ]
    assert [[(p.tokens, p.forward_s) for p in f.parts] for f in calibration.fabrics] == [
        [(16, pytest.approx(0.03)), (32, pytest.approx(0.06))],
        [(16, pytest.approx(0.011)), (32, pytest.approx(0.022))],
    ]
    assert [f.pass_s for f in calibration.fabrics] == [pytest.approx(0.003), pytest.approx(0.0011)]
    optimizer_s = [f.optimizer_s for f in calibration.fabrics]
    assert optimizer_s[0] and optimizer_s[1] and optimizer_s[0] > 2 * optimizer_s[1]
    assert calibration.step_s == pytest.approx(0.003)
    costs = Costs(calibration)
    assert costs.layer_s(spawn.MODEL, BATCH, 1, site.pool("h"))[0] == pytest.approx(0.011)


def test_deadline_ends_for_all_ranks_when_one_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.dist, "all_reduce", lambda tensor, **_: None)
    assert networks.Deadline(None, 1e6).has_time_left() and not networks.Deadline(None, 0).has_time_left()
    monkeypatch.setattr(networks.dist, "all_reduce", lambda tensor, **_: tensor.fill_(1))
    assert not networks.Deadline(None, 1e6).has_time_left()


@pytest.mark.integration
def test_real_layers_are_measured_in_several_shapes_with_tp(tmp_path: Path) -> None:
    plan = spawn.plan(tp=2, batch=replace(BATCH, micro_size=2))
    finished = spawn.train(tmp_path, plan, {"train": {"measure": True, "steps": 4}})
    assert set(finished.codes) == {0}, finished.output
    (fabric,) = read_calibration(finished).fabrics
    shapes = {(p.tokens // p.sequence, p.sequence) for p in fabric.parts if p.part == "layer"}
    assert shapes == {(2, 16), *measure.other_shapes(plan)} and len(shapes) > 5
    assert all(p.tp == 2 and p.forward_s > 0 for p in fabric.parts)


def test_other_shapes_have_several_sizes_and_lengths_and_limited_tokens() -> None:
    plan = spawn.plan(pp=2, dp=2, batch=Batch(64, 4, 32))
    shapes = measure.other_shapes(plan)
    assert {m for m, s in shapes if s == 32} >= {1, 2, 8, 16} and {s for _, s in shapes} == {32, 16, 8}
    assert (4, 32) not in shapes and all(m * s <= 4 * 4 * 32 for m, s in shapes) and len(set(shapes)) == len(shapes)


def test_fit_of_impossible_times_gives_a_valid_link() -> None:
    faster = networks.fit([Sample(("a",), "local", "", 1, s, 0.1) for s in (1.0, 2.0)])[("a",), "local"]
    assert faster.efficiency > 5 and faster.latency_s >= 0
