"""What a training program does that its times and memory depend on: what is fused, what overlaps, what is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import ATTENTION, FUSED_ATTENTION
from holmes_hpc.schema import check, key

SHARDING = ("none", "optimizer", "gradients", "full")
RECOMPUTED = ("scores", "norms", "ffn")  # parts of a layer that selective recomputation may compute again


@dataclass(frozen=True)
class Software:
    """What a training program does, as of now by default.

    `attention`: flash (FlashAttention-2 or later, scores never leave the chip), flash1 (its first version), sdpa
    (torch's own fused one), softmax (two batched products around Megatron-LM's fused softmax), unfused (each operation
    by itself). `sharding`: what data-parallel ranks share out; none and optimizer are what a plan says itself,
    gradients and full are FSDP's SHARD_GRAD_OP and FULL_SHARD. `scatter_transfers`: of what all TP ranks hold alike,
    each sends its part only, and they gather it after (Megatron-LM's scatter/gather optimisation of 2021).
    `recompute_parts`, `recompute_layers`: of selective and of full recomputation (Megatron-Core's recompute_modules;
    and recompute_num_layers by blocks: so many of each chunk, the others keep all).
    `backward_reductions`: 2 where the products that share an input are one, more where gate or query are by themselves.
    """

    attention: Annotated[str, key("how scores are computed", one_of=ATTENTION)] = "flash"
    fused_norm: Annotated[bool, key("a norm is one kernel; else each of its operations is")] = True
    fused_elementwise: Annotated[bool, key("bias, activation, dropout, residual and rotary are fused")] = True
    overlap: Annotated[bool, key("gradients' traffic is hidden behind computing where it can be")] = True
    overlap_gather: Annotated[bool, key("parameters' too")] = True
    overlap_transfers: Annotated[bool, key("interleaved stages compute while they exchange")] = True
    paired_transfers: Annotated[bool, key("1F1B sends and receives at once; else one after the other")] = True
    scatter_transfers: Annotated[bool, key("TP ranks share out a stage transfer")] = False
    all_reduced: Annotated[bool, key("gradients are all-reduced although the optimizer is shared out")] = False
    wire_bytes: Annotated[int | None, key("of a gradient's element on the wire; none: as in its buffer", ge=1)] = None
    awaited_launches: Annotated[bool, key("CUDA_LAUNCH_BLOCKING=1: each kernel is waited for")] = False
    gathered_logits: Annotated[bool, key("every TP rank has the logits of all tokens of the vocabulary")] = False
    backward_reductions: Annotated[int, key("all-reduces of a layer's backward pass under TP", ge=1)] = 2
    sharding: Annotated[str, key("what data-parallel ranks share out", one_of=SHARDING)] = "optimizer"

    recompute_parts: Annotated[tuple[str, ...], key("what selective recomputation computes again")] = ("scores",)
    recompute_layers: Annotated[
        int | None, key("layers of a stage's chunk that full recomputation computes again; null: all", ge=0)
    ] = None

    def __post_init__(self) -> None:
        check(self, "software")
        ConfigError.refuse(
            *(
                (
                    part not in RECOMPUTED,
                    f"unknown part {part!r} to recompute",
                    "software.recompute_parts",
                    f"use some of {', '.join(RECOMPUTED)}",
                )
                for part in self.recompute_parts
            ),
            (
                self.sharding == "full" and not self.overlap,
                "parameters are sharded and their traffic is not overlapped",
                "software",
                "FSDP prefetches; set overlap, or sharding=optimizer",
            ),
        )

    @property
    def flash(self) -> bool:
        """Whether scores never leave the chip."""
        return self.attention in FUSED_ATTENTION

    def attention_of(self, heads: int, sequence: int, micro_size: int) -> str:
        """`attention` for `heads` heads of a rank: Megatron-LM's fused softmax wants a multiple of 4 rows of blocks and
        4,096 tokens at most, and falls back to separate operations (its fused_softmax.py)."""
        falls_back = heads * micro_size % 4 or sequence > 4096
        return "unfused" if self.attention == "softmax" and falls_back else self.attention


CURRENT = Software()
