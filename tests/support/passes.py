"""What the stages of a pipeline have to compute, whatever the schedule."""

from __future__ import annotations

from itertools import product

from holmes_hpc.planning.schedule.kinds import Pass
from holmes_hpc.planning.schedule.order import Order


def every_pass(order: Order) -> list[Pass]:
    """Those of each stage, sorted: every micro-batch of every chunk, both ways."""
    return sorted(Pass(*one) for one in product((True, False), range(order.micro_batches), range(order.chunks)))
