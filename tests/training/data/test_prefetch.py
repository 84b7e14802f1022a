"""A thread prefetches micro-batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from spawn import plan

from holmes_hpc.errors import DataError
from holmes_hpc.training.data import samples
from holmes_hpc.training.data.build import Synthetic


def test_items_are_prefetched_in_order() -> None:
    computed: list[int] = []
    is_ahead = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(10):
            computed.append(number)
            if number == samples.DEPTH:
                is_ahead.set()
            yield number

    stream = samples.prefetch(numbers())
    assert next(stream) == 0
    assert is_ahead.wait(10)  # before the second item is requested
    assert len(computed) <= samples.DEPTH + 1
    assert list(stream) == list(range(1, 10)) == computed[1:]


def test_error_is_raised_in_place_of_its_item() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise DataError("a bad token")

    stream = samples.prefetch(numbers())
    assert list(itertools.islice(stream, 3)) == [0, 1, 2]
    with pytest.raises(DataError, match="a bad token"):
        next(stream)


def test_thread_ends_with_the_stream() -> None:
    stream = samples.prefetch(itertools.count())
    next(stream)
    assert any(t.name.startswith("data") for t in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    assert not any(t.name.startswith("data") for t in threading.enumerate())


def test_batches_are_equal_on_gpu_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test places all tensors of the GPU on the CPU."""
    devices: list[torch.device] = []

    def copy_to_gpu(host_rows: Iterator[np.ndarray], device: torch.device) -> Iterator[torch.Tensor]:
        devices.append(device)
        return samples.prefetch(map(torch.from_numpy, host_rows))

    monkeypatch.setattr(samples, "copy_to_gpu", copy_to_gpu)
    p = plan()
    data = Synthetic(3, p.model.vocab, p.batch.sequence_length)
    on_cpu = list(itertools.islice(samples.batches(data, p, 0, 2), 6))
    ones, arange = torch.ones, torch.arange
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "arange", lambda *shape, device: arange(*shape))
    on_gpu = list(itertools.islice(samples.batches(data, p, 0, 2, torch.device("cuda")), 6))
    assert devices == [torch.device("cuda")]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert a.keys() == b.keys() and b["attention_mask"] is None
        for name in a.keys() - {"attention_mask"}:
            assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
