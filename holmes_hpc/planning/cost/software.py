"""The behaviour of a training program that determines its times and memory: fusion, overlap, sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import Case
from holmes_hpc.fabric.site import ATTENTION, FUSED_ATTENTION
from holmes_hpc.schema import Checked, key

SHARDING = ("none", "optimizer", "gradients", "full")
RECOMPUTABLE = ("scores", "norms", "ffn")  # parts of a layer for selective recomputation


@dataclass(frozen=True)
class Software(Checked, where="software"):
    """The behaviour of a training program. The defaults describe current programs. `attention`: flash (FlashAttention-2
    or later, scores stay on the chip), flash1 (FlashAttention's first version), sdpa (torch's fused attention), softmax
    (two batched matrix products around Megatron-LM's fused softmax), unfused (separate operations). `sharding`: none or
    optimizer, between which a plan chooses, or FSDP's gradients (SHARD_GRAD_OP) or full (FULL_SHARD).
    `scatter_transfers`: each TP rank sends its part of a replicated tensor, and the receivers gather the parts
    (Megatron-LM's scatter/gather optimisation of 2021). `recompute_parts`: parts of a layer that selective
    recomputation repeats (Megatron-Core's recompute_modules). `recompute_layers`: number of layers per chunk that full
    recomputation repeats (recompute_num_layers of Megatron-Core's block method). `backward_reductions`: 2 if matrix
    products with the same input are fused, more if gate or query are separate."""

    attention: Annotated[str, key("implementation of attention", one_of=ATTENTION)] = "flash"
    fused_norm: Annotated[bool, key("a norm is one kernel")] = True
    fused_elementwise: Annotated[bool, key("bias, activation, dropout, residual and rotary are fused")] = True
    overlap: Annotated[bool, key("gradient reduction overlaps with computing")] = True
    overlap_gather: Annotated[bool, key("parameter gather overlaps with computing")] = True
    aligned_gather: Annotated[bool, key("all stages gather at once; default: yes unless transport=single")] = False
    overlap_tp: Annotated[bool, key("TP collectives overlap with products")] = False
    fused_wgrad: Annotated[bool, key("products add to the gradient buffer")] = True
    overlap_transfers: Annotated[bool, key("interleaved stages compute during transfers")] = True
    paired_transfers: Annotated[bool, key("1F1B sends and receives at the same time")] = True
    scatter_transfers: Annotated[bool, key("TP ranks split a stage transfer")] = False
    all_reduced: Annotated[bool, key("gradients are all-reduced despite a sharded optimizer")] = False
    wire_bytes: Annotated[int | None, key("bytes of a gradient on the wire; null: as in its buffer", ge=1)] = None
    fp8: Annotated[bool, key("products of layers are in FP8")] = False
    deduplicated: Annotated[bool, key("a token for several experts crosses to their node once, as in DeepEP")] = False
    expert_imbalance: Annotated[float, key("tokens of the busiest EP rank, divided by the mean", ge=1)] = 1.0
    awaited_launches: Annotated[bool, key("CUDA_LAUNCH_BLOCKING=1: the CPU waits for each kernel")] = False
    gathered_logits: Annotated[bool, key("every TP rank holds the logits of the complete vocabulary")] = False
    backward_reductions: Annotated[int, key("all-reduces of a layer's backward pass under TP", ge=1)] = 2
    sharding: Annotated[str, key("state that data-parallel ranks shard", one_of=SHARDING)] = "optimizer"
    instances: Annotated[int, key("blocks of data-parallel ranks that each shard a copy (HSDP)", ge=1)] = 1
    recompute_parts: Annotated[tuple[str, ...], key("parts for selective recomputation")] = ("scores",)
    recompute_layers: Annotated[int | None, key("layers per chunk for full recomputation; null: all", ge=0)] = None

    def _mistakes(self) -> Iterator[Case]:
        for part in self.recompute_parts:
            hint = f"use some of {', '.join(RECOMPUTABLE)}"
            yield part not in RECOMPUTABLE, f"unknown part {part!r} to recompute", hint, "software.recompute_parts"
        hint = "set overlap (FSDP prefetches), or sharding=optimizer"
        yield self.sharding == "full" and not self.overlap, "sharding=full requires overlap", hint

    @staticmethod
    def facts_of(train: TrainConfig, transport: str) -> dict[str, Any]:
        """Return the fields that follow from `train` and the plan's `transport` if holmes_hpc is the program."""
        return {
            "overlap": train.overlap_grad_reduce,
            "overlap_gather": train.overlap_param_gather,
            "aligned_gather": train.overlap_param_gather and transport != "single",
            "fp8": train.fp8 is not None,
        }

    @property
    def flash(self) -> bool:
        """Return whether scores stay on the chip."""
        return self.attention in FUSED_ATTENTION

    def attention_of(self, heads: int, sequence: int, micro_size: int) -> str:
        """Return the implementation of attention that runs with `heads` heads on a rank.
        Megatron-LM's fused softmax falls back to separate operations (unfused) unless heads x micro-batch size is a
        multiple of 4 and a sequence has at most 4,096 tokens (fused_softmax.py)."""
        falls_back = heads * micro_size % 4 or sequence > 4096
        return "unfused" if self.attention == "softmax" and falls_back else self.attention


CURRENT = Software()
