"""Reading Megatron's indexed data sets: checked first, split, blended, and in an order that no layout changes.

GPTDataset cuts one epoch of documents into shuffled samples. Its indices are made by one rank, in a cache directory
that appears complete or not at all. Megatron's own BlendedMegatronDatasetBuilder is not used: it holds barriers over
all ranks, and its order depends on how many steps were asked for. Its blending rule (`build_blending_indices`) is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
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
from holmes_hpc.training.data.prefix import (
    Prefix,
    bounds_of,
    check_lengths,
    digest,
    parse_blend,
    parse_split,
    samples_of,
)
from holmes_hpc.training.data.samples import Samples, shuffled

_BLEND_PERIOD = 1 << 20  # samples after which the pattern of a blend repeats
_WAIT = timedelta(minutes=30)  # of the other ranks for rank 0's index of a very large data set


class _NoPickles:
    """numpy as GPTDataset sees it: its indices are numbers, but it reads them with ``allow_pickle=True``, and a cache
    that several share may hold another user's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def load(path: str, **options: Any) -> Any:
        return np.load(path, **{**options, "allow_pickle": False})


vars(gpt_dataset).update(numpy=_NoPickles(), safe_numpy_load=_NoPickles.load)  # later versions have the second name


class Source:
    """Endless samples of one split of one prefix: epoch after epoch, each in its own order."""

    def __init__(self, prefix: Prefix, bounds: tuple[float, float], split: Split, config: Any) -> None:
        self.name = prefix.path
        low = GPTDataset.build_low_level_dataset(prefix.path, config)
        chosen = np.arange(*bounds_of(prefix, bounds), dtype=np.int32)
        self._dataset = GPTDataset(low, prefix.path, chosen, None, split, config)
        self._key = (config.random_seed, split.value)

    def __len__(self) -> int:
        return len(self._dataset)

    def tokens(self, index: int) -> np.ndarray:
        epoch, inside = divmod(index, len(self))
        if epoch:  # the first epoch comes shuffled
            inside = shuffled(inside, len(self), (self._key[0], epoch << 2 | self._key[1]))
        return self._dataset._query_document_sample_shuffle_indices(inside)[0]


class Blend:
    """Samples of several sources, each as often as its weight says at every moment."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.name = "blend of " + ", ".join(s.name for s in sources)
        self._sources = sources
        self._weights = np.array(weights, dtype=np.float64) / sum(weights)

    def __len__(self) -> int:
        return sum(len(s) for s in self._sources)

    @cached_property
    def _pattern(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        source, nth = np.zeros(_BLEND_PERIOD, np.int16), np.zeros(_BLEND_PERIOD, np.int64)
        helpers.build_blending_indices(source, nth, self._weights.tolist(), len(self._sources), _BLEND_PERIOD, False)
        return source, nth, np.bincount(source, minlength=len(self._sources))

    def tokens(self, index: int) -> np.ndarray:
        source, nth, counts = self._pattern
        period, inside = divmod(index, _BLEND_PERIOD)
        chosen = int(source[inside])
        return self._sources[chosen].tokens(period * int(counts[chosen]) + int(nth[inside]))


def build(
    data: DataConfig, seed: int, plan: Plan, run_dir: str | None, evaluates: bool
) -> tuple[Samples, Samples | None]:
    """See build.build_datasets. The indices lie in `data.cache`, else in the run directory, else beside PREFIX."""
    (names, weights), split = parse_blend(data.prefix), parse_split(data.split, evaluates)
    length = plan.batch.sequence_length
    wanted = [names, weights, list(split.values()), seed, length]
    root = Path(data.cache or (Path(run_dir) / "data" if run_dir else f"{names[0]}.cache"))

    def open_all() -> tuple[list[Prefix], Path]:
        prefixes = [Prefix.open(name) for name in names]
        state = [megatron_version, *([p.sequences, p.bin_bytes, p.changed_ns] for p in prefixes)]
        return prefixes, root / digest([wanted, state])

    def make(prefixes: Sequence[Prefix], directory: Path) -> list[Samples]:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=length,
            blend=(names, None),
            split="1",
            path_to_cache=str(directory),
            tokenizer=SimpleNamespace(  # what is asked of one when nothing is masked or tokenised
                vocab_size=plan.model.vocab,
                eod=-2,
                unique_identifiers={"class": "_Vocabulary", "vocab_size": plan.model.vocab},
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        made: list[Samples] = []
        for part, kind in zip(split.values(), (Split.train, Split.valid), strict=False):
            sources = [Source(p, part, kind, config) for p in prefixes if samples_of(p, part, length) > 0]
            made.append(sources[0] if len(sources) == 1 else Blend(sources, weights or [len(s) for s in sources]))
        return made

    def prepare() -> None:
        prefixes, cache = open_all()
        check_lengths(prefixes, split, plan.batch, each=weights is not None)
        checked = cache / f"vocabulary-{plan.model.vocab}"  # an earlier start has read all tokens of these files
        if not checked.exists():
            for prefix in prefixes:
                prefix.check_tokens(plan.model.vocab)
        if not cache.is_dir():
            _make_cache(cache, lambda directory: make(prefixes, directory))
        with contextlib.suppress(OSError):
            checked.touch()

    logging.getLogger("megatron.core.datasets").setLevel(logging.WARNING)
    _first_on_rank0(f"holmes/data/{digest(wanted)}", prepare)
    prefixes, cache = open_all()
    try:
        datasets = make(prefixes, _seen(cache))
    except (OSError, ValueError, EOFError) as e:
        raise DataError(
            f"cannot read the index of samples: {getattr(e, 'strerror', None) or e}",
            where=str(cache),
            hint="remove it, or set data.cache to a directory that all nodes see and only you write",
        ) from e
    return datasets[0], datasets[1] if evaluates else None


def _seen(directory: Path, patience_s: float = 30) -> Path:
    """Network file systems show a new directory late."""
    until = time.monotonic() + patience_s
    while not directory.is_dir() and time.monotonic() < until:
        time.sleep(0.2)
    return directory


def _make_cache(cache: Path, make: Callable[[Path], object]) -> None:
    """Build into a directory of its own and rename it: an interrupted build is never taken for a whole one."""
    temporary = cache.with_name(f".{cache.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        make(temporary)
        try:
            temporary.rename(cache)
        except OSError:
            if not cache.is_dir():  # else another process was quicker, with equal bytes
                raise
    except OSError as e:
        raise DataError(
            f"cannot write the index of samples: {e.strerror or e}",
            where=str(cache),
            hint="free some space or set data.cache to a writable directory that all nodes see",
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _first_on_rank0(key: str, prepare: Callable[[], None]) -> None:
    """Run `prepare` on rank 0 alone; the others wait for its answer. Its DataError is raised on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return prepare()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            prepare()
        except DataError as e:
            store.set(key, json.dumps(vars(e)))
            raise
        return store.set(key, "null")
    try:
        store.wait([key], _WAIT)
    except RuntimeError as e:
        raise DataError("rank 0 did not finish the index of samples", where=key, hint="see rank 0's log") from e
    if problem := json.loads(store.get(key)):
        raise DataError(**problem)
