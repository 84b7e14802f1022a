"""Which rows of which Hugging Face tensors make each of Megatron-Core's weights: one table a family, read both ways.

Megatron-Core keeps queries, keys and values in one matrix, group by group of heads (the group's queries, its key, its
value), and the gate and the up matrix of SwiGLU in one. GPT-2 keeps its matrices transposed. Names and shapes alone: no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    table = _gpt2 if family_of(spec) == "gpt2" else _llama
    return {w.name: w for w in table(spec)}


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


def _llama(spec: ModelSpec) -> Iterator[Weight]:
    """Llama, Mistral, Qwen2 and Qwen3."""
    h, q, k = spec.hidden, spec.query_width, spec.key_width
    yield Weight("embedding.word_embeddings.weight", (_all("model.embed_tokens.weight", spec.vocab),), h, 0)
    for i in range(spec.layers):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        yield Weight(f"{ours}.input_layernorm.weight", (_all(f"{theirs}.input_layernorm.weight", h),))
        for kind in ("weight", "bias")[: 2 if spec.bias or spec.qkv_bias else 1]:
            parts = [
                Rows(f"{theirs}.self_attn.{letter}_proj.{kind}", 0, n) for letter, n in (("q", q), ("k", k), ("v", k))
            ]
            yield Weight(
                f"{ours}.self_attention.linear_qkv.{kind}",
                (_by_group(spec, *parts),),
                h if kind == "weight" else None,
                0,
            )
        if spec.qk_norm:
            for letter in "qk":
                yield Weight(
                    f"{ours}.self_attention.{letter}_layernorm.weight",
                    (_all(f"{theirs}.self_attn.{letter}_norm.weight", spec.head_width),),
                )
        yield Weight(f"{ours}.self_attention.linear_proj.weight", (_all(f"{theirs}.self_attn.o_proj.weight", h),), q, 1)
        yield Weight(f"{ours}.pre_mlp_layernorm.weight", (_all(f"{theirs}.post_attention_layernorm.weight", h),))
        yield Weight(
            f"{ours}.mlp.linear_fc1.weight",
            (_all(f"{theirs}.mlp.gate_proj.weight", spec.ffn), _all(f"{theirs}.mlp.up_proj.weight", spec.ffn)),
            h,
            0,
        )
        yield Weight(f"{ours}.mlp.linear_fc2.weight", (_all(f"{theirs}.mlp.down_proj.weight", h),), spec.ffn, 1)
        if spec.bias:
            yield Weight(f"{ours}.self_attention.linear_proj.bias", (_all(f"{theirs}.self_attn.o_proj.bias", h),))
            yield Weight(
                f"{ours}.mlp.linear_fc1.bias",
                (_all(f"{theirs}.mlp.gate_proj.bias", spec.ffn), _all(f"{theirs}.mlp.up_proj.bias", spec.ffn)),
                None,
                0,
            )
            yield Weight(f"{ours}.mlp.linear_fc2.bias", (_all(f"{theirs}.mlp.down_proj.bias", h),))
    yield Weight("decoder.final_layernorm.weight", (_all("model.norm.weight", h),))
    if not spec.tied:
        yield Weight("output_layer.weight", (_all("lm_head.weight", spec.vocab),), h, 0)


def _gpt2(spec: ModelSpec) -> Iterator[Weight]:
    h = spec.hidden

    def norm(ours: str, theirs: str) -> Iterator[Weight]:
        for kind in ("weight", "bias"):
            yield Weight(f"{ours}.{kind}", (_all(f"transformer.{theirs}.{kind}", h),))

    yield Weight("embedding.word_embeddings.weight", (_all("transformer.wte.weight", spec.vocab),), h, 0)
    yield Weight("embedding.position_embeddings.weight", (_all("transformer.wpe.weight", spec.max_positions),), h)
    for i in range(spec.layers):
        ours, theirs = f"decoder.layers.{i}", f"h.{i}"
        linear = {
            "self_attention.linear_qkv": ("attn.c_attn", 3 * h, h, 0),
            "self_attention.linear_proj": ("attn.c_proj", h, h, 1),
            "mlp.linear_fc1": ("mlp.c_fc", spec.ffn, h, 0),
            "mlp.linear_fc2": ("mlp.c_proj", h, spec.ffn, 1),
        }
        yield from norm(f"{ours}.input_layernorm", f"{theirs}.ln_1")
        yield from norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2")
        for name, (tensor, out, into, split) in linear.items():
            for kind in ("weight", "bias"):
                whole = f"transformer.{theirs}.{tensor}.{kind}"
                rows = _all(whole, out)
                if name.endswith("qkv"):
                    rows = _by_group(spec, *(Rows(whole, part * h, h) for part in range(3)))
                yield Weight(
                    f"{ours}.{name}.{kind}",
                    (rows,),
                    into if kind == "weight" else None,
                    split if kind == "weight" or split == 0 else None,
                    transposed=kind == "weight",
                )
    yield from norm("decoder.final_layernorm", "ln_f")
    if not spec.tied:
        yield Weight("output_layer.weight", (_all("lm_head.weight", spec.vocab),), h, 0)
