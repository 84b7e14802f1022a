"""Plans of mixtures of experts: their groups, and the layouts that are refused. Dense plans do not mention experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import spawn
import yaml

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Experts, ModelSpec
from holmes_hpc.errors import PlanError
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, Parallel, groups
from holmes_hpc.planning.plan.plan import Plan

MODEL = replace(spawn.MODEL, experts=Experts(4))


def test_a_plan_with_experts_is_read_back(tmp_path: Any) -> None:
    plan = spawn.plan(pp=2, dp=2, model=MODEL, ep=2)
    plan.write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml") == plan
    assert "ep_comm" not in plan.to_yaml()  # which older versions lack
    gathered = spawn.plan(pp=2, dp=2, model=MODEL, ep=2, ep_comm="allgather")
    assert Plan.from_dict(yaml.safe_load(gathered.to_yaml())) == gathered
    assert "EP 2, all-gathered tokens" in str(gathered.parallel) and gathered.id != plan.id
    assert "EP 2" in str(plan.parallel) and plan.id != spawn.plan(pp=2, dp=2, model=MODEL).id


def test_the_plan_of_a_dense_model_does_not_mention_experts() -> None:
    text = spawn.plan(pp=2, dp=2).to_yaml()
    data = yaml.safe_load(text)
    assert "expert" not in text and "expt" not in text and "ep" not in data["parallel"]
    assert "ep" not in Parallel.uniform(1, 2, 2).to_dict()


def test_expert_groups_are_runs_of_ranks_inside_a_stage() -> None:
    p = Parallel.uniform(2, 2, 4, ep=4, sequence_parallel=True)
    concrete: dict[str, list[tuple[int, ...]]] = {}
    for group in groups(p, 8, tied=False, has_experts=True):
        concrete.setdefault(group.kind, []).append(group.ranks)
    assert concrete["ep"] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert concrete["expt_dp"][:4] == [(0, 4), (1, 5), (2, 6), (3, 7)] and len(concrete["expt_dp"]) == 8
    assert concrete["tp_ep_pp"] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert {"ep", "expt_dp", "tp_ep_pp"}.isdisjoint(g.kind for g in groups(p, 8, tied=False))
    split = replace(p, ep=2, etp=2, ep_comm="allgather")  # the same ranks share all experts
    assert list(groups(split, 8, tied=False, has_experts=True)) == list(groups(p, 8, tied=False, has_experts=True))
    assert str(split) == "TP 2, PP 2, DP 4, EP 2, ETP 2, all-gathered tokens" and split.settings()["etp"] == 2


def test_the_experts_of_a_stage_use_the_network_of_its_fabric() -> None:
    plan = spawn.plan(pp=2, dp=2, model=MODEL, ep=2)
    assert [g.transport.fabric for g in plan.transports() if g.kind == "ep"] == ["ib-0", "roce-1"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "indivisible experts": ({"dp": 3, "ep": 3}, "EP 3 does not divide 4 experts"),
    "indivisible ranks": ({"dp": 3, "ep": 2}, "EP 2 does not divide the 3 ranks of a stage"),
    "dense": ({"dp": 2, "ep": 2, "model": spawn.MODEL}, "EP is 2, the model has no experts.*a model with experts"),
    "ETP and ranks": ({"dp": 2, "ep": 2, "etp": 2, "ep_comm": "allgather"}, "EP 2 x ETP 2 does not divide the 2 ranks"),
    "ETP and width": ({"dp": 3, "etp": 3, "ep_comm": "allgather"}, "ETP 3 does not divide the experts' width of 64"),
    "ETP of whole experts": ({"dp": 2, "etp": 2}, "expert tensor parallelism needs all-gathered tokens"),
    "ETP, dense": ({"dp": 2, "etp": 2, "ep_comm": "allgather", "model": spawn.MODEL}, "ETP is 2, .* no experts"),
    "zero bubble": (
        {"pp": 2, "schedule": "zero_bubble", "deferred": (0, 0), "final": (1, 1)},
        "experts do not support zero_bubble",
    ),
    "TP": ({"tp": 2}, "experts do not support TP without sequence parallelism"),
    "instances": ({"dp": 4, "optimizer_instances": 2}, "experts do not support optimizer instances"),
    "per stage": ({"dp": 3, "batch": replace(spawn.BATCH, global_size=4)}, "per-stage|hierarchical|schedule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_experts_do_not_support_are_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        spawn.plan(**{"model": MODEL, **fields})


def test_hierarchical_plans_and_per_stage_tp_and_dp_are_refused() -> None:
    with pytest.raises(PlanError, match="experts do not support per-stage TP/DP"):
        spawn.unequal((1, 2), (1, 1), model=MODEL)
    with pytest.raises(PlanError, match="experts do not support"):
        spawn.shared(2, [1, 1], model=MODEL)
    with pytest.raises(PlanError, match="EP 2 does not divide the 3"):
        Parallel.uniform(dp=3, ep=2, order=HIERARCHICAL_ORDER)


def test_experts_are_not_shared_by_replicas_in_unlike_pools() -> None:
    dense = spawn.shared(1, [1, 1])
    fields = {"parallel": Parallel.uniform(dp=2, ep=2), "strategy": "one-fabric", "model": MODEL}
    with pytest.raises(PlanError, match=r"experts of ranks 0, 1 are shared by pools fast, slow"):
        replace(dense, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": Experts(2, top_k=3)}, r"experts.top_k is 3, but a layer has 2 experts"),
        ({"experts": Experts(2), "bias": True}, "experts cannot have biases"),
        ({"experts": Experts(2, bias=0.1)}, "experts.bias is 0.1, but experts.score is softmax"),
        ({"experts": Experts(8, 2, groups=3)}, r"experts.top_groups is 1, of 3 groups of 8"),
        ({"experts": Experts(8, 4, groups=4, top_groups=1)}, r"experts.top_groups is 1, of 4 groups of 8"),
        ({"experts": Experts(8, 3, groups=4, top_groups=2)}, r"experts.top_groups is 2, of 4 groups of 8"),
        ({"experts": Experts(2, first_dense=6)}, "experts.first_dense is 6, of 6 layers.*use at most 5"),
        ({"experts": Experts(first_dense=1)}, "experts.first_dense is 1, of 6 layers.*use at most 0"),
    ],
)
def test_wrong_experts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(spawn.MODEL, **fields)


def test_first_dense_layers_are_in_the_first_chunk_of_a_stage_with_experts() -> None:
    model = replace(MODEL, experts=Experts(4, first_dense=1))
    assert spawn.plan(pp=2, dp=2, model=model, layers=[[1, 2], [1, 2]]).stages[0].layers == 3
    for layers, chunks in (([[1], [5]], "1"), ([[0, 3], [1, 2]], "0, 3")):
        with pytest.raises(PlanError, match=f"chunks of {chunks} layers, but experts.first_dense is 1"):
            spawn.plan(pp=2, dp=2, model=model, layers=layers)
    with pytest.raises(PlanError, match=r"63 ffn \(dense\) cannot be divided by TP 2"):
        spawn.plan(tp=2, model=replace(model, ffn=63), sequence_parallel=True)


def test_experts_are_configured_by_dotted_keys() -> None:
    config = load(["model.experts.count=8", "model.experts.top_k=1", "plan.ep=auto"])
    assert config.model.experts == Experts(8, 1) and config.plan.ep is None
    assert isinstance(config.model, ModelSpec) and load(["plan.ep=4"]).plan.ep == 4
    with pytest.raises(PlanError, match=r"top_k is 0"):
        load(["model.experts.top_k=0"])
