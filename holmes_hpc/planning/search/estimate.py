"""A quick estimate of a placement's step: arithmetic on numbers or on arrays of many placements at once. And which
placements are listed by it: all where they are few, then those not far from the best."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

import numpy as np

SMALL = 300  # placements up to which estimates drop none


@dataclass(frozen=True)
class Estimate:
    """What a step is made of, in seconds (numbers, or arrays of shape (placements,)).

    `tau`: the slowest stage's layers for one micro-batch, forward and backward; `head`: a stage's share of the output
    layer; `wire`: one transfer over the slowest edge; `transfers`: one micro-batch's way down the pipeline and up;
    `reduce`: the gradients' traffic of a stage, `after`: what nothing hides; `early`: how much of both is left without
    virtual stages, where the first stages run far ahead. `most_chunks`: virtual stages it may have.
    """

    micro_batches: Any
    stages: Any
    tau: Any
    head: Any
    wire: Any
    transfers: Any
    reduce: Any
    after: Any
    early: Any
    most_chunks: Any

    def seconds(self, chunks: Any) -> Any:
        """Of the step with so many virtual stages: all micro-batches through what is slowest, the slowest stage or the
        slowest edge, the pipeline's fill and drain, and the gradients' traffic that the other stages' fill does not
        hide."""
        most = np.maximum if isinstance(self.tau, np.ndarray) else max  # of numbers Python's own is ten times quicker
        fill = (self.stages - 1) * self.tau / chunks
        computing = self.micro_batches * (self.tau + self.head) + self.transfers * chunks
        sending = self.micro_batches * self.wire * chunks + most(0, self.transfers - 2 * self.wire)  # to it and from it
        hides = (fill + self.transfers * chunks) / 2
        left = 1 - (1 - self.early) * (chunks == 1)
        return most(computing, sending) + fill + (most(0, self.reduce - hides) + self.after) * left

    def least(self) -> Any:
        """Seconds with the number of virtual stages that suits best: none, some, or as many as there may be."""
        if not isinstance(self.tau, np.ndarray):
            return min(self.seconds(chunks) for chunks in {1, min(3, self.most_chunks), self.most_chunks})
        few = np.minimum(self.most_chunks, 3)
        return np.minimum(self.seconds(1), np.minimum(self.seconds(few), self.seconds(self.most_chunks)))

    def at(self, row: int) -> Estimate:
        """That of one placement of many."""
        return Estimate(
            *(float(v[row]) if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self))
        )


class Limit:
    """The least estimate so far, of all placements, and of those on each fabric, each pair and all fabrics: they are
    looked at whatever the others promise. Up to SMALL placements all are allowed; then those whose estimate is at most
    `margin` times that."""

    def __init__(self, fabrics: int, margin: float) -> None:
        self.fabrics, self.margin, self.count = fabrics, margin, 0
        self.least: dict[frozenset[str], float] = {}

    def most(self, on: frozenset[str] = frozenset()) -> float:
        """Seconds up to which placements on these fabrics are allowed."""
        return inf if self.count <= SMALL else self.margin * self.least.get(self._kind(on), inf)

    def allows(self, estimate: float, on: frozenset[str]) -> bool:
        self.count += isfinite(estimate)
        kind = self._kind(on)
        for one in (kind, frozenset[str]()):
            self.least[one] = min(self.least.get(one, inf), estimate)
        return isfinite(estimate) and estimate <= self.most(on)

    def _kind(self, on: frozenset[str]) -> frozenset[str]:
        """Which of the least ones counts; the empty set: that of all."""
        return on if required(len(on), self.fabrics) else frozenset()


def required(used: int, fabrics: int) -> bool:
    """Whether the best placement on so many of a site's fabrics is always tried: one alone, a pair, all."""
    return used in (1, 2, fabrics)
