"""Statistics against what can be said about them by hand, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.records.rates import harmonic_mean, warmup_steps
from holmes_hpc.results import statistics as s

numbers = st.floats(0.001, 1e6)


@given(st.integers(0, 10_000))
def test_warmup_never_takes_more_than_half(count: int) -> None:
    left_out = warmup_steps(count)
    assert 0 <= left_out <= count / 2 and left_out <= 20
    assert left_out >= 2 or count < 4


@pytest.mark.parametrize(("n", "ranks"), [(5, None), (6, (0, 5)), (10, (1, 8)), (20, (5, 14)), (100, (39, 60))])
def test_interval_positions_are_those_of_the_tables(n: int, ranks: tuple[int, int] | None) -> None:
    assert s.interval_positions(n) == ranks


def test_interval_positions_of_many_values_go_on_smoothly() -> None:
    low, high = s.interval_positions(1000) or (0, 0)
    more, most = s.interval_positions(1001) or (0, 0)
    assert abs(more - low) <= 1 and abs(most - high) <= 2


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [s.median_interval(rng.exponential(size=25)) for _ in range(2000)]
    covered = np.mean([e.low <= math.log(2) <= e.high for e in found])
    assert 0.94 <= covered <= 0.985  # at least 95%, and not by being endlessly wide


def test_too_few_values_have_a_median_and_no_interval() -> None:
    e = s.median_interval([1.0, 3.0, math.nan])
    assert (e.median, e.count) == (2.0, 2) and math.isnan(e.low) and math.isnan(e.high)
    assert s.median_interval([]).count == 0


@given(st.lists(numbers, min_size=1, max_size=40))
def test_harmonic_mean_is_all_work_over_all_time(rates: list[float]) -> None:
    assert harmonic_mean(rates) == pytest.approx(len(rates) / sum(1 / r for r in rates))
    assert harmonic_mean(rates) <= np.mean(rates) * (1 + 1e-9)


def test_harmonic_mean_of_a_stopped_run_is_not_a_number() -> None:
    assert math.isnan(harmonic_mean([1.0, 0.0])) and math.isnan(harmonic_mean([]))


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_interval_over_repeats_covers_what_another_run_would_show(count: int) -> None:
    rng = np.random.default_rng(3)
    found = [s.repeats_interval(np.exp(rng.normal(1, 0.05, count))) for _ in range(2000)]
    assert np.mean([e.low <= math.e <= e.high for e in found]) >= 0.94
    assert all(e.low <= e.median <= e.high and e.count == count for e in found)


def test_one_run_says_nothing_about_another() -> None:
    assert math.isnan(s.repeats_interval([1.0]).low) and s.repeats_interval([1.0]).median == 1.0
    assert s.repeats_interval([]).count == 0


def test_mape_and_errors() -> None:
    assert list(s.percentage_errors([110, 90], [100, 100])) == [pytest.approx(10), pytest.approx(-10)]
    assert s.mape([110, 80, math.nan], [100, 100, 100]) == pytest.approx(15)
    assert math.isnan(s.mape([1.0], [0.0]))


def test_fraction_and_scaling() -> None:
    assert s.fraction_of_homogeneous(9.0, [10.0, 8.0]) == pytest.approx(1.0)
    assert list(s.scaling_efficiency([10, 19, 36], [1, 2, 4])) == [1.0, 0.95, 0.9]


def _runs(rows: list[tuple[str, str, int, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["session", "system", "started", "samples_per_s"])
    frame["started"] = pd.to_datetime(frame["started"], unit="s")
    return frame


def test_pairs_are_made_within_a_session_only() -> None:
    # the machine is twice as fast in session b; the candidate is 1.5 times the baseline in both
    runs = _runs(
        [
            ("a", "one", 0, 10),
            ("a", "holmes", 1, 15),
            ("a", "one", 2, 10),
            ("b", "one", 10, 20),
            ("b", "holmes", 11, 30),
            ("b", "holmes", 12, 30),
        ]
    )
    pairs = s.paired_ratios(runs, "system", "one", "holmes")
    assert list(pairs["ratio"]) == [1.5, 1.5] and list(pairs["session"]) == ["a", "b"]


def test_pairs_follow_start_time_not_row_order() -> None:
    runs = _runs([("a", "one", 5, 20), ("a", "holmes", 6, 20), ("a", "holmes", 1, 11), ("a", "one", 0, 10)])
    assert list(s.paired_ratios(runs, "system", "one", "holmes")["ratio"]) == [1.1, 1.0]


def test_nothing_to_pair_is_an_empty_table() -> None:
    assert s.paired_ratios(_runs([("a", "one", 0, 1)]), "system", "one", "holmes").empty
