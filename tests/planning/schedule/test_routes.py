"""Micro-batches that go their own ways through stages of unequal numbers of replicas."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import Pass
from holmes_hpc.planning.schedule.launches import Post, check_launches, in_line, windowed
from holmes_hpc.planning.schedule.order import Order, least_in_flight
from holmes_hpc.planning.schedule.simulation import RowDurations, ends


def in_turn(replicas: tuple[int, ...], micro_batches: int, in_flight: tuple[int, ...] = ()) -> Order:
    return Order.routed(
        tuple(tuple(k % dp for k in range(micro_batches)) for dp in replicas), in_flight or least_in_flight(replicas)
    )


REPLICAS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60)
@given(REPLICAS, st.integers(5, 30), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_the_least_depth_and_deeper_ones_do_not_lock_up(replicas: tuple[int, ...], count: int, more: list[int]) -> None:
    check_launches(in_turn(replicas, count, least_in_flight(replicas, tuple(more))))


def test_too_little_in_flight_is_refused() -> None:
    with pytest.raises(PlanError, match=r"with in_flight \[2, 2\] stage \d would wait for ever for micro-batch"):
        check_launches(in_turn((1, 2), 6, (2, 2)))
    takes = RowDurations([1, 1], [2, 2], [0, 0], [0, 0], [(0.5, 0)], [(0.5, 0)], [0, 1, 1], [0])
    assert inf in ends(in_turn((1, 2), 6, (2, 2)), takes) and inf not in ends(in_turn((1, 2), 6, (5, 2)), takes)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 9), st.integers(0, 3))
def test_equal_widths_launch_what_a_grid_does(dp: int, stages: int, each: int, more: int) -> None:
    depth = tuple((1 + more) * (stages - s) for s in range(stages))
    grid, routed = Order("ahead", stages, each, 1, depth), in_turn((dp,) * stages, dp * each, depth)
    for of in (windowed, in_line):
        expected, found = of(grid), of(routed)
        for stage in range(stages):
            for replica in range(dp):
                row = found[routed.row(stage, replica)]
                assert [_in_grid(launch, dp, routed) for launch in row if isinstance(launch, Pass)] == [
                    launch for launch in expected[stage] if isinstance(launch, Pass)
                ]
                if of is windowed:
                    assert [_in_grid(launch, dp, routed) for launch in row] == expected[stage]


def _in_grid(launch: Pass | Post, dp: int, order: Order) -> Pass | Post:
    if isinstance(launch, Pass):
        return launch._replace(micro_batch=launch.micro_batch // dp)
    t = launch.transfer
    made = t.made._replace(micro_batch=t.made.micro_batch // dp)
    return Post(launch.sends, t._replace(source=order.stage_of(t.source), target=order.stage_of(t.target), made=made))


def test_every_micro_batch_is_computed_once_a_stage_and_handed_on_once() -> None:
    order = in_turn((3, 2, 4), 17)
    for stage in range(3):
        own = [m for replica in range(order.replicas[stage]) for m in order.own(order.row(stage, replica))]
        assert sorted(own) == list(range(17))
    posts = [launch for row in windowed(order) for launch in row if isinstance(launch, Post)]
    sent, received = ([p.transfer for p in posts if p.sends is way] for way in (True, False))
    assert len(sent) == len(set(sent)) == 2 * 2 * 17 and set(sent) == set(received)
