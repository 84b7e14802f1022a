"""The passes that a pipeline's stages compute, whatever the schedule."""

from __future__ import annotations

from itertools import product

from holmes_hpc.planning.schedule.kinds import Pass
from holmes_hpc.planning.schedule.order import Order


def every_pass(order: Order) -> list[Pass]:
    """Return the passes of a stage, sorted: every micro-batch of every chunk, forward and backward."""
    return sorted(Pass(*fields) for fields in product((True, False), range(order.micro_batches), range(order.chunks)))
