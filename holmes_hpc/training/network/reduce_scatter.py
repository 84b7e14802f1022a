"""A reduce-scatter of gloo ranks in which each rank sends only its bytes, in both directions at once.

Gloo's own reduce-scatter moves an all-reduce. Its all-to-all sends before it receives: of two ranks, the later one
announces its receive behind its data, so that the directions take turns (benchmarks/results/limit.md).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter under way. `parts` (n, m): of all n ranks, for this rank. `output`: (m)."""

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
    Same arguments as Megatron-Core's `reduce_scatter_with_fp32_accumulation`, which it replaces."""
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"the reduce-scatter sums only, it cannot {op}")
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
