"""The data set that a run trains on, as its configuration names it: synthetic tokens or an indexed data set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data.prefix import Prefix, parse_blend
from holmes_hpc.training.data.samples import Samples

_VALIDATION = 1 << 32  # sets the validation samples of synthetic data apart from those of any 32-bit seed
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


def build_datasets(
    data: DataConfig, train: TrainConfig, plan: Plan, run_dir: str | None
) -> tuple[Samples, Samples | None]:
    """The training samples that `data` names, and the validation samples when `train.eval_interval` is above 0.

    Rank 0 and every rank that needs data call it, after torch.distributed is initialised (if it is to be): rank 0
    checks the data and makes the index (in `data.cache`, else under `run_dir`), the others wait for its answer in the
    rendezvous store, without a barrier. Raises DataError, the same on every rank, for data that are missing, damaged,
    too short or of another vocabulary.
    """
    seed = train.seed if data.seed is None else data.seed
    evaluates = train.eval_interval > 0
    if data.kind == "indexed":
        from holmes_hpc.training.data import indexed_dataset  # Megatron's data sets take seconds to load

        return indexed_dataset.build(data, seed, plan, run_dir, evaluates)
    vocab, length = plan.model.vocab, plan.batch.sequence_length
    return (
        Synthetic(seed, vocab, length, data.learnable),
        Synthetic(seed + _VALIDATION, vocab, length, data.learnable, "synthetic validation") if evaluates else None,
    )


def described(data: DataConfig, samples: Samples, plan: Plan, steps: int) -> str:
    """What `steps` steps train on, in a line: data set, tokens, vocabularies, epochs."""
    model, taken = plan.model.vocab, steps * plan.batch.tokens
    if data.kind != "indexed":
        kind = "learnable made-up tokens" if data.learnable else "random tokens, of which nothing is learned"
        return f"data: {kind} (data=synthetic), vocabulary {model:,}; {steps:,} steps take {taken:,} tokens"
    prefixes = [Prefix.open(name) for name in parse_blend(data.prefix)[0]]
    vocab = max(prefix.vocab() for prefix in prefixes)
    said = f"vocabulary {vocab:,.0f}, " if math.isfinite(vocab) else ""
    epoch = len(samples) * plan.batch.sequence_length
    return (
        f"data: {samples.name}: {sum(p.tokens for p in prefixes):,} tokens, {epoch:,} of them for training, "
        f"{said}the model's {model:,}; {steps:,} steps take {taken:,} tokens, "
        f"{taken / epoch:.3g} epochs"
    )
