"""The check that replicas of a weight are equal: its checksum, and its message."""

from __future__ import annotations

import pytest
import torch

from holmes_hpc.training.model import replica_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_depends_on_every_bit_and_the_order(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 60).reshape(6, 10).to(dtype)
    expected = replica_check.replica_checksum(weights)
    for index in range(60):
        changed = weights.clone().view(-1)
        bits = changed.view(replica_check._BITS[changed.element_size()])
        bits[index] ^= 1
        assert replica_check.replica_checksum(changed) != expected
    assert replica_check.replica_checksum(weights.T) != expected
    assert replica_check.replica_checksum(weights.T.contiguous().T) == expected  # the memory layout does not matter


def test_the_checksum_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = replica_check.replica_checksum(weights)
    monkeypatch.setattr(replica_check, "_BLOCK", 7)
    assert replica_check.replica_checksum(weights) == expected


def test_the_rank_that_differs_is_named() -> None:
    equal_rows = {4: [1, 2], 5: [1, 2], 9: [1, 2]}
    assert not list(replica_check.replica_differences(equal_rows, ["a", "b"]))
    messages = list(replica_check.replica_differences({**equal_rows, 9: [1, 3]}, ["a", "b"]))
    assert messages == ["b of rank 9 differs from its replicas"]
