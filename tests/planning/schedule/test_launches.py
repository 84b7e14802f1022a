"""The order of launches under which no GPU can lock up."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule import launches as launching
from holmes_hpc.planning.schedule.graph import graph
from holmes_hpc.planning.schedule.kinds import Pass, StageTransfer, in_flight
from holmes_hpc.planning.schedule.launches import Launch, Launches, Post, check_launches, check_line
from holmes_hpc.planning.schedule.order import Order


def runs(order: Order) -> bool:
    """Whether a step has a time: the graph of what waits for what has no circle."""
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
    more = draw(st.lists(st.integers(0, 12), min_size=stages, max_size=stages))
    return Order(kind, stages, count, chunks, tuple(a + b for a, b in zip(least, more, strict=True)))


def orders(kind: str) -> st.SearchStrategy[Order]:
    """Of `kind`, with depths that virtual stages can work with."""
    return drawn(kind).filter(runs)


@settings(max_examples=150)
@given(st.sampled_from(["1f1b", "interleaved", "ahead"]).flatmap(orders))
def test_no_order_of_launches_can_lock_up_a_gpu(order: Order) -> None:
    check_launches(order)


@given(orders("ahead"), st.booleans())
def test_every_pass_and_both_ends_of_every_transfer_are_launched_once(order: Order, forward_only: bool) -> None:
    rows = launching.in_line(order, forward_only)
    transfers = {
        order.transfer_from(s, p) for s in range(order.stages) for p in launching.passes(order, s, forward_only)
    } - {None}
    for stage, row in enumerate(rows):
        assert [p for p in row if isinstance(p, Pass)] == launching.passes(order, stage, forward_only)
    posts = [p for row in rows for p in row if isinstance(p, Post)]
    assert len(posts) == len(set(posts)) == 2 * len(transfers) and {p.transfer for p in posts} == transfers


@given(orders("ahead"))
def test_what_is_posted_and_held_fits_into_what_memory_was_counted_for(order: Order) -> None:
    """Activations of the depth, a window of receives in both directions of both edges, and those taken next (of each
    chunk, of which the next one's can come before this one's)."""
    for stage, row in enumerate(launching.in_line(order)):
        held = 0
        for launch in row:
            if isinstance(launch, Post):
                held += not launch.sends
            else:
                held += 1 if launch.forward else -1
                held -= order.transfer_to(stage, launch) is not None
            edges = [(stage - 1) % order.stages, stage]
            room = sum(order.window_below(edge) * (2 if edge == order.stages - 1 else 1) for edge in edges)
            assert held <= order.depths[stage] + room + 2 * order.chunks, (stage, launch)


@given(st.integers(2, 4), st.integers(2, 3), st.lists(st.integers(1, 12), min_size=4, max_size=4))
def test_virtual_stages_that_would_wait_for_ever_are_refused(stages: int, chunks: int, depths: list[int]) -> None:
    """Those, and no others, that lock up over gloo, whose windows the graph of a step has."""
    order = Order("ahead", stages, 2 * stages, chunks, tuple(depths[:stages]))
    if runs(order):
        check_launches(order)
    else:
        with pytest.raises(PlanError, match="would wait for ever"):
            check_launches(order)


# ---- what the check refuses


def before(order: Order) -> Launches:
    """The order of posts until November 2026, on NCCL: one receive of each edge and direction before anything is
    computed, and the next one when that is taken."""
    found: Launches = []
    for stage in range(order.stages):
        steps = order.passes(stage)
        coming = {
            way: deque(t for p in steps if p.forward is way and (t := order.transfer_to(stage, p)) is not None)
            for way in (True, False)
        }
        row: list[Launch] = [Post(False, coming[way].popleft()) for way in (True, False) if coming[way]]
        for step in steps:
            if order.transfer_to(stage, step) is not None and coming[step.forward]:
                row.append(Post(False, coming[step.forward].popleft()))
            row.append(step)
            if (leaves := order.transfer_from(stage, step)) is not None:
                row.append(Post(True, leaves))
        found.append(row)
    return found


@given(orders("ahead"))
def test_the_order_of_posts_of_before_is_refused(order: Order) -> None:
    """Stage 0 waited for its first gradient before its first forward pass."""
    assert not isinstance(before(order)[0][0], Pass)
    for rows in (before(order), launching.windowed(order)):
        with pytest.raises(PlanError, match="would wait for ever"):
            check_line(order, rows)


def test_two_stages_that_both_send_first_are_refused() -> None:
    order = Order("1f1b", 2, 4)
    rows = launching.of_megatron(order)
    check_line(order, rows)
    down, up = Post(True, StageTransfer(0, 1, Pass(True, 1, 0))), Post(False, StageTransfer(1, 0, Pass(False, 0, 0)))
    at = rows[0].index(down)
    assert rows[0][at + 1] == up
    rows[0][at : at + 2] = [up, down]  # receives first, as Megatron-Core's edges did here
    with pytest.raises(PlanError, match="stage 0 would wait for ever for micro-batch 0"):
        check_line(order, rows)


def test_a_pass_before_its_input_is_refused() -> None:
    order = Order("ahead", 2, 2, 1, (2, 1))
    rows = launching.in_line(order)
    rows[1].remove(Post(False, StageTransfer(0, 1, Pass(True, 0, 0))))
    with pytest.raises(PlanError, match="would wait for ever"):
        check_line(order, rows)


def test_too_few_passes_for_virtual_stages_are_refused() -> None:
    check_launches(Order("ahead", 2, 4, 2, (5, 3)))
    with pytest.raises(PlanError, match=r"plan.schedule: with in_flight \[2, 2\].*hold more passes in flight"):
        check_launches(Order("ahead", 2, 4, 2, (2, 2)))
