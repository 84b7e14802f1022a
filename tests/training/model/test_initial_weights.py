"""Initial weights are whole numbers times one constant: nothing in them can differ between devices or layouts."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.training.model import initial_weights
from holmes_hpc.training.model.initial_weights import hash64


def whole(seed: int, name: str, rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
    return initial_weights.normal(seed, name, torch.arange(rows), torch.arange(columns), columns, std)


def test_a_seeds_weights_are_these_bits() -> None:
    """On every machine: a change of a seed's weights shows here."""
    drawn = whole(1234, "decoder.layers.0.mlp.linear_fc1.weight", 300, 70)
    assert hashlib.sha256(drawn.numpy().tobytes()).hexdigest()[:16] == "a0956f7b710132ad"


def test_every_number_is_a_whole_one_times_a_constant() -> None:
    """So that only one operation rounds, once, as all devices round it."""
    drawn = whole(1, "w", 64, 64, std=65536.0)
    assert torch.equal(drawn, drawn.round()) and drawn.abs().max() < 1 << 19


def test_the_hash_is_splitmix64() -> None:
    """Its published first numbers for the seed 1234567 (Vigna's splitmix64.c)."""
    found = hash64(torch.arange(1, 4), 1234567)
    assert [int(n) % (1 << 64) for n in found] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_they_are_normal_enough() -> None:
    drawn = whole(5, "w", 1000, 1000, std=1.0).double()
    assert abs(float(drawn.mean())) < 4e-3 and float(drawn.std()) == pytest.approx(1, abs=3e-3)
    for at in (-2.0, -1.0, 0.0, 0.5, 1.5, 3.0):
        share = float((drawn < at).double().mean())
        assert share == pytest.approx(float(torch.special.ndtr(torch.tensor(at))), abs=4.5e-3)
    rows, columns = drawn[:-1] * drawn[1:], drawn[:, :-1] * drawn[:, 1:]
    assert abs(float(rows.mean())) < 4e-3 and abs(float(columns.mean())) < 4e-3  # neighbours do not go together


def test_names_and_seeds_differ() -> None:
    drawn = [whole(1, "a", 50, 50), whole(1, "b", 50, 50), whole(2, "a", 50, 50)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([drawn[first].view(-1), drawn[second].view(-1)]))[0, 1])) < 0.08


@given(tp=st.sampled_from([1, 2, 4, 8]), rows=st.integers(1, 40), columns=st.integers(1, 40), by_row=st.booleans())
def test_parts_are_the_wholes(tp: int, rows: int, columns: int, by_row: bool) -> None:
    rows, columns = (rows * tp, columns) if by_row else (rows, columns * tp)
    parts = []
    for rank in range(tp):
        own = [torch.arange(rows), torch.arange(columns)]
        own[0 if by_row else 1] = own[0 if by_row else 1].chunk(tp)[rank]
        parts.append(initial_weights.normal(7, "w", *own, columns, 0.02))
    assert torch.equal(torch.cat(parts, dim=0 if by_row else 1), whole(7, "w", rows, columns))
