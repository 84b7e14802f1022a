"""Uniform layouts and layouts with per-stage TP/DP: written, read back, or refused in one line."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import spawn
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel, groups
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.rows import exchanged_rows


def test_per_stage_sizes_are_written_and_read_back() -> None:
    plan = spawn.unequal((2, 1), (1, 3), weights={1: [3, 1, 1]})
    data = plan.to_dict()
    assert plan.is_per_stage and not {"tp", "dp"} & set(data["parallel"])
    assert [(s["nodes"], s["tp"], s["dp"]) for s in data["stages"]] == [(1, 2, 1), (3, 1, 3)]
    assert data["routing"] == {"weights": [[1], [3, 1, 1]]}
    assert Plan.from_dict(data) == plan and Plan.from_dict(data).id == plan.id


def test_cp_of_one_stage_is_written_and_read_back() -> None:
    plan = spawn.unequal((1, 1), (1, 2, 2))
    data = plan.to_dict()
    assert [s.get("cp") for s in data["stages"]] == [None, 2] and Plan.from_dict(data) == plan
    assert str(plan.parallel) == "PP 2 of TP 1 x DP 1 + TP 1 x CP 2 x DP 2"
    kinds = [(g.kind, g.ranks) for g in groups(plan.parallel, 4, tied=False)]
    assert [r for k, r in kinds if k == "cp"] == [(1, 2), (3, 4)] and ("dp", (1, 2, 3, 4)) in kinds
    assert [r for k, r in kinds if k == "edge"] == [(0, 1), (0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["batch"].update(sequence_length=30), "sequence_length 30 is not a multiple of 4"),
        (lambda d: d["model"].update(dropout=0.1), "does not support dropout"),
        (lambda d: d["parallel"].update(cp_comm="a2a"), "cp_comm is a2a with per-stage TP/DP"),
        (lambda d: [s.update(cp=2, dp=1) for s in d["stages"]], "every stage has CP 2"),
    ],
)
def test_cp_of_a_stage_that_cannot_run_is_refused(change: Any, message: str) -> None:
    data = spawn.unequal((1, 1), (1, 2, 2)).to_dict()
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(data)


def test_equal_stages_form_a_grid() -> None:
    grid, by_stage = spawn.plan(pp=2, dp=2, schedule="ahead", in_flight=[3, 1]), spawn.unequal((1, 2), (1, 2))
    read = Plan.from_dict({**by_stage.to_dict(), "schedule": {"kind": "ahead", "in_flight": [3, 1]}})
    assert read.to_yaml() == grid.to_yaml() and not read.is_per_stage
    assert Plan.from_dict(spawn.unequal((1, 3), (1, 3)).to_dict()).is_per_stage  # 8 micro-batches: shares are unequal


def test_plans_keep_the_ids_of_earlier_releases() -> None:
    plans = (spawn.plan(pp=2, dp=2), spawn.plan(tp=2, pp=2, schedule="ahead", in_flight=[3, 1], pace_layer_ms=10.0))
    assert [p.id for p in plans] == ["61433d06b607", "5aef77fecb10"]  # by 2cf097f


def older(plan: Plan) -> dict[str, Any]:
    """Return a plan in the form of versions 1 and 2."""
    data = plan.to_dict()
    if plan.is_per_stage:
        return {**data, "version": 2, "parallel": {"sequence_parallel": plan.parallel.sequence_parallel}}
    stages = [{k: v for k, v in s.items() if k not in ("tp", "dp", "nodes")} for s in data["stages"]]
    return {**data, "version": 1, "stages": stages}


@pytest.mark.parametrize("plan", [spawn.plan(pp=2, dp=2), spawn.unequal((2, 1), (1, 3), weights={1: [3, 1, 1]})])
def test_older_versions_are_read(plan: Plan) -> None:
    assert Plan.from_dict(older(plan)) == plan
    written = yaml.safe_load(plan.to_yaml())
    assert written["version"] == 3 and set(written["derived"]) >= {"transports", "components", "stages", "parallel"}
    assert Plan.from_dict(written) == plan
    assert Plan.from_dict({k: v for k, v in written.items() if k != "derived"}) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["stages"][1].update(fabric="ib-0"),
            "stages[1].fabric: it is ib-0, but the other keys give roce-1",
        ),
        (
            lambda d: d["components"][0].update(stages=[0, 1]),
            "components[0].stages: it is [0, 1], but the other keys give [0]",
        ),
        (lambda d: d["parallel"].update(pp=3), "parallel.pp: it is 3, but the other keys give 2"),
        (lambda d: d.update(unused={"ib-0": 1}), "unused: it is {'ib-0': 1}, but the other keys give {}"),
        (lambda d: d["transports"][0].update(transport="rdma"), "transports[0]: it is "),
    ],
)
def test_derived_keys_are_checked(change: Any, message: str) -> None:
    data = yaml.safe_load(spawn.plan(pp=2, dp=2).to_yaml())
    change(data["derived"])
    with pytest.raises(PlanError) as refused:
        Plan.from_dict(data)
    assert message in str(refused.value) and "remove the key (it is derived)" in str(refused.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "TP across nodes": (
        {"stages": {0: {"tp": 2, "dp": 1}}, "parallel": {"sequence_parallel": True}},
        "TP 2 does not divide 1 GPUs per node",
    ),
    "another number of nodes": ({"stages": {0: {"nodes": 1}}}, "stages[0].nodes: it is 1, but the other keys give 2"),
    "more replicas than micro-batches": (
        {"batch": {"global_size": 1, "micro_size": 1, "sequence_length": 16}},
        "stage 0 has 2 replicas for 1 micro-batches a step",
    ),
    "a replica without micro-batches": ({"routing": {"weights": [[100, 1], [1]]}}, "stage 0: replica 1 gets none of 8"),
    "weights for other replicas": ({"routing": {"weights": [[1, 2, 3], [1]]}}, "3 weights for DP 2"),
    "a weight of zero": ({"routing": {"weights": [[0, 1], [1]]}}, "weights is (0, 1)"),
    "Megatron's schedule": (
        {"schedule": {"kind": "1f1b", "in_flight": [2, 1]}},
        "schedule.kind is 1f1b, but the replicas of a stage have unequal shares",
    ),
    "plain Megatron": ({"transport_mode": "single"}, "transport_mode is single, but the replicas of a"),
    "too few in flight": ({"schedule": {"kind": "ahead", "in_flight": [1, 3]}}, "would wait forever"),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_layouts_are_refused_in_one_line(name: str) -> None:
    changes, message = BAD[name]
    data = spawn.unequal((1, 2), (1, 1), layers=[4, 2]).to_dict()
    del data["transports"]
    for key, value in changes.items():
        if key == "stages":
            for s, keys in value.items():
                data["stages"][s] |= keys
        else:
            data[key] = value
    with pytest.raises(PlanError) as refused:
        Plan.from_dict(data)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_uniform_sizes_of_a_per_stage_layout_are_refused() -> None:
    with pytest.raises(PlanError, match="the plan has per-stage TP/DP, but only uniform layouts are supported here"):
        spawn.unequal((1, 2), (1, 1)).parallel.tp  # noqa: B018 (it raises)


def test_an_indivisible_batch_is_shared_by_replicas_only_with_default_settings() -> None:
    batch = {"global_size": 7, "micro_size": 1, "sequence_length": 16}
    data = spawn.plan(pp=2, dp=2, schedule="ahead", in_flight=[3, 1]).to_dict() | {"batch": batch}
    del data["transports"]
    assert Plan.from_dict(data).is_per_stage
    for settings, message in (
        ({"order": "tp-cp-ep-pp-dp"}, "strategy is pipeline"),
        ({"distributed_optimizer": False}, "not a multiple"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_dict(data | {"parallel": data["parallel"] | settings})


@given(st.integers(1, 6), st.integers(1, 60), st.data())
def test_micro_batches_are_shared_by_weight(dp: int, count: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 4), min_size=dp, max_size=dp))
    for chosen in ((), tuple(float(w) for w in weights)):
        try:
            (route,) = Parallel((StageParallel(1, dp, chosen),)).routes(count)
        except PlanError:
            assert count < dp * max(weights)
            continue
        counts = Counter(route)
        if not chosen:
            assert max(counts.values()) - min(counts[r] for r in range(dp)) <= 1
        shares = [count * w / sum(chosen) for w in chosen]
        assert all(abs(counts[r] - share) < dp for r, share in enumerate(shares))


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    ("upper", "lower"),
    [((2, 1), (1, 1)), ((1, 1), (4, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 1)), ((2, 1), (1, 2)), ((2, 2), (1, 4))],
)
def test_every_token_of_a_part_arrives_once(upper: tuple[int, int], lower: tuple[int, int], splits: bool) -> None:
    """The sizes are (TP, CP). Without sequence parallelism, both stages have one TP."""
    upper, lower = (upper, lower) if splits else ((2, upper[1]), (2, lower[1]))

    def parts(tp: int, cp: int) -> list[np.ndarray]:
        chunks = np.arange(48).reshape(2 * cp, -1) if cp > 1 else np.arange(48)[None]
        sequences = [np.concatenate([chunks[c], chunks[-1 - c]]) if cp > 1 else chunks[0] for c in range(cp)]
        return [row for s in sequences for row in (s.reshape(tp, -1) if splits else [s] * tp)]

    received = [np.full(len(part), -1) for part in parts(*lower)]
    for (i, j), rows in exchanged_rows(upper, lower, splits, 48).items():
        for above, below in rows:
            assert (received[j][below] == -1).all()
            received[j][below] = parts(*upper)[i][above]
    assert [r.tolist() for r in received] == [part.tolist() for part in parts(*lower)]


def test_groups_of_a_per_stage_layout() -> None:
    stages = (StageParallel(1, 2), StageParallel(1, 3), StageParallel(2, 1))
    kinds = [(g.kind, g.ranks) for g in groups(Parallel(stages, sequence_parallel=True), 4, tied=True)]
    assert ("world", tuple(range(7))) in kinds
    assert [r for k, r in kinds if k == "dp"] == [(0, 1), (2, 3, 4)] and ("tp", (5, 6)) in kinds
    assert [r for k, r in kinds if k == "embd"] == [(0, 1, 5, 6)]
    # Micro-batches 0 to 3 go to replicas 0 1 0 1 and 0 1 2 0
    assert [r for k, r in kinds if k == "edge"] == [
        (0, 2),
        (0, 4),
        (1, 2),
        (1, 3),
        (2, 5),
        (2, 6),
        (3, 5),
        (3, 6),
        (4, 5),
        (4, 6),
    ]
