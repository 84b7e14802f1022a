"""Do components fit together, and what may keep them waiting; which plan ends first."""

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

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import PlanError, SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.scontrol import Config, parse_partition
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.preflight import beyond_limit, check_fit, eligible, warnings
from holmes_hpc.submission.queue_estimate import earliest, plans_to_try, start_rows, training_time_s

NODES = [node(f"ib{i}", "nic_ib,a", "ib,all") for i in range(4)] + [
    node(f"eth{i}", "nic_ethernet", "eth,all") for i in range(2)
]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["ib", "eth", "all"])), min_size=2, max_size=4))
def test_fit_is_what_trying_all_ways_finds(wanted: list[tuple[int, str]]) -> None:
    requests = [ComponentRequest(n, partition=p) for n, p in wanted]
    sets = [eligible(r, NODES) for r in requests]
    if any(len(found) < r.nodes for found, r in zip(sets, requests, strict=True)):
        return  # each is tested alone before
    slots = [found for found, r in zip(sets, requests, strict=True) for _ in range(r.nodes)]
    possible = len(slots) <= 6 and any(
        all(name in slot for name, slot in zip(names, slots, strict=True))
        for names in itertools.permutations([n.name for n in NODES], len(slots))
    )
    if possible:
        check_fit(requests, NODES)
    else:
        with pytest.raises(SubmissionError, match="nodes together"):
            check_fit(requests, NODES)


def test_node_lists_and_exclusions_count() -> None:
    assert eligible(ComponentRequest(1, partition="ib", exclude="ib[0-1]"), NODES) == {"ib2", "ib3"}
    assert eligible(ComponentRequest(1, partition="ib", nodelist="ib2"), NODES) == {"ib2"}


def test_warnings_name_what_may_keep_the_job_waiting() -> None:
    parts = [ComponentRequest(1, partition="ib", constraint="nic_ib"), ComponentRequest(1, partition="all")]
    bad = Config({"SchedulerType": "sched/builtin", "SchedulerParameters": "disable_hetjob_steps"})
    found = warnings(parts, NODES, bad, {"MaxSubmit": 1})
    for word in (
        "sched/backfill",
        "disable_hetjob_steps",
        "MaxSubmit is 1",
        "component 1 has no constraint",
        "partitions overlap",
    ):
        assert any(word in line for line in found), (word, found)
    assert warnings([parts[0]], NODES, Config({"SchedulerType": "sched/builtin"}), {}) == []
    good = [parts[0], ComponentRequest(1, partition="eth", constraint="nic_ethernet")]
    assert warnings(good, NODES, Config({"SchedulerType": "sched/backfill"}), {"MaxJobs": 9}) == []
    assert warnings(good, NODES, None, {}) == []


STARTS = """
for a in "$@"; do case "$a" in --test-only) test=1;; *.sh) file=$a;; --partition=bad) bad=1;; esac; done
[ -n "$bad" ] && { echo "allocation failure: Requested partition configuration not available now" >&2; exit 1; }
when=2030-01-01T00:00:00
[ -n "$file" ] && grep -q partition=roce "$file" && when=2030-01-01T05:00:00
echo "sbatch: Job 9 to start at $when using 4 processors on nodes n1 in partition p" >&2
"""


@pytest.mark.integration
def test_a_smaller_plan_that_starts_now_beats_the_best_that_waits(fake_slurm: Any) -> None:
    fake_slurm.answer("sbatch", STARTS)
    fast, slow = plans.plan("ib-a", "roce-a", step_time_s=1.0), plans.plan("ib-a", step_time_s=2.0)
    found = earliest([fast, slow], 3600, SlurmSettings(timeout_min=600))
    assert [c.plan.id for c in found] == [slow.id, fast.id]
    assert found[0].start == datetime(2030, 1, 1).timestamp()
    assert found[0].end == found[0].start + training_time_s(slow, 3600)
    columns, rows = start_rows(found)
    assert columns[2:5] == ["start", "duration", "end"] and rows[0][2].startswith("2030-01-01 00:00")


def test_candidates_are_the_best_plans_of_parts_of_the_site() -> None:
    asked = []

    def plan_for(nodes: dict[str, int] | None) -> Plan:
        asked.append(nodes)
        if nodes is not None and "eth-a" in nodes:
            raise PlanError("no", where="test", hint="none")
        fabrics = sorted(nodes or {"ib-a": 4, "roce-a": 4})
        return plans.plan(*fabrics, nodes=min((nodes or {"x": 4}).values()))

    found = plans_to_try(plan_for, plans.site())
    layouts = [tuple((c.fabric, c.nodes) for c in plan.components) for plan in found]
    assert layouts[0] == (("ib-a", 4), ("roce-a", 4)) and len(set(layouts)) == len(layouts) == 9
    assert (("ib-a", 1),) in layouts and (("ib-a", 2), ("roce-a", 2)) in layouts
    assert len(plans_to_try(plan_for, plans.site(), most=3)) == 3


@pytest.mark.integration
def test_impossible_candidates_come_last_with_their_reason(fake_slurm: Any) -> None:
    fake_slurm.answer("sbatch", STARTS)
    possible = plans.plan("ib-a")
    found = earliest([plans.plan("ib-a", step_time_s=100), possible], 3600, SlurmSettings(timeout_min=600))
    assert found[0].plan.id == possible.id and found[1].end is None and "timeout_min" in found[1].reason


@pytest.mark.slurm
@pytest.mark.usefixtures("testbed")
def test_slurms_own_queue_decides(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("busy_roce")
    preflight.forget()
    waits, starts_now = plans.plan("ib-a", "roce-a", step_time_s=0.5), plans.plan("ib-a", step_time_s=1.0)
    found = earliest([waits, starts_now], 30, SlurmSettings(timeout_min=10))
    assert [c.plan.id for c in found] == [starts_now.id, waits.id]
    assert found[1].start is not None and found[0].start is not None and found[1].start - found[0].start > 60
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", start_rows(found)[1][0][2])


def test_a_time_beyond_the_partitions_limit_would_wait_for_ever() -> None:
    limits = [
        parse_partition(partition_line(name, "n1", max_time=most))
        for name, most in (("eth", "00:05:00"), ("ib", "UNLIMITED"), ("roce", "1-00:00:00"))
    ]
    assert [p.limit_min for p in limits] == [5, None, 1440]
    assert (
        beyond_limit(ComponentRequest(partition="eth"), 6, limits)
        == "6 min is beyond the time limit of its partition, 5 min"
    )
    for request, wanted in (
        (ComponentRequest(partition="eth"), 5),
        (ComponentRequest(partition="ib"), 9999),
        (ComponentRequest(partition="eth,roce"), 60),
        (ComponentRequest(partition="eth,ib"), 9999),
        (ComponentRequest(partition="eth", qos="long"), 60),
        (ComponentRequest(), 60),
    ):
        assert beyond_limit(request, wanted, limits) is None
