"""A reduce-scatter for gloo in which each rank sends only what its peers need, while it receives from them.

Gloo's own reduce-scatter sends the bytes of an all-reduce. Gloo's all-to-all posts its sends before its receives. The
later of two ranks then announces its receive only after its data, so that the two directions take turns
(benchmarks/results/limit.md).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter in progress over n ranks. `works`: its sends and receives; `parts`: the values of every rank for
    this rank, (n, m); `output`: their sum, (m)."""

    works: list[Any]
    parts: torch.Tensor
    output: torch.Tensor

    def wait(self) -> None:
        """Wait for the parts of all ranks, and sum them in the order of ranks, in fp32."""
        for work in self.works:
            work.wait()
        self.output.copy_(torch.sum(self.parts, dim=0, dtype=torch.float32))


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> ReduceScatter | None:
    """Sum `input` (n * m) over the n ranks of `group`, and leave this rank's m elements in `output`.
    The arguments are those of Megatron-Core's `reduce_scatter_with_fp32_accumulation`, which this function replaces."""
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"the reduce-scatter only sums; op is {op}")
    group = group or dist.group.WORLD
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent, parts = input.view(len(ranks), -1), torch.empty_like(input).view(len(ranks), -1)
    parts[own] = sent[own]
    peers = [(own + distance) % len(ranks) for distance in range(1, len(ranks))]
    works = [dist.irecv(parts[peer], ranks[peer], group) for peer in reversed(peers)]
    works += [dist.isend(sent[peer], ranks[peer], group) for peer in peers]
    handle = ReduceScatter(works, parts, output)
    if async_op:
        return handle
    handle.wait()
    return None
