"""Made-up tokens from a seed: for throughput, and (learnable ones) for trying out whether a loss falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_NOISE = 0.1


@dataclass(frozen=True)
class Synthetic:
    """Seeded tokens, each sample a function of its index. `learnable`: nine of ten tokens follow from the last one."""

    seed: int
    vocab: int
    sequence_length: int
    learnable: bool = False
    name: str = "synthetic"

    def __len__(self) -> int:
        return 1 << 62

    def tokens(self, index: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], dtype=np.uint64)))
        drawn = random.integers(self.vocab, size=self.sequence_length + 1, dtype=np.int64)
        if not self.learnable:
            return drawn
        fresh = random.random(self.sequence_length + 1) < _NOISE
        fresh[0] = True
        since = np.arange(len(drawn)) - np.maximum.accumulate(np.where(fresh, np.arange(len(drawn)), 0))
        return (drawn[np.arange(len(drawn)) - since] + since) % self.vocab
