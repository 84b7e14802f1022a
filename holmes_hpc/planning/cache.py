"""A cache of results: a search asks for the same values again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo(dict[tuple[object, ...], Any]):
    """Results by everything that they depend on."""

    def of(self, *key: object, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which runs once per `key`."""
        try:
            value: T = self[key]
        except KeyError:
            value = self[key] = compute()
        return value
