"""Initial weights that depend only on the seed, the parameter's name and the element's index.

torch's normal numbers differ between GPU models (its CUDA generator depends on the number of multiprocessors) and
between kinds of CPU (which compute log and cosine with different instructions). These weights are therefore computed in
integer arithmetic, from a hash of the element's index in the full parameter. Only the last operation uses fp32: a
multiplication by a constant, which all devices round equally. A rank computes only its own part.
"""

import hashlib

import torch

# Elements per block. A CPU's block fits in its cache. A GPU's block is so large that launches take little time.
_BLOCK, _BLOCK_CUDA = 1 << 16, 1 << 22


def normal(seed: int, name: str, rows: torch.Tensor, columns: torch.Tensor, width: int, std: float) -> torch.Tensor:
    """Return elements (rows, columns) of the matrix `name`, which has `width` columns: fp32, on the device of `rows`.
    The mean is 0, the standard deviation `std`. Each element is a scaled sum of twelve uniform numbers (Irwin 1927,
    Hall 1927), of at most 6 `std`. Its distribution function differs from a normal one by at most 0.0024."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)
    weights = torch.empty((rows.numel(), columns.numel()), dtype=torch.float32, device=rows.device)
    step = max(1, (_BLOCK_CUDA if rows.is_cuda else _BLOCK) // columns.numel())
    for first in range(0, rows.numel(), step):
        index = rows[first : first + step, None] * width + columns[None, :]
        weights[first : first + step] = _sum_of_uniforms(index, key)
    return weights.mul_(std / 65536)


def _sum_of_uniforms(index: torch.Tensor, key: int) -> torch.Tensor:
    """Return, for each index, the sum of twelve 16-bit numbers minus its mean. The sums are integers.
    Their standard deviation is 65536, because that of one uniform number with n values is the root of (n*n - 1)/12."""
    sums = torch.zeros_like(index)  # two in each element, 32 bits apart
    for part in range(3):
        bits = hash64(index * 3 + part, key)
        sums += (bits & 0x0000FFFF0000FFFF) + ((bits >> 16) & 0x0000FFFF0000FFFF)
    return (sums & 0xFFFFFFFF) + (sums >> 32) - 12 * 65535 // 2


def hash64(number: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Return SplitMix64 (Steele, Lea and Flood 2014), int64: 64 bits after `number` steps from the state `key`."""
    z = number * -7046029254386353131 + key  # 0x9E3779B97F4A7C15
    z.bitwise_xor_(_shift(z, 30)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    z.bitwise_xor_(_shift(z, 27)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    return z.bitwise_xor_(_shift(z, 31))


def _shift(number: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without sign extension."""
    return (number >> by).bitwise_and_((1 << (64 - by)) - 1)
