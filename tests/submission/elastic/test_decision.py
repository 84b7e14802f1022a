"""The coordinator's decision: what is present decides, whatever happened before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holmes_hpc.submission.elastic.decision import GRACE_S, JOIN_S, Beat, Decision, Placement, State
from holmes_hpc.submission.elastic.decision import decide as decide_at
from holmes_hpc.submission.executor.environment import ComponentRanks

PLACEMENT = Placement(
    (ComponentRanks(("ib1", "ib2"), 0, 2), ComponentRanks(("roce1",), 4, 2)), (("ib3", "ib4"), ("roce2",))
)
RANKS = {"ib1": (0, 1), "ib2": (2, 3), "roce1": (4, 5)}
NODES = ("ib1", "ib2", "ib3", "ib4", "roce1", "roce2")
NOW = 1000.0
WAIT = Decision()


def decide(state: State) -> Decision:
    return decide_at(state, NOW)


def state(start: int = 1, running: int = 2, **changes: Any) -> State:
    """Return the state of a run whose ranks train."""
    beats = {node: Beat(node, start, running if node in RANKS else 0) for node in NODES}
    return replace(State(PLACEMENT, 3.0, silent(), start, True, beats), **changes)


def silent(*nodes: str, seconds: float = 3.1) -> dict[str, float]:
    """Return when each node was heard, if `nodes` have been silent for `seconds`."""
    return {node: NOW - (seconds if node in nodes else 0.1) for node in NODES}


def ended(code_of_rank_3: int = 0, nodes: tuple[str, ...] = tuple(RANKS)) -> dict[str, Beat]:
    codes = {node: {rank: code_of_rank_3 if rank == 3 else 0 for rank in RANKS[node]} for node in nodes}
    return {node: Beat(node, 1, 0, codes.get(node, {})) for node in NODES}


def test_a_run_that_trains_goes_on() -> None:
    assert decide(state()) == WAIT
    assert decide(state(heard_at=silent("ib2", seconds=2.9))) == WAIT
    assert decide(state(heard_at=silent("ib3", "roce2"))) == WAIT  # spare nodes


@pytest.mark.parametrize("cause", [{"heard_at": silent("ib2")}, {"left": {"ib2"}}])
def test_a_spare_of_its_component_takes_the_place_of_a_lost_node(cause: dict[str, Any]) -> None:
    decision = decide(state(**cause))
    assert decision.lost == ("ib2",) and decision.placement is not None and decision.code is None
    assert decision.placement.nodes == ["ib1", "ib3", "roce1"]
    assert decision.placement.spares == (("ib4",), ("roce2",))
    assert [*decision.placement.ranks_on("ib3")] == [2, 3] and not decision.placement.ranks_on("ib2")


def test_spares_that_are_lost_or_not_ready_take_no_place() -> None:
    beats = {node: Beat(node, 1) for node in NODES if node != "ib3"}
    without_ib3 = state(beats=beats, heard_at=silent("ib2"))
    assert decide(without_ib3) == Decision(("ib2",), PLACEMENT.without(["ib2"], ["ib4"]))
    assert decide(replace(without_ib3, heard_at=silent("ib2", "ib4"))) == Decision(("ib2",), code=1)


def test_two_losses_at_once_take_two_spares() -> None:
    decision = decide(state(heard_at=silent("ib1", "roce1")))
    assert decision.placement is not None and decision.placement.nodes == ["ib3", "ib2", "roce2"]
    assert decide(state(heard_at=silent("ib1", "ib2", "ib3"))) == Decision(("ib1", "ib2"), code=1)


def test_ranks_start_when_all_nodes_are_there_and_no_old_rank_runs() -> None:
    waiting = state(start=2, running=0, is_started=False)
    assert decide(waiting) == Decision(is_go=True)
    for beat in (Beat("ib1", 1, 2), Beat("ib1", 2, 1)):
        assert decide(replace(waiting, beats={**waiting.beats, "ib1": beat})) == WAIT
    missing = {node: beat for node, beat in waiting.beats.items() if node != "ib2"}
    assert decide(replace(waiting, beats=missing, heard_at=silent("ib2", seconds=60))) == WAIT
    late = decide(replace(waiting, beats=missing, heard_at=silent("ib2", seconds=JOIN_S + 1)))
    assert late.placement is not None and late.placement.nodes == ["ib1", "ib3", "roce1"]


def test_the_run_ends_with_its_ranks() -> None:
    assert decide(state(beats=ended(nodes=("ib1", "ib2")))) == WAIT
    assert decide(state(beats=ended())) == Decision(code=0)
    assert decide(state(beats=ended(-9))) == Decision(code=9)


def test_a_failed_rank_ends_the_run_unless_its_node_turns_out_to_be_lost() -> None:
    failed = state(beats=ended(1, nodes=("ib2",)), failed_at=NOW - 3)
    assert decide(failed) == WAIT
    assert decide(replace(failed, failed_at=NOW - 3 - GRACE_S - 0.1)) == Decision(code=1)
    assert decide(replace(failed, heard_at=silent("roce1"))).placement is not None


def test_a_job_that_is_being_ended_takes_no_spare() -> None:
    assert decide(state(is_stopping=True)) == WAIT  # its ranks save
    assert decide(state(is_stopping=True, beats=ended())) == Decision(code=0)
    assert decide(state(is_stopping=True, left={"ib2"})) == Decision(("ib2",), code=1)
    assert decide(state(is_stopping=True, is_started=False, running=0)) == Decision(code=1)
