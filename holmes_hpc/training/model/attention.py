"""Causal attention in one fused operation: torch's scaled_dot_product_attention in the place of Megatron-Core's own.

Megatron-Core's local layers write the scores of all pairs of tokens to memory, several times over; without Transformer
Engine that is most of a model's activations. torch's operation never does (Dao et al. 2022, arXiv 2205.14135, on GPUs;
a kernel after the same idea on CPUs), and needs nothing but torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.fabric.site import FUSED_ATTENTION
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.schema import refuse
from holmes_hpc.training.rank.cuda_check import has_transformer_engine


class SdpaAttention(MegatronModule):
    """Stands where Megatron-Core's ``DotProductAttention`` does, with its arguments: the same function of queries, keys
    and values, but for rounding. `config.num_query_groups` below the number of heads: grouped queries."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        known = {
            "softmax_type": "vanilla",
            "window_size": None,
            "apply_query_key_layer_scaling": False,
            "context_parallel_size": 1,
        }
        kind = attn_mask_type.name
        refuse(
            "model",
            *(
                (getattr(config, name, value) != value, f"torch's fused attention knows no {name}", "unset it")
                for name, value in known.items()
            ),
            (kind != "causal", f"torch's fused attention is causal here, not {kind}", "use a decoder"),
        )
        self._scale = softmax_scale  # none: one over the root of the head's width
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Queries (sequence, batch, heads, width), keys and values (sequence, batch, groups, width) of this rank to
        (sequence, batch, heads * width); `attention_mask`: samples.apart's, or None: causal."""
        if attention_bias is not None or packed_seq_params is not None:
            raise ConfigError(
                "torch's fused attention takes no bias or packed sequences here",
                where="model",
                hint="leave it to a mask",
            )
        kept = None if attention_mask is None else ~attention_mask  # Megatron-Core's says what is left out
        dropout = self._dropout if self.training else 0.0
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        # as Megatron-Core has it: other random numbers on each tensor-parallel rank, whose heads are others
        forked = dropout and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forked else nullcontext():
            context = F.scaled_dot_product_attention(
                q, k, v, kept, dropout, kept is None, scale=self._scale, enable_gqa=key.size(2) < query.size(2)
            )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def refuse_apart(document_end: int | None, cuda: bool) -> None:
    """Raise ConfigError where documents are to be kept apart and the attention takes no mask."""
    if document_end is not None and cuda and has_transformer_engine():
        raise ConfigError(
            "Transformer Engine's attention, as it is set up here, takes no mask",
            where="data.documents",
            hint="use data.documents=joined, or an environment without Transformer Engine",
        )


def refuse_unfused(plan: Plan, rank: int, device: torch.device, dtype: torch.dtype, masked: bool) -> None:
    """Raise PlanError where the plan counts on fused attention and neither Transformer Engine nor torch has it for
    this model on this GPU: its memory would not do. `masked`: documents are kept apart by a mask. Nothing is asked on a
    CPU."""
    gpu = plan.site.fabric(plan.places[rank].fabric).gpu
    counted_on = not gpu.is_cpu and (gpu.attention or "flash") in FUSED_ATTENTION
    if device.type != "cuda" or not counted_on:
        return
    m, s, tp = plan.model, plan.batch.sequence_length, plan.parallel.tp_of(plan.parallel.coordinates(rank)[0])
    if has_transformer_engine():
        whose, fused, instead = "Transformer Engine", dtype != torch.float32, "train in bf16"
    else:
        whose, fused = "torch", _torch_fuses(m, s, tp, device, dtype, masked)
        instead = "use data.documents=joined" if masked else "install Transformer Engine"
    if not fused:
        mask = ", with documents kept apart" if masked else ""
        raise PlanError(
            f"the plan counts on fused attention, and {whose} has none here for heads {m.head_width} wide in "
            f"{str(dtype).removeprefix('torch.')}{mask}",
            where=f"GPU of rank {rank}",
            hint=f"{instead}, or plan with gpu: {{attention: unfused}} in the site file",
        )


def _torch_fuses(m: ModelSpec, sequence: int, tp: int, device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Whether torch has a fused kernel for a rank's heads."""
    heads = torch.empty(1, m.heads // tp, sequence, m.head_width, dtype=dtype, device=device, requires_grad=True)
    keys = heads[:, : max(1, m.kv_heads // tp)]
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device) if masked else None
    asked = torch.backends.cuda.SDPAParams(heads, keys, keys, mask, m.dropout, not masked, m.kv_heads < m.heads)
    return any(
        can_use(asked)
        for can_use in (
            torch.backends.cuda.can_use_flash_attention,
            torch.backends.cuda.can_use_efficient_attention,
            torch.backends.cuda.can_use_cudnn_attention,
        )
    )
