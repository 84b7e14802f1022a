"""The decision for components that are jobs of their own: those that are there train, and changes lose no step."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.elastic.claims import claim
from holmes_hpc.submission.elastic.coordinator import coordinate
from holmes_hpc.submission.elastic.decision import Beat, Decision
from holmes_hpc.submission.elastic.members import ARRIVAL_S, MemberState
from holmes_hpc.submission.executor.environment import LEADER

NOW = 1000.0
BOTH, IB = plans.plan("ib-a", "roce-a"), plans.plan("ib-a", step_time_s=2.0)
WAIT = Decision()
CONFIG = {"elastic": {"dead_s": 3.0, "min_nodes": 1, "min_fabrics": 1}, "train": {"steps": 10**6}}


def state(*nodes: str, **changes: Any) -> MemberState:
    """Return the state before training, after `nodes` have reported."""
    made = MemberState.of(BOTH, CONFIG, 0, 0)
    made.plans[2, 0] = IB
    for node in nodes:
        arrive(made, node)
    return replace(made, **{"decides_from": 0.0, **changes})


def arrive(made: MemberState, node: str, start: int = 0) -> bool:
    beat = Beat(node, start, member=int(node.startswith("roce")))
    is_admitted = made.admit(beat, NOW)
    if is_admitted:
        made.heard_at[node], made.beats[node] = NOW, beat
    return is_admitted


def follow(made: MemberState, decision: Decision) -> None:
    """Do what the coordinator and its agents do."""
    if decision.placement is not None:
        made.placement, made.start = decision.placement, made.start + 1
        made.plan = decision.plan or made.plan
        made.is_started = made.is_changing = False
    made.is_started |= decision.is_go
    made.is_changing |= decision.is_stop
    for node, beat in made.beats.items():
        running = len(made.placement.ranks_on(node)) if made.is_started else 0
        made.beats[node] = replace(beat, start=made.start, running=running, codes={})


def training(*nodes: str) -> MemberState:
    made = state(*nodes)
    for _ in range(2):
        follow(made, made.decide(NOW))
    assert made.is_started
    return made


def end_ranks(made: MemberState, code: int = 0) -> None:
    for node, beat in made.beats.items():
        codes = dict.fromkeys(made.placement.ranks_on(node), code)
        made.beats[node] = replace(beat, running=0, codes=codes)


def planned(decision: Decision) -> tuple[Plan | None, list[str]]:
    assert decision.placement is not None
    return decision.plan, decision.placement.nodes


def test_training_starts_on_the_complete_components() -> None:
    assert state("ib1").decide(NOW) == WAIT
    assert planned(state("ib1", "ib2", "roce1").decide(NOW)) == (IB, ["ib1", "ib2"])
    assert planned(state("ib1", "ib2", "roce1", "roce2").decide(NOW))[0] == BOTH
    assert state("ib1", "ib2", min_fabrics=2).decide(NOW) == WAIT
    assert state("ib1", "ib2", plans={}).decide(NOW) == WAIT  # it is being made
    made = training("ib1", "ib2")
    assert made.placement.nodes == ["ib1", "ib2"] and made.decide(NOW) == WAIT


def test_nodes_whose_jobs_start_together_are_waited_for() -> None:
    made = state("ib1", "ib2")
    assert arrive(made, "roce1") and made.decides_from == NOW + ARRIVAL_S
    assert made.decide(NOW + ARRIVAL_S - 0.1) == WAIT


def test_a_component_joins_after_a_step_if_that_pays() -> None:
    made = training("ib1", "ib2")
    arrive(made, "roce1")
    assert made.decide(NOW) == WAIT
    arrive(made, "roce2")
    assert replace(made, last_step=10**6 - 1).decide(NOW) == WAIT
    decision = made.decide(NOW)
    assert decision == Decision(is_stop=True, reason="roce-a joins")
    follow(made, decision)
    assert made.decide(NOW) == WAIT
    made.beats["ib1"] = replace(made.beats["ib1"], running=0, codes={0: -signal.SIGTERM})
    assert made.decide(NOW) == WAIT
    end_ranks(made, -signal.SIGTERM)
    plan, nodes = planned(made.decide(NOW))
    assert plan == BOTH and nodes == ["ib1", "ib2", "roce1", "roce2"]


def test_a_component_that_leaves_is_given_back_after_a_step() -> None:
    made = training("ib1", "ib2", "roce1", "roce2")
    made.beats["roce2"] = replace(made.beats["roce2"], is_leaving=True)
    decision = made.decide(NOW)
    assert decision == Decision(is_stop=True, reason="nodes roce2 leave")
    follow(made, decision)
    made.beats["roce1"] = replace(made.beats["roce1"], is_leaving=True)
    end_ranks(made)
    assert planned(made.decide(NOW)) == (IB, ["ib1", "ib2"])


def test_a_lost_component_leaves_the_others_training() -> None:
    made = training("ib1", "ib2", "roce1", "roce2")
    made.gone |= {"roce1", "roce2"}
    decision = made.decide(NOW)
    assert decision.lost == ("roce1", "roce2") and planned(decision) == (IB, ["ib1", "ib2"])
    made.plans.clear()
    assert made.decide(NOW) == Decision(("roce1", "roce2"))  # until the plan is made


@pytest.mark.parametrize("is_at_limit", [False, True])
def test_the_coordinator_hands_over_when_its_own_job_ends(is_at_limit: bool) -> None:
    made = training("ib1", "ib2", "roce1", "roce2")
    made.is_stopping = not is_at_limit
    made.beats["ib2"] = replace(made.beats["ib2"], is_leaving=is_at_limit)
    decision = made.decide(NOW)
    assert decision.is_stop
    follow(made, decision)
    end_ranks(made)
    assert made.decide(NOW) == Decision(is_handover=True)


def test_a_node_whose_job_starts_again_waits_until_its_loss_is_known() -> None:
    made = training("ib1", "ib2", "roce1", "roce2")
    assert not arrive(made, "roce1")
    made.gone |= {"roce1", "roce2"}
    follow(made, made.decide(NOW))
    assert arrive(made, "roce1") and arrive(made, "roce2") and not made.gone
    assert made.placement.spares == ((), ("roce1", "roce2"))


def test_the_run_ends_with_its_ranks() -> None:
    made = training("ib1", "ib2")
    end_ranks(made)
    assert made.decide(NOW).code == 0


@pytest.mark.parametrize(
    ("nodes", "sizes"), [((), [(0, 2)]), (("ib1", "ib2"), [(1, 0)]), (("roce1", "roce2"), [(0, 2), (0, 1)])]
)
def test_plans_are_made_for_what_may_come_next(nodes: tuple[str, ...], sizes: list[tuple[int, int]]) -> None:
    assert state(*nodes).missing_plans(NOW) == sizes


def test_failed_ranks_start_again_if_they_may() -> None:
    made = training("ib1", "ib2")
    end_ranks(made, 1)
    assert made.decide(NOW) == Decision(code=1)
    made.may_restart = True
    assert made.decide(NOW) == Decision(placement=made.placement, reason="a rank has failed", ended="failed")
    made.is_stopping = True
    assert made.decide(NOW) == Decision(is_stop=True, reason="the coordinator's job ends")


def test_a_node_that_reports_before_the_others_of_its_component_is_kept() -> None:
    made = training("ib1", "ib2", "roce1")
    assert made.placement.spares == ((), ("roce1",))
    arrive(made, "roce2")
    assert made.decide(NOW).reason == "roce-a joins"


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("changes", [{"min_nodes": 4}, {"plans": {(2, 2): BOTH, (2, 0): None}}])
def test_without_a_plan_for_the_others_all_wait_for_the_requeued_job(changes: dict[str, Any], is_leaving: bool) -> None:
    made = replace(training("ib1", "ib2", "roce1", "roce2"), **changes)
    for node in ("roce1", "roce2"):
        made.beats[node] = replace(made.beats[node], is_leaving=is_leaving)
    if is_leaving:
        follow(made, made.decide(NOW))
        end_ranks(made)
    else:
        made.gone |= {"roce1", "roce2"}
    decision = made.decide(NOW)
    assert planned(decision) == (None, []) and decision.lost == (() if is_leaving else ("roce1", "roce2"))
    follow(made, decision)
    assert made.placement.spares == (("ib1", "ib2"), ()) and made.decide(NOW) == WAIT
    assert arrive(made, "roce1") and arrive(made, "roce2")
    assert planned(made.decide(NOW + ARRIVAL_S))[0] == BOTH


@pytest.mark.integration
def test_a_job_that_is_requeued_after_the_end_of_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOLMES_MEMBER", "1"), (LEADER, "7"), ("SLURMD_NODENAME", "roce1")):
        monkeypatch.setenv(name, value)
    run = RunDirectory.create(tmp_path / "run", config=CONFIG)
    (run.path / "submission").mkdir()
    assert claim(run.path / "submission", 1, ())
    run.write_result({"state": "completed"}, writer="batch")
    with subprocess.Popen(["sleep", "60"]) as srun:
        assert coordinate(run, srun.pid, 1) == 0
    assert srun.returncode == -signal.SIGKILL
