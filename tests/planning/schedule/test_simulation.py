"""The order of passes of each schedule, and its simulated time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import every_pass

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.graph import Durations, NodeNumbers, graph
from holmes_hpc.planning.schedule.kinds import SCHEDULES, Exchange, in_flight
from holmes_hpc.planning.schedule.megatron_programs import program
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.planning.schedule.simulation import ACCURATE, early_step_seconds, least_seconds, rounds, step_seconds


def durations(
    stages: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0
) -> Durations:
    """Return durations of equal stages: the chunks of a stage together take forward + backward."""
    shape = (1, stages, chunks)
    transfers = np.full((1, stages), transfer)
    zeros = np.zeros(shape)
    return Durations(
        np.full(shape, forward / chunks),
        np.full(shape, backward / chunks),
        transfers,
        transfers,
        transfers,
        zeros,
        zeros,
        zeros,
    )


def seconds(order: Order, d: Durations) -> float:
    return float(step_seconds(order, d)[0])


def eager(stages: int, micro_batches: int, extra: int = 0) -> Order:
    """Return an order of eager 1F1B: each stage holds one micro-batch and `extra` more than the stage below."""
    return Order(
        "ahead", stages, micro_batches, in_flight=tuple((1 + extra) * (stages - s - 1) + 1 for s in range(stages))
    )


@given(st.integers(1, 8), st.integers(1, 24))
def test_equal_stages_without_stage_transfers_have_the_known_bubble(stages: int, micro_batches: int) -> None:
    """(m + p - 1) times a stage's time: Narayanan et al. 2021, section 2.2."""
    for order in (Order("1f1b", stages, micro_batches), eager(stages, micro_batches)):
        assert seconds(order, durations(stages)) == pytest.approx(3 * (micro_batches + stages - 1))


@pytest.mark.integration
@given(st.integers(2, 6), st.integers(1, 5), st.integers(2, 4))
def test_virtual_stages_divide_the_bubble(stages: int, groups: int, chunks: int) -> None:
    """(m + (p - 1) / v) times a stage's time: Narayanan et al. 2021, section 2.2."""
    m = stages * groups
    for kind in ("interleaved", "ahead"):
        order = Order(kind, stages, m, chunks, in_flight(stages, m, chunks))
        assert seconds(order, durations(stages, chunks)) == pytest.approx(3 * (m + (stages - 1) / chunks))


def test_two_stages_under_1f1b_wait_for_one_transfer_per_micro_batch() -> None:
    """Both stages exchange once per micro-batch in both directions at once: throughput is 1 / (1 + transfer ratio)."""
    m, transfer = 32, 0.23 * 3
    slow = seconds(Order("1f1b", 2, m), durations(2, transfer=transfer))
    assert slow == pytest.approx(3 * (m + 1) + transfer * (m + 1))


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_unpaired_exchanges_cost_both_directions(stages: int) -> None:
    """Each further micro-batch costs a stage the transfers of all its edges, one after the other. Inner stages have
    two edges. Paired exchanges transfer both directions at once."""
    transfer, edges = 0.3, min(2, stages - 1)
    d = durations(stages, transfer=transfer)

    def further(paired: bool) -> float:
        few, many = (seconds(Order("1f1b", stages, m, paired=paired), d) for m in (20, 40))
        return (many - few) / 20

    assert further(paired=True) == pytest.approx(3 + edges * transfer)
    assert further(paired=False) == pytest.approx(3 + 2 * edges * transfer)


def test_eager_1f1b_hides_the_stage_transfer() -> None:
    m, transfer = 32, 0.45 * 3
    fill_and_drain = 3 * (m + 1) + 2 * transfer
    assert seconds(eager(2, m, extra=1), durations(2, transfer=transfer)) == pytest.approx(fill_and_drain)


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 3), st.randoms(use_true_random=False))
def test_eager_1f1b_is_never_slower_than_1f1b(stages: int, micro_batches: int, extra: int, random) -> None:  # type: ignore[no-untyped-def]
    d = durations(stages)
    draw = lambda shape: np.array([random.uniform(0.1, 2) for _ in range(int(np.prod(shape)))]).reshape(shape)  # noqa: E731
    d = replace(d, forward=draw(d.forward.shape), backward=draw(d.backward.shape), down=draw(d.down.shape))
    d = replace(d, up=draw(d.up.shape))
    d = replace(d, last_up=d.up)
    assert seconds(eager(stages, micro_batches, extra), d) <= seconds(Order("1f1b", stages, micro_batches), d) + 1e-9


@st.composite
def orders(draw: st.DrawFn) -> Order:
    stages = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    m = stages * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 12))
    kind = draw(st.sampled_from(("1f1b", "ahead", "zero_bubble") if chunks == 1 else ("interleaved", "ahead")))
    extra = [draw(st.integers(0, 2)) for _ in range(stages)]
    depths = tuple(min(m * chunks, b + sum(extra[s:])) for s, b in enumerate(in_flight(stages, m, chunks)))
    deferred, final = (tuple(draw(st.integers(n, 14)) for _ in range(stages * (kind == "zero_bubble"))) for n in (0, 1))
    return Order(kind, stages, m, chunks, () if SCHEDULES[kind].megatron else depths, deferred=deferred, final=final)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Order, Durations]:
    order = draw(orders())
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    s, c = order.stages, order.chunks
    shapes = {"down": (1, s), "up": (1, s), "last_up": (1, s)}
    drawn = {name: random.random(shapes.get(name, (1, s, c))) for name in Durations.__dataclass_fields__}
    if not order.schedule.splits:
        del drawn["weight"]
    slow = draw(st.sampled_from((1.0, 30.0)))  # transfers shorter and longer than compute
    drawn |= {name: slow * drawn[name] for name in shapes}
    return order, Durations(**{**drawn, "last_up": drawn["up"] + drawn["last_up"]})


@given(orders())
def test_every_stage_computes_every_pass_once_in_megatrons_order(order: Order) -> None:
    for stage in range(order.stages):
        passes = order.passes(stage)
        assert sorted(passes) == every_pass(order)
        for forward in (True, False):  # micro-batches of a chunk in order, so that gradients sum up in the same order
            for chunk in range(order.chunks):
                turns = [p.micro_batch for p in passes if p.forward is forward and p.chunk == chunk]
                assert turns == sorted(turns)


@given(orders())
def test_no_stage_holds_more_than_its_depth(order: Order) -> None:
    for stage in range(order.stages):
        in_flight_now = np.cumsum([1 if p.forward else -1 for p in order.passes(stage)])
        assert in_flight_now.max() <= order.depths[stage] and in_flight_now.min() >= 0


@given(orders())
def test_every_sent_transfer_is_received(order: Order) -> None:
    if not order.schedule.megatron:
        return
    sent, received = [], []
    for stage in range(order.stages):
        for item in program(order, stage):
            if isinstance(item, Exchange):
                sent += item.sends
                received += item.receives
                assert all(t.source == stage for t in item.sends) and all(t.target == stage for t in item.receives)
    assert len(sent) == len(set(sent)) and sorted(sent) == sorted(received)


@settings(deadline=None)
@given(cases())
def test_no_pass_or_transfer_starts_before_its_input(case: tuple[Order, Durations]) -> None:
    order, d = case
    try:
        dependencies = graph(order)
    except PlanError:
        return
    numbers, table = NodeNumbers(order), d.table()
    ends = np.empty(numbers.count)
    starts = np.empty(numbers.count)
    sorted_ends = dependencies.end_times(table)[0]
    ends[dependencies.node] = sorted_ends
    starts[dependencies.node] = sorted_ends - table[0, dependencies.column]
    for stage in range(order.stages):
        last = 0.0
        for p in order.passes(stage):
            node = numbers.node(stage, p)
            assert starts[node] >= last - 1e-9
            last = ends[node]
            into, out = order.transfer_to(stage, p), order.transfer_from(stage, p)
            if into is not None:
                assert starts[node] >= ends[numbers.transfer(into)] - 1e-9
            if out is not None:
                assert starts[numbers.transfer(out)] >= ends[node] - 1e-9


@settings(deadline=None)
@given(cases(), st.integers(0, 2**12))
def test_bound_is_below_the_simulation(case: tuple[Order, Durations], nics: int) -> None:
    order, d = case
    shared = tuple(bool(nics >> s & 1) for s in range(order.stages))
    try:
        simulated = step_seconds(order, d, shared)[0]
    except PlanError:
        return
    assert least_seconds(order, d, shared)[0] <= simulated + 1e-9


@pytest.mark.integration
@settings(deadline=None, max_examples=10)
@given(
    st.sampled_from((2, 3, 5, 8)),
    st.sampled_from((0.05, 0.3, 0.9)),
    st.sampled_from((0.0, 0.01, 0.05, 0.5)),
    st.integers(0, 1000),
)
def test_extrapolation_from_the_period_is_accurate(stages: int, transfer: float, spread: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    passes = 2000
    m = 2 * passes // stages
    d = durations(stages, transfer=transfer)
    uneven = 1 + spread * random.random(d.forward.shape)
    d = replace(d, forward=d.forward * uneven, backward=d.backward * uneven)
    for order in (Order("1f1b", stages, m), eager(stages, m, extra=int(random.integers(0, 3)))):
        first, period = rounds(order, passes)
        assert first + period < m  # otherwise nothing is extrapolated
        simulated = graph(order).end_times(d.table()).max()
        assert step_seconds(order, d, passes=passes)[0] == pytest.approx(simulated, rel=1e-2)


def test_deferred_weight_passes_fill_the_bubble() -> None:
    """Of equal stages, only the forward passes that fill the pipeline remain of the bubble."""
    d, m = durations(3), 12
    split = replace(d, backward=d.backward / 2, weight=d.backward / 2)
    order = Order("zero_bubble", 3, m, in_flight=(6, 4, 1), deferred=(2, 3, 6))
    assert seconds(eager(3, m, extra=2), d) == pytest.approx(3 * (m + 2))
    assert seconds(order, split) == pytest.approx(3 * m + 2)


def test_early_steps_fill_the_rest_of_the_bubble() -> None:
    """The first stage starts the next step while the others end their weight passes. Without these it ends last."""
    d, m = durations(3), 12
    split = replace(d, backward=d.backward / 2, weight=d.backward / 2)
    order = Order("zero_bubble", 3, m, in_flight=(6, 4, 1), deferred=(2, 3, 6), final=(1, 4, 6))

    def early(order: Order, d: Durations, update: float = 0.0, tied: float = 0.0, posted: bool = False) -> float:
        return float(early_step_seconds([(order, d, ())], np.full((1, 3), update), tied, ACCURATE, posted)[0])

    assert early(order, split) == pytest.approx(3 * m)
    assert early(order, split, update=0.5) == pytest.approx(3 * m + 0.5)
    assert early(order, split, tied=1) == pytest.approx(seconds(order, split) + 1)
    assert early(eager(3, m, extra=2), d) == pytest.approx(3 * (m + 2))
    short, d = replace(order, micro_batches=6), durations(3, transfer=0.5)
    sent = replace(d, backward=d.backward / 2, weight=d.backward / 2)
    assert early(short, sent, posted=True) == pytest.approx(early(short, sent) - 0.5)  # arrives before its stage starts
    long = replace(order, micro_batches=3000)
    assert early(long, split) == pytest.approx(3 * 3000, rel=1e-3)


def test_one_nic_for_both_directions_is_slower() -> None:
    """The middle of three stages sends up and down: with transfers as long as compute, its NIC is the bottleneck."""
    order, d = eager(3, 24, extra=3), durations(3, transfer=3.0)
    two_nics = float(step_seconds(order, d)[0])
    shared = float(step_seconds(order, d, (False, True, False))[0])
    assert shared > 1.5 * two_nics


def test_gradients_are_reduced_after_the_last_backward_pass() -> None:
    order, d = Order("1f1b", 2, 4), durations(2)
    reduced = replace(d, tail=d.tail + np.array([[[5.0], [1.0]]]))
    assert seconds(order, reduced) == pytest.approx(seconds(order, d) + 5)


def test_a_gather_delays_the_first_pass() -> None:
    order, d = Order("1f1b", 2, 4), durations(2)
    late = replace(d, ready=d.ready + np.array([[[0.5], [0.25]]]))
    assert seconds(order, late) == pytest.approx(seconds(order, d) + 0.75)


def test_depths_that_deadlock_are_refused() -> None:
    with pytest.raises(PlanError, match="wait for each other"):
        graph(Order("ahead", 3, 6, 2, (2, 2, 2)))


def test_virtual_stages_need_groups() -> None:
    with pytest.raises(PlanError, match="no multiple of PP, 3"):
        Order("interleaved", 3, 4, 2)
