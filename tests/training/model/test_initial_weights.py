"""Initial weights: integers times a constant, so that they cannot differ between devices or layouts."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.training.model import initial_weights
from holmes_hpc.training.model.initial_weights import hash64


def full_matrix(seed: int, name: str, rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
    return initial_weights.normal(seed, name, torch.arange(rows), torch.arange(columns), columns, std)


def test_the_weights_of_a_seed_have_a_fixed_checksum() -> None:
    """A change of a seed's weights, on any machine, fails this test."""
    weights = full_matrix(1234, "decoder.layers.0.mlp.linear_fc1.weight", 300, 70)
    assert hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16] == "a0956f7b710132ad"


def test_every_weight_is_an_integer_times_a_constant() -> None:
    """Only one operation rounds, and all devices round it equally."""
    weights = full_matrix(1, "w", 64, 64, std=65536.0)
    assert torch.equal(weights, weights.round()) and weights.abs().max() < 1 << 19


def test_the_hash_is_splitmix64() -> None:
    """The published first numbers for the seed 1234567 (Vigna's splitmix64.c)."""
    hashes = hash64(torch.arange(1, 4), 1234567)
    assert [int(n) % (1 << 64) for n in hashes] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_weights_are_approximately_normal_and_uncorrelated() -> None:
    weights = full_matrix(5, "w", 1000, 1000, std=1.0).double()
    assert abs(float(weights.mean())) < 4e-3 and float(weights.std()) == pytest.approx(1, abs=3e-3)
    for bound in (-2.0, -1.0, 0.0, 0.5, 1.5, 3.0):
        fraction = float((weights < bound).double().mean())
        assert fraction == pytest.approx(float(torch.special.ndtr(torch.tensor(bound))), abs=4.5e-3)
    rows, columns = weights[:-1] * weights[1:], weights[:, :-1] * weights[:, 1:]
    assert abs(float(rows.mean())) < 4e-3 and abs(float(columns.mean())) < 4e-3  # neighbours are uncorrelated


def test_weights_of_different_names_or_seeds_are_uncorrelated() -> None:
    weights = [full_matrix(1, "a", 50, 50), full_matrix(1, "b", 50, 50), full_matrix(2, "a", 50, 50)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([weights[first].view(-1), weights[second].view(-1)]))[0, 1])) < 0.08


@given(tp=st.sampled_from([1, 2, 4, 8]), rows=st.integers(1, 40), columns=st.integers(1, 40), by_row=st.booleans())
def test_the_parts_of_tp_ranks_make_up_the_full_matrix(tp: int, rows: int, columns: int, by_row: bool) -> None:
    rows, columns = (rows * tp, columns) if by_row else (rows, columns * tp)
    parts = []
    for rank in range(tp):
        indices = [torch.arange(rows), torch.arange(columns)]
        indices[0 if by_row else 1] = indices[0 if by_row else 1].chunk(tp)[rank]
        parts.append(initial_weights.normal(7, "w", *indices, columns, 0.02))
    assert torch.equal(torch.cat(parts, dim=0 if by_row else 1), full_matrix(7, "w", rows, columns))
