"""The estimate of a run whose pools are jobs of their own, from Slurm's starts of each and predicted steps."""

from __future__ import annotations

import plans
import pytest

from holmes_hpc.submission.elastic.members import CHANGE_S
from holmes_hpc.submission.queue_estimate import QueueEstimate, member_starts
from holmes_hpc.submission.time_limit import START_UP_S

NOW, LATER = 1e9, 1e9 + START_UP_S + 100


def estimates(roce_start: float | None = LATER) -> list[QueueEstimate]:
    both = QueueEstimate(plans.plan("ib-a", "roce-a", step_time_s=1.0), roce_start, 0, 60)
    ib = QueueEstimate(plans.plan("ib-a", step_time_s=2.0), NOW, 0, 60)
    return [both, ib, QueueEstimate(plans.plan("roce-a", step_time_s=3.0), roce_start, 0, 60)]


def test_a_pool_that_is_free_later_joins() -> None:
    starts, end = member_starts(estimates(), 1050) or ({}, 0)
    assert starts == {"ib-a": NOW, "roce-a": LATER}
    assert end == pytest.approx(LATER + CHANGE_S + 1000)  # 50 of the steps are made before


def test_a_pool_that_is_free_after_the_end_does_not_join() -> None:
    assert member_starts(estimates(), 50) == ({"ib-a": NOW}, pytest.approx(NOW + START_UP_S + 100))


def test_there_is_no_estimate_without_a_plan_and_a_start_for_each_pool() -> None:
    assert member_starts(estimates(None), 50) is None
    assert member_starts(estimates()[:2], 50) is None
    assert member_starts(estimates()[1:2], 50) is None
