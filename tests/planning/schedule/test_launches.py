"""The launch order of each rank, and the check that it cannot deadlock a GPU."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule import launches as launching
from holmes_hpc.planning.schedule.graph import graph
from holmes_hpc.planning.schedule.kinds import Pass, StageTransfer, in_flight
from holmes_hpc.planning.schedule.launches import Launch, Launches, Post, check_launches, check_unbuffered
from holmes_hpc.planning.schedule.order import Order


def has_step_time(order: Order) -> bool:
    """Return whether the dependency graph of a step has no cycle."""
    try:
        graph(order)
    except PlanError:
        return False
    return True


@st.composite
def drawn(draw: st.DrawFn, kind: str) -> Order:
    stages = draw(st.integers(2, 8))
    chunks = 1 if kind == "1f1b" else draw(st.integers(2 if kind == "interleaved" else 1, 4))
    count = draw(st.integers(1, 24 if chunks == 1 else 3)) * (1 if chunks == 1 else stages)
    least = in_flight(stages, count, chunks) if chunks > 1 else (1,) * stages
    extra = draw(st.lists(st.integers(0, 12), min_size=stages, max_size=stages))
    return Order(kind, stages, count, chunks, tuple(a + b for a, b in zip(least, extra, strict=True)))


def orders(kind: str) -> st.SearchStrategy[Order]:
    """Return orders of `kind`, with depths that do not deadlock virtual stages."""
    return drawn(kind).filter(has_step_time)


@settings(max_examples=150)
@given(st.sampled_from(["1f1b", "interleaved", "ahead"]).flatmap(orders))
def test_no_launch_order_can_deadlock_a_gpu(order: Order) -> None:
    check_launches(order)


@given(orders("ahead"), st.booleans())
def test_every_pass_and_both_ends_of_every_transfer_are_launched_once(order: Order, forward_only: bool) -> None:
    rows = launching.nccl_launches(order, forward_only)
    transfers = {
        order.transfer_from(s, p) for s in range(order.stages) for p in launching.passes(order, s, forward_only)
    } - {None}
    for stage, row in enumerate(rows):
        assert [p for p in row if isinstance(p, Pass)] == launching.passes(order, stage, forward_only)
    posts = [p for row in rows for p in row if isinstance(p, Post)]
    assert len(posts) == len(set(posts)) == 2 * len(transfers) and {p.transfer for p in posts} == transfers


@given(orders("ahead"))
def test_posted_receives_and_held_activations_fit_the_memory_estimate(order: Order) -> None:
    """The estimate has activations of the depth, a window of receives per edge and direction, and two per chunk for
    the next passes."""
    for stage, row in enumerate(launching.nccl_launches(order)):
        held = 0
        for launch in row:
            if isinstance(launch, Post):
                held += not launch.sends
            else:
                held += 1 if launch.forward else -1
                held -= order.transfer_to(stage, launch) is not None
            edges = [(stage - 1) % order.stages, stage]
            windows = sum(order.window_below(edge) * (2 if edge == order.stages - 1 else 1) for edge in edges)
            assert held <= order.depths[stage] + windows + 2 * order.chunks, (stage, launch)


@given(st.integers(2, 4), st.integers(2, 3), st.lists(st.integers(1, 12), min_size=4, max_size=4))
def test_virtual_stages_that_would_deadlock_are_refused(stages: int, chunks: int, depths: list[int]) -> None:
    """Exactly those are refused that deadlock over gloo, whose windows are in the graph of a step."""
    order = Order("ahead", stages, 2 * stages, chunks, tuple(depths[:stages]))
    if has_step_time(order):
        check_launches(order)
    else:
        with pytest.raises(PlanError, match="would wait forever"):
            check_launches(order)


# ---- launch orders that the check refuses


def early_receives(order: Order) -> Launches:
    """Return the NCCL launches until November 2026: one receive per edge and direction before the first pass, and the
    next one when a pass takes it."""
    rows: Launches = []
    for stage in range(order.stages):
        stage_passes = order.passes(stage)
        unposted = {
            forward: deque(
                t for p in stage_passes if p.forward is forward and (t := order.transfer_to(stage, p)) is not None
            )
            for forward in (True, False)
        }
        row: list[Launch] = [Post(False, unposted[d].popleft()) for d in (True, False) if unposted[d]]
        for p in stage_passes:
            if order.transfer_to(stage, p) is not None and unposted[p.forward]:
                row.append(Post(False, unposted[p.forward].popleft()))
            row.append(p)
            if (sent := order.transfer_from(stage, p)) is not None:
                row.append(Post(True, sent))
        rows.append(row)
    return rows


@given(orders("ahead"))
def test_early_receives_are_refused(order: Order) -> None:
    """Stage 0 waits for its first gradient before its first forward pass."""
    assert not isinstance(early_receives(order)[0][0], Pass)
    for rows in (early_receives(order), launching.gloo_launches(order)):
        with pytest.raises(PlanError, match="would wait forever"):
            check_unbuffered(order, rows)


def test_two_stages_that_both_send_first_are_refused() -> None:
    order = Order("1f1b", 2, 4)
    rows = launching.megatron_launches(order)
    check_unbuffered(order, rows)
    down, up = Post(True, StageTransfer(0, 1, Pass(True, 1, 0))), Post(False, StageTransfer(1, 0, Pass(False, 0, 0)))
    at = rows[0].index(down)
    assert rows[0][at + 1] == up
    rows[0][at : at + 2] = [up, down]  # receives first, as Megatron-Core's edges did here
    with pytest.raises(PlanError, match="stage 0 would wait forever for micro-batch 0"):
        check_unbuffered(order, rows)


def test_a_pass_before_its_input_is_refused() -> None:
    order = Order("ahead", 2, 2, 1, (2, 1))
    rows = launching.nccl_launches(order)
    rows[1].remove(Post(False, StageTransfer(0, 1, Pass(True, 0, 0))))
    with pytest.raises(PlanError, match="would wait forever"):
        check_unbuffered(order, rows)


def test_too_few_passes_for_virtual_stages_are_refused() -> None:
    check_launches(Order("ahead", 2, 4, 2, (5, 3)))
    with pytest.raises(PlanError, match=r"plan.schedule: with in_flight \[2, 2\].*hold more passes in flight"):
        check_launches(Order("ahead", 2, 4, 2, (2, 2)))
