"""What is trained: a GPT- or Llama-like decoder, and the batch. Shapes and counts only."""

from __future__ import annotations

from dataclasses import dataclass

from holmes_hpc.errors import PlanError


def _whole(where: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name} is {value!r}", where=where, hint=f"{name} is a whole number above 0")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. `hidden` h, `ffn` f, `heads` a, `kv_heads` k (a: multi-head, less: grouped-query), `vocab` V.

    `tied`: input embedding and output head are one matrix. `rope`: rotary positions, else learned ones up to
    `max_positions`. `swiglu`: gated FFN with three matrices of h x f. `bias`: linear layers have biases.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    kv_heads: int
    swiglu: bool = True
    rmsnorm: bool = True
    rope: bool = True
    tied: bool = False
    bias: bool = False
    max_positions: int = 2048
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this times TP
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        _whole(where, layers=self.layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab, ffn=self.ffn,
               kv_heads=self.kv_heads, max_positions=self.max_positions, vocab_multiple=self.vocab_multiple)
        if self.hidden % self.heads:
            raise PlanError(f"hidden {self.hidden} is not a multiple of {self.heads} heads", where=where,
                            hint="choose heads that divide hidden")
        if self.heads % self.kv_heads:
            raise PlanError(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads", where=where,
                            hint="choose kv_heads that divide heads")
        if self.rope and self.head_dim % 2:
            raise PlanError(f"hidden {self.hidden} over {self.heads} heads is {self.head_dim}, odd", where=where,
                            hint="choose an even width of a head, as rotary embedding needs, or model.rope=false")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"dropout is {self.dropout}", where=where, hint="use 0 up to, not including, 1")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows after padding, as Megatron-LM pads: to a multiple of `vocab_multiple` * tp."""
        unit = self.vocab_multiple * tp
        return -(-self.vocab // unit) * unit


@dataclass(frozen=True)
class Batch:
    """`global_size` and `micro_size` in sequences, `sequence_length` in tokens."""

    global_size: int
    micro_size: int
    sequence_length: int

    def __post_init__(self) -> None:
        _whole("batch", global_size=self.global_size, micro_size=self.micro_size, sequence_length=self.sequence_length)

    def micro_batches(self, dp: int) -> int:
        """Micro-batches per pipeline and step."""
        if self.global_size % (self.micro_size * dp):
            raise PlanError(f"global_size {self.global_size} is not a multiple of micro_size {self.micro_size} x DP"
                            f" {dp}", where="batch", hint=f"use a multiple of {self.micro_size * dp}")
        return self.global_size // (self.micro_size * dp)
