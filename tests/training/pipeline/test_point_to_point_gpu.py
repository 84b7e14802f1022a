"""Edges and the schedule on a GPU, which all ranks share: NCCL over sockets, and gloo through pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import Case, play_apart

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("stages", [2, 3])
def test_nccl_edges_give_megatrons_numbers(stages: int) -> None:
    common: dict[str, Any] = {
        "layers": [[1]] * stages,
        "micro_batches": [6, 1, 2],
        "steps": 6,
        "device": "cuda",
        "backend": "nccl",
        "dropout": 0.1,
    }
    deep = [3 * (stages - s) - 2 for s in range(stages)]
    theirs, edges, ours, starved = play_apart(
        [
            Case(schedule="megatron", **common),
            Case(schedule="edges", **common),
            Case(schedule="ahead", in_flight=deep, **common),
            Case(schedule="ahead", in_flight=[1] * stages, **common),
        ]
    )
    for other in (edges, ours, starved):
        assert [r["losses"] for r in other] == [r["losses"] for r in theirs]
        assert [r["gradients"] for r in other] == [r["gradients"] for r in theirs]
    assert max(e[-1] for e in ours[0]["events"][0]) == min(6, deep[0])


@pytest.mark.parametrize("edge_dtype", ["same", "bf16", "fp8"])
def test_gloo_edges_go_through_pinned_memory(edge_dtype: str) -> None:
    """On a CPU the numbers differ in the last bits; between the two schedules on a GPU they do not."""
    common: dict[str, Any] = {"layers": [[1], [1]], "micro_batches": [5, 2], "steps": 6, "edge_dtype": edge_dtype}
    waits, ahead, on_cpu = play_apart(
        [
            Case(schedule="edges", device="cuda", **common),
            Case(schedule="ahead", in_flight=[3, 1], device="cuda", **common),
            Case(schedule="ahead", in_flight=[3, 1], **common),
        ]
    )
    assert [r["losses"] for r in waits] == [r["losses"] for r in ahead]
    assert [r["gradients"] for r in waits] == [r["gradients"] for r in ahead]
    for a, b in zip(ahead[-1]["losses"][0], on_cpu[-1]["losses"][0], strict=True):
        assert abs(a - b) < 0.3  # other random weights: the same order of size


def test_interleaved_over_nccl() -> None:
    common: dict[str, Any] = {
        "layers": [[1, 1], [1, 1]],
        "micro_batches": [4, 2],
        "steps": 4,
        "device": "cuda",
        "backend": "nccl",
    }
    edges, overlapped, ours = play_apart(
        [
            Case(schedule="edges", **common),
            Case(schedule="edges", overlap=True, **common),
            Case(schedule="ahead", in_flight=[6, 4], **common),
        ]
    )
    assert [r["gradients"] for r in edges] == [r["gradients"] for r in ours] == [r["gradients"] for r in overlapped]
