from __future__ import annotations

import pytest

from holmes_hpc.slurm.constraint import matcher


@pytest.mark.parametrize(
    "constraint, features, fits",
    [
        (None, "", True),
        ("ib", "ib", True),
        ("ib", "x", False),
        ("ib&fast", "ib", False),
        ("ib|roce", "roce", True),
        ("a&b|c", "c", True),
        ("a&(b|c)", "c", False),
        ("a&(b|c)", "a c", True),
        ("!a", "b", True),
        ("!a&b", "a b", False),
    ],
)
def test_constraints(constraint: str | None, features: str, fits: bool) -> None:
    assert matcher(constraint)(frozenset(features.split())) is fits


@pytest.mark.parametrize(
    "constraint", ["[a*2&b*1]", "a*2", "a&", "(a", "a&&b", "a,b", "a b", "a(b)", "()", "a !b", "(" * 9999]
)
def test_what_only_slurm_can_judge(constraint: str) -> None:
    assert matcher(constraint)(frozenset())
