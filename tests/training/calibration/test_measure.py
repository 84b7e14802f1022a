"""What `holmes calibrate` measures, by ranks of this machine, and that the planner believes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import spawn
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.training.calibration import networks
from holmes_hpc.training.calibration.networks import Sample

PACE_MS = 30.0  # a busy machine's delays are small beside it
BATCH = replace(spawn.BATCH, global_size=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[spawn.Ended, Calibration]:
    """Two stages of two ranks, paced."""
    ended = spawn.train(tmp_path_factory.mktemp("measured"), spawn.plan(pp=2, dp=2, batch=BATCH),
                        {"train": {"measure": True, "steps": 8, "pace_layer_ms": PACE_MS}})
    assert set(ended.codes) == {0}, ended.output
    return ended, Calibration.from_dict(yaml.safe_load((ended.run.path / "calibration.yaml").read_text()))


@pytest.mark.integration
def test_the_file_holds_every_part_and_the_only_network_of_one_host(made: tuple[spawn.Ended, Calibration]) -> None:
    calibration = made[1]
    assert sorted(p.part for p in calibration.parts) == ["embedding", "head", "layer"]
    assert all(p.forward_s > 0 and p.backward_s > 0 for p in calibration.parts)
    assert set(calibration.links) == {"local", "local.reduce_scatter", "local.all_gather"}
    assert 0 <= calibration.pass_s < 1 and 0 < calibration.step_s < 1
    assert calibration.optimizer_s is not None and calibration.optimizer_s > 0
    assert calibration.pace_layer_ms == PACE_MS and calibration.device == "cpu" and calibration.dtype == "fp32"
    assert Calibration.from_dict(calibration.to_dict()) == calibration


@pytest.mark.integration
def test_a_paced_layer_takes_its_pace(made: tuple[spawn.Ended, Calibration]) -> None:
    """Never less; how much more is the machine's business, but a pace that counts twice would show."""
    layer = next(p for p in made[1].parts if p.part == "layer")
    assert 0.97 < layer.forward_s / (PACE_MS / 1e3) < 1.6
    assert 0.97 < layer.backward_s / (2 * PACE_MS / 1e3) < 1.6


@pytest.mark.integration
def test_predict_uses_what_was_measured(made: tuple[spawn.Ended, Calibration]) -> None:
    plan, calibration = spawn.plan(pp=2, dp=2, batch=BATCH), made[1]
    costs = Costs(calibration, PACE_MS)
    gpu = plan.site.fabrics[0].gpu
    layer = next(p for p in calibration.parts if p.part == "layer")
    assert costs.layer_s(plan.model, plan.batch, 1, gpu) == pytest.approx((layer.forward_s, layer.backward_s))
    slower = replace(calibration, parts=tuple(
        replace(p, forward_s=2 * p.forward_s, backward_s=2 * p.backward_s) for p in calibration.parts))
    least = 3 * (layer.forward_s + layer.backward_s) * plan.micro_batches  # of one stage: three layers
    assert predict(plan, costs).step_time_s > least
    assert predict(plan, Costs(slower, PACE_MS)).step_time_s > 2 * least


@pytest.mark.integration
def test_its_own_steps_are_in_the_record(made: tuple[spawn.Ended, Calibration]) -> None:
    ended = made[0]
    assert len(ended.run.metrics()) == 8
    said = ended.run.read_run()["calibration"]
    assert said["step_time_s"] > 0 and said["predicted_step_time_s"] > 0


def test_every_network_between_the_nodes_has_a_pair() -> None:
    plan = spawn.plan(pp=2, dp=2, tp=2)  # an InfiniBand and a RoCE fabric, two nodes each
    found = networks.pairs(plan, one_host=False)
    assert set(found) == {"local", "ib", "roce", "ethernet"}
    for name, (transport, (a, b)) in found.items():
        same_fabric = plan.places[a].fabric == plan.places[b].fabric
        assert same_fabric == (name != "ethernet"), name
        assert (plan.places[a] == plan.places[b]) == (name == "local") and networks.link_name(transport) == name
    alone = spawn.plan(dp=2)
    found = networks.pairs(alone, one_host=False)
    assert {k: t.kind for k, (t, _) in found.items()} == {"ib": "rdma", "ethernet": "tcp"}


@given(st.floats(0, 1e-2), st.floats(0.1, 1.4), st.lists(st.floats(1e-6, 1e-1), min_size=2, max_size=6, unique=True))
def test_the_fit_finds_a_link_that_keeps_to_the_model(latency: float, efficiency: float, sent: list[float]) -> None:
    rows = [Sample("ib", "", 1 + i % 2, s, (1 + i % 2) * latency + s / efficiency) for i, s in enumerate(sent)]
    found = networks.fit(rows)
    for row in rows:
        assert networks.fitted_s(row, found) == pytest.approx(row.seconds, rel=1e-2)


def test_a_fit_of_what_no_link_can_do_is_still_a_link() -> None:
    faster = networks.fit([Sample("local", "", 1, 1.0, 0.1), Sample("local", "", 1, 2.0, 0.1)])["local"]
    assert faster.efficiency > 5 and faster.latency_s >= 0


@pytest.mark.slurm
def test_a_job_over_three_fabrics_measures_their_networks(testbed, tmp_path: Path) -> None:
    """Two nodes of each fabric; the planner then names no published link as an assumption."""
    file = tmp_path / "site.cal.yaml"
    holmes = str(Path(sys.executable).with_name("holmes"))
    environment = {**os.environ, "HOLMES_RUNS": str(tmp_path)}
    done = subprocess.run([holmes, "calibrate", "name=measured", "train.pace_layer_ms=20", "train.steps=4",
                           "model.layers=3", "-o", str(file)], env=environment, capture_output=True, text=True,
                          timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = Calibration.from_dict(yaml.safe_load(file.read_text()))
    assert set(found.links) == {f"{nic}{what}" for nic in ("ib", "roce", "ethernet")
                                for what in ("", ".reduce_scatter", ".all_gather")}
    planned = subprocess.run([holmes, "plan", f"calibration={file}", "train.pace_layer_ms=20",
                              "plan.nodes={ib-a: 2, roce-a: 2}", "--json"],
                             env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert planned.returncode == 0, planned.stderr
    assert not [a for a in json.loads(planned.stdout)["assumptions"] if "published" in a]
