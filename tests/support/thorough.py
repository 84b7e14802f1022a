"""Leave repeated cases of a test to `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def all_but(cases: Iterable[Any], *first: Any) -> list[Any]:
    """Mark all cases except `first` as thorough; only `first` are part of `make test`."""
    params = [
        pytest.param(case, marks=() if case in first else pytest.mark.thorough, id=getattr(case, "stem", str(case)))
        for case in cases
    ]
    assert len([p for p in params if not p.marks]) == len(first), f"{first} are not all among the cases"
    return params
