"""Weights that should be alike and are not end a run, with the parameter and the rank."""

from __future__ import annotations

import pytest
import torch

from holmes_hpc.training.model import replica_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 60).reshape(6, 10).to(dtype)
    own = replica_check.checksum(weights)
    for at in range(60):
        other = weights.clone().view(-1)
        bits = other.view(replica_check._BITS[other.element_size()])
        bits[at] ^= 1
        assert replica_check.checksum(other) != own
    assert replica_check.checksum(weights.T) != own
    assert replica_check.checksum(weights.T.contiguous().T) == own  # as it is laid out in memory is nothing to it


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    own = replica_check.checksum(weights)
    monkeypatch.setattr(replica_check, "_BLOCK", 7)
    assert replica_check.checksum(weights) == own


def test_who_differs_is_named() -> None:
    alike = {4: [1, 2], 5: [1, 2], 9: [1, 2]}
    assert not list(replica_check.differences(alike, ["a", "b"]))
    found = list(replica_check.differences({**alike, 9: [1, 3]}, ["a", "b"]))
    assert found == ["b of rank 9 is not that of the ranks that should hold the same"]
