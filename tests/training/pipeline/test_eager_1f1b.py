"""Eager 1F1B: its order, its bounds, and results equal to Megatron-Core's bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from pipelines import Case, play_apart

from holmes_hpc.planning.schedule.kinds import SCHEDULES, in_flight
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.training.pipeline import eager_1f1b

BACKGROUND = [kind for kind in SCHEDULES.values() if not kind.megatron]
STEPS = 6
PIPELINES = [(2, True), (3, False), (4, True), (6, False)]  # stages, and whether their layers are even


def deep_in_flight(stages: int) -> list[int]:
    """Return two more micro-batches in flight per transfer than 1F1B has."""
    return [3 * (stages - s) - 2 for s in range(stages)]


def micro_batches_of(stages: int, even: bool) -> list[int]:
    """Return each step's micro-batches: one, fewer than stages, as many, and more than the first stage holds."""
    counts = [1, stages - 1, stages, deep_in_flight(stages)[0] + 2, 1, 2]
    return counts if even else counts[::-1]


def are_equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return all(x["losses"] == y["losses"] and x["gradients"] == y["gradients"] for x, y in zip(a, b, strict=True))


def max_in_flight(result: dict[str, Any], step: int) -> int:
    return max(event[-1] for event in result["events"][step])


# ---- the order


def timeline(order: Order, waits: bool, transfer: int = 1, slots: int = 20) -> list[str]:
    """Return a timeline of each stage, one character per slot.
    A forward pass takes one slot, a backward pass two, a stage transfer `transfer`; `waits`: for its sends."""
    ends: dict[Any, int] = {}
    rows = [["."] * 200 for _ in range(order.stages)]
    clock, queues = [0] * order.stages, [list(order.passes(s)) for s in range(order.stages)]
    while any(queues):
        for s, queue in enumerate(queues):
            needed = order.transfer_to(s, queue[0]) if queue else None
            if not queue or (needed is not None and (needed.source, needed.source_pass) not in ends):
                continue
            step = queue.pop(0)
            start = max(clock[s], ends[needed.source, needed.source_pass] + transfer if needed else 0)
            end = start + (1 if step.forward else 2)
            rows[s][start:end] = [("01234567" if step.forward else "abcdefgh")[step.micro_batch]] * (end - start)
            ends[s, step] = end
            clock[s] = end + (transfer if waits and order.transfer_from(s, step) else 0)
    return ["".join(row)[:slots] for row in rows]


def test_the_docstrings_timeline_is_the_schedules() -> None:
    assert eager_1f1b.__doc__ is not None
    rows = [
        line.split()[-1] for line in eager_1f1b.__doc__.splitlines() if line.startswith("    ") and " stage " in line
    ]
    assert rows[2:] == timeline(Order("ahead", 2, 8, 1, (3, 1)), waits=False)
    assert rows[:2] == timeline(Order("ahead", 2, 8, 1, (2, 1)), waits=True)


# ---- real processes


@pytest.fixture(scope="module")
def long_runs() -> Iterator[dict[Any, Any]]:
    """Return runs of Megatron's 1F1B and of eager 1F1B, even and uneven; with dropout the order of draws matters."""
    cases = {}
    for stages, even in PIPELINES:
        layers = [[1]] * stages if even else [[2 if s in (1, 4) else 1] for s in range(stages)]
        common: dict[str, Any] = {"layers": layers, "micro_batches": micro_batches_of(stages, even), "dropout": 0.1}
        cases[stages, even, "megatron"] = Case(schedule="megatron", steps=STEPS, **common)
        cases[stages, even, "eager"] = Case(schedule="ahead", in_flight=deep_in_flight(stages), steps=STEPS, **common)
        cases[stages, even, "edges"] = Case(schedule="edges", steps=4, **common)
    yield dict(zip(cases, play_apart(list(cases.values())), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize(("stages", "even"), PIPELINES)
def test_losses_and_gradients_equal_megatrons(long_runs: dict[Any, Any], stages: int, even: bool) -> None:
    megatron, eager = long_runs[stages, even, "megatron"], long_runs[stages, even, "eager"]
    assert are_equal(megatron, eager)
    assert all(rank["group_sizes"] == [2] for rank in eager)
    losses = megatron[-1]["losses"]
    assert len(losses) == STEPS and len({tuple(x) for x in losses}) == STEPS  # it trained: all steps differ
    for stage, step in itertools.product(range(stages), range(STEPS)):
        micro_batches = micro_batches_of(stages, even)[step]
        computed = [e[:3] for e in eager[stage]["events"][step] if e[0] in ("forward", "backward")]
        assert len(computed) == 2 * micro_batches
        assert max_in_flight(eager[stage], step) == min(deep_in_flight(stages)[stage], micro_batches)
        if stage < stages - 1 and micro_batches > stages - stage:
            assert max_in_flight(eager[stage], step) > stages - stage  # 1F1B's


@pytest.mark.integration
@pytest.mark.parametrize(("stages", "even"), PIPELINES)
def test_megatrons_own_schedule_over_edges_is_unchanged(long_runs: dict[Any, Any], stages: int, even: bool) -> None:
    megatron, edges = long_runs[stages, even, "megatron"], long_runs[stages, even, "edges"]
    for a, b in zip(megatron, edges, strict=True):
        count = len(b["losses"])
        assert count >= 3 and b["losses"] == a["losses"][:count] and b["gradients"] == a["gradients"][:count]
        assert b["group_sizes"] == [2]  # never over WORLD or the pipeline's group


VARIANTS = {
    "data parallel": {"dp": 2},
    "tensor parallel": {"tp": 2},
    "loss per token": {"per_token": True},
    "outputs kept": {"deallocate": False},
    "validation": {"forward_only": True},
    "striped": {"stripes": 3},
    "through a host buffer": {"staged": True},  # as with gloo on GPUs, here from host to host
}


def variant_cases() -> dict[tuple[str, str], Case]:
    cases = {}
    for name, options in VARIANTS.items():
        common: dict[str, Any] = {"layers": [[1], [2]], "micro_batches": [5, 1], "steps": 2, "dropout": 0.1, **options}
        cases[name, "megatron"] = Case(schedule="megatron", **common)
        cases[name, "edges"] = Case(schedule="edges", **common)
        for kind in BACKGROUND:
            if kind.supports(1):
                cases[name, kind.name] = Case(schedule=kind.name, in_flight=list(kind.in_flight(2, 5, 1)), **common)
        cases[name, "deeper"] = Case(schedule="ahead", in_flight=[4, 1], **common)
        cases[name, "starved"] = Case(schedule="ahead", in_flight=[1, 1], **common)
        cases[name, "as on a GPU"] = Case(schedule="ahead", in_flight=[4, 1], as_on_gpu=True, **common)
        cases[name, "zero bubble as on a GPU"] = Case(
            schedule="zero_bubble", in_flight=[4, 1], deferred=[1, 0], final=[1, 1], as_on_gpu=True, **common
        )
        cases[name, "1f1b as on a GPU"] = Case(schedule="edges", as_on_gpu=True, **common)
    for stages, chunks, dp in ((2, 2, 2), (2, 3, 1), (3, 2, 1)):
        depths_1f1b = list(in_flight(stages, 2 * stages, chunks))
        common = {"layers": [[1] * chunks] * stages, "micro_batches": [stages, 2 * stages], "steps": 2, "dp": dp}
        name = f"{stages} stages of {chunks} chunks, {dp} replicas"
        # Over gloo, Megatron's schedule needs overlap: without it two stages mix up activations and gradients.
        # It must not deallocate outputs: its background sends would read freed memory.
        cases[name, "megatron"] = Case(schedule="megatron", overlap=True, deallocate=False, **common)
        cases[name, "edges"] = Case(schedule="edges", **common)
        cases[name, "overlapped"] = Case(schedule="edges", overlap=True, **common)
        for kind in BACKGROUND:
            if kind.supports(chunks):
                depths = list(kind.in_flight(stages, 2 * stages, chunks))
                cases[name, kind.name] = Case(schedule=kind.name, in_flight=depths, **common)
        cases[name, "as on a GPU"] = Case(schedule="ahead", in_flight=depths_1f1b, as_on_gpu=True, **common)
        cases[name, "interleaved as on a GPU"] = Case(schedule="edges", overlap=True, as_on_gpu=True, **common)
        cases[name, "deeper"] = Case(
            schedule="ahead", in_flight=[n + stages - 1 - s for s, n in enumerate(depths_1f1b)], **common
        )
    return cases


@pytest.mark.integration
@pytest.mark.thorough
def test_every_variant_equals_megatrons() -> None:
    cases = variant_cases()
    variants = dict(zip(cases, play_apart(list(cases.values()), timeout_s=300), strict=True))
    different = [key for key, ranks in variants.items() if not are_equal(variants[key[0], "megatron"], ranks)]
    assert not different
    assert all(rank["losses"][0] for (name, _), ranks in variants.items() for rank in ranks[-1:])
    for (name, kind), case in cases.items():
        ranks = variants[name, kind]
        if kind != "megatron":
            assert all(rank["group_sizes"] == [2] for rank in ranks), (name, kind)
        if kind == "deeper" and not case.forward_only:
            megatrons = in_flight(len(case.layers), max(case.micro_batches), len(case.layers[0]))[0]
            assert max(max_in_flight(ranks[0], step) for step in range(case.steps)) > megatrons, name


SHAPES = ((2, 1), (3, 1), (4, 1), (2, 2), (2, 1), (3, 1), (4, 1), (2, 2), (3, 1), (8, 1))  # stages, chunks of each
RUNS = 30  # every shape with every number of micro-batches
PACE_S = 0.002  # emulated forward pass of a layer; its backward pass takes twice as long


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "runs"), [("ahead", RUNS), pytest.param("zero_bubble", 100, marks=pytest.mark.thorough)]
)
def test_no_deadlock_and_no_difference_with_random_delays(kind: str, runs: int) -> None:
    """Every run equals Megatron's, though each transfer takes up to three stage times and each stage has its own depth.
    A stage's time is 6 ms of emulated compute per layer and some 2 ms more: three stage times are four emulated."""
    delayed: list[Case] = []
    undelayed: dict[tuple[int, int, int], Case] = {}
    for number in range(runs):
        stages, chunks = SHAPES[number % 10]
        lags: dict[str, Any] = {}
        if SCHEDULES[kind].splits:
            chunks = 1
            lags = {"deferred": tuple((number + s) % 3 for s in range(stages)), "final": (1 + number % 3,) * stages}
        depths = (
            [1 + (number + stages - s) % 4 + stages - s for s in range(stages)]
            if chunks == 1
            else [2 * (stages - s) + 2 for s in range(stages)]
        )
        micro_batches = (2, 4, 6)[number % 3] if chunks > 1 else (1, 3, 5)[number % 3]
        common: dict[str, Any] = {"layers": [[1] * chunks] * stages, "micro_batches": [micro_batches]}
        delayed.append(
            Case(schedule=kind, in_flight=depths, pace_s=PACE_S, delay_s=4 * 3 * PACE_S * chunks, **common, **lags)
        )
        undelayed.setdefault(
            (stages, chunks, micro_batches),
            Case(schedule="megatron", overlap=chunks > 1, deallocate=chunks == 1, **common),
        )
    results = play_apart(delayed + list(undelayed.values()))
    megatron = dict(zip(undelayed, results[runs:], strict=True))
    deeper, transfers = 0, []  # transfers: in emulated stage times
    for case, ranks in zip(delayed, results[:runs], strict=True):
        stages, chunks, micro_batches = len(case.layers), len(case.layers[0]), case.micro_batches[0]
        assert are_equal(megatron[stages, chunks, micro_batches], ranks), case
        assert all(rank["group_sizes"] == [2] for rank in ranks)
        lags = {"deferred": case.deferred, "final": case.final}
        order = Order(kind, stages, micro_batches, chunks, tuple(case.in_flight or ()), **lags)
        assert [max_in_flight(rank, 0) for rank in ranks] == [order.depths[s] for s in range(stages)], case
        deeper += order.depths[0] > in_flight(stages, micro_batches, chunks)[0]
        transfers += [
            (end - start) / (3 * PACE_S * chunks)
            for rank in ranks
            for kind, _, _, start, end, _ in rank["events"][0]
            if kind == "send_forward"
        ]
    assert deeper > 0.4 * runs  # than Megatron's schedules
    assert len(transfers) > 5 * runs and max(transfers) > 3  # the delays took effect
