"""The mapping between Megatron-Core's weights and rows of Hugging Face tensors, by the names in weight_names.yaml.

Megatron-Core joins queries, keys and values into one matrix. Its rows are ordered by group of heads: the group's
queries, its key, its value. Megatron-Core also joins the gate and up matrices of SwiGLU. Hugging Face's
GPT-2 stores the transposed matrices. This module handles only names and shapes, and does not import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holmes_hpc.config.hugging_face import family_of
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.tables import read_table

_TABLE: dict[str, dict[str, Any]] = read_table(__file__)
# Published files may contain these tensors, which are computed or duplicates.
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Rows:
    """`count` rows of a Hugging Face tensor from row `first` on (columns of it, if the weight is transposed)."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True)
class Weight:
    """A Megatron-Core weight. `name`: its name, in which layers count from 0; `parts`: the matrices that the weight
    joins (such as gate and up), each as its rows in order; `columns`: the number of columns, None for a vector;
    `split`: what tensor parallelism divides: the rows of each part (0), the columns (1), or nothing (None);
    `transposed`: whether the Hugging Face tensor is the transpose of the weight."""

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
        """The full weight's shape, without the rows that pad a vocabulary."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def weights(spec: ModelSpec) -> dict[str, Weight]:
    """Return all weights of a model by Megatron-Core's names. Raise ConfigError if the model fits no family."""
    family = family_of(spec)
    names = _TABLE.get(family, _TABLE["llama"])
    return {w.name: w for w in _weights(spec, names, is_gpt2=family == "gpt2")}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face's name -> shape of each tensor of a model, in the order of :func:`weights`."""
    rows, shapes = dict[str, int](), dict[str, tuple[int, ...]]()
    for weight in weights(spec).values():
        for r in (r for part in weight.parts for r in part):
            rows[r.tensor] = max(rows.get(r.tensor, 0), r.first + r.count)
            shape = (rows[r.tensor],) if weight.columns is None else (rows[r.tensor], weight.columns)
            shapes[r.tensor] = shape[::-1] if weight.transposed else shape
    return shapes


def local_rows(weight: Weight, rank: int, row_count: int) -> Iterator[tuple[int, Rows]]:
    """Yield (first local row, rows) for the `row_count` rows of `weight` that tensor-parallel rank `rank` holds.
    `rows` are the rank's rows from `first local row` on. Rows that pad a vocabulary are in no tensor, and omitted."""
    part_rows, split_index = row_count // len(weight.parts), rank if weight.split == 0 else 0
    for number, part in enumerate(weight.parts):
        offset, low, high = 0, split_index * part_rows, (split_index + 1) * part_rows
        for r in part:
            first, last = max(low, offset), min(high, offset + r.count)
            if first < last:
                yield number * part_rows + first - low, Rows(r.tensor, r.first + first - offset, last - first)
            offset += r.count


def transformer_engine_name(name: str) -> str:
    """Return Transformer Engine's name of a weight. A norm's weight is in the linear layer that follows."""
    for norm, linear in _NORMS:
        name = name.replace(f"{norm}.", f"{linear}.layer_norm_")
    return name


_NORMS = (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1"))


def _full(tensor: str, rows: int) -> tuple[Rows, ...]:
    return (Rows(tensor, 0, rows),)


def _by_group(spec: ModelSpec, queries: Rows, keys: Rows, values: Rows) -> tuple[Rows, ...]:
    """Return the rows of queries, keys and values group by group, as Megatron-Core orders them."""
    key_rows, query_rows = spec.head_width, spec.heads // spec.kv_heads * spec.head_width
    return tuple(
        Rows(rows.tensor, rows.first + group * count, count)
        for group in range(spec.kv_heads)
        for rows, count in ((queries, query_rows), (keys, key_rows), (values, key_rows))
    )


def _weights(spec: ModelSpec, names: Mapping[str, Any], is_gpt2: bool) -> Iterator[Weight]:
    """Yield all weights. `names`: the family's entry in weight_names.yaml."""
    h, q, k = spec.hidden, spec.query_width, spec.key_width
    shapes: dict[str, tuple[tuple[tuple[int, int], ...], int, int | None]] = {
        # (first row, rows) of each tensor, columns, and the dimension that tensor parallelism splits
        "linear_qkv": (((0, q), (h, k), (2 * h, k)) if is_gpt2 else ((0, q), (0, k), (0, k)), h, 0),
        "linear_proj": (((0, h),), q, 1),
        "router": (((0, spec.experts.count),), h, None),
        "linear_fc1": (((0, spec.ffn_width),) * (1 if is_gpt2 else 2), h, 0),
        "linear_fc2": (((0, h),), spec.ffn_width, 1),
    }
    linears = {  # no expert is split
        pattern.format(e): ([t.format(e) for t in tensors], rows, columns, None if "{}" in pattern else split)
        for pattern, tensors in names["linears"].items()
        for rows, columns, split in [shapes[pattern.rpartition(".")[2]]]
        for e in range(spec.experts.count if "{}" in pattern else 1)
    }
    kinds = ("weight", "bias") if is_gpt2 else ("weight",)  # of a norm
    yield Weight("embedding.word_embeddings.weight", (_full(f"{names['embedding']}.weight", spec.vocab),), h, 0)
    if is_gpt2:
        yield Weight("embedding.position_embeddings.weight", (_full("transformer.wpe.weight", spec.max_positions),), h)
    for i in range(spec.layers):
        layer, hf_layer = f"decoder.layers.{i}", f"{names['layers']}.{i}"
        for norm, hf_norm in names["norms"].items():
            for kind in kinds:
                yield Weight(f"{layer}.{norm}.{kind}", (_full(f"{hf_layer}.{hf_norm}.{kind}", h),))
        for letter in "qk" if spec.qk_norm else "":
            norm_rows = _full(f"{hf_layer}.self_attn.{letter}_norm.weight", spec.head_width)
            yield Weight(f"{layer}.self_attention.{letter}_layernorm.weight", (norm_rows,))
        for name, (tensors, rows, columns, split) in linears.items():
            is_qkv = name == "self_attention.linear_qkv"
            for kind in ("weight", "bias") if is_gpt2 or spec.bias or (is_qkv and spec.qkv_bias) else ("weight",):
                parts = [Rows(f"{hf_layer}.{tensor}.{kind}", *r) for tensor, r in zip(tensors, rows, strict=True)]
                yield Weight(
                    f"{layer}.{name}.{kind}",
                    (_by_group(spec, *parts),) if is_qkv else tuple((part,) for part in parts),
                    columns if kind == "weight" else None,
                    split if kind == "weight" or split == 0 else None,
                    transposed=is_gpt2 and kind == "weight",
                )
    for kind in kinds:
        yield Weight(f"decoder.final_layernorm.{kind}", (_full(f"{names['final_norm']}.{kind}", h),))
    if not spec.tied:
        yield Weight("output_layer.weight", (_full("lm_head.weight", spec.vocab),), h, 0)
