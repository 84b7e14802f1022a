"""The tied embedding of a first and a last stage of unequal widths: its gradient is the sum of both stages'.

Megatron-Core sums it over pairs of ranks that hold the same part of it. Ranks of unequal stages hold parts of other
sizes, so here every rank puts what it holds of its stage's sum into the whole matrix, and all of them sum those up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from holmes_hpc.training.model import gpt


class FinalizeWithTied:
    """Megatron-Core's ``finalize_model_grads``, and then the tied embedding's sum over `group`: all ranks of the first
    and the last stage, of which this rank may be none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, models: list[Any], num_tokens: Any = None, **more: Any) -> None:
        finalize_model_grads(models, num_tokens, **more)
        if self._group is not None:
            _sum(models, self._group)


def _sum(models: Sequence[Any], group: dist.ProcessGroup) -> None:
    wrapped = models[0] if gpt.inner(models[0]).pre_process else models[-1]
    weight = gpt.inner(wrapped).shared_embedding_or_output_weight()
    gradient = weight.main_grad.view(-1)
    parts, part = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    whole = torch.zeros(parts, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    first, end = reduced_here(wrapped, weight)
    whole[part, first:end] = gradient[first:end]
    dist.all_reduce(whole, group=group)
    gradient.copy_(whole[part])


def reduced_here(wrapped: Any, weight: torch.nn.Parameter) -> tuple[int, int]:
    """Which of a parameter's elements the data-parallel reduction (a reduce-scatter of its bucket) left on this rank:
    from the first to before the second; none where they are equal."""
    buffer = next(b for b in wrapped.buffers if weight in b.param_index_map)
    start, end, number = buffer.param_index_map[weight]
    bucket = buffer.buckets[number]
    rank, size = dist.get_rank(buffer.data_parallel_group), dist.get_world_size(buffer.data_parallel_group)
    share = bucket.grad_data.numel() // size
    low = bucket.offset + rank * share
    held = max(start, low), min(end, low + share)
    return (held[0] - start, held[1] - start) if held[0] < held[1] else (0, 0)
