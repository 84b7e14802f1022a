"""Are the weights that several ranks hold alike really alike, bit for bit? Asked at the start and after every resume.

Replicas that differ stay different, for all of them take the same steps, and nothing else ever tells: the loss falls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from holmes_hpc.errors import RunFailed
from holmes_hpc.training.model import gpt
from holmes_hpc.training.model.initial_weights import hash64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements at a time, so that it takes no memory to speak of


def checksum(parameter: torch.Tensor, before: int = 0) -> torch.Tensor:
    """A number of 64 bits, on the parameter's device, that changes with any bit of it and with its elements' order.
    `before`: elements of a larger one that stand before it; checksums of its parts add up to its own."""
    bits = parameter.detach().contiguous().view(-1).view(_BITS[parameter.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for first in range(0, bits.numel(), _BLOCK):
        block = bits[first : first + _BLOCK].to(torch.int64)
        place = torch.arange(before + first, before + first + block.numel(), device=block.device)
        total += hash64(place, block).sum()
    return total


def check(chunks: Sequence[Any], tied: bool, tied_group: dist.ProcessGroup | None = None) -> None:
    """Compare this rank's weights with those of the ranks that should hold the same. RunFailed, on all ranks of a group
    in which one differs, with the parameter and the ranks.

    `chunks`: this rank's GPTModels. `tied`: the first and the last stage share the embedding. `tied_group`: of all
    ranks of both, where they have unequal widths.
    """
    held = {gpt.global_name(name, chunk): p for chunk in chunks for name, p in chunk.named_parameters()}
    _compare(held, parallel_state.get_data_parallel_group(with_context_parallel=True))
    _compare(
        {name: p for name, p in held.items() if not getattr(p, "tensor_model_parallel", False)},
        parallel_state.get_tensor_model_parallel_group(),
    )
    if tied_group is None and not (tied and parallel_state.is_rank_in_embedding_group()):
        return
    end = next(c for c in chunks if c.pre_process or c.post_process).shared_embedding_or_output_weight()
    if tied_group is None:
        _compare({"the tied embedding": end}, parallel_state.get_embedding_group())
        return
    # ranks hold other parts of it: the checksums of the parts add up to that of the whole
    total = checksum(end, parallel_state.get_tensor_model_parallel_rank() * end.numel())
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    _compare_rows({"the tied embedding": total}, tied_group)


def _compare(held: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) > 1 and held:  # or there is nothing to hash
        _compare_rows({name: checksum(parameter) for name, parameter in held.items()}, group)


def _compare_rows(held: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    own = torch.stack(list(held.values()))
    rows = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(rows, own, group=group)
    for found in differences(dict(zip(ranks, (row.tolist() for row in rows), strict=True)), list(held)):
        raise RunFailed(
            found,
            where="weights",
            hint="replicas must start alike: resume from another checkpoint; "
            "if this was a start, report it, with the kinds of GPUs",
        )


def differences(rows: Mapping[int, Sequence[int]], names: Sequence[str]) -> Iterator[str]:
    """A sentence for each parameter whose checksums, one of each rank's row, are not all the same: who differs from
    most of them."""
    for at, name in enumerate(names):
        counted = Counter(row[at] for row in rows.values())
        if len(counted) > 1:
            usual, _ = counted.most_common(1)[0]
            others = [rank for rank, row in rows.items() if row[at] != usual]
            yield (
                f"{name} of rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} is not that of the ranks "
                f"that should hold the same"
            )
