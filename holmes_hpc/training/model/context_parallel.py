"""Context parallelism: `cp` ranks share each sequence. They pass keys and values around a ring (Liu et al. 2023, arXiv
2310.01889), or exchange tokens for heads before and after attention (Jacobs et al. 2023, arXiv 2309.14509).

A sequence has 2 * cp chunks. Rank i holds chunks i and 2 * cp - 1 - i, so that every rank has equal work in causal
attention. With Transformer Engine, its own attention is used, which distributes chunks in the same way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

Pending = tuple[Tensor, list[Any]]  # the received tensor; the requests, then the sent tensor to keep it


def size() -> int:
    return parallel_state.get_context_parallel_world_size()


def support_cpu() -> None:
    """Make rotary positions work on CPUs."""
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda whole, dimension, group: _part(whole, dimension)


def _part(whole: Tensor, dimension: int, rank: int | None = None) -> Tensor:
    """Return the two chunks of `whole` that `rank` holds (None: this rank). `dimension`: that of the tokens."""
    chunks = whole.chunk(2 * size(), dimension)
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    return torch.cat([chunks[rank], chunks[-1 - rank]], dimension)


def part_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a micro-batch of whole sequences. Only the attention mask stays whole. The key
    ``loss_tokens`` is added: the number of tokens with a loss on all `cp` ranks. Each rank divides its loss by this
    number, and the schedules multiply the loss by `cp`."""
    if size() == 1:
        return batch
    part = {name: value if name == "attention_mask" else _part(value, 1) for name, value in batch.items()}
    return part | {"loss_tokens": batch["loss_mask"].sum()}


def with_all_tokens(attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return the output of `attend` for this rank's tokens and all heads. `attend` is called with the tokens of all
    ranks and 1/`cp` of the heads. Tensors are (tokens, batch, heads, width)."""
    exchange = partial(all_to_all, parallel_state.get_context_parallel_group())  # of parts, one per rank
    heads = [tensor.size(2) // size() for tensor in tensors]
    parts = torch.cat([tensor.unflatten(2, (size(), -1)) for tensor in tensors], 3).movedim(2, 0)
    early, late = exchange(parts).chunk(2, 1)  # the two chunks of each rank
    output = attend(*torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)]).split(heads, 2))
    return exchange(torch.stack([_part(output, 0, rank) for rank in range(size())])).movedim(0, 2).flatten(2, 3)


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries over the keys and values of all ranks. Keys and values travel around a
    ring of ranks. In the backward pass, their gradients travel with them and end on the rank that owns the keys and
    values. Tensors are (batch, heads, tokens, width). Keys and values may have fewer heads than queries. `mask`: for
    all pairs of tokens of a sequence, True for hidden pairs."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return the attention output in the shape of `query`: of each ring step, weighted by softmax sums."""
        local_key_value = passing = torch.stack([key, value])
        output = torch.zeros_like(query, dtype=torch.float32)
        log_sum = torch.full(query.shape[:3], -torch.inf, device=query.device)
        for step in range(size()):
            pending = _pass_on(passing) if step < size() - 1 else None
            rows, columns, visible = _visible(step, query, mask)
            piece, piece_sum = _attend(query[:, :, rows], passing[:, :, :, columns], visible, scale)
            merged = torch.logaddexp(log_sum[:, :, rows], piece_sum)
            old_share, new_share = ((s - merged).exp().unsqueeze(-1) for s in (log_sum[:, :, rows], piece_sum))
            output[:, :, rows] = output[:, :, rows] * old_share + piece * new_share
            log_sum[:, :, rows] = merged
            passing = _arrived(pending) if pending else passing
        output = output.to(query.dtype)
        context.save_for_backward(query, local_key_value, output, log_sum)
        context.mask, context.scale = mask, scale
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override, unused-ignore]
        query, passing, output, log_sum = context.saved_tensors
        query_gradient = torch.zeros_like(query)
        kv_gradient = torch.zeros_like(passing)  # of this rank's keys and values
        pending_gradient: Pending | None = None
        for step in range(size()):
            pending = _pass_on(passing) if step < size() - 1 else None
            rows, columns, visible = _visible(step, query, context.mask)
            query_piece, piece = _attend_backward(
                *(t[:, :, rows] for t in (gradient, query, output, log_sum)),
                key_value=passing[:, :, :, columns],
                visible=visible,
                scale=context.scale,
            )
            query_gradient[:, :, rows] += query_piece
            # The sum so far of these keys' and values' gradients. From step 2 on, it arrives from the previous rank.
            sums = kv_gradient if step == 0 else _arrived(pending_gradient) if pending_gradient else kv_gradient * 0
            sums[:, :, :, columns] += piece
            pending_gradient = _pass_on(sums) if step > 0 else None
            passing = _arrived(pending) if pending else passing
        kv_gradient += _arrived(pending_gradient) if pending_gradient else 0
        return query_gradient, kv_gradient[0], kv_gradient[1], None, None


def _visible(step: int, query: Tensor, mask: Tensor | None) -> tuple[slice, slice, dict[str, Any]]:
    """Return the slices of this rank's queries and of the keys that take part in a ring step, and the kernel's options.
    In step 0, the keys are this rank's own. Keys of an earlier rank lie in chunks around this rank's two chunks, so
    only their first chunk is visible. Keys of a later rank lie between this rank's chunks, so only the second chunk of
    queries sees them. Hidden scores stay finite, because all scores of a query may be hidden in one step. The output of
    this step then has no weight beside that for the rank's own keys."""
    rank, half = parallel_state.get_context_parallel_rank(), query.size(2) // 2
    rows = columns = slice(None)
    if step > rank:
        rows = slice(half, None)
    elif step > 0:  # from a rank before this one
        columns = slice(half)
    if mask is None:
        return rows, columns, {"is_causal": step == 0}
    hidden = _part(_part(mask, 2), 3, (rank - step) % size())[:, :, rows, columns]
    scores = torch.zeros(hidden.shape, dtype=query.dtype, device=mask.device)
    return rows, columns, {"attn_mask": scores.masked_fill_(hidden, -1e9)}


def _pass_on(tensor: Tensor) -> Pending:
    """Start to send a tensor to the next rank of the ring and to receive one from the rank before."""
    group = parallel_state.get_context_parallel_group()
    ranks, position = dist.get_process_group_ranks(group), group.rank()
    sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    transfers = [
        dist.P2POp(dist.isend, sent, ranks[(position + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[position - 1], group),
    ]
    return received, [*dist.batch_isend_irecv(transfers), sent]


def _arrived(pending: Pending) -> Tensor:
    received, (*requests, _) = pending
    for request in requests:
        request.wait()
    return received


def _attend(query: Tensor, key_value: Tensor, visible: dict[str, Any], scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the attention output and the logarithm of each softmax's sum. `visible`: arguments of the kernel."""
    key, value = _for_each_query(key_value, query)
    if query.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, **visible, scale=scale)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale, **visible)


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    output: Tensor,
    log_sum: Tensor,
    *,
    key_value: Tensor,
    visible: dict[str, Any],
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and keys and values, in a ring step. `output`, `log_sum`: of all steps."""
    key, value = _for_each_query(key_value, query)
    tensors = gradient, query, key, value, output, log_sum.contiguous()
    if query.is_cuda:
        random_state = [torch.empty(n, dtype=torch.uint64, device=query.device) for n in (2, 0)]  # for dropout: unused
        lengths = None, None, query.size(2), key.size(2)
        queries, *key_values = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, visible["is_causal"], *random_state, scale=scale
        )
    else:
        queries, *key_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, **{"is_causal": False, **visible}, scale=scale
        )
    return queries, torch.stack(key_values).unflatten(2, (key_value.size(2), -1)).sum(3)


def _for_each_query(key_value: Tensor, query: Tensor) -> Tensor:
    """Return keys and values with as many heads as the queries."""
    return key_value.repeat_interleave(query.size(1) // key_value.size(2), 2)
