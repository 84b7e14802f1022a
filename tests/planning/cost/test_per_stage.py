"""What is predicted of stages of unequal widths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import spawn

from holmes_hpc.config.model import Batch
from holmes_hpc.fabric.site import CPU
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict, timeline
from holmes_hpc.planning.plan.plan import GroupTransport, Plan
from holmes_hpc.training.network import audit

MODEL = replace(spawn.MODEL, layers=24, hidden=256, ffn=1024, max_positions=256)
BATCH = Batch(48, 1, 256)
PACED = Costs(pace_layer_ms=5.0)


def test_equal_widths_are_predicted_as_a_grid() -> None:
    for costs in (Costs(), PACED):
        more = {"model": MODEL, "batch": BATCH, "in_flight": [4, 2]}
        grid = predict(spawn.plan(pp=2, dp=2, schedule="ahead", layers=[[12], [12]], **more), costs)
        routed = predict(spawn.unequal((1, 2), (1, 2), layers=[12, 12], **more), costs)
        assert routed.step_time_s == pytest.approx(grid.step_time_s, rel=0.01)
        assert routed.memory_bytes_per_gpu == pytest.approx(grid.memory_bytes_per_gpu, rel=0.02)
        assert routed.nic_bytes_per_step == pytest.approx(grid.nic_bytes_per_step, rel=1e-3)


def test_three_and_five_nodes_do_what_four_and_four_do() -> None:
    slow = Costs(pace_layer_ms=100.0)  # beside which gradients take little
    equal = predict(
        spawn.plan(pp=2, dp=4, schedule="ahead", layers=[[12], [12]], model=MODEL, batch=BATCH, in_flight=[4, 2]), slow
    )
    unequal = predict(spawn.unequal((1, 3), (1, 5), layers=[9, 15], model=MODEL, batch=BATCH, in_flight=[5, 2]), slow)
    assert unequal.samples_per_s > 0.93 * equal.samples_per_s
    assert sum(unequal.breakdown.values()) == pytest.approx(unequal.step_time_s)


def test_a_timeline_holds_every_pass_once() -> None:
    plan = spawn.unequal((1, 3), (1, 2), model=MODEL, batch=BATCH)
    events = timeline(plan, Costs())
    passes = Counter((e["kind"], e["micro_batch"]) for e in events if e["kind"] in ("forward", "backward"))
    assert set(passes.values()) == {2} and len(passes) == 2 * 48
    assert {e["stage"] for e in events} == set(range(5))
    for row in range(5):
        own = [e for e in events if e["stage"] == row and e["kind"] in ("forward", "backward")]
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in pairwise(own))


def test_the_audit_expects_what_was_predicted() -> None:
    plan = spawn.unequal((2, 1), (1, 2), (1, 1), model=replace(MODEL, tied=True), batch=BATCH)
    nodes = [place.node for place in plan.places]
    loads = Counter[str]()
    for load in audit.planned_loads(plan, nodes, "fp32"):
        loads["ethernet" if load.kind == "ethernet" else load.node.partition("[")[0]] += load.bytes
    assert dict(loads) == pytest.approx(predict(plan, Costs(dtype="fp32")).nic_bytes_per_step)


def sent(plan: Plan) -> list[tuple[GroupTransport, int, float]]:
    return list(sent_bytes(Layout.of(plan, Costs(dtype="fp32")), layer_array(plan)))


def test_unlike_tp_sends_every_byte_once() -> None:
    whole = BATCH.sequence_length * MODEL.hidden * 4 * BATCH.global_size
    for widths in (((2, 1), (1, 2)), ((1, 3), (2, 2)), ((1, 2), (1, 1))):
        plan = spawn.unequal(*widths, model=MODEL, batch=BATCH)
        amounts = [amount for group, _, amount in sent(plan) if group.kind == "edge"]
        assert sum(amounts) == pytest.approx(2 * whole)  # activations down, their gradients up


def test_the_vocabulary_is_padded_for_the_widest_tp_in_every_stage() -> None:
    """Beside TP 2 the head of TP 1 has 512 rows, not 384: its replicas sum up so many more gradients."""
    model = replace(MODEL, vocab=300)
    wide, narrow = (
        sum(amount for group, _, amount in sent(plan) if group.stages == (1,))
        for plan in (spawn.unequal(first, (1, 3), model=model, batch=BATCH) for first in ((2, 1), (1, 1)))
    )
    how = Costs().collectives(CPU)
    whole = 4 * (how.reduce_scatter + how.all_gather) * (512 - 384) * MODEL.hidden
    assert wide - narrow == pytest.approx(3 * whole * 2 / 3)  # each of three replicas sends two thirds
