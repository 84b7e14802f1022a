"""Predictions of training runs that others measured (benchmarks/published/): a few of each set, against loose bounds;
benchmarks/published_table.py has all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from published_fit import sample
from published_runs import costs as costs_of
from published_runs import layers, layout, predicted_s, read

from holmes_hpc.planning.cost.memory import memory, room

pytestmark = pytest.mark.integration

SETS = ("sc21", "holmes", "vtrain_multi", "vtrain_single", "bloom", "aleph", "mosaic_a100", "mosaic_h100", "sailor")


@pytest.mark.parametrize("name", SETS)
def test_steps_are_predicted(name: str) -> None:
    """Mean error of ten runs; that of all runs is 3 to 11%."""
    runs = sample([r for r in read([name]) if r.seconds and r.expressible], 10)
    errors = [predicted_s(r) / (r.seconds or 1) - 1 for r in runs]
    assert np.abs(errors).mean() < (0.2 if name == "vtrain_single" else 0.15)


def test_what_fitted_is_told_from_what_did_not() -> None:
    """Of every tenth run of the sweep with runs out of memory, at most a tenth is on the wrong side."""
    runs = read(["aleph"])[::10]
    wrong = 0
    for run in runs:
        made = layout(run, costs_of(run))
        fits = bool((memory(made, layers(run, made)).total() <= room(made)).all())
        wrong += fits != run.fits
    assert wrong <= 0.1 * len(runs)


def test_rows_say_what_their_set_does_not() -> None:
    runs = read()
    assert {r.set for r in runs} == set(SETS) and len(runs) > 2800
    assert {r.attention for r in runs if r.set == "aleph"} == {"flash2", "flash1", "softmax", "torch"}
    with pytest.raises(ValueError, match="has no seconds"):
        type(runs[0])(**{**vars(runs[0]), "seconds": None, "fits": True})
