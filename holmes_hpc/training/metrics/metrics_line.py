"""A line of metrics.jsonl: what a step was like, from all ranks, gathered to rank 0 beside the next step."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.training.network.nic_bytes import sum_by_kind

_LOSS, _COUNT, _MEMORY, _STEP, _NIC = 0, 1, 2, 3, 4
_PARTS = _NIC + 7
WIDTH = _PARTS + len(PARTS)


def peak_memory_bytes(cuda: bool) -> int:
    """The most memory this rank has held: of its device, or of its process on a CPU."""
    if cuda:
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_row(
    loss_sum: float,
    loss_count: int,
    step_time_s: float,
    parts: Mapping[str, float],
    nic: tuple[float, ...],
    memory: int,
) -> torch.Tensor:
    """One rank's figures of one step. `loss_sum`: of its micro-batches, on the last stage's first TP rank, else 0."""
    return torch.tensor(
        [loss_sum, loss_count, memory, step_time_s, *nic, *(parts[p] for p in PARTS)], dtype=torch.float64
    )


def stage_breakdown(plan: Plan, rows: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Per stage the mean over its ranks, in seconds; the parts add up to the step's time."""
    return [
        {part: sum(rows[r][_PARTS + i] for r in ranks) / len(ranks) for i, part in enumerate(PARTS)}
        for ranks in plan.parallel.stage_ranks
    ]


def metrics_line(
    plan: Plan, tensors: Sequence[torch.Tensor], step: int, when: float, more: Mapping[str, Any]
) -> dict[str, Any]:
    """A line of metrics.jsonl (its fields: holmes_hpc/records/metrics.py) from every rank's row; not rounded."""
    rows = [tensor.tolist() for tensor in tensors]
    losses, count = sum(r[_LOSS] for r in rows), sum(r[_COUNT] for r in rows)
    step_time_s = rows[0][_STEP]
    samples_per_s = plan.batch.global_size / step_time_s
    per_gpu = 1e12 * plan.world_size * step_time_s
    return {
        "step": step,
        "time": when,
        "step_time_s": step_time_s,
        "loss": losses / count if count else math.nan,
        **more,
        "tokens_per_s": samples_per_s * plan.batch.sequence_length,
        "samples_per_s": samples_per_s,
        "model_tflops_per_gpu": model_flops_per_step(plan.model, plan.batch) / per_gpu,
        "hardware_tflops_per_gpu": hardware_flops_per_step(
            plan.model, plan.batch, plan.parallel.vocabulary_parts, plan.recompute
        )
        / per_gpu,
        "breakdown": stage_breakdown(plan, rows),
        "nic_bytes": sum_by_kind(plan, nic_rows(tensors)),
        "peak_memory_bytes": [int(r[_MEMORY]) for r in rows],
    }


def nic_rows(rows: Sequence[torch.Tensor]) -> list[list[float]]:
    """Every rank's bytes, as :meth:`Traffic.take` counted them."""
    return [r[_NIC:_PARTS].tolist() for r in rows]


def part_by_rank(rows: list[torch.Tensor], part: str) -> list[float]:
    """Seconds that a part of the step (of BREAKDOWN) took every rank."""
    at = _PARTS + PARTS.index(part)
    return [float(r[at]) for r in rows]


class Gathering:
    """Rows of one step on their way to rank 0."""

    def __init__(
        self, own: torch.Tensor, rank: int, world_size: int, group: Any, step: int, more: Mapping[str, Any]
    ) -> None:
        self.step, self.more, self.when = step, dict(more), time.time()
        self._own = own
        self.rows = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 else None
        self._work = dist.gather(own, self.rows, dst=0, group=group, async_op=True)

    def ready(self, wait_s: float) -> bool:
        """Whether they have come, at the latest in so long."""
        end = time.perf_counter() + wait_s
        while not self._work.is_completed():
            if time.perf_counter() > end:
                return False
            time.sleep(wait_s / 10)
        return True

    def finish(self) -> list[torch.Tensor] | None:
        """Every rank's row, on rank 0."""
        self._work.wait()
        return self.rows
