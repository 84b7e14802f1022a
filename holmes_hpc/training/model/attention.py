"""Causal attention in one fused operation: torch's scaled_dot_product_attention instead of Megatron-Core's own.

Megatron-Core's local layers write the scores of all pairs of tokens to memory several times. Without Transformer Engine
that is most of a model's activation memory. Torch's fused kernels avoid it (FlashAttention on GPUs, Dao et al. 2022,
arXiv 2205.14135; a similar kernel on CPUs) and need only torch.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.fabric.site import FUSED_ATTENTION
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.model import context_parallel
from holmes_hpc.training.rank.cuda_check import has_transformer_engine


class SdpaAttention(MegatronModule):
    """A replacement for Megatron-Core's ``DotProductAttention`` with the same results up to rounding. It ignores some
    of its arguments. It supports grouped queries (`config.num_query_groups` below the number of heads)."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, cp_comm_type: str | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale  # None: one over the root of the head's width
        self._dropout = config.attention_dropout
        self._exchanges_heads = cp_comm_type == "a2a"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        """Return the attention output of this rank, (sequence, batch, heads * width). `query`: (sequence, batch, heads,
        width); `key`, `value`: (…, groups, width); `attention_mask`: from samples.separate_documents; None: causal."""
        attend = partial(self._attend, excluded=attention_mask)
        if self._exchanges_heads:  # only with context parallelism
            attend = partial(context_parallel.with_all_tokens, attend)
        return attend(query, key, value).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, excluded: Tensor | None) -> Tensor:
        """Return the attention output in the shape of `query`. `excluded`: a mask, True for hidden pairs of tokens."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if context_parallel.size() > 1 and not self._exchanges_heads:
            return context_parallel.RingAttention.apply(q, k, v, excluded, self._scale).permute(2, 0, 1, 3)
        mask = None if excluded is None else ~excluded  # torch's mask is True for included pairs
        dropout = self._dropout if self.training else 0.0
        # Tensor-parallel ranks have different heads, so they draw different random numbers, as in Megatron-Core.
        has_own_random_state = dropout and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if has_own_random_state else nullcontext():
            context = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, mask is None, scale=self._scale, enable_gqa=key.size(2) < query.size(2)
            )
        return context.permute(2, 0, 1, 3)


def refuse_unsupported(document_end: int | None, cuda: bool, config: TransformerConfig) -> None:
    """Raise ConfigError if this rank's attention cannot keep documents apart (`data.documents`), or cannot pass keys
    around a ring. `document_end`: the end-of-document token, None if documents are joined."""
    is_te = cuda and has_transformer_engine()
    is_torch_ring = context_parallel.size() > 1 and config.cp_comm_type == "p2p" and cuda and not is_te
    are_apart, hint = document_end is not None, "use data.documents=joined, or no Transformer Engine"
    problem = "documents cannot be kept apart: Transformer Engine's attention is set up without a mask"
    ConfigError.refuse("data.documents", (are_apart and is_te, problem, hint))
    problem = "ring attention on GPUs supports neither fp32 nor documents that are kept apart"
    is_unsupported = is_torch_ring and (are_apart or config.params_dtype == torch.float32)
    ConfigError.refuse("plan.cp_comm", (is_unsupported, problem, "use plan.cp_comm=a2a"))


def refuse_unfused(plan: Plan, rank: int, device: torch.device, dtype: torch.dtype, masked: bool) -> None:
    """Raise PlanError if the plan assumes fused attention and neither Transformer Engine nor torch supports it on this
    GPU. Unfused attention would need more memory than planned. `masked`: documents are kept apart by a mask."""
    gpu = plan.site.pool(plan.places[rank].pool).gpu
    is_planned = not gpu.is_cpu and (gpu.attention or "flash") in FUSED_ATTENTION
    if device.type != "cuda" or not is_planned:
        return
    m, s, tp = plan.model, plan.batch.sequence_length, plan.parallel.tp_of(plan.parallel.coordinates(rank)[0])
    if has_transformer_engine():
        library, case, is_fused = "Transformer Engine", "", dtype != torch.float32 and gpu.has_bf16
        fix = "train in bf16" if gpu.has_bf16 else "use an environment without Transformer Engine"
    else:
        library, is_fused = "torch", _torch_fuses(m, s, tp, device, dtype, masked)
        case = f" for heads of width {m.head_width}" + ", with documents kept apart" * masked
        fix = "use data.documents=joined" if masked else "install Transformer Engine"
    if not is_fused:
        dtype_name = str(dtype).removeprefix("torch.")
        raise PlanError(
            f"the plan assumes fused attention; on this GPU, {library} does not support it in {dtype_name}{case}",
            where=f"GPU of rank {rank}",
            hint=f"{fix}, or plan with gpu: {{attention: unfused}} in the site file",
        )


def _torch_fuses(m: ModelSpec, sequence: int, tp: int, device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether torch has a fused kernel for a rank's heads. `m`: the model; `sequence`: tokens of a sequence."""
    queries = torch.empty(1, m.heads // tp, sequence, m.head_width, dtype=dtype, device=device, requires_grad=True)
    keys = queries[:, : max(1, m.kv_heads // tp)]
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device) if masked else None
    cuda = torch.backends.cuda
    parameters = cuda.SDPAParams(queries, keys, keys, mask, m.dropout, not masked, m.kv_heads < m.heads)
    checks = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention)
    return any(can_use(parameters) for can_use in checks)
