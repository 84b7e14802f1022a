"""Rows of stages, each (fabric's place among the offers, nodes, TP): other orders of a row, and rows a change away."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, permutations, product

FEW_FABRICS = 3  # of which every order is looked at, and each one's wider stages first or last by themselves
Stages = tuple[tuple[int, int, int], ...]


def orders(row: list[tuple[int, int, int]]) -> Iterator[Stages]:
    """The stages with the fabrics in other orders, and each fabric's wider stages first or last."""
    parts = [tuple(part) for _, part in groupby(row, key=lambda stage: stage[0])]
    few = len(parts) <= FEW_FABRICS
    for order in permutations(parts) if few else [parts, parts[::-1]]:
        ways = product(*((part, part[::-1]) for part in order)) if few else [order, [part[::-1] for part in order]]
        yield from (sum(way, ()) for way in ways)


def changed(stages: Stages) -> Iterator[Stages]:
    """The stages with one of them cut in two, or two that follow each other made one or in each other's place, or a
    node of one given to another: all within a fabric."""
    for i, (f, nodes, tp) in enumerate(stages):
        before, after = stages[:i], stages[i + 1 :]
        for some in {1, nodes // 2, nodes - 1} - {0, nodes}:
            yield (*before, (f, some, tp), (f, nodes - some, tp), *after)
        if after and after[0][0] == f:
            yield (*before, (f, nodes + after[0][1], tp), *after[1:])
            yield (*before, after[0], stages[i], *after[1:])
        for j, (g, more, other) in enumerate(stages if nodes > 1 else ()):
            if g == f and i != j:
                moved = {i: (f, nodes - 1, tp), j: (g, more + 1, other)}
                yield tuple(moved.get(at, stage) for at, stage in enumerate(stages))
