"""The rows of a tensor, one per token, that neighbouring stages with different TP or CP exchange.

A part is what one rank of a replica holds. Parts are numbered CP rank x TP + TP rank.
"""

import math
from functools import lru_cache
from itertools import product
from operator import itemgetter

Rows = list[tuple[slice, slice]]  # the same rows, counted in a part of the upper and in a part of the lower stage


@lru_cache(maxsize=256)
def exchanged_rows(
    upper: tuple[int, int], lower: tuple[int, int], splits: bool, length: int
) -> dict[tuple[int, int], Rows]:
    """Return {(part of the upper stage, part of the lower stage): the rows that both hold, in the order of tokens}.
    `upper`, `lower`: (TP, CP). `splits`: TP ranks hold parts of a sequence, not whole ones. `length`: its tokens."""
    if upper == lower:
        return {(part, part): [(slice(None), slice(None))] for part in range(math.prod(upper))}
    exchanged = dict[tuple[int, int], Rows]()
    parts = (
        [_token_ranges(part, *sizes, splits, length) for part in range(math.prod(sizes))] for sizes in (upper, lower)
    )
    for (i, above), (j, below) in product(*map(enumerate, parts)):
        rows = [
            (low, slice(low - first + row, high - first + row), slice(low - start + target, high - start + target))
            for (first, end, row), (start, stop, target) in product(above, below)
            if (low := max(first, start)) < (high := min(end, stop))
        ]
        if rows and (splits or i % upper[0] == j % lower[0]):
            exchanged[i, j] = [(a, b) for _, a, b in sorted(rows, key=itemgetter(0))]
    return exchanged


def _token_ranges(part: int, tp: int, cp: int, splits: bool, length: int) -> list[tuple[int, int, int]]:
    """Return the ranges of tokens that a part holds (with CP, two chunks), as (first token, end, first row)."""
    cp_rank, tp_rank = divmod(part, tp)
    chunk, held = length // (2 * cp), length // cp
    chunks = [0] if cp == 1 else [cp_rank * chunk, (2 * cp - 1 - cp_rank) * chunk]
    low, high = (tp_rank * held // tp, (tp_rank + 1) * held // tp) if splits else (0, held)
    ranges, size = list[tuple[int, int, int]](), held // len(chunks)
    for i, first in enumerate(chunks):
        start, end = max(low, i * size), min(high, (i + 1) * size)
        if start < end:
            ranges.append((first + start - i * size, first + end - i * size, start - low))
    return ranges
