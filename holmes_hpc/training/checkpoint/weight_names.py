"""Which rows of which Hugging Face tensors make each of Megatron-Core's weights: one table a family, read both ways.

Megatron-Core keeps queries, keys and values in one matrix, group by group of heads (the group's queries, its key, its
value), and the gate and the up matrix of SwiGLU in one. GPT-2 keeps its matrices transposed. Names and shapes alone: no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from holmes_hpc.config.hugging_face import family_of
from holmes_hpc.config.model import ModelSpec

# published files may carry these, which are computed, or are copies of what is read
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Rows:
    """`count` rows of a Hugging Face tensor from row `first` on (columns, where the family transposes)."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True)
class Weight:
    """One of Megatron-Core's weights, layers counted from 0. `parts`: its rows in order; tensor parallelism shares out
    the rows of each part by itself (`split` 0), or the columns (1), or nothing (None). `columns`: None for a vector."""

    name: str
    parts: tuple[tuple[Rows, ...], ...]
    columns: int | None = None
    split: int | None = None
    transposed: bool = False

    @property
    def rows(self) -> int:
        return sum(r.count for part in self.parts for r in part)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight, without rows that only pad a vocabulary."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """All weights of a model by Megatron-Core's names. ConfigError where no family is like it."""
    names = _GPT2 if family_of(spec) == "gpt2" else _LLAMA
    return {w.name: w for w in _weights(spec, names)}


def tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors of a model and their shapes, in the order of :func:`weights`."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights(spec).values():
        for part in weight.parts:
            for r in part:
                rows[r.tensor] = max(rows.get(r.tensor, 0), r.first + r.count)
                shape = (rows[r.tensor],) if weight.columns is None else (rows[r.tensor], weight.columns)
                shapes[r.tensor] = shape[::-1] if weight.transposed else shape
    return shapes


def share(weight: Weight, rank: int, local_rows: int) -> Iterator[tuple[int, Rows]]:
    """(row there, rows) of what tensor-parallel rank `rank` holds, in its `local_rows` rows: of a vocabulary that is
    padded, the last ranks hold fewer than that, or none."""
    each, turn = local_rows // len(weight.parts), rank if weight.split == 0 else 0
    for number, part in enumerate(weight.parts):
        at, low, high = 0, turn * each, (turn + 1) * each
        for r in part:
            first, last = max(low, at), min(high, at + r.count)
            if first < last:
                yield number * each + first - low, Rows(r.tensor, r.first + first - at, last - first)
            at += r.count


def in_transformer_engine(name: str) -> str:
    """Where Transformer Engine has a norm's weight: in the linear layer that follows."""
    for norm, linear in _NORMS:
        name = name.replace(f"{norm}.", f"{linear}.layer_norm_")
    return name


_NORMS = (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1"))


def _all(tensor: str, rows: int) -> tuple[Rows, ...]:
    return (Rows(tensor, 0, rows),)


def _by_group(spec: ModelSpec, queries: Rows, keys: Rows, values: Rows) -> tuple[Rows, ...]:
    """Queries, keys and values of all heads as Megatron-Core orders them."""
    width, each = spec.head_width, spec.heads // spec.kv_heads * spec.head_width
    return tuple(
        Rows(whole.tensor, whole.first + group * count, count)
        for group in range(spec.kv_heads)
        for whole, count in ((queries, each), (keys, width), (values, width))
    )


class _Names(NamedTuple):
    """How a family calls what Megatron-Core has: the tables around the layers, a layer's norms, and its linear layers,
    of which several tensors, or several parts of one, may make one."""

    embedding: str
    layers: str
    final_norm: str
    norms: Mapping[str, str]
    linears: Mapping[str, tuple[str, ...]]


_LLAMA = _Names(  # Llama, Mistral, Qwen2 and Qwen3
    "model.embed_tokens",
    "model.layers",
    "model.norm",
    {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"},
    {
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
    },
)
_GPT2 = _Names(  # its matrices are transposed, and every linear layer and norm has a bias
    "transformer.wte",
    "transformer.h",
    "transformer.ln_f",
    {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"},
    {
        "self_attention.linear_qkv": ("attn.c_attn", "attn.c_attn", "attn.c_attn"),
        "self_attention.linear_proj": ("attn.c_proj",),
        "mlp.linear_fc1": ("mlp.c_fc",),
        "mlp.linear_fc2": ("mlp.c_proj",),
    },
)


def _weights(spec: ModelSpec, names: _Names) -> Iterator[Weight]:
    h, q, k, is_gpt2 = spec.hidden, spec.query_width, spec.key_width, names is _GPT2
    linears = {  # (first row, rows) of each tensor, columns, and along which of the two tensor parallelism cuts
        "self_attention.linear_qkv": (((0, q), (h, k), (2 * h, k)) if is_gpt2 else ((0, q), (0, k), (0, k)), h, 0),
        "self_attention.linear_proj": (((0, h),), q, 1),
        "mlp.linear_fc1": (((0, spec.ffn),) * len(names.linears["mlp.linear_fc1"]), h, 0),
        "mlp.linear_fc2": (((0, h),), spec.ffn, 1),
    }
    kinds = ("weight", "bias") if is_gpt2 else ("weight",)  # of a norm
    yield Weight("embedding.word_embeddings.weight", (_all(f"{names.embedding}.weight", spec.vocab),), h, 0)
    if is_gpt2:
        yield Weight("embedding.position_embeddings.weight", (_all("transformer.wpe.weight", spec.max_positions),), h)
    for i in range(spec.layers):
        ours, theirs = f"decoder.layers.{i}", f"{names.layers}.{i}"
        for norm, their_norm in names.norms.items():
            for kind in kinds:
                yield Weight(f"{ours}.{norm}.{kind}", (_all(f"{theirs}.{their_norm}.{kind}", h),))
        for letter in "qk" if spec.qk_norm else "":
            whole = _all(f"{theirs}.self_attn.{letter}_norm.weight", spec.head_width)
            yield Weight(f"{ours}.self_attention.{letter}_layernorm.weight", (whole,))
        for name, (rows, columns, split) in linears.items():
            is_qkv = name == "self_attention.linear_qkv"
            for kind in ("weight", "bias") if is_gpt2 or spec.bias or (is_qkv and spec.qkv_bias) else ("weight",):
                parts = [
                    Rows(f"{theirs}.{tensor}.{kind}", *r) for tensor, r in zip(names.linears[name], rows, strict=True)
                ]
                yield Weight(
                    f"{ours}.{name}.{kind}",
                    (_by_group(spec, *parts),) if is_qkv else tuple((part,) for part in parts),
                    columns if kind == "weight" else None,
                    split if kind == "weight" or split == 0 else None,
                    transposed=is_gpt2 and kind == "weight",
                )
    for kind in kinds:
        yield Weight(f"decoder.final_layernorm.{kind}", (_all(f"{names.final_norm}.{kind}", h),))
    if not spec.tied:
        yield Weight("output_layer.weight", (_all("lm_head.weight", spec.vocab),), h, 0)
