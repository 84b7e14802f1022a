"""The micro-batches of each rank. The order of samples depends only on data, seed and step.

Step s trains on samples [s*B, (s+1)*B) of the data set's order, where B is the global batch size. A resumed run sees
the same batches, also under another layout or with more steps.
"""

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
DEPTH = 4  # prefetched micro-batches


class Samples(Protocol):
    """An endless sequence of samples. ``len``: the number of samples in an epoch. Each epoch has another order."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> np.ndarray:
        """Return sample `index` >= 0: int64, shape (sequence length + 1). Labels are the inputs shifted by one."""
        ...


Datasets = tuple[Samples, Samples | None]  # for training and validation


def permute(index: int, size: int, key: tuple[int, int]) -> int:
    """Return the position of `index` in a pseudo-random permutation of range(size), in constant memory: a four-round
    Feistel network over the next power of four, repeated until the result is below `size` (Black and Rogaway, 2002)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for feistel_round in range(4):
            digest = hashlib.blake2b(struct.pack("<qqqq", *key, feistel_round, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def sample_indices(step: int, micro_batch: int, dp_rank: int, dp: int, micro_size: int, global_size: int) -> range:
    """Return the indices of one micro-batch's samples. A step orders its samples by micro-batch, then by DP rank."""
    start = step * global_size + (micro_batch * dp + dp_rank) * micro_size
    return range(start, start + micro_size)


def batches(
    dataset: Samples,
    plan: Plan,
    dp_rank: int,
    start_step: int = 0,
    device: torch.device = CPU,
    document_end: int | None = None,
    stage: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of data-parallel rank `dp_rank` of `stage` from step `start_step` on, without end.
    A step has `plan.micro_batches` micro-batches, or with per-stage TP/DP those that the plan routes to this replica.
    Keys: tokens, labels, position_ids (int64, shape (micro size, sequence length)); loss_mask (float32, same shape);
    attention_mask (None for causal attention). `document_end`: the token at which :func:`separate_documents` separates
    documents; None to join them. All tensors are on `device`, but only token ids are copied from the host. Raise
    DataError for a token beyond the model's vocabulary."""
    micro, length = plan.batch.micro_size, plan.batch.sequence_length
    host_rows = sample_rows(dataset, plan, dp_rank, start_step, stage)
    for rows in copy_to_gpu(host_rows, device) if device.type == "cuda" else map(torch.from_numpy, host_rows):
        tokens, positions, mask = rows[:, :-1].contiguous(), torch.arange(length, device=device).repeat(micro, 1), None
        if document_end is not None:
            positions, mask = separate_documents(tokens, document_end)
        yield {
            "tokens": tokens,
            "labels": rows[:, 1:].contiguous(),
            "position_ids": positions,
            "attention_mask": mask,
            "loss_mask": torch.ones(micro, length, device=device),
        }


def separate_documents(tokens: torch.Tensor, document_end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (positions, mask) for rows of `tokens` in which each document ends with the token `document_end`.
    `tokens`: shape (rows, length). Positions (int64, same shape) restart at 0 in each document. The mask (bool, shape
    (rows, 1, length, length)) follows Megatron-Core: True hides later tokens and tokens of other documents."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    is_start = torch.zeros_like(tokens, dtype=torch.bool)
    is_start[:, 1:] = tokens[:, :-1] == document_end
    start = torch.where(is_start, index, 0).cummax(1).values  # of each token's document
    is_other_document = start[:, None, :, None] != start[:, None, None, :]
    return index - start, is_other_document | (index[None, :] > index[:, None])


def sample_rows(dataset: Samples, plan: Plan, dp_rank: int, start_step: int, stage: int = 0) -> Iterator[np.ndarray]:
    """Yield the samples of each micro-batch: int64, shape (micro size, sequence length + 1)."""
    size, micro = plan.batch.global_size, plan.batch.micro_size
    if plan.order.routes:  # micro-batches are numbered over the step, as if there were one replica
        micro_batches: Sequence[int] = plan.order.micro_batches_of(plan.order.row(stage, dp_rank))
        dp, dp_rank = 1, 0
    else:
        micro_batches, dp = range(plan.micro_batches), plan.parallel.replicas
    for step in count(start_step):
        for micro_batch in micro_batches:
            indices = sample_indices(step, micro_batch, dp_rank, dp, micro, size)
            rows = np.stack([dataset.tokens(i) for i in indices])
            check_vocabulary(rows, plan.model.vocab, dataset.name)
            yield rows


def prefetch(stream: Iterator[Any]) -> Iterator[Any]:
    """Yield from `stream`, which a thread computes :data:`DEPTH` elements ahead. Errors come in their place."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        futures = deque(thread.submit(next, stream, end) for _ in range(DEPTH))
        while (batch := futures.popleft().result()) is not end:
            futures.append(thread.submit(next, stream, end))
            yield batch


def copy_to_gpu(host_rows: Iterator[np.ndarray], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield `host_rows` as tensors on `device`. A thread prefetches them into pinned memory.
    The copy to `device` then blocks neither the host nor kernels that were launched earlier."""

    def pinned_rows() -> Iterator[torch.Tensor]:
        torch.cuda.set_device(device)  # per thread: otherwise memory would be pinned for the first GPU
        for rows in host_rows:
            yield torch.from_numpy(rows).pin_memory()

    for rows in prefetch(pinned_rows()):
        yield rows.to(device, non_blocking=True)
