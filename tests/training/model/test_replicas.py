"""Weights that should be alike and are not end a run, with the parameter and the rank."""

from __future__ import annotations

import pytest
import torch

from holmes_hpc.training.model import replicas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 60).reshape(6, 10).to(dtype)
    own = replicas.checksum(weights)
    for at in range(60):
        other = weights.clone().view(-1)
        bits = other.view(replicas._BITS[other.element_size()])
        bits[at] ^= 1
        assert replicas.checksum(other) != own
    assert replicas.checksum(weights.T) != own
    assert replicas.checksum(weights.T.contiguous().T) == own  # as it is laid out in memory is nothing to it


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    own = replicas.checksum(weights)
    monkeypatch.setattr(replicas, "_BLOCK", 7)
    assert replicas.checksum(weights) == own


def test_who_differs_is_named() -> None:
    alike = {4: [1, 2], 5: [1, 2], 9: [1, 2]}
    assert not list(replicas.differences(alike, ["a", "b"]))
    found = list(replicas.differences({**alike, 9: [1, 3]}, ["a", "b"]))
    assert found == ["b of rank 9 is not that of the ranks that should hold the same"]
