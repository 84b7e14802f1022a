"""What was computed before: a search asks for the same things again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo(dict[tuple[object, ...], Any]):
    """Results by all that they depend on."""

    def of(self, *key: object, compute: Callable[[], T]) -> T:
        """Return what `compute` gives, which is computed once for each `key`."""
        try:
            value: T = self[key]
        except KeyError:
            value = self[key] = compute()
        return value
