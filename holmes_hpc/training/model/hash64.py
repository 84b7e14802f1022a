"""A hash of whole numbers in tensors, the same on every device: what initial weights and checksums are made of."""

from __future__ import annotations

import torch


def hash64(number: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014): the 64 bits, as int64, that follow the state `key` after `number` steps,
    for an int64 tensor of numbers."""
    z = number * -7046029254386353131 + key  # 0x9E3779B97F4A7C15
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift(z, 31)


def _shift(number: torch.Tensor, by: int) -> torch.Tensor:
    """To the right without the sign."""
    return (number >> by) & ((1 << (64 - by)) - 1)
