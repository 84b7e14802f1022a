"""Plans of unequal widths: written as version 2 and read back, refused in one line where they cannot be."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
import spawn
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.planning.spec.widths import Width, Widths, pieces, unequal_groups


def test_it_is_written_as_version_2_and_read_back() -> None:
    plan = spawn.unequal((2, 1), (1, 3), weights={1: [3, 1, 1]})
    data = plan.to_dict()
    assert data["version"] == 2 and data["parallel"] == {"sequence_parallel": True}
    assert [(s["nodes"], s["tp"], s["dp"]) for s in data["stages"]] == [(1, 2, 1), (3, 1, 3)]
    assert data["routing"] == {"weights": [[1], [3, 1, 1]]}
    assert Plan.from_dict(data) == plan and Plan.from_dict(data).id == plan.id


def test_equal_widths_are_a_grid_and_written_as_version_1() -> None:
    grid, wide = spawn.plan(pp=2, dp=2, schedule="ahead", in_flight=[3, 1]), spawn.unequal((1, 2), (1, 2))
    read = Plan.from_dict({**wide.to_dict(), "schedule": {"kind": "ahead", "in_flight": [3, 1]}})
    assert read.to_yaml() == grid.to_yaml() and read.version == 1
    assert Plan.from_dict(spawn.unequal((1, 3), (1, 3)).to_dict()).version == 2  # 8 micro-batches: shares are unequal


def test_a_plan_of_equal_widths_is_written_as_before_there_were_others() -> None:
    plans = (spawn.plan(pp=2, dp=2), spawn.plan(tp=2, pp=2, schedule="ahead", in_flight=[3, 1], pace_layer_ms=10.0))
    written = [(p.id, hashlib.sha256(p.to_yaml().encode()).hexdigest()[:16]) for p in plans]
    assert written == [("61433d06b607", "d3c1d8b43804d81f"), ("5aef77fecb10", "5bd896542a93abad")]  # by 2cf097f


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "TP across nodes": (
        {"stages": {0: {"tp": 2, "dp": 1}}, "parallel": {"sequence_parallel": True}},
        "TP 2 does not divide 1 GPUs of a node",
    ),
    "half a node": ({"stages": {0: {"nodes": 1}}}, "stage 0: TP 1 x DP 2 on 1 nodes of 1 ranks"),
    "more replicas than micro-batches": (
        {"batch": {"global_size": 1, "micro_size": 1, "sequence_length": 16}},
        "stage 0 has 2 replicas for 1 micro-batches a step",
    ),
    "a replica without any": ({"routing": {"weights": [[100, 1], [1]]}}, "stage 0: replica 1 gets none of 8"),
    "weights of other replicas": ({"routing": {"weights": [[1, 2, 3], [1]]}}, "3 weights for DP 2"),
    "no weight": ({"routing": {"weights": [[0, 1], [1]]}}, "weights is (0, 1)"),
    "Megatron's schedule": ({"schedule": {"kind": "1f1b", "in_flight": [2, 1]}}, "1f1b with stages of unequal widths"),
    "one size for all": ({"parallel": {"tp": 1}}, "tp"),
    "plain Megatron": ({"transport_mode": "single"}, "transport_mode single with stages of unequal widths"),
    "too few in flight": ({"schedule": {"kind": "ahead", "in_flight": [1, 3]}}, "would wait for ever"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_in_one_line(name: str) -> None:
    changes, said = BAD[name]
    data = spawn.unequal((1, 2), (1, 1), layers=[4, 2]).to_dict()
    del data["transports"]
    for key, value in changes.items():
        if key == "stages":
            for s, more in value.items():
                data["stages"][s] |= more
        else:
            data[key] = value
    with pytest.raises(PlanError) as refused:
        Plan.from_dict(data)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_what_takes_one_width_for_all_stages_says_so() -> None:
    with pytest.raises(PlanError, match="its stages have unequal widths, and this takes equal ones only"):
        spawn.unequal((1, 2), (1, 1)).parallel.tp  # noqa: B018 (it raises)


@given(st.integers(1, 6), st.integers(1, 60), st.data())
def test_micro_batches_are_dealt_out_by_weight(dp: int, count: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 4), min_size=dp, max_size=dp))
    for chosen in ((), tuple(float(w) for w in weights)):
        try:
            (route,) = Widths((Width(dp, 1, dp, chosen),)).routes(count)
        except PlanError:
            assert count < dp * max(weights)
            continue
        dealt = Counter(route)
        if not chosen:
            assert max(dealt.values()) - min(dealt[r] for r in range(dp)) <= 1
        shares = [count * w / sum(chosen) for w in chosen]
        assert all(abs(dealt[r] - share) < dp for r, share in enumerate(shares))


@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2), (4, 2), (2, 4), (3, 2), (2, 2)])
def test_every_part_of_a_sequence_crosses_once(source: int, target: int) -> None:
    whole = source * target
    for a, b in pieces(source, target):
        assert source == target or set(range(a * target, (a + 1) * target)) & set(range(b * source, (b + 1) * source))
    if source != target:
        crossed = sum(
            len(set(range(a * target, (a + 1) * target)) & set(range(b * source, (b + 1) * source)))
            for a, b in pieces(source, target)
        )
        assert crossed == whole


def test_groups_of_stages_that_form_no_grid() -> None:
    widths = Widths((Width(2, 1, 2), Width(3, 1, 3), Width(1, 2, 1)), sequence_parallel=True)
    found = [(g.kind, g.ranks) for g in unequal_groups(widths, 4, tied=True)]
    assert ("world", tuple(range(7))) in found
    assert [r for k, r in found if k == "dp"] == [(0, 1), (2, 3, 4)] and ("tp", (5, 6)) in found
    assert [r for k, r in found if k == "embd"] == [(0, 1, 5, 6)]
    # micro-batches 0 to 3 go to replicas 0 1 0 1 and 0 1 2 0
    assert [r for k, r in found if k == "edge"] == [
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
