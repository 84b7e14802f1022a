"""Properties that every schedule of SCHEDULES must have, and errors for unknown or unsupported ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sites
from hypothesis import given
from hypothesis import strategies as st
from passes import every_pass

from holmes_hpc.config import plan_options
from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError, PlanError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.graph import Durations
from holmes_hpc.planning.schedule.kinds import SCHEDULES, Pass, ScheduleKind, candidate_schedules
from holmes_hpc.planning.schedule.launches import check_launches
from holmes_hpc.planning.schedule.megatron_programs import program
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.planning.schedule.simulation import least_seconds, step_seconds
from holmes_hpc.planning.search.best import best_plan, fixed_plan


@st.composite
def orders(draw: st.DrawFn, kind: ScheduleKind) -> Order:
    """Draw orders with the depth of the schedule itself."""
    stages, largest = draw(st.integers(1, 4)), kind.chunks[1]
    chunks = draw(st.integers(kind.chunks[0], kind.chunks[0] + 2 if largest is None else largest))
    count = stages * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 9))
    return Order(kind.name, stages, count, chunks, kind.in_flight(stages, count, chunks))


def test_the_configuration_has_the_same_schedules() -> None:
    assert set(SCHEDULES) == set(plan_options.SCHEDULE_NAMES)
    assert {k.name for k in SCHEDULES.values() if k.megatron} == set(plan_options.MEGATRON_SCHEDULES)


def test_eager_1f1b_is_the_same_option_as_ahead() -> None:
    options = load(["plan.schedule=eager_1f1b"]).plan
    assert options == PlanOptions(schedule="eager_1f1b") == PlanOptions(schedule="ahead")
    assert options.schedule in SCHEDULES


@given(st.sampled_from(list(SCHEDULES.values())).flatmap(orders))
def test_a_stage_computes_every_pass_once_and_holds_at_most_its_depth(order: Order) -> None:
    for stage in range(order.stages):
        passes = order.passes(stage)
        assert sorted(passes) == every_pass(order)
        assert all(passes.index(p._replace(forward=True)) < passes.index(p) for p in passes if not p.forward)
        assert max(np.cumsum([1 if p.forward else -1 for p in passes])) == order.depths[stage] <= order.in_flight[stage]
        if order.schedule.megatron:
            assert [item for item in program(order, stage) if isinstance(item, Pass)] == passes


@given(st.sampled_from(list(SCHEDULES.values())).flatmap(orders))
def test_no_stage_deadlocks_and_no_step_is_shorter_than_its_bound(order: Order) -> None:
    check_launches(order)
    each, per_stage = np.ones((1, order.stages, order.chunks)), np.full((1, order.stages), 0.5)
    d = Durations(each, 2 * each, per_stage, per_stage, per_stage, 0 * each, 0 * each, 0 * each)
    assert least_seconds(order, d)[0] <= step_seconds(order, d)[0] * (1 + 1e-9)


@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_requested_schedule_is_used(kind: ScheduleKind) -> None:
    """By the search and for a fixed layout, with at least the schedule's own depth."""
    options = PlanOptions(pp=2, tp=1, dp=4, schedule=kind.name, virtual_stages=kind.chunks[0])
    batch = Batch(32, 1, 1024)
    for plan_of in (best_plan, fixed_plan):
        plan: Plan = plan_of(named("gpt_small"), batch, sites.two_clusters(1), options, Costs())
        assert plan.schedule.kind == kind.name
        assert Plan.from_dict(plan.to_dict()).order == plan.order
        least = kind.in_flight(2, plan.micro_batches, kind.chunks[0])
        assert all(count >= n for count, n in zip(plan.schedule.in_flight, least, strict=True))


def test_a_schedule_with_its_own_turns_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forward passes, then all backward ones; and an order that runs passes before their input arrives."""
    gpipe = ScheduleKind(
        "gpipe", "GPipe", (1, 1), lambda stages, count, chunks: (count,) * stages, turns=lambda t, _: np.arange(2 * t)
    )
    monkeypatch.setitem(SCHEDULES, "gpipe", gpipe)
    order = Order("gpipe", 3, 5)
    check_launches(order)
    assert [p.forward for p in order.passes(1)] == [True] * 5 + [False] * 5
    assert order.passes(1) == replace(Order("ahead", 3, 5, 1, (5, 5, 5))).passes(1)
    monkeypatch.setitem(SCHEDULES, "gpipe", replace(gpipe, turns=lambda t, _: np.arange(2 * t)[::-1]))
    with pytest.raises(PlanError, match="would wait forever"):
        check_launches(Order("gpipe", 3, 4))


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        ("1f1b", 2, "1f1b has no virtual stages; use interleaved or eager_1f1b"),
        ("zero_bubble", 2, "zero_bubble has no virtual stages; use interleaved or eager_1f1b"),
        ("interleaved", 1, "interleaved has at least 2 virtual stages; use 1f1b or eager_1f1b or zero_bubble"),
    ],
)
def test_unsupported_virtual_stages_are_refused(schedule: str, chunks: int, message: str) -> None:
    options = PlanOptions(tp=1, pp=2, dp=4, schedule=schedule, virtual_stages=chunks)
    for plan_of in (best_plan, fixed_plan):
        with pytest.raises(PlanError, match=message):
            plan_of(named("gpt_small"), Batch(32, 1, 1024), sites.two_clusters(1), options, Costs())


def test_an_unknown_schedule_is_refused_in_one_line() -> None:
    for wrong in (
        lambda: Order("1fb1", 2, 4),
        lambda: candidate_schedules("1fb1", 1, background=True),
        lambda: PlanOptions(schedule="1fb1"),
    ):
        with pytest.raises(HolmesError, match="did you mean '1f1b'") as refused:
            wrong()
        assert "\n" not in str(refused.value)
