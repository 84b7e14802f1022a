"""Edges and schedules on a GPU shared by all ranks: NCCL over sockets, and gloo through pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import Case, play_apart

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("stages", [2, 3])
def test_losses_and_gradients_over_nccl_edges_equal_megatrons(stages: int) -> None:
    common: dict[str, Any] = {
        "layers": [[1]] * stages,
        "micro_batches": [6, 1, 2],
        "steps": 6,
        "device": "cuda",
        "backend": "nccl",
        "dropout": 0.1,
    }
    deep = [3 * (stages - s) - 2 for s in range(stages)]
    megatron, edges, eager, starved = play_apart(
        [
            Case(schedule="megatron", **common),
            Case(schedule="edges", **common),
            Case(schedule="ahead", in_flight=deep, **common),
            Case(schedule="ahead", in_flight=[1] * stages, **common),
        ]
    )
    for ranks in (edges, eager, starved):
        assert [r["losses"] for r in ranks] == [r["losses"] for r in megatron]
        assert [r["gradients"] for r in ranks] == [r["gradients"] for r in megatron]
    assert max(e[-1] for e in eager[0]["events"][0]) == min(6, deep[0])


@pytest.mark.parametrize("edge_dtype", ["same", "bf16", "fp8"])
def test_gloo_edges_use_pinned_memory(edge_dtype: str) -> None:
    """Both schedules give equal numbers on a GPU; a CPU's numbers differ in the last bits."""
    common: dict[str, Any] = {"layers": [[1], [1]], "micro_batches": [5, 2], "steps": 6, "edge_dtype": edge_dtype}
    waiting, eager, on_cpu = play_apart(
        [
            Case(schedule="edges", device="cuda", **common),
            Case(schedule="ahead", in_flight=[3, 1], device="cuda", **common),
            Case(schedule="ahead", in_flight=[3, 1], **common),
        ]
    )
    assert [r["losses"] for r in waiting] == [r["losses"] for r in eager]
    assert [r["gradients"] for r in waiting] == [r["gradients"] for r in eager]
    for a, b in zip(eager[-1]["losses"][0], on_cpu[-1]["losses"][0], strict=True):
        assert abs(a - b) < 0.3  # other random weights: the same order of magnitude


def test_interleaved_schedules_over_nccl_have_equal_gradients() -> None:
    common: dict[str, Any] = {
        "layers": [[1, 1], [1, 1]],
        "micro_batches": [4, 2],
        "steps": 4,
        "device": "cuda",
        "backend": "nccl",
    }
    edges, overlapped, eager = play_apart(
        [
            Case(schedule="edges", **common),
            Case(schedule="edges", overlap=True, **common),
            Case(schedule="ahead", in_flight=[6, 4], **common),
        ]
    )
    assert [r["gradients"] for r in edges] == [r["gradients"] for r in eager] == [r["gradients"] for r in overlapped]
