"""The stage transfer cost of a plan, the hidden share of it, and a depth limited by memory."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from sites import small_testbed

from holmes_hpc import cli
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import USABLE_SHARE, fits, memory
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.stage_transfer import StageTransferCost, stage_transfer_cost
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.layers import deepen, extra_depth

pytestmark = pytest.mark.integration

COSTS = Costs(pace_layer_ms=10)


def plan(
    schedule: str = "ahead",
    layers: tuple[int, int] | None = (4, 4),
    site: Site = small_testbed(),
    batch: Batch = Batch(64, 2, 256),
    **more: object,
) -> Plan:
    options = PlanOptions(
        strategy="pipeline",
        nodes={"ib-a": 2, "roce-a": 2},
        tp=1,
        pp=2,
        dp=2,
        virtual_stages=1,
        layers_per_stage=layers,
        recompute="none",
        schedule=schedule,
        **more,
    )  # type: ignore[arg-type]
    return best_plan(named("gpt_tiny"), batch, site, options, COSTS)


def cost(plan: Plan) -> StageTransferCost:
    transfer_cost = stage_transfer_cost(plan, COSTS)
    assert transfer_cost is not None
    return transfer_cost


def test_eager_1f1b_hides_stage_transfers() -> None:
    eager, megatron = cost(plan()), cost(plan("1f1b"))
    assert eager.one_way_s == pytest.approx(2 * 256 * 256 * 4 / (0.05e9 / 8), rel=0.1)  # T x h in fp32 at 50 Mbit/s
    assert eager.ratio == pytest.approx(eager.one_way_s / (4 * 3 * 0.01), rel=0.1)
    assert eager.wire_s == pytest.approx(2 * 16 * eager.one_way_s)
    assert eager.one_way_s < eager.exposed_s < 2.1 * eager.one_way_s  # filling and draining the pipeline
    assert 1 - 1.05 / 16 < eager.hidden < 1 - 0.5 / 16
    assert megatron.exposed_s == pytest.approx(eager.waiting_s) and megatron.hidden < 0.6
    assert stage_transfer_cost(replace(plan(), edge_dtype="fp16", predicted=None), COSTS).ratio < 0.6 * eager.ratio  # type: ignore[union-attr]


def test_the_plan_text_reports_the_hidden_share() -> None:
    made = plan()
    text = " ".join(explain(made, COSTS))
    assert "from stage 0 to 1 by tcp over ethernet" in text and f"{cost(made).hidden:.0%} of that overlaps" in text
    assert "s with Megatron's 1F1B)" in text


def test_the_json_of_a_plan_has_the_stage_transfer_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for sizes, transfers in ((("plan.pp=2", "plan.dp=1"), True), (("plan.pp=1", "plan.dp=2"), False)):
        monkeypatch.setattr(sys, "argv", ["holmes", "plan", "launcher=local", *sizes, "--json"])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        assert not exit_info.value.code
        plan_json = json.loads(capsys.readouterr().out)
        transfer = plan_json["stage_transfer"]
        assert transfer == plan_json["hop"]  # the former name, kept for one version
        assert (transfer is not None) == transfers
        if transfer:
            assert transfer["stages"] == [0, 1] and 0 <= transfer["hidden"] <= 1 and transfer["ratio"] > 0
            assert {"transport", "one_way_s", "wire_s", "exposed_s", "waiting_s"} <= transfer.keys()


def test_a_depth_limited_by_memory_is_reported() -> None:
    deep = plan()
    assert deep.predicted is not None and not any("memory allows" in a for a in deep.assumptions)
    depth = deep.schedule.in_flight[0]
    assert depth > 3
    max_gib = (deep.predicted.memory_bytes_per_gpu[0] - 1) / 2**30 / USABLE_SHARE
    shallow = plan(max_memory_gib=max_gib)
    assert shallow.schedule.in_flight[0] == depth - 1
    assert any("memory allows" in a and "hiding its transfers takes" in a for a in shallow.assumptions)
    assert shallow.predicted is not None and shallow.predicted.step_time_s > deep.predicted.step_time_s


def gib(plan: Plan, in_flight: tuple[int, int] | None) -> float:
    """Return the GiB of a GPU that a plan just needs, as it is or under eager 1F1B with `in_flight` passes."""
    schedule = plan.schedule if in_flight is None else Schedule("ahead", in_flight)
    layout = Layout.of(replace(plan, schedule=schedule, predicted=None), COSTS)
    return (float(memory(layout, layer_array(plan)).total().max()) + 1) / 2**30 / USABLE_SHARE


def test_a_schedule_chosen_for_lack_of_memory_is_reported() -> None:
    """Stage transfers take almost no time, and memory suffices only for 1F1B's depth, at which eager 1F1B gains too
    little."""
    slow = small_testbed()
    site = replace(slow, pools=tuple(replace(f, ethernet_gbps=100, rdma_gbps=20) for f in slow.pools[:2]))
    deep = plan("auto", (5, 3), site, Batch(256, 2, 256))
    assert deep.schedule == Schedule("ahead", (3, 1))
    shallow = plan("auto", (5, 3), site, Batch(256, 2, 256), max_memory_gib=gib(deep, (2, 1)))
    assert shallow.schedule == Schedule("1f1b", (2, 1))
    assert any("memory allows 0 extra" in a and "hiding its transfers takes" in a for a in shallow.assumptions)


def test_memory_for_megatrons_schedule_alone_is_enough() -> None:
    """Eager 1F1B holds more buffers, even with equal passes in flight."""
    megatron = plan("1f1b")
    max_gib = gib(megatron, None)
    assert max_gib < gib(megatron, (2, 1))
    made = plan("auto", max_memory_gib=max_gib)
    assert made.schedule == megatron.schedule and made.stages == megatron.stages
    assert any("memory allows 0 extra" in a and "hiding its transfers takes" in a for a in made.assumptions)


@pytest.mark.parametrize(("ethernet_gbps", "depth"), [(0.05, 2), (0.05, 6), (0.02, 2), (0.02, 3), (0.02, 5)])
def test_the_reported_depth_belongs_to_the_final_layers(ethernet_gbps: float, depth: int) -> None:
    """Little memory first reduces the passes in flight, then the layers on the stage that holds many."""
    fabrics = tuple(replace(f, ethernet_gbps=ethernet_gbps) for f in small_testbed().pools)
    site = replace(small_testbed(), pools=fabrics)
    max_gib = gib(plan(site=site), (depth, 1))
    made = plan(layers=None, site=site, max_memory_gib=max_gib)
    layout, layers = Layout.of(made, COSTS), layer_array(made)
    missing = extra_depth(layout, layers)
    notes = [a for a in made.assumptions if "memory allows" in a]
    has_memory = fits(deepen(layout, missing), layers, max_gib)[0]
    assert len(notes) == (not has_memory), notes
    if notes:
        allowed = int(notes[0].split()[2])
        assert f"hiding its transfers takes {max(missing)}" in notes[0] and allowed < max(missing)
        assert fits(deepen(layout, [allowed, 0]), layers, max_gib)[0]
        assert not fits(deepen(layout, [allowed + 1, 0]), layers, max_gib)[0]
