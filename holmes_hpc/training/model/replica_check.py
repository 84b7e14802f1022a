"""The check that replicas of a weight are equal bit for bit, at the start and after every resume.

Replicas that differ stay different, because all receive the same updates. Nothing else reveals it: the loss falls.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from holmes_hpc.errors import RunFailed
from holmes_hpc.training.model import experts, gpt
from holmes_hpc.training.model.initial_weights import hash64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements at a time, which bounds the memory


def replica_checksum(parameter: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a 64-bit checksum of the elements' bits and order, as a scalar on the parameter's device. `offset`: the
    index of the first element in the full parameter, whose checksum is the sum of those of its parts."""
    bits = parameter.detach().contiguous().view(-1).view(_BITS[parameter.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for first in range(0, bits.numel(), _BLOCK):
        block = bits[first : first + _BLOCK].to(torch.int64)
        index = torch.arange(offset + first, offset + first + block.numel(), device=block.device)
        total += hash64(index, block).sum()
    return total


def check(chunks: Sequence[Any], tied: bool, tied_group: dist.ProcessGroup | None = None) -> None:
    """Compare this rank's weights with their replicas on other ranks. If a weight differs, raise RunFailed on all ranks
    that have a replica. `chunks`: this rank's GPTModels; `tied`: the first and the last stage share the embedding;
    `tied_group`: with per-stage TP/DP, the group of all ranks of these two stages."""
    all_parameters = {gpt.global_name(name, chunk): p for chunk in chunks for name, p in chunk.named_parameters()}
    parameters = {name: p for name, p in all_parameters.items() if not experts.is_expert(p)}
    if len(parameters) < len(all_parameters):
        expert_parameters = {name: p for name, p in all_parameters.items() if name not in parameters}
        _compare(expert_parameters, parallel_state.get_expert_data_parallel_group())
    _compare(parameters, parallel_state.get_data_parallel_group(with_context_parallel=True))
    whole = {name: p for name, p in parameters.items() if not getattr(p, "tensor_model_parallel", False)}
    _compare(whole, parallel_state.get_tensor_model_parallel_group())
    if tied_group is None and not (tied and parallel_state.is_rank_in_embedding_group()):
        return
    embedding = next(c for c in chunks if c.pre_process or c.post_process).shared_embedding_or_output_weight()
    if tied_group is None:
        _compare({"the tied embedding": embedding}, parallel_state.get_embedding_group())
        return
    # the stages hold parts of different sizes, but the checksums of all parts add up to that of the embedding
    total = replica_checksum(embedding, parallel_state.get_tensor_model_parallel_rank() * embedding.numel())
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    _compare_checksums({"the tied embedding": total}, tied_group)


def _compare(parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) > 1 and parameters:
        _compare_checksums({name: replica_checksum(parameter) for name, parameter in parameters.items()}, group)


def _compare_checksums(checksums: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    row = torch.stack(list(checksums.values()))
    rows = [torch.empty_like(row) for _ in ranks]
    dist.all_gather(rows, row, group=group)
    checksums_by_rank = dict(zip(ranks, (r.tolist() for r in rows), strict=True))
    hint = "resume from another checkpoint; if the run just started, report it with the kinds of GPUs"
    for difference in replica_differences(checksums_by_rank, list(checksums)):
        raise RunFailed(difference, where="weights", hint=f"replicas must be equal: {hint}")


def replica_differences(checksums_by_rank: Mapping[int, Sequence[int]], names: Sequence[str]) -> Iterator[str]:
    """Yield a message, naming the minority of ranks, for each of `names` whose checksums differ."""
    for column, name in enumerate(names):
        counts = Counter(row[column] for row in checksums_by_rank.values())
        if len(counts) > 1:
            majority, _ = counts.most_common(1)[0]
            ranks = [rank for rank, row in checksums_by_rank.items() if row[column] != majority]
            yield f"{name} of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} differs from its replicas"
