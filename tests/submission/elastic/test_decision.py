"""The coordinator's decision: what is present decides, whatever happened before."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import plans
import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.submission.elastic.decision import (
    GRACE_S,
    ISOLATION_S,
    JOIN_S,
    SETTLE_S,
    Beat,
    Decision,
    Placement,
    State,
    place,
)
from holmes_hpc.submission.elastic.replan import smaller_plan
from holmes_hpc.submission.executor.environment import ComponentRanks

PLACEMENT = Placement(
    (ComponentRanks(("ib1", "ib2"), 0, 2), ComponentRanks(("roce1",), 4, 2)), (("ib3", "ib4"), ("roce2",))
)
RANKS = {"ib1": (0, 1), "ib2": (2, 3), "roce1": (4, 5)}
NODES = ("ib1", "ib2", "ib3", "ib4", "roce1", "roce2")
NOW = 1000.0
WAIT = Decision()


def decide(state: State) -> Decision:
    return state.decide(NOW)


def state(start: int = 1, running: int = 2, **changes: Any) -> State:
    """Return the state of a run whose ranks train."""
    beats = {node: Beat(node, start, running if node in RANKS else 0) for node in NODES}
    whole = State(PLACEMENT, 3.0, silent(), ("ib-a", "roce-a"), start=start, is_started=True, beats=beats)
    return replace(whole, **changes)


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


@pytest.mark.parametrize("cause", [{"heard_at": silent("ib2")}, {"gone": {"ib2"}}])
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
    without_ib4 = replace(without_ib3, heard_at=silent("ib2", "ib4"))
    decision = decide(without_ib4)  # ib3 still loads torch
    assert decision == Decision(("ib2",), PLACEMENT.without(["ib2"], ["ib3"])) and decision.placement is not None
    waiting = replace(without_ib4, placement=decision.placement, is_started=False)
    assert not decide(waiting).is_go
    never = {**silent("ib2", "ib4"), "ib3": NOW - JOIN_S - 1}
    assert decide(replace(without_ib3, heard_at=never)) == Decision(("ib2",))  # until there is a plan


def test_a_coordinator_that_most_nodes_left_at_once_may_be_cut_off() -> None:
    others = NODES[1:]
    assert state(heard_at=silent(*others)).is_isolated(NOW)
    assert not state(heard_at=silent(*others[:3])).is_isolated(NOW)
    all_soon = silent(*others, seconds=2.8)
    assert state(heard_at={**all_soon, others[0]: NOW - 3.1}).is_isolated(NOW)  # the others' agents reported later
    assert not state(heard_at=all_soon).is_isolated(NOW)
    assert not state(heard_at=silent(*others, seconds=3.1 + ISOLATION_S)).is_isolated(NOW)  # decided long ago
    ended = silent(*others, seconds=inf)
    assert not state(heard_at=ended, gone=set(others)).is_isolated(NOW)


def test_two_losses_at_once_take_two_spares() -> None:
    decision = decide(state(heard_at=silent("ib1", "roce1")))
    assert decision.placement is not None and decision.placement.nodes == ["ib3", "ib2", "roce2"]
    assert decide(state(heard_at=silent("ib1", "ib2", "ib3"))) == Decision(("ib1", "ib2"))


def test_without_a_spare_the_plan_for_the_nodes_left_is_next() -> None:
    smaller = plans.plan("roce-a", "ib-a", nodes=1)
    lost = state(heard_at=silent("ib2", "ib3", "ib4"), plans={(1, 2): smaller})
    decision = decide(lost)
    assert decision.plan == smaller and decision.placement is not None and decision.code is None
    assert decision.placement.nodes == ["ib1", "roce1"] and decision.placement.spares == ((), ("roce2",))
    assert [*decision.placement.ranks_on("roce1")] == [0] and [*decision.placement.ranks_on("ib1")] == [1]
    assert [part.nodes for part in decision.placement.planned] == [("roce1",), ("ib1",)]
    assert decide(replace(lost, is_stopping=True)) == Decision(("ib2",), code=1)


def test_a_plan_may_leave_out_a_component() -> None:
    left = [["ib1"], ["roce1", "roce2", "roce3"]]
    placement = place(plans.plan("roce-a"), ("ib-a", "roce-a"), left)
    assert placement.nodes == ["roce1", "roce2"] and placement.spares == (("ib1",), ("roce3",))
    assert placement.world_size == 2 and [*placement.ranks_on("roce2")] == [1]


def test_with_too_few_nodes_or_without_a_plan_the_run_ends() -> None:
    lost = state(heard_at=silent("ib2", "ib3", "ib4"), plans={(1, 2): None})
    assert (decide(lost).code, decide(lost).placement) == (1, None) and "there is no plan" in decide(lost).reason
    few = decide(replace(lost, min_nodes=4))
    assert few.code == 1 and "elastic.min_nodes is 4" in few.reason
    assert decide(state(heard_at=silent(*NODES))).code == 1


def test_plans_are_made_for_every_node_that_no_spare_replaces() -> None:
    assert not state().missing_plans(NOW)
    assert state(heard_at=silent("roce2")).missing_plans(NOW) == [(4, 0)]
    no_spares = state(heard_at=silent("ib3", "ib4", "roce2"))
    assert no_spares.missing_plans(NOW) == [(1, 1), (2, 0)]
    assert replace(no_spares, plans={(1, 1): None}, min_nodes=3).missing_plans(NOW) == []
    lost = state(heard_at=silent("ib2", "ib3", "ib4", "roce2"))
    assert lost.missing_plans(NOW) == [(1, 1), (0, 1), (1, 0)]  # first the one that the run waits for


def test_a_smaller_plan_has_the_same_model_and_batch() -> None:
    plan = plans.plan("ib-a", "roce-a")
    config = load(["plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.schedule=1f1b", "train.pace_layer_ms=10"])
    smaller = smaller_plan(plan, config, (1, 2))
    assert (smaller.model, smaller.batch.global_size) == (plan.model, plan.batch.global_size)
    assert {part.pool: part.nodes for part in smaller.components} == {"ib-a": 1, "roce-a": 2}
    assert {part.pool for part in smaller_plan(plan, config, (0, 2)).components} == {"roce-a"}


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


def test_ranks_start_again_after_one_was_killed_if_they_made_new_steps() -> None:
    killed = state(beats=ended(-9, nodes=("ib2",)), failed_at=NOW - SETTLE_S + 0.1, has_new_steps=True)
    assert decide(killed) == WAIT  # perhaps its node is being lost
    assert decide(replace(killed, gone={"ib2"})).lost == ("ib2",)
    settled = replace(killed, failed_at=NOW - SETTLE_S - 0.1)
    decision = decide(settled)
    assert decision.placement == PLACEMENT and not decision.lost
    assert decision.reason == "rank 3: killed by signal 9 (SIGKILL: kill -9, or the kernel for lack of memory)"
    all_ended = replace(settled, beats=ended(-9))
    assert decide(all_ended).placement == PLACEMENT
    assert decide(replace(all_ended, has_new_steps=False)) == Decision(code=9)
    assert decide(replace(settled, is_stopping=True)) == WAIT


def test_a_failed_rank_ends_the_run_unless_its_node_turns_out_to_be_lost() -> None:
    failed = state(beats=ended(1, nodes=("ib2",)), failed_at=NOW - 3)
    assert decide(failed) == WAIT
    assert decide(replace(failed, failed_at=NOW - 3 - GRACE_S - 0.1)) == Decision(code=1)
    assert decide(replace(failed, heard_at=silent("roce1"))).placement is not None


def test_a_job_that_is_being_ended_takes_no_spare() -> None:
    assert decide(state(is_stopping=True)) == WAIT  # its ranks save
    assert decide(state(is_stopping=True, beats=ended())) == Decision(code=0)
    assert decide(state(is_stopping=True, gone={"ib2"})) == Decision(("ib2",), code=1)
    assert decide(state(is_stopping=True, is_started=False, running=0)) == Decision(code=1)
