"""A cache of results, for a search that needs the same values again and again."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo(dict[tuple[object, ...], Any]):
    """A dictionary of results. Each key consists of a name and of all values that the result depends on."""

    def of(self, *key: object, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which runs only once for each `key`."""
        try:
            value: T = self[key]
        except KeyError:
            value = self[key] = compute()
        return value
