"""Of the faults of `make faults` those that need a testbed to break, once each; the others are in
tests/training/test_checkpoint.py, with local processes."""

from __future__ import annotations

from pathlib import Path

import interruptions
import pytest
from faults import KINDS, RANKS, Fault, draw_faults


def test_faults_are_drawn_from_the_seed_each_kind_alike() -> None:
    drawn = draw_faults(7, 24)
    assert drawn == draw_faults(7, 24) != draw_faults(8, 24) and drawn[:9] == draw_faults(7, 9)
    assert [sum(f.kind == kind for f in drawn) for kind in KINDS] == [3] * len(KINDS)
    assert len({f.rank for f in drawn}) == RANKS and len({f.step for f in drawn}) > 8


@pytest.mark.slurm
@pytest.mark.breaking
@pytest.mark.parametrize(
    ("kind", "rank", "step"), [("node killed", 0, 10), ("RDMA link cut", 3, 12), ("slurmctld restarted", 1, 6)]
)
def test_the_run_goes_on_bit_by_bit(kind: str, rank: int, step: int, root: Path, whole: interruptions.Figures) -> None:
    fault = Fault(list(KINDS).index(kind), kind, rank, step, background=True)
    outcome = interruptions.run_with_fault(fault, root, whole)
    assert not outcome.problem, interruptions.line_of(outcome)
