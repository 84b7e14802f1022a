"""The configuration groups `model` and `batch`: what is trained. Shapes and counts only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from holmes_hpc.errors import PlanError
from holmes_hpc.schema import check, key, refuse


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than the first ones trained on."""

    factor: Annotated[float, key("by which slow frequencies are divided", ge=1)]
    kind: Annotated[
        str,
        key(
            "linear: all frequencies; llama3: those that turn less than low_frequency_turns times in "
            "original_positions, and in part those up to high_frequency_turns (arXiv 2407.21783)",
            one_of=("linear", "llama3"),
        ),
    ] = "llama3"
    low_frequency_turns: Annotated[float, key("of llama3: below, the whole factor", gt=0)] = 1.0
    high_frequency_turns: Annotated[float, key("of llama3: above, no factor", gt=0)] = 4.0
    original_positions: Annotated[int, key("of llama3: longest sequence trained on before", unit="tokens", ge=1)] = 8192

    def __post_init__(self) -> None:
        check(self, "rope_scaling", PlanError)
        refuse(
            "rope_scaling",
            (
                self.low_frequency_turns >= self.high_frequency_turns,
                f"low_frequency_turns is {self.low_frequency_turns}",
                f"use a number below high_frequency_turns, which is {self.high_frequency_turns}",
            ),
            error=PlanError,
        )


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
    head_dim: Annotated[int | None, key("width of a head; null: hidden / heads", ge=1)] = None
    qk_norm: Annotated[bool, key("queries and keys are normalised, each head by itself")] = False
    qkv_bias: Annotated[bool, key("queries, keys and values have biases, whatever `bias` says of the rest")] = False
    gelu_tanh: Annotated[bool, key("without swiglu: GELU by its tanh approximation, as GPT-2 was trained")] = False
    rope_scaling: Annotated[
        RopeScaling | None,
        key(
            "of the rotary frequencies, as Llama 3.1 has it: {factor: 8}, and "
            "kind, low_frequency_turns, high_frequency_turns, "
            "original_positions; null: none"
        ),
    ] = None

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        check(self, where, PlanError)
        of = f" (hidden {self.hidden} over {self.heads} heads)" if self.head_dim is None else ""
        refuse(
            where,
            (
                self.head_dim is None and self.hidden % self.heads,
                f"hidden {self.hidden} is not a multiple of {self.heads} heads",
                "choose heads that divide hidden, or give model.head_dim",
            ),
            (
                self.heads % self.kv_heads,
                f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads",
                "choose kv_heads that divide heads",
            ),
            (
                self.rope and self.head_width % 2,
                f"a head is {self.head_width} wide{of}, an odd number",
                "choose an even width of a head, as rotary embedding needs, or model.rope=false",
            ),
            (
                self.rope_scaling is not None and not self.rope,
                "rope_scaling of a model without rope",
                "leave model.rope_scaling out",
            ),
            (self.gelu_tanh and self.swiglu, "gelu_tanh of a model with swiglu", "leave model.gelu_tanh out"),
            error=PlanError,
        )

    @property
    def head_width(self) -> int:
        """Of a head's queries, keys or values."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Of all heads' queries, and of what attention hands on: `hidden`, but for heads of a width of their own."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Of all keys; values are as wide."""
        return self.kv_heads * self.head_width

    def to_dict(self) -> dict[str, Any]:
        """Plain data. A key that older versions do not know is there only where it says something."""
        return {k: v for k, v in asdict(self).items() if k not in _LATER or v != _LATER[k]}

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows after padding, as Megatron-LM pads: to a multiple of `vocab_multiple` * tp."""
        unit = self.vocab_multiple * tp
        return -(-self.vocab // unit) * unit


_LATER = {
    f.name: f.default
    for f in fields(ModelSpec)
    if f.name in ("head_dim", "qk_norm", "qkv_bias", "gelu_tanh", "rope_scaling")
}


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
        refuse(
            "batch",
            (
                self.global_size % (self.micro_size * dp),
                f"global_size {self.global_size} is not a multiple of micro_size {self.micro_size} x DP {dp}",
                f"use a multiple of {self.micro_size * dp}",
            ),
            error=PlanError,
        )
        return self.global_size // (self.micro_size * dp)
