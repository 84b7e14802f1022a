"""What a plan says of its stage transfers: their cost, what is hidden, and a depth that memory cuts short."""

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
from holmes_hpc.planning.cost.memory import SLACK, fits, memory
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.stage_transfer import StageTransferCost, stage_transfer_cost
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.layers import deepened, extra_depth

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


def cost(made: Plan) -> StageTransferCost:
    found = stage_transfer_cost(made, COSTS)
    assert found is not None
    return found


def test_a_stage_transfers_costs_its_bytes_and_running_ahead_hides_them() -> None:
    ahead, waits = cost(plan()), cost(plan("1f1b"))
    assert ahead.one_way_s == pytest.approx(2 * 256 * 256 * 4 / (0.05e9 / 8), rel=0.1)  # T x h in fp32 at 50 Mbit/s
    assert ahead.ratio == pytest.approx(ahead.one_way_s / (4 * 3 * 0.01), rel=0.1)
    assert ahead.wire_s == pytest.approx(2 * 16 * ahead.one_way_s)
    assert ahead.one_way_s < ahead.exposed_s < 2.1 * ahead.one_way_s  # to fill and to drain
    assert 1 - 1.05 / 16 < ahead.hidden < 1 - 0.5 / 16
    assert waits.exposed_s == pytest.approx(ahead.waiting_s) and waits.hidden < 0.6
    assert stage_transfer_cost(replace(plan(), edge_dtype="fp16", predicted=None), COSTS).ratio < 0.6 * ahead.ratio  # type: ignore[union-attr]


def test_the_plan_says_so_in_words() -> None:
    made = plan()
    text = " ".join(explain(made, COSTS))
    assert "from stage 0 to 1 by tcp over ethernet" in text and f"{cost(made).hidden:.0%} of that is hidden" in text
    assert "(Megatron's 1F1B: " in text


def test_the_json_of_a_plan_has_it_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, transfers in ((("plan.pp=2", "plan.dp=1"), True), (("plan.pp=1", "plan.dp=2"), False)):
        monkeypatch.setattr(sys, "argv", ["holmes", "plan", "launcher=local", *sizes, "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        transfer = json.loads(capsys.readouterr().out)["hop"]
        assert (transfer is not None) == transfers
        if transfer:
            assert transfer["stages"] == [0, 1] and 0 <= transfer["hidden"] <= 1 and transfer["ratio"] > 0
            assert {"transport", "one_way_s", "wire_s", "exposed_s", "waiting_s"} <= transfer.keys()


def test_a_depth_that_memory_lacks_is_smaller_and_said() -> None:
    deep = plan()
    assert deep.predicted is not None and not any("memory allows" in a for a in deep.assumptions)
    held = deep.schedule.in_flight[0]
    assert held > 3
    one_less = (deep.predicted.memory_bytes_per_gpu[0] - 1) / 2**30 / SLACK
    shallow = plan(max_memory_gib=one_less)
    assert shallow.schedule.in_flight[0] == held - 1
    assert any("memory allows" in a and "would hide it" in a for a in shallow.assumptions)
    assert shallow.predicted is not None and shallow.predicted.step_time_s > deep.predicted.step_time_s


def gib(made: Plan, in_flight: tuple[int, int] | None) -> float:
    """GiB of a GPU that `made` needs just about, as it is or when it runs ahead with so many in flight."""
    schedule = made.schedule if in_flight is None else Schedule("ahead", in_flight)
    layout = Layout.of(replace(made, schedule=schedule, predicted=None), COSTS)
    return (float(memory(layout, layer_array(made)).total().max()) + 1) / 2**30 / SLACK


def test_a_plainer_schedule_for_lack_of_memory_says_so_too() -> None:
    """Stage transfers that take next to nothing, and memory for 1F1B's depth only: there running ahead gains too
    little."""
    slow = small_testbed()
    site = replace(slow, fabrics=tuple(replace(f, ethernet_gbps=100, rdma_gbps=20) for f in slow.fabrics[:2]))
    deep = plan("auto", (5, 3), site, Batch(256, 2, 256))
    assert deep.schedule == Schedule("ahead", (3, 1))
    shallow = plan("auto", (5, 3), site, Batch(256, 2, 256), max_memory_gib=gib(deep, (2, 1)))
    assert shallow.schedule == Schedule("1f1b", (2, 1))
    assert any("memory allows 0 more" in a and "would hide it" in a for a in shallow.assumptions)


def test_memory_for_nothing_but_megatrons_schedule_is_enough() -> None:
    """The schedule that runs ahead holds some more buffers, even with no more passes in flight."""
    own = plan("1f1b")
    most = gib(own, None)
    assert most < gib(own, (2, 1))
    made = plan("auto", max_memory_gib=most)
    assert made.schedule == own.schedule and made.stages == own.stages
    assert any("memory allows 0 more" in a and "would hide it" in a for a in made.assumptions)


@pytest.mark.parametrize(("ethernet_gbps", "depth"), [(0.05, 2), (0.05, 6), (0.02, 2), (0.02, 3), (0.02, 5)])
def test_the_depth_that_is_said_to_be_lacking_is_that_of_the_final_layers(ethernet_gbps: float, depth: int) -> None:
    """Little memory is first met by fewer passes in flight, and then by fewer layers on the stage that holds many."""
    fabrics = tuple(replace(f, ethernet_gbps=ethernet_gbps) for f in small_testbed().fabrics)
    site = replace(small_testbed(), fabrics=fabrics)
    most = gib(plan(site=site), (depth, 1))
    made = plan(layers=None, site=site, max_memory_gib=most)
    layout, layers = Layout.of(made, COSTS), layer_array(made)
    wanted = extra_depth(layout, layers)
    said = [a for a in made.assumptions if "memory allows" in a]
    enough = fits(deepened(layout, wanted), layers, most)[0]
    assert len(said) == (not enough), said
    if said:
        allowed = int(said[0].split()[2])
        assert f"{max(wanted)} would hide it" in said[0] and allowed < max(wanted)
        assert fits(deepened(layout, [allowed, 0]), layers, most)[0]
        assert not fits(deepened(layout, [allowed + 1, 0]), layers, most)[0]
