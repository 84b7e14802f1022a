"""Data that a thread makes ready while the step before computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

DEPTH = 4  # micro-batches that are ready or in the making


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
