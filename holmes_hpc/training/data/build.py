"""The data set of a run: synthetic tokens or an indexed data set, as configured."""

import math
from dataclasses import dataclass

import numpy as np

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data.prefix import Prefix, parse_blend
from holmes_hpc.training.data.samples import Datasets, Samples

_VALIDATION = 1 << 32  # added to the seed of validation data, which thus differs from any 32-bit seed
_NOISE = 0.1  # share of random tokens in learnable data


@dataclass(frozen=True)
class Synthetic:
    """Random tokens; `seed` and the sample's index determine each sample.
    `learnable`: 90% of the tokens are their predecessor plus 1."""

    seed: int
    vocab: int
    sequence_length: int
    learnable: bool = False
    name: str = "synthetic"

    def __len__(self) -> int:
        return 1 << 62

    def tokens(self, index: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], dtype=np.uint64)))
        tokens = random.integers(self.vocab, size=self.sequence_length + 1, dtype=np.int64)
        if not self.learnable:
            return tokens
        is_random = random.random(self.sequence_length + 1) < _NOISE
        is_random[0] = True
        distance = np.arange(len(tokens)) - np.maximum.accumulate(np.where(is_random, np.arange(len(tokens)), 0))
        return (tokens[np.arange(len(tokens)) - distance] + distance) % self.vocab


def build_datasets(data: DataConfig, train: TrainConfig, plan: Plan, run_dir: str | None) -> Datasets:
    """Return the training samples, and the validation samples if `train.eval_interval` is above 0.
    Rank 0 and every rank that needs data call it. With torch.distributed, initialize that first. Rank 0 checks the data
    and builds the index in `data.cache`, or under `run_dir` if `data.cache` is not set. The other ranks wait for its
    result in the rendezvous store, without a barrier. Raise the same DataError on all ranks for data that are missing,
    damaged or too short, or that exceed the model's vocabulary."""
    seed = train.seed if data.seed is None else data.seed
    evaluates = train.eval_interval > 0
    if data.kind == "indexed":
        from holmes_hpc.training.data import indexed_dataset  # importing Megatron's data sets takes seconds

        return indexed_dataset.build(data, seed, plan, run_dir, evaluates)
    vocab, length = plan.model.vocab, plan.batch.sequence_length
    return (
        Synthetic(seed, vocab, length, data.learnable),
        Synthetic(seed + _VALIDATION, vocab, length, data.learnable, "synthetic validation") if evaluates else None,
    )


def describe_data(data: DataConfig, samples: Samples, plan: Plan, steps: int) -> str:
    """Return one line for the log: the data set, its tokens, both vocabularies, and the epochs of `steps` steps."""
    model_vocab, step_tokens = plan.model.vocab, steps * plan.batch.tokens
    if data.kind != "indexed":
        kind = "learnable synthetic tokens" if data.learnable else "random tokens, which cannot be learned"
        return f"data: {kind} (data=synthetic), vocabulary {model_vocab:,}; {steps:,} steps use {step_tokens:,} tokens"
    prefixes = [Prefix.open(name) for name in parse_blend(data.prefix)[0]]
    vocab = max(prefix.vocab() for prefix in prefixes)
    data_vocab = f"vocabulary {vocab:,.0f}, " if math.isfinite(vocab) else ""
    epoch_tokens = len(samples) * plan.batch.sequence_length
    return (
        f"data: {samples.name}: {sum(p.tokens for p in prefixes):,} tokens, {epoch_tokens:,} of them for training, "
        f"{data_vocab}the model's {model_vocab:,}; {steps:,} steps use {step_tokens:,} tokens, "
        f"{step_tokens / epoch_tokens:.3g} epochs"
    )
