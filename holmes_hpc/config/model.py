"""The configuration groups `model` and `batch`: shapes and counts of the model and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import gcd
from typing import Annotated, Any

from holmes_hpc.errors import Case, PlanError
from holmes_hpc.schema import Checked, key


@dataclass(frozen=True)
class RopeScaling(Checked, where="rope_scaling", error=PlanError):
    """The scaling of rotary frequencies for sequences longer than those of pre-training."""

    factor: Annotated[float, key("divisor of slow frequencies", ge=1)]
    kind: Annotated[
        str,
        key(
            "linear: scale all frequencies; llama3 (arXiv 2407.21783), yarn (arXiv 2309.00071): scale those with fewer "
            "than low_frequency_turns turns in original_positions, and partly those up to high_frequency_turns",
            one_of=("linear", "llama3", "yarn"),
        ),
    ] = "llama3"
    low_frequency_turns: Annotated[float, key("below it, the full factor applies", gt=0)] = 1.0
    high_frequency_turns: Annotated[float, key("above it, no factor applies; 0: llama3's 4, or yarn's 32", ge=0)] = 0.0
    original_positions: Annotated[int, key("longest sequence of pre-training", unit="tokens", ge=1)] = 8192

    def __post_init__(self) -> None:
        if self.high_frequency_turns == 0:
            object.__setattr__(self, "high_frequency_turns", 32.0 if self.kind == "yarn" else 4.0)
        super().__post_init__()

    def _mistakes(self) -> Iterator[Case]:
        low, high = self.low_frequency_turns, self.high_frequency_turns
        hint = f"use a number below high_frequency_turns, which is {high}"
        yield low >= high, f"low_frequency_turns is {low}", hint


@dataclass(frozen=True)
class Experts(Checked, where="model.experts", error=PlanError):
    """The experts of a layer, which replace its feed-forward part. A router sends each token to `top_k` of them."""

    count: Annotated[int, key("experts of a layer; 0: a dense model", ge=0)] = 0
    top_k: Annotated[int, key("experts that compute a token", ge=1)] = 2
    ffn: Annotated[int | None, key("inner width of an expert; null: model.ffn", ge=1)] = None
    balance: Annotated[float, key("coefficient of the loss that balances the experts", ge=0)] = 0.01
    score: Annotated[
        str,
        key(
            "weights of a token's experts: softmax over these (over all with top_k 1), softmax over all, or sigmoid",
            one_of=("softmax", "softmax_all", "sigmoid"),
        ),
    ] = "softmax"
    bias: Annotated[float, key("per step, change of the biases that balance experts without a loss", ge=0)] = 0.0
    groups: Annotated[int, key("groups of experts; a token's experts are in top_groups of these", ge=1)] = 1
    top_groups: Annotated[int, key("groups that contain a token's experts", ge=1)] = 1
    z_loss: Annotated[float, key("coefficient of the loss that keeps the router's logits small", ge=0)] = 0.0
    shared: Annotated[int, key("inner width of the experts that compute every token; 0: none", ge=0)] = 0
    capacity: Annotated[
        float | None, key("an expert drops tokens beyond this multiple of the mean; null: drops none", gt=0)
    ] = None
    first_dense: Annotated[int, key("first layers without experts, whose width is model.ffn", ge=0)] = 0
    per_sequence: Annotated[bool, key("the balancing loss counts tokens per sequence, not per micro-batch")] = False

    @property
    def has_valid_groups(self) -> bool:
        """True if all groups have the same size, and each of a token's `top_groups` groups has at least
        `top_k` / `top_groups` experts, which must be a whole number."""
        are_equal = self.count % self.groups == 0 and self.top_k % self.top_groups == 0
        are_large = self.count * self.top_groups >= self.top_k * self.groups
        return are_equal and are_large and self.top_groups <= self.groups


@dataclass(frozen=True)
class ModelSpec(Checked, where="model {0.name}", error=PlanError):
    """A decoder like GPT or Llama. Symbols in formulas: `hidden` h, `ffn` f, `heads` a, `kv_heads` k, `vocab` V."""

    name: Annotated[str, key("name in records and tables")]
    layers: Annotated[int, key("transformer layers", ge=1)]
    hidden: Annotated[int, key("width of the residual stream", ge=1)]
    heads: Annotated[int, key("attention heads", ge=1)]
    vocab: Annotated[int, key("number of token ids, before padding", ge=1)]
    ffn: Annotated[int, key("inner width of the feed-forward part", ge=1)]
    kv_heads: Annotated[int, key("key and value heads; fewer than heads: grouped-query attention", ge=1)]
    swiglu: Annotated[bool, key("gated feed-forward part with three hidden x ffn matrices; else GELU with two")] = True
    rmsnorm: Annotated[bool, key("RMSNorm; else LayerNorm")] = True
    rope: Annotated[bool, key("rotary positions; else learned ones up to max_positions")] = True
    tied: Annotated[bool, key("input embedding and output head are one matrix")] = False
    bias: Annotated[bool, key("linear layers have biases")] = False
    max_positions: Annotated[int, key("longest sequence", unit="tokens", ge=1)] = 2048
    vocab_multiple: Annotated[int, key("pad the vocabulary to a multiple of this times TP", ge=1)] = 128
    dropout: Annotated[float, key("dropout of activations and attention", ge=0, lt=1)] = 0.0
    norm_eps: Annotated[float, key("epsilon of the norms", gt=0)] = 1e-5
    rope_base: Annotated[float, key("base of the rotary frequencies", gt=0)] = 10000.0
    head_dim: Annotated[int | None, key("width of a head; null: hidden / heads", ge=1)] = None
    qk_norm: Annotated[bool, key("normalise queries and keys per head")] = False
    qkv_bias: Annotated[bool, key("queries, keys and values have biases, independent of `bias`")] = False
    gelu_tanh: Annotated[bool, key("without swiglu: the tanh approximation of GELU, as in GPT-2")] = False
    rope_scaling: Annotated[
        RopeScaling | None,
        key(
            "scaling of rotary frequencies, for Llama 3.1 {factor: 8}; other keys: kind, low_frequency_turns, "
            "high_frequency_turns, original_positions; null: none"
        ),
    ] = None
    experts: Annotated[
        Experts,
        key(
            "experts of a layer: count (0: dense), top_k, ffn (null: model.ffn), balance (coefficient), "
            "score (softmax, softmax_all, sigmoid), bias (change per step), groups, top_groups, z_loss, shared, "
            "capacity, first_dense, per_sequence (balance)"
        ),
    ] = Experts()

    def _mistakes(self) -> Iterator[Case]:
        experts, heads = self.experts, self.heads
        hint = "choose heads that divide hidden, or give model.head_dim"
        has_odd_hidden = self.head_dim is None and self.hidden % heads
        yield has_odd_hidden, f"hidden {self.hidden} is not a multiple of {heads} heads", hint
        problem = f"{heads} heads are not a multiple of {self.kv_heads} kv_heads"
        yield heads % self.kv_heads, problem, "choose kv_heads that divide heads"
        cause = f" (hidden {self.hidden} over {heads} heads)" if self.head_dim is None else ""
        problem = f"a head is {self.head_width} wide{cause}, an odd number"
        hint = "choose an even head width, which rotary embedding needs, or model.rope=false"
        yield self.rope and self.head_width % 2, problem, hint
        problem, hint = "rope_scaling is set, but the model has no rope", "remove model.rope_scaling"
        yield self.rope_scaling is not None and not self.rope, problem, hint
        problem, hint = "gelu_tanh is set, but the model has swiglu", "remove model.gelu_tanh"
        yield self.gelu_tanh and self.swiglu, problem, hint
        problem = f"experts.top_k is {experts.top_k}, but a layer has {experts.count} experts"
        yield 0 < experts.count < experts.top_k, problem, f"use at most {experts.count}"
        problem = f"experts.bias is {experts.bias}, but experts.score is {experts.score}"
        hint = "use experts.score=sigmoid, or balance by experts.balance"
        yield experts.bias and experts.score != "sigmoid", problem, hint
        problem = f"experts.top_groups is {experts.top_groups}, of {experts.groups} groups of {experts.count} experts"
        hint = "choose groups that divide experts.count, and top_groups that divides experts.top_k"
        yield experts.count and not experts.has_valid_groups, problem, hint
        yield experts.count and self.bias, "experts cannot have biases", "use model.bias=false"
        most = self.layers - 1 if experts.count else 0
        problem = f"experts.first_dense is {experts.first_dense}, of {self.layers} layers"
        yield experts.first_dense > most, problem, f"use at most {most}"

    @cached_property
    def dense(self) -> ModelSpec:
        """The model without experts: its first layers are like all layers of this one."""
        return replace(self, experts=Experts())

    @property
    def head_width(self) -> int:
        """The width of a head's queries, keys or values."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """The total width of all heads' queries, and of attention's output. It is `hidden` unless `head_dim` is set."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """The total width of all heads' keys. Their values have the same width."""
        return self.kv_heads * self.head_width

    @property
    def active_ffns(self) -> float:
        """The mean number of feed-forward parts that compute a token: experts within capacity, or a dense layer's."""
        return self.experts.top_k * min(1, self.experts.capacity or 1) if self.experts.count else 1

    @property
    def ffn_width(self) -> int:
        """The inner width of a dense model's feed-forward part, or of one expert."""
        return (self.experts.count and self.experts.ffn) or self.ffn

    @property
    def active_width(self) -> float:
        """The inner width of all feed-forward parts that compute a token."""
        return self.active_ffns * self.ffn_width + self.experts.shared

    @property
    def tp_ffn(self) -> int:
        """The inner width that TP splits: of a dense model's feed-forward part, or of shared experts (0 if none)."""
        return self.experts.shared if self.experts.count else self.ffn

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. Keys that older versions lack are left out if they have their defaults."""
        return {k: v for k, v in asdict(self).items() if k not in _NEWER_KEYS or getattr(self, k) != _NEWER_KEYS[k]}

    def check_sequence(self, length: int) -> None:
        """Raise PlanError if a sequence of `length` tokens is longer than the model allows."""
        problem = f"sequence_length {length} is above the model's {self.max_positions}"
        hint = "shorten the sequence or raise model.max_positions"
        PlanError.refuse("batch", (length > self.max_positions, problem, hint))

    def padded_vocab(self, tp: int) -> int:
        """Return the number of vocabulary rows, padded as in Megatron-LM to a multiple of `vocab_multiple` * tp."""
        unit = self.vocab_multiple * tp
        return -(-self.vocab // unit) * unit


_NEWER_NAMES = ("head_dim", "qk_norm", "qkv_bias", "gelu_tanh", "rope_scaling", "experts")
_NEWER_KEYS = {f.name: f.default for f in fields(ModelSpec) if f.name in _NEWER_NAMES}


@dataclass(frozen=True)
class Batch(Checked, where="batch", error=PlanError, dotted=True):
    """The sequences of one step."""

    global_size: Annotated[int, key("sequences per optimizer step, over all replicas", unit="sequences", ge=1)]
    micro_size: Annotated[int, key("sequences per pass through a pipeline stage", unit="sequences", ge=1)]
    sequence_length: Annotated[int, key("tokens per sequence", unit="tokens", ge=1)]
    cp, all_to_all = 1, False  # fields of PartialBatch; here every rank holds whole sequences

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.global_size * self.sequence_length

    @property
    def context(self) -> int:
        """The length of a whole sequence in tokens. The last token attends to all of them."""
        return self.sequence_length * self.cp

    @property
    def whole(self) -> Batch:
        """The same batch in whole sequences, as before :meth:`split`."""
        return self if self.cp == 1 else Batch(self.global_size // self.cp, self.micro_size, self.context)

    def split(self, cp: int, all_to_all: bool = False) -> Batch:
        """Return this batch with every sequence divided over `cp` context-parallel ranks. `all_to_all`: as in
        :class:`PartialBatch`. With CP above 1, raise PlanError unless 2 x CP divides the sequence length."""
        problem = f"sequence_length {self.sequence_length} is not a multiple of {2 * cp} (2 x CP {cp})"
        hint = f"use another CP, or a sequence_length that {2 * cp} divides"
        PlanError.refuse("plan.cp", (cp > 1 and self.sequence_length % (2 * cp), problem, hint))
        sizes = self.global_size * cp, self.micro_size, self.sequence_length // cp
        return self if cp == 1 else PartialBatch(*sizes, cp, all_to_all)

    def micro_batches(self, dp: int) -> int:
        """Return the number of micro-batches that each pipeline processes in a step. `dp`: DP times CP; with 1, return
        the number of all pipelines together. Raise PlanError if the batch cannot be divided without a remainder."""
        shared = gcd(self.cp, dp)
        size, multiple = self.global_size // shared, self.micro_size * (dp // shared)
        sequences = f"{self.whole.global_size}" + f" x CP {self.cp}" * (shared < self.cp)
        problem = f"global_size {sequences} is not a multiple of micro_size {self.micro_size} x DP {dp // shared}"
        PlanError.refuse("batch", (size % multiple, problem, f"use a multiple of {multiple}"))
        return size // multiple


@dataclass(frozen=True)
class PartialBatch(Batch):
    """A batch in which each of `cp` context-parallel ranks holds a part of every sequence. `sequence_length` is the
    length of such a part, and `global_size` counts the parts. `all_to_all`: for attention, the ranks exchange tokens
    for heads by all-to-all instead of passing keys and values around a ring."""

    cp: Annotated[int, key("ranks that share a sequence", ge=1)]
    all_to_all: bool = False
