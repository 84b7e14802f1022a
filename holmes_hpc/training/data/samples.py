"""The tokens that each rank trains on. The order of samples depends on data, seed and step alone.

Step s trains on samples [s*B, (s+1)*B) of the data set's order, B the global batch, however many ranks share them; so
an interrupted run, or one continued under another layout or for more steps, sees the same batches.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data.prefix import check_vocabulary

CPU = torch.device("cpu")
DEPTH = 4  # micro-batches that are ready or in the making


class Samples(Protocol):
    """An endless order of samples. ``len``: how many until they repeat (in another order)."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> np.ndarray:
        """Sample `index` >= 0: int64, shape (sequence length + 1); its first part is input, its last part labels."""
        ...


def shuffled(index: int, size: int, key: tuple[int, int]) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size), without holding the permutation.

    A four-round Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            word = hashlib.blake2b(struct.pack("<qqqq", *key, turn, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def sample_indices(step: int, micro_batch: int, dp_rank: int, dp: int, micro_size: int, global_size: int) -> range:
    """The samples of one micro-batch: consecutive ones, rank by rank, then micro-batch by micro-batch."""
    start = step * global_size + (micro_batch * dp + dp_rank) * micro_size
    return range(start, start + micro_size)


def batches(
    dataset: Samples,
    plan: Plan,
    dp_rank: int,
    start_step: int = 0,
    device: torch.device = CPU,
    end: int | None = None,
    stage: int = 0,
) -> Iterator[dict[str, Any]]:
    """Micro-batches of data-parallel rank `dp_rank` of `stage` from step `start_step` on, without end; a step has
    `plan.micro_batches`, or with unequal widths those that the plan routes to this replica.

    tokens, labels, position_ids: int64, shape (micro size, sequence length); loss_mask: float32, the same shape;
    attention_mask: None (causal), or, of documents that token `end` keeps apart, as :func:`apart` has it; all on
    `device`, of which only the tokens' text is copied there. Raises DataError for a token beyond the model's
    vocabulary.
    """
    micro, length = plan.batch.micro_size, plan.batch.sequence_length
    rows = texts(dataset, plan, dp_rank, start_step, stage)
    for text in on_gpu(rows, device) if device.type == "cuda" else map(torch.from_numpy, rows):
        tokens, positions, mask = text[:, :-1].contiguous(), torch.arange(length, device=device).repeat(micro, 1), None
        if end is not None:
            positions, mask = apart(tokens, end)
        yield {
            "tokens": tokens,
            "labels": text[:, 1:].contiguous(),
            "position_ids": positions,
            "attention_mask": mask,
            "loss_mask": torch.ones(micro, length, device=device),
        }


def apart(tokens: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, mask) for documents that are packed into rows of `tokens`, (rows, length), each with `end` behind it.

    Positions, int64 as `tokens`, begin anew with each document. Mask, bool, (rows, 1, length, length): True where a
    token may not attend, as Megatron-Core has it: to what follows it and to other documents.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end
    first = torch.where(begins, place, 0).cummax(1).values  # where each token's document begins
    other = first[:, None, :, None] != first[:, None, None, :]
    return place - first, other | (place[None, :] > place[:, None])


def texts(dataset: Samples, plan: Plan, dp_rank: int, start_step: int, stage: int = 0) -> Iterator[np.ndarray]:
    """The samples of one micro-batch after the other: int64, shape (micro size, sequence length + 1)."""
    size, micro = plan.batch.global_size, plan.batch.micro_size
    if plan.order.routes:  # numbers of the whole step, as if there were one replica
        own: Sequence[int] = plan.order.own(plan.order.row(stage, dp_rank))
        dp, dp_rank = 1, 0
    else:
        own, dp = range(plan.micro_batches), plan.parallel.dp
    for step in count(start_step):
        for micro_batch in own:
            chosen = sample_indices(step, micro_batch, dp_rank, dp, micro, size)
            rows = np.stack([dataset.tokens(i) for i in chosen])
            check_vocabulary(rows, plan.model.vocab, dataset.name)
            yield rows


def prefetched(items: Iterator[Any]) -> Iterator[Any]:
    """`items`, made by a thread, :data:`DEPTH` of them ahead. What it raises comes where its item would have."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        made = deque(thread.submit(next, items, end) for _ in range(DEPTH))
        while (item := made.popleft().result()) is not end:
            made.append(thread.submit(next, items, end))
            yield item


def on_gpu(rows: Iterator[np.ndarray], device: torch.device) -> Iterator[torch.Tensor]:
    """`rows` as tensors on `device`. The thread puts them into pinned memory, from where a copy holds up neither the
    host nor the computing that was launched before."""

    def pinned() -> Iterator[torch.Tensor]:
        torch.cuda.set_device(device)  # of this thread: memory would be pinned for the first GPU
        for row in rows:
            yield torch.from_numpy(row).pin_memory()

    for text in prefetched(pinned()):
        yield text.to(device, non_blocking=True)
