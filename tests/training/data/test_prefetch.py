"""Micro-batches made ahead by a thread."""

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


def test_items_come_in_order_and_are_made_ahead() -> None:
    made: list[int] = []
    far = threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == samples.DEPTH:
                far.set()
            yield number

    stream = samples.prefetched(items())
    assert next(stream) == 0
    assert far.wait(10)  # nobody has asked for the second one yet
    assert len(made) <= samples.DEPTH + 1
    assert list(stream) == list(range(1, 10)) == made[1:]


def test_an_error_comes_where_its_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise DataError("a bad token")

    stream = samples.prefetched(items())
    assert list(itertools.islice(stream, 3)) == [0, 1, 2]
    with pytest.raises(DataError, match="a bad token"):
        next(stream)


def test_the_thread_ends_with_the_stream() -> None:
    stream = samples.prefetched(itertools.count())
    next(stream)
    assert any(t.name.startswith("data") for t in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    assert not any(t.name.startswith("data") for t in threading.enumerate())


def test_a_gpus_batches_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the copies and what is made on the device go to the CPU."""
    copied: list[torch.device] = []

    def on_gpu(rows: Iterator[np.ndarray], device: torch.device) -> Iterator[torch.Tensor]:
        copied.append(device)
        return samples.prefetched(map(torch.from_numpy, rows))

    monkeypatch.setattr(samples, "on_gpu", on_gpu)
    p = plan()
    data = Synthetic(3, p.model.vocab, p.batch.sequence_length)
    on_cpu = list(itertools.islice(samples.batches(data, p, 0, 2), 6))
    ones, arange = torch.ones, torch.arange
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "arange", lambda *shape, device: arange(*shape))
    there = list(itertools.islice(samples.batches(data, p, 0, 2, torch.device("cuda")), 6))
    assert copied == [torch.device("cuda")]
    for a, b in zip(on_cpu, there, strict=True):
        assert a.keys() == b.keys() and b["attention_mask"] is None
        for name in a.keys() - {"attention_mask"}:
            assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
