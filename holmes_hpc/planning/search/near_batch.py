"""A global batch near the one asked for that can be shared out better: 511 sequences leave few ways to, 512 many."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, gcd, inf

from holmes_hpc.config.model import Batch
from holmes_hpc.planning.search.offers import Question, divisors
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.space import Space

EVEN = 16  # micro-batches of all ranks that are a multiple of this are shared out well as they are
APART = 0.03  # a batch so much larger or smaller is near
LOOKED_AT = 3
WORTH = 0.05  # more samples a second than that are worth a remark


def near_batch(question: Question, best: Placement, seconds: float) -> Batch | None:
    """Return the batch near the one asked for that may give the most samples a second, in micro-batches as those of
    `best`, where a step takes `seconds`; None where none can give so many more that it is worth a remark."""
    batch, options = question.batch, question.options
    if options.dp is not None or batch.global_size // best.micro % EVEN == 0:
        return None
    told = replace(options, search_micro_size=False)

    def rate(size: int) -> float:
        near = replace(batch, global_size=size, micro_size=best.micro)
        found = Space(*question._replace(batch=near, options=told)).placements()
        return size / min((p.least_s for p in found), default=inf)

    unit = EVEN * best.micro
    size = batch.global_size
    others = [n * unit for n in range(max(1, ceil(size * (1 - APART) / unit)), floor(size * (1 + APART) / unit) + 1)]
    others.sort(key=lambda n: (-gcd(n // best.micro, best.gpus), -len(divisors(n // best.micro)), abs(n - size)))
    rates = {n: rate(n) for n in others[:LOOKED_AT]}
    own = size / seconds
    worth = [n for n in rates if rates[n] > (1 + WORTH) * own]
    if not worth:
        return None
    most = max(rates.values())
    return replace(batch, global_size=next(n for n in worth if rates[n] > most / (1 + WORTH)))
