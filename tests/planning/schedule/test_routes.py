"""Orders of layouts with per-stage TP/DP, in which each micro-batch is assigned to one replica of every stage."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.graph import Durations
from holmes_hpc.planning.schedule.kinds import COMPUTING, Pass, StageTransfer
from holmes_hpc.planning.schedule.launches import Post, check_launches, gloo_launches, nccl_launches
from holmes_hpc.planning.schedule.order import Order, least_in_flight, limited_in_flight
from holmes_hpc.planning.schedule.simulation import RowDurations, TimedPass, row_end_times, step_seconds


def round_robin(replicas: tuple[int, ...], micro_batches: int, in_flight: tuple[int, ...] = ()) -> Order:
    return Order.per_stage(
        tuple(tuple(k % dp for k in range(micro_batches)) for dp in replicas), in_flight or least_in_flight(replicas)
    )


REPLICAS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60)
@given(REPLICAS, st.integers(5, 30), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_the_least_depth_and_larger_ones_do_not_deadlock(
    replicas: tuple[int, ...], count: int, extra: list[int]
) -> None:
    check_launches(round_robin(replicas, count, least_in_flight(replicas, tuple(extra))))


@settings(max_examples=60)
@given(REPLICAS, st.integers(5, 30), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_depths_within_those_of_the_stage_above_do_not_deadlock(
    replicas: tuple[int, ...], count: int, more: list[int]
) -> None:
    micro_batches = [-(-count // dp) for dp in replicas]
    fewest = [*map(min, least_in_flight(replicas), micro_batches)]
    wanted = [min(sum(pair), most) for *pair, most in zip(fewest, more, micro_batches, strict=False)]
    limited = limited_in_flight(wanted, replicas, micro_batches)
    check_launches(round_robin(replicas, count, tuple(limited)))
    assert all(few <= depth <= want for few, depth, want in zip(fewest, limited, wanted, strict=True))


def test_too_little_in_flight_is_refused() -> None:
    with pytest.raises(PlanError, match=r"with in_flight \[2, 2\] stage \d would wait forever for micro-batch"):
        check_launches(round_robin((1, 2), 6, (2, 2)))
    durations = RowDurations([1, 1], [2, 2], [0, 0], [0, 0], [(0.5, 0)], [(0.5, 0)], [0, 1, 1], [0])
    assert inf in row_end_times(round_robin((1, 2), 6, (2, 2)), durations)
    assert inf not in row_end_times(round_robin((1, 2), 6, (5, 2)), durations)


@settings(max_examples=40)
@given(REPLICAS, st.integers(5, 30), st.floats(0.2, 2.0))
def test_a_simulation_ends_early_only_if_the_step_is_too_long(
    replicas: tuple[int, ...], count: int, share: float
) -> None:
    order, stages = round_robin(replicas, count), len(replicas)
    edges = [(0.5, 0.1)] * (stages - 1)
    durations = RowDurations(
        *([1.0] * stages, [2.0] * stages, [0.3] * stages, [0.0] * stages, edges, edges), range(order.rows), [0] * stages
    )
    ends = row_end_times(order, durations)
    assert row_end_times(order, durations, max_s=1.001 * max(ends)) == ends
    assert row_end_times(order, durations, max_s=share * max(ends)) in ([inf] * order.rows, ends)
    assert row_end_times(order, durations, max_s=2.9) == [inf] * order.rows  # a micro-batch takes 3 s


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 9), st.integers(0, 3))
def test_equal_stages_launch_the_same_as_a_grid(dp: int, stages: int, each: int, extra: int) -> None:
    depth = tuple((1 + extra) * (stages - s) for s in range(stages))
    grid, per_stage = Order("ahead", stages, each, 1, depth), round_robin((dp,) * stages, dp * each, depth)
    for launches_of in (gloo_launches, nccl_launches):
        expected, rows = launches_of(grid), launches_of(per_stage)
        for stage in range(stages):
            for replica in range(dp):
                row = rows[per_stage.row(stage, replica)]
                assert [_in_grid(launch, dp, per_stage) for launch in row if isinstance(launch, Pass)] == [
                    launch for launch in expected[stage] if isinstance(launch, Pass)
                ]
                if launches_of is gloo_launches:
                    assert [_in_grid(launch, dp, per_stage) for launch in row] == expected[stage]


@given(st.integers(1, 4), st.integers(4, 12), st.integers(0, 3), st.integers(1, 4), st.floats(0.0, 0.6))
def test_weight_passes_of_equal_rows_take_as_long_as_in_a_grid(
    stages: int, count: int, lag: int, final: int, transfer: float
) -> None:
    in_flight = tuple(3 * (stages - s) for s in range(stages))
    weights: dict[str, Any] = {"deferred": (lag,) * stages, "final": (final,) * stages}
    grid = Order("zero_bubble", stages, count, in_flight=in_flight, **weights)
    rows = Order.per_stage(((0,) * count,) * stages, in_flight, "zero_bubble", **weights)
    ones, edges = np.ones((1, stages, 1)), np.full((1, stages), transfer)
    d = Durations(ones, ones, edges, edges, edges, 0 * ones, 0 * ones, 0 * ones, weight=0.7 * ones)
    each, links = [1.0] * stages, [(transfer, 0.0)] * (stages - 1)
    zeros, nodes, wires = [0.0] * stages, range(stages), [0] * (stages - 1)
    row_times = RowDurations(each, each, zeros, zeros, links, links, nodes, wires, weight=[0.7] * stages)
    passes = list[TimedPass]()
    ends = row_end_times(rows, row_times, passes)
    assert max(ends) == pytest.approx(float(step_seconds(grid, d)[0]))
    kinds = Counter((p.row, p.kind) for p in passes)
    assert kinds == {(row, kind): count for row in range(stages) for kind in COMPUTING}


def _in_grid(launch: Pass | Post, dp: int, order: Order) -> Pass | Post:
    if isinstance(launch, Pass):
        return launch._replace(micro_batch=launch.micro_batch // dp)
    t = launch.transfer
    source_pass = t.source_pass._replace(micro_batch=t.source_pass.micro_batch // dp)
    source, target = order.stage_of(t.source), order.stage_of(t.target)
    return Post(launch.sends, StageTransfer(source, target, source_pass))


def test_every_stage_computes_and_sends_every_micro_batch_once() -> None:
    order = round_robin((3, 2, 4), 17)
    for stage in range(3):
        rows = (order.row(stage, replica) for replica in range(order.replicas[stage]))
        assert sorted(m for row in rows for m in order.micro_batches_of(row)) == list(range(17))
    posts = [launch for row in gloo_launches(order) for launch in row if isinstance(launch, Post)]
    sent, received = ([p.transfer for p in posts if p.sends is sends] for sends in (True, False))
    assert len(sent) == len(set(sent)) == 2 * 2 * 17 and set(sent) == set(received)
