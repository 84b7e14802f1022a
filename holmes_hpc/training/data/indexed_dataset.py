"""Megatron's indexed data sets: checked, split, blended, and in an order that does not depend on the layout.

GPTDataset cuts one epoch of documents into shuffled samples. One rank builds its index, in a cache directory that
appears complete or not at all. Megatron's BlendedMegatronDatasetBuilder is not used, since it has barriers over all
ranks, and its order depends on the number of steps. Its blending rule (`build_blending_indices`) is used.
"""

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import gpt_dataset, helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.package_info import __version__ as megatron_version

from holmes_hpc.config.data import DataConfig
from holmes_hpc.errors import DataError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data.prefix import Fractions, Prefix, check_data, digest, parse_blend, parse_split
from holmes_hpc.training.data.samples import Datasets, Samples, permute
from holmes_hpc.waiting import wait_until

_BLEND_PERIOD = 1 << 20  # samples after which the pattern of a blend repeats
_INDEX_TIMEOUT = timedelta(minutes=30)  # rank 0 may index a very large data set


class _NumpyWithoutPickles:
    """A replacement of numpy in GPTDataset, which loads its indices with ``allow_pickle=True``.
    The indices are numbers, but in a shared cache they may be another user's untrusted input."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def load(path: str, **options: Any) -> Any:
        return np.load(path, **{**options, "allow_pickle": False})


# Newer versions of Megatron-Core call safe_numpy_load.
vars(gpt_dataset).update(numpy=_NumpyWithoutPickles(), safe_numpy_load=_NumpyWithoutPickles.load)


class Source:
    """The endless samples of one split of one prefix. Each epoch has another order. `config`: a GPTDatasetConfig."""

    def __init__(self, prefix: Prefix, fractions: Fractions, split: Split, config: Any) -> None:
        self.name = prefix.path
        low_level_dataset = GPTDataset.build_low_level_dataset(prefix.path, config)
        sequences = np.arange(*prefix.sequence_bounds(fractions), dtype=np.int32)
        self._dataset = GPTDataset(low_level_dataset, prefix.path, sequences, None, split, config)
        self._key = (config.random_seed, split.value)

    def __len__(self) -> int:
        return len(self._dataset)

    def tokens(self, index: int) -> np.ndarray:
        epoch, epoch_index = divmod(index, len(self))
        if epoch:  # GPTDataset itself shuffles the first epoch
            epoch_index = permute(epoch_index, len(self), (self._key[0], epoch << 2 | self._key[1]))
        return self._dataset._query_document_sample_shuffle_indices(epoch_index)[0]


class Blend:
    """The samples of several sources, interleaved so that any stretch of samples has the weights' proportions."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.name = "blend of " + ", ".join(s.name for s in sources)
        self._sources = sources
        self._weights = (np.array(weights, dtype=np.float64) / sum(weights)).tolist()

    def __len__(self) -> int:
        return sum(len(s) for s in self._sources)

    @cached_property
    def _pattern(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The source of each sample of a period, its index in that source, and the number of samples of each source."""
        sources, samples = np.zeros(_BLEND_PERIOD, np.int16), np.zeros(_BLEND_PERIOD, np.int64)
        helpers.build_blending_indices(sources, samples, self._weights, len(self._sources), _BLEND_PERIOD, False)
        return sources, samples, np.bincount(sources, minlength=len(self._sources))

    def tokens(self, index: int) -> np.ndarray:
        sources, samples, counts = self._pattern
        period, period_index = divmod(index, _BLEND_PERIOD)
        source = int(sources[period_index])
        return self._sources[source].tokens(period * int(counts[source]) + int(samples[period_index]))


def build(data: DataConfig, seed: int, plan: Plan, run_dir: str | None, evaluates: bool) -> Datasets:
    """Build the data sets for build.build_datasets.
    The index is in `data.cache` if that is set. Otherwise it is in the run directory or, without one, beside PREFIX."""
    (names, weights), split = parse_blend(data.prefix), parse_split(data.split, evaluates)
    length = plan.batch.sequence_length
    settings = [names, weights, list(split.values()), seed, length]
    root = Path(data.cache or (Path(run_dir) / "data" if run_dir else f"{names[0]}.cache"))

    def open_all() -> tuple[list[Prefix], Path]:
        prefixes = [Prefix.open(name) for name in names]
        versions = [megatron_version, *([p.sequences, p.bin_bytes, p.changed_ns] for p in prefixes)]
        return prefixes, root / digest([settings, versions])

    def build_all(prefixes: Sequence[Prefix], directory: Path) -> list[Samples]:
        identifiers = {"class": "_Vocabulary", "vocab_size": plan.model.vocab}
        # Without masks and tokenization, Megatron reads only these attributes. -2 is no token.
        tokenizer = SimpleNamespace(vocab_size=plan.model.vocab, eod=-2, unique_identifiers=identifiers)
        disabled = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
        options = {"random_seed": seed, "sequence_length": length, "blend": (names, None), "split": "1"}
        options |= dict.fromkeys(disabled, False)
        config = GPTDatasetConfig(**options, path_to_cache=str(directory), tokenizer=tokenizer)
        datasets: list[Samples] = []
        for fractions, kind in zip(split.values(), (Split.train, Split.valid), strict=False):
            sources = [Source(p, fractions, kind, config) for p in prefixes if p.sample_count(fractions, length) > 0]
            datasets.append(sources[0] if len(sources) == 1 else Blend(sources, weights or [len(s) for s in sources]))
        return datasets

    def prepare() -> None:
        prefixes, cache = open_all()
        marker = cache / f"vocabulary-{plan.model.vocab}"  # exists if an earlier run has checked all tokens
        check_data(data, plan.model, plan.batch, evaluates, max_bytes=0 if marker.exists() else math.inf)
        if not cache.is_dir():
            _build_cache(cache, lambda directory: build_all(prefixes, directory))
        with contextlib.suppress(OSError):
            marker.touch()

    logging.getLogger("megatron.core.datasets").setLevel(logging.WARNING)
    _run_on_rank0(f"holmes/data/{digest(settings)}", prepare)
    prefixes, cache = open_all()
    errors, what = (OSError, ValueError, EOFError), "cannot read the index of samples:"
    hint = "remove it, or set data.cache to a directory that all nodes share and only you can write"
    wait_until(cache.is_dir, 30, 0.2)  # network file systems show a new directory late
    with DataError.instead_of(*errors, where=cache, hint=hint, what=what):
        datasets = build_all(prefixes, cache)
    return datasets[0], datasets[1] if evaluates else None


def _build_cache(cache: Path, build_into: Callable[[Path], object]) -> None:
    """Build the cache in a temporary directory and rename it, so that an interrupted build is never used."""
    temporary = cache.with_name(f".{cache.name}.{os.uname().nodename}.{os.getpid()}")
    hint = "free some space or set data.cache to a writable directory that all nodes see"
    try:
        with DataError.instead_of(OSError, where=cache, hint=hint, what="cannot write the index of samples:"):
            temporary.mkdir(parents=True)
            build_into(temporary)
            try:
                temporary.rename(cache)
            except OSError:
                if not cache.is_dir():  # otherwise another process has built the same cache
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_on_rank0(key: str, prepare: Callable[[], None]) -> None:
    """Run `prepare` on rank 0; the other ranks wait for it. Its DataError is raised on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return prepare()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            prepare()
        except DataError as e:
            store.set(key, json.dumps({"what": e.what, "where": e.where, "hint": e.hint}))
            raise
        return store.set(key, "null")
    what, hint = "rank 0 did not finish the index of samples", "see rank 0's log"
    with DataError.instead_of(RuntimeError, where=key, hint=hint, what=what):
        store.wait([key], _INDEX_TIMEOUT)
    if error := json.loads(store.get(key)):
        raise DataError(**error)
