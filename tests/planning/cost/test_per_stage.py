"""Predictions of plans with per-stage TP/DP."""

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


def test_equal_stages_are_predicted_like_a_uniform_layout() -> None:
    for costs in (Costs(), PACED):
        settings = {"model": MODEL, "batch": BATCH, "in_flight": [4, 2]}
        grid = predict(spawn.plan(pp=2, dp=2, schedule="ahead", layers=[[12], [12]], **settings), costs)
        routed = predict(spawn.unequal((1, 2), (1, 2), layers=[12, 12], **settings), costs)
        assert routed.step_time_s == pytest.approx(grid.step_time_s, rel=0.01)
        assert routed.memory_bytes_per_gpu == pytest.approx(grid.memory_bytes_per_gpu, rel=0.02)
        assert routed.nic_bytes_per_step == pytest.approx(grid.nic_bytes_per_step, rel=1e-3)


def test_dp_of_three_and_five_reaches_dp_of_four_and_four() -> None:
    slow = Costs(pace_layer_ms=100.0)  # so that gradients take little of the step
    uniform = predict(
        spawn.plan(pp=2, dp=4, schedule="ahead", layers=[[12], [12]], model=MODEL, batch=BATCH, in_flight=[4, 2]), slow
    )
    per_stage = predict(spawn.unequal((1, 3), (1, 5), layers=[9, 15], model=MODEL, batch=BATCH, in_flight=[5, 2]), slow)
    assert per_stage.samples_per_s > 0.93 * uniform.samples_per_s
    assert sum(per_stage.breakdown.values()) == pytest.approx(per_stage.step_time_s)


def test_the_timeline_contains_every_pass_once() -> None:
    plan = spawn.unequal((1, 3), (1, 2), model=MODEL, batch=BATCH)
    events = timeline(plan, Costs())
    passes = Counter((e["kind"], e["micro_batch"]) for e in events if e["kind"] in ("forward", "backward"))
    assert set(passes.values()) == {2} and len(passes) == 2 * 48
    assert {e["stage"] for e in events} == set(range(5))
    for row in range(5):
        row_passes = [e for e in events if e["stage"] == row and e["kind"] in ("forward", "backward")]
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in pairwise(row_passes))


def test_the_audit_expects_the_predicted_bytes() -> None:
    plan = spawn.unequal((2, 1), (1, 2), (1, 1), model=replace(MODEL, tied=True), batch=BATCH)
    nodes = [place.node for place in plan.places]
    loads = Counter[str]()
    for load in audit.planned_loads(audit.planned_bytes(plan, "fp32"), nodes):
        loads["ethernet" if load.kind == "ethernet" else load.node.partition("[")[0]] += load.bytes
    assert dict(loads) == pytest.approx(predict(plan, Costs(dtype="fp32")).nic_bytes_per_step)


def sent(plan: Plan) -> list[tuple[GroupTransport, int, float]]:
    return list(sent_bytes(Layout.of(plan, Costs(dtype="fp32")), layer_array(plan)))


def test_stages_with_different_tp_send_every_byte_once() -> None:
    total = BATCH.sequence_length * MODEL.hidden * 4 * BATCH.global_size
    for sizes in (((2, 1), (1, 2)), ((1, 3), (2, 2)), ((1, 2), (1, 1))):
        plan = spawn.unequal(*sizes, model=MODEL, batch=BATCH)
        amounts = [amount for group, _, amount in sent(plan) if group.kind == "edge"]
        assert sum(amounts) == pytest.approx(2 * total)  # activations down, gradients up


def test_every_stage_pads_the_vocabulary_for_the_largest_tp() -> None:
    """Next to TP 2, the head of TP 1 has 512 rows instead of 384, and its replicas reduce as many more gradients."""
    model = replace(MODEL, vocab=300)
    wide, narrow = (
        sum(amount for group, _, amount in sent(plan) if group.stages == (1,))
        for plan in (spawn.unequal(first, (1, 3), model=model, batch=BATCH) for first in ((2, 1), (1, 1)))
    )
    plan = spawn.unequal((1, 1), (1, 3), model=model, batch=BATCH)
    factors, nodes = Costs().collectives(CPU), len({plan.places[r] for r in plan.parallel.stage_ranks[1]})
    padding_bytes = 4 * (factors.reduce_scatter(3, nodes) + factors.all_gather) * (512 - 384) * MODEL.hidden
    assert wide - narrow == pytest.approx(3 * padding_bytes * 2 / 3)  # each of three replicas sends two thirds
