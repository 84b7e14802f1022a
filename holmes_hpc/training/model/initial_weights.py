"""Initial weights that depend on nothing but the seed and a parameter's name and place: no device, no layout.

torch's own normal numbers differ from one GPU model to the next (its CUDA generator counts multiprocessors), and from
one kind of CPU to the next (which instructions its log and cosine are made of). Here an element's number is a hash of
its index in the whole parameter, in integer arithmetic, and one multiplication in fp32, which all devices round alike.
A rank computes its own part only.
"""

from __future__ import annotations

import hashlib

import torch

_BLOCK = 1 << 16  # elements at a time: what is in between stays in a CPU's cache


def normal(seed: int, name: str, rows: torch.Tensor, columns: torch.Tensor, width: int, std: float) -> torch.Tensor:
    """Elements (rows, columns) of the parameter `name`, a matrix `width` columns wide: fp32, on the device of `rows`.

    Mean 0, standard deviation `std`: the sum of twelve uniform numbers (Irwin 1927, Hall 1927), whose distribution
    function is nowhere further than 0.0024 from a normal one's; none is further out than 6 `std`.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)
    drawn = torch.empty((rows.numel(), columns.numel()), dtype=torch.float32, device=rows.device)
    step = max(1, _BLOCK // columns.numel())
    for first in range(0, rows.numel(), step):
        index = rows[first : first + step, None] * width + columns[None, :]
        drawn[first : first + step] = _sum_of_uniforms(index, key)
    return drawn.mul_(std / 65536)


def _sum_of_uniforms(index: torch.Tensor, key: int) -> torch.Tensor:
    """Twelve numbers of 16 bits for each index, summed up, less their mean: whole numbers whose standard deviation is
    65536, for that of one of n values is the root of (n*n - 1)/12."""
    sums = torch.zeros_like(index)  # two in each element, 32 bits apart
    for part in range(3):
        bits = hash64(index * 3 + part, key)
        sums += (bits & 0x0000FFFF0000FFFF) + ((bits >> 16) & 0x0000FFFF0000FFFF)
    return (sums & 0xFFFFFFFF) + (sums >> 32) - 12 * 65535 // 2


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
