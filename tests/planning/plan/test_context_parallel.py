"""Plans with context parallelism: their groups, and the layouts that are refused. Other plans do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import spawn
import yaml

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.errors import PlanError
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, Parallel, groups
from holmes_hpc.planning.plan.plan import Plan

CP_2 = {"pp": 2, "dp": 4, "cp": 2}  # two sequences at a time


def test_a_plan_with_cp_is_read_back(tmp_path: Any) -> None:
    plan = spawn.plan(**CP_2)
    plan.write(tmp_path / "plan.yaml")
    data = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert Plan.read(tmp_path / "plan.yaml") == plan
    assert str(plan.parallel) == "TP 1, PP 2, DP 2, CP 2" and plan.id != spawn.plan(pp=2, dp=4).id
    assert data["parallel"]["cp"] == 2 and data["derived"]["parallel"] == {"tp": 1, "pp": 2, "dp": 2}
    assert data["stages"][0]["dp"] == 2 and data["batch"]["sequence_length"] == 16


def test_a_plan_by_all_to_all_is_read_back(tmp_path: Any) -> None:
    plan = spawn.plan(**CP_2, cp_comm="a2a")
    plan.write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml") == plan and plan.parts.all_to_all
    assert str(plan.parallel) == "TP 1, PP 2, DP 2, CP 2, all-to-all attention" and plan.id != spawn.plan(**CP_2).id


def test_users_write_dp_without_the_ranks_that_share_a_sequence() -> None:
    data = spawn.plan(**CP_2).to_dict()
    del data["unused"], data["transports"]
    for stage in data["stages"]:
        del stage["tp"], stage["dp"], stage["nodes"]
    assert data["parallel"]["dp"] == 2 and Plan.from_dict(data) == spawn.plan(**CP_2)


def test_ranks_that_share_a_sequence_are_neighbours_and_each_replica_computes_its_sequences() -> None:
    concrete: dict[str, list[tuple[int, ...]]] = {}
    for group in groups(Parallel.uniform(2, 2, 4, cp=2), 16, tied=False):
        concrete.setdefault(group.kind, []).append(group.ranks)
    assert concrete["cp"] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert concrete["dp"][:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    plan = spawn.plan(**CP_2)
    assert (plan.micro_batches, plan.parts, plan.is_per_stage) == (4, Batch(8, 1, 16).split(2), False)
    assert plan.parts.whole == plan.batch == spawn.BATCH
    assert [g.transport.fabric for g in plan.transports() if g.kind == "cp"] == ["ib-0", "ib-0", "roce-1", "roce-1"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sequence": ({"dp": 2, "cp": 2, "batch": Batch(8, 1, 18)}, r"length 18 is not a multiple of 4 \(2 x CP 2\)"),
    "batch": ({"dp": 6, "cp": 2}, "does not support per-stage TP/DP"),
    "micro-batch": (
        {"dp": 2, "cp": 2, "batch": Batch(3, 5, 16)},
        r"global_size 3 x CP 2 is not a multiple of micro_size 5 x DP 1; use a multiple of 5",
    ),
    "replicas": ({"dp": 3, "cp": 2}, r"CP 2 does not divide 3 replicas"),
    "zero bubble": (
        {"pp": 2, "dp": 2, "cp": 2, "schedule": "zero_bubble", "deferred": (0, 0), "final": (1, 1)},
        "context parallelism does not support zero_bubble",
    ),
    "dropout": ({"dp": 2, "cp": 2, "model": replace(spawn.MODEL, dropout=0.1)}, "does not support dropout"),
    "heads": (
        {"tp": 2, "dp": 2, "cp": 2, "cp_comm": "a2a"},
        r"all-to-all attention: TP x CP 4 does not divide 2 heads of keys and values",
    ),
    "instances": ({"dp": 4, "cp": 2, "optimizer_instances": 2}, "does not support optimizer instances"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_cp_does_not_support_are_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        spawn.plan(**fields)


def test_hierarchical_plans_per_stage_dp_and_groups_across_fabrics_are_refused() -> None:
    shared = spawn.shared(2, [1, 1])
    with pytest.raises(PlanError, match="does not support hierarchical data parallelism"):
        hierarchical = Parallel.uniform(dp=2, pp=2, cp=2, order=HIERARCHICAL_ORDER)
        replace(shared, parallel=hierarchical, schedule=replace(shared.schedule, kind="1f1b"))
    plan = spawn.unequal((2, 2), (1, 4))
    with pytest.raises(PlanError, match=r"cp is 2 with per-stage TP/DP"):
        replace(plan, parallel=replace(plan.parallel, cp=2))
    plan = spawn.plan(pp=2, dp=2)  # four ranks in two fabrics
    with pytest.raises(PlanError, match=r"stage 0 has ranks in ib-0 and roce-1"):
        replace(plan, parallel=Parallel.uniform(dp=4, cp=4), schedule=replace(plan.schedule, in_flight=(1,)),
                stages=(replace(plan.stages[0], layers=6, chunks=(6,)),))  # fmt: skip


def test_cp_is_configured_like_other_sizes() -> None:
    assert load(["plan.cp_comm=a2a"]).plan.cp_comm == "a2a"
    assert load(["plan.cp=4"]).plan.cp == 4 and load(["plan.cp=auto"]).plan.cp is None
