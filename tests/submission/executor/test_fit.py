"""Whether components fit together, warnings about waiting jobs, and the plan that ends first."""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from typing import Any

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import node, partition_line

from holmes_hpc.config.slurm_settings import PoolSettings, SlurmSettings
from holmes_hpc.errors import PlanError, SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.scontrol import Config, parse_partition
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.preflight import check_fit, eligible_nodes, find_warnings, time_limit_error
from holmes_hpc.submission.queue_estimate import candidate_plans, estimate_ends, estimate_rows, training_time_s
from holmes_hpc.submission.time_limit import partition_warnings, requeue_warning

NODES = [node(f"ib{i}", "nic_ib,a", "ib,all") for i in range(4)] + [
    node(f"eth{i}", "nic_ethernet", "eth,all") for i in range(2)
]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["ib", "eth", "all"])), min_size=2, max_size=4))
def test_fit_agrees_with_brute_force(sizes: list[tuple[int, str]]) -> None:
    requests = [ComponentRequest(n, partition=p) for n, p in sizes]
    eligible_sets = [eligible_nodes(r, NODES) for r in requests]
    if any(len(names) < r.nodes for names, r in zip(eligible_sets, requests, strict=True)):
        return  # each is tested alone before
    slots = [names for names, r in zip(eligible_sets, requests, strict=True) for _ in range(r.nodes)]
    is_possible = len(slots) <= 6 and any(
        all(name in slot for name, slot in zip(permutation, slots, strict=True))
        for permutation in itertools.permutations([n.name for n in NODES], len(slots))
    )
    if is_possible:
        check_fit(requests, NODES)
    else:
        with pytest.raises(SubmissionError, match="nodes together"):
            check_fit(requests, NODES)


def test_nodelist_and_exclude_limit_eligible_nodes() -> None:
    assert eligible_nodes(ComponentRequest(1, partition="ib", exclude="ib[0-1]"), NODES) == {"ib2", "ib3"}
    assert eligible_nodes(ComponentRequest(1, partition="ib", nodelist="ib2"), NODES) == {"ib2"}


def test_gpu_types_limit_eligible_nodes() -> None:
    nodes = [node("n1", gres="gpu:a100:4"), node("n2", gres="gpu:h100:4"), node("n3", gres="gpu:h100:8")]
    a100, h100 = (ComponentRequest(1, partition="ib", gpus_per_node=f"{kind}:4") for kind in ("a100", "h100"))
    assert eligible_nodes(a100, nodes) == {"n1"} and eligible_nodes(h100, nodes) == {"n2", "n3"}
    assert eligible_nodes(ComponentRequest(1, partition="ib", gpus_per_node=4), nodes) == {"n1", "n2", "n3"}
    with pytest.raises(SubmissionError, match="need 4 nodes together, but only 3"):
        check_fit([a100, h100, ComponentRequest(2, partition="ib", gpus_per_node=4)], nodes)
    assert not list(find_warnings([a100, h100], nodes, None, {}))


def test_warnings_about_jobs_that_may_not_start() -> None:
    parts = [ComponentRequest(1, partition="ib", constraint="nic_ib"), ComponentRequest(1, partition="all")]
    bad = Config({"SchedulerType": "sched/builtin", "SchedulerParameters": "disable_hetjob_steps"})
    lines = list(find_warnings(parts, NODES, bad, {"MaxSubmit": 1}))
    for word in (
        "sched/backfill",
        "disable_hetjob_steps",
        "MaxSubmit is 1",
        "component 1 has no constraint",
        "partitions overlap",
    ):
        assert any(word in line for line in lines), (word, lines)
    assert list(find_warnings([parts[0]], NODES, Config({"SchedulerType": "sched/builtin"}), {})) == []
    good = [parts[0], ComponentRequest(1, partition="eth", constraint="nic_ethernet")]
    assert list(find_warnings(good, NODES, Config({"SchedulerType": "sched/backfill"}), {"MaxJobs": 9})) == []
    assert list(find_warnings(good, NODES, None, {})) == []


STARTS = """
for a in "$@"; do case "$a" in --test-only) test=1;; *.sh) file=$a;; --partition=bad) bad=1;; esac; done
[ -n "$bad" ] && { echo "allocation failure: Requested partition configuration not available now" >&2; exit 1; }
when=2030-01-01T00:00:00
[ -n "$file" ] && grep -q partition=roce "$file" && when=2030-01-01T05:00:00
echo "sbatch: Job 9 to start at $when using 4 processors on nodes n1 in partition p" >&2
"""


@pytest.mark.integration
def test_smaller_plan_that_starts_now_beats_a_waiting_plan(fake_slurm: Any) -> None:
    fake_slurm.answer("sbatch", STARTS)
    fast, slow = plans.plan("ib-a", "roce-a", step_time_s=1.0), plans.plan("ib-a", step_time_s=2.0)
    candidates = estimate_ends([fast, slow], 3600, SlurmSettings(timeout_min=600))
    assert [c.plan.id for c in candidates] == [slow.id, fast.id]
    assert candidates[0].start == datetime(2030, 1, 1).timestamp()
    assert candidates[0].end == candidates[0].start + training_time_s(slow, 3600)
    columns, rows = estimate_rows(candidates)
    assert columns[2:5] == ["start", "duration", "end"] and rows[0][2].startswith("2030-01-01 00:00")


def test_candidates_are_the_best_plans_of_site_subsets() -> None:
    requested_nodes = []

    def plan_for(nodes: dict[str, int] | None) -> Plan:
        requested_nodes.append(nodes)
        if nodes is not None and "eth-a" in nodes:
            raise PlanError("no", where="test", hint="none")
        fabrics = sorted(nodes or {"ib-a": 4, "roce-a": 4})
        return plans.plan(*fabrics, nodes=min((nodes or {"x": 4}).values()))

    candidates = candidate_plans(plan_for, plans.site())
    layouts = [tuple((c.pool, c.nodes) for c in plan.components) for plan in candidates]
    assert layouts[0] == (("ib-a", 4), ("roce-a", 4)) and len(set(layouts)) == len(layouts) == 9
    assert (("ib-a", 1),) in layouts and (("ib-a", 2), ("roce-a", 2)) in layouts
    assert len(candidate_plans(plan_for, plans.site(), max_plans=3)) == 3


@pytest.mark.integration
def test_impossible_candidates_come_last_with_their_reason(fake_slurm: Any) -> None:
    fake_slurm.answer("sbatch", STARTS)
    possible = plans.plan("ib-a")
    candidates = estimate_ends([plans.plan("ib-a", step_time_s=100), possible], 3600, SlurmSettings(timeout_min=600))
    assert candidates[0].plan.id == possible.id and candidates[1].end is None and "timeout_min" in candidates[1].reason


@pytest.mark.slurm
@pytest.mark.usefixtures("testbed")
def test_slurm_queue_decides_which_plan_ends_first(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("busy_roce")
    preflight.clear_cache()
    waits, starts_now = plans.plan("ib-a", "roce-a", step_time_s=0.5), plans.plan("ib-a", step_time_s=1.0)
    candidates = estimate_ends([waits, starts_now], 30, SlurmSettings(timeout_min=10))
    assert [c.plan.id for c in candidates] == [starts_now.id, waits.id]
    assert (
        candidates[1].start is not None
        and candidates[0].start is not None
        and candidates[1].start - candidates[0].start > 60
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", estimate_rows(candidates)[1][0][2])


def test_time_limit_above_that_of_the_partition_is_an_error() -> None:
    limits = [
        parse_partition(partition_line(name, "n1", max_time=limit))
        for name, limit in (("eth", "00:05:00"), ("ib", "UNLIMITED"), ("roce", "1-00:00:00"))
    ]
    assert [p.time_limit_min for p in limits] == [5, None, 1440]
    assert (
        time_limit_error(ComponentRequest(partition="eth"), 6, limits)
        == "6 min exceeds the partition's time limit of 5 min"
    )
    for request, timeout_min in (
        (ComponentRequest(partition="eth"), 5),
        (ComponentRequest(partition="ib"), 9999),
        (ComponentRequest(partition="eth,roce"), 60),
        (ComponentRequest(partition="eth,ib"), 9999),
        (ComponentRequest(partition="eth", qos="long"), 60),
        (ComponentRequest(), 60),
    ):
        assert time_limit_error(request, timeout_min, limits) is None


@pytest.mark.parametrize(
    ("steps", "step_time_s", "timeout_min", "text"),
    [
        (1_000_000, 1.0, 60, "and 1,000,000 steps take 11.6 days: the job is requeued about 289 times; increase"),
        (3450, 1.0, 60, None),
        (3451, 1.0, "1:00:00", "is 1:00:00, and 3,451 steps take 57.5 minutes: the job is requeued about 1 time;"),
        (30, 1.0, 2, None),  # a short job gets its signal later
        (2, 4000.0, 60, "the job ends before its first step"),
    ],
)
def test_a_run_longer_than_its_time_limit_is_noted(
    steps: int, step_time_s: float, timeout_min: int | str, text: str | None
) -> None:
    warning = requeue_warning(plans.plan("ib-a", step_time_s=step_time_s), steps, timeout_min)
    assert warning is None if text is None else text in str(warning)


def test_partitions_with_a_lower_time_limit_are_named() -> None:
    limits = [parse_partition(partition_line(name, "n1", max_time="02:00:00")) for name in ("ib", "eth")]
    plan = plans.plan("ib-a", "roce-a", "eth-a")
    (line, other) = partition_warnings(plan, SlurmSettings(timeout_min="1-00:00:00"), limits)
    assert "pool ib-a: 1440 min exceeds the partition's time limit of 120 min; request less time" in line
    assert "pool eth-a" in other
    long_queue = SlurmSettings(timeout_min=240, pools={"eth-a": PoolSettings(qos="long")})
    assert [line.split(": ")[1] for line in partition_warnings(plan, long_queue, limits)] == ["pool ib-a"]
    assert not list(partition_warnings(plan, SlurmSettings(timeout_min=120), limits))
