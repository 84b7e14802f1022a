"""The configuration groups `model` and `batch`: what is trained. Shapes and counts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.errors import PlanError
from holmes_hpc.schema import check, key


@dataclass(frozen=True)
class ModelSpec:
    """A decoder, GPT- or Llama-like. In formulas: `hidden` h, `ffn` f, `heads` a, `kv_heads` k, `vocab` V."""

    name: Annotated[str, key("in records and tables")]
    layers: Annotated[int, key("transformer layers", ge=1)]
    hidden: Annotated[int, key("width of the residual stream", ge=1)]
    heads: Annotated[int, key("attention heads", ge=1)]
    vocab: Annotated[int, key("token ids, before padding", ge=1)]
    ffn: Annotated[int, key("inner width of the feed-forward part", ge=1)]
    kv_heads: Annotated[int, key("heads of keys and values; fewer than heads: grouped-query attention", ge=1)]
    swiglu: Annotated[bool, key("gated feed-forward part, three matrices of hidden x ffn; else GELU with two")] = True
    rmsnorm: Annotated[bool, key("RMSNorm; else LayerNorm")] = True
    rope: Annotated[bool, key("rotary positions; else learned ones up to max_positions")] = True
    tied: Annotated[bool, key("input embedding and output head are one matrix")] = False
    bias: Annotated[bool, key("linear layers have biases")] = False
    max_positions: Annotated[int, key("longest sequence", unit="tokens", ge=1)] = 2048
    vocab_multiple: Annotated[int, key("the vocabulary is padded to a multiple of this times TP", ge=1)] = 128
    dropout: Annotated[float, key("of activations and attention", ge=0, lt=1)] = 0.0
    norm_eps: Annotated[float, key("epsilon of the norms", gt=0)] = 1e-5
    rope_base: Annotated[float, key("base of the rotary frequencies", gt=0)] = 10000.0

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        check(self, where, PlanError)
        if self.hidden % self.heads:
            raise PlanError(f"hidden {self.hidden} is not a multiple of {self.heads} heads", where=where,
                            hint="choose heads that divide hidden")
        if self.heads % self.kv_heads:
            raise PlanError(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads", where=where,
                            hint="choose kv_heads that divide heads")
        if self.rope and self.head_dim % 2:
            raise PlanError(f"hidden {self.hidden} over {self.heads} heads is {self.head_dim}, odd", where=where,
                            hint="choose an even width of a head, as rotary embedding needs, or model.rope=false")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows after padding, as Megatron-LM pads: to a multiple of `vocab_multiple` * tp."""
        unit = self.vocab_multiple * tp
        return -(-self.vocab // unit) * unit


@dataclass(frozen=True)
class Batch:
    """What a step trains on."""

    global_size: Annotated[int, key("sequences of one optimizer step, over all replicas", unit="sequences", ge=1)]
    micro_size: Annotated[int, key("sequences of one pass through a pipeline stage", unit="sequences", ge=1)]
    sequence_length: Annotated[int, key("tokens of a sequence", unit="tokens", ge=1)]

    def __post_init__(self) -> None:
        check(self, "batch", PlanError, dotted=True)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_size * self.sequence_length

    def micro_batches(self, dp: int) -> int:
        """Micro-batches per pipeline and step."""
        if self.global_size % (self.micro_size * dp):
            raise PlanError(f"global_size {self.global_size} is not a multiple of micro_size {self.micro_size} x DP"
                            f" {dp}", where="batch", hint=f"use a multiple of {self.micro_size * dp}")
        return self.global_size // (self.micro_size * dp)
