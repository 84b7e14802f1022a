"""Parameters and FLOPs of a layer, the embedding and the head.

They follow Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21),
section 5.1 and its appendix. A matrix of n parameters costs 2n FLOPs per token forward and 4n backward. Attention
scores and their product with the values cost 4*s*h FLOPs per token and layer, or 4*s*heads*head_dim if that differs.
The half of the scores that the causal mask hides is not subtracted. For GPT with f=4h and full recomputation, the sum
is the paper's 96*B*s*l*h^2*(1 + s/(6h) + V/(16*l*h)). In grouped-query attention (Ainslie et al. 2023), the key and
value matrices are smaller by the factor kv_heads/heads. SwiGLU (Shazeer 2020) has three FFN matrices instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holmes_hpc.config.model import Batch, ModelSpec


def attention_matrix(m: ModelSpec) -> int:
    """Return the number of weights of one layer's attention: query, key, value and output matrices."""
    return 2 * m.hidden * (m.query_width + m.key_width)


def ffn_weights(m: ModelSpec, width: int) -> int:
    """Return the number of weights of an FFN of inner width `width`: up, down and, with SwiGLU, gate matrix."""
    return (3 if m.swiglu else 2) * m.hidden * width


def expert_parameters(m: ModelSpec, ranks: int = 1) -> int:
    """Return the parameters of one layer's experts on one of the `ranks` that hold them; 0 for a dense model."""
    return m.experts.count * ffn_weights(m, m.ffn_width) // ranks


def ffn_matrix(m: ModelSpec) -> float:
    """Return the weights of one layer's FFN that compute a token: `top_k` experts, shared ones and the router."""
    return ffn_weights(m, 1) * m.active_width + m.experts.count * m.hidden


def permuted_elements(m: ModelSpec) -> float:
    """Return how many elements are read and written to permute a token to its experts and back; 0 if dense."""
    return 4.0 * m.active_ffns * m.hidden if m.experts.count else 0.0


def norm_parameters(m: ModelSpec, width: int | None = None) -> int:
    """Return the parameters of one norm of `width`, by default hidden. RMSNorm has a scale, LayerNorm also a shift."""
    return (1 if m.rmsnorm else 2) * (width or m.hidden)


def layer_parameters(m: ModelSpec, tp: int = 1, expert_ranks: int = 1) -> int:
    """Return the parameters of a layer on one of `tp` ranks, with one of `expert_ranks` parts of its experts.
    Norms, the router and biases of row-parallel matrices are on every rank."""
    split = attention_matrix(m) + ffn_weights(m, m.tp_ffn)
    replicated = 2 * norm_parameters(m) + (2 * norm_parameters(m, m.head_width) if m.qk_norm else 0)
    replicated += expert_parameters(m, expert_ranks) + m.experts.count * m.hidden
    if m.bias or m.qkv_bias:
        split += m.query_width + 2 * m.key_width
    if m.bias:
        split += (2 if m.swiglu else 1) * m.ffn
        replicated += 2 * m.hidden
    return split // tp + replicated


def embedding_parameters(m: ModelSpec, tp: int = 1) -> int:
    """Return the parameters of the input embedding on one of `tp` ranks. Learned positions are on every rank."""
    return m.padded_vocab(tp) // tp * m.hidden + (0 if m.rope else m.max_positions * m.hidden)


def head_parameters(m: ModelSpec, tp: int = 1, own_matrix: bool = True) -> int:
    """Return the parameters of the final norm and the output matrix on one of `tp` ranks.
    A tied head on the embedding's stage has no matrix of its own (`own_matrix` False)."""
    return norm_parameters(m) + (m.padded_vocab(tp) // tp * m.hidden if own_matrix else 0)


def parameters(m: ModelSpec) -> int:
    """Return the parameters of the complete model. Only `vocab_multiple` pads its vocabulary."""
    return int(of_layers(m, layer_parameters)) + embedding_parameters(m) + head_parameters(m, own_matrix=not m.tied)


def of_layers(
    m: ModelSpec, amount: Callable[[ModelSpec], float], layers: int | None = None, is_first: bool = True
) -> float:
    """Return the sum of `amount` over the layers of `m`, or over `layers` of a stage.
    `amount`: of a layer, for a model with equal layers; `is_first`: the stage holds the first dense layers."""
    dense = m.experts.first_dense if is_first else 0
    return ((m.layers if layers is None else layers) - dense) * amount(m) + dense * amount(m.dense)


def layer_score_flops(m: ModelSpec, tokens: int, sequence: int) -> float:
    """Return the forward FLOPs of one layer's scores and their product with the values."""
    return 4.0 * tokens * sequence * m.query_width


def layer_flops(m: ModelSpec, tokens: int, sequence: int) -> float:
    """Return the forward FLOPs of one layer: the matrices with weights, and the scores."""
    return 2.0 * tokens * (attention_matrix(m) + ffn_matrix(m)) + layer_score_flops(m, tokens, sequence)


def head_flops(m: ModelSpec, tokens: int, tp: int = 1) -> float:
    """Return the forward FLOPs of the output matrix with padded vocabulary (the embedding has none)."""
    return 2.0 * tokens * m.hidden * m.padded_vocab(tp)


def part_flops(m: ModelSpec, part: str, tokens: int, sequence: int, tp: int) -> float:
    """Return the forward FLOPs of a measured `part` for the complete micro-batch, on all `tp` ranks together.
    The embedding computes nothing, so its value is the number of elements that it writes."""
    return {
        "layer": layer_flops(m, tokens, sequence),
        "embedding": float(tokens * m.hidden),
        "head": head_flops(m, tokens, tp),
    }[part]


def model_flops_per_step(
    model: ModelSpec, batch: Batch, tp: int = 1, layers: int | None = None, is_first: bool = True, is_last: bool = True
) -> float:
    """Return the FLOPs of one step without recomputation, of the model or of a stage of `layers` layers. The backward
    pass has twice those of the forward pass. `is_first`, `is_last`: the stage has the first layers, or the head."""
    tokens = batch.global_size * batch.sequence_length
    flops = of_layers(model, lambda m: layer_flops(m, tokens, batch.context), layers, is_first)
    return 3 * (flops + head_flops(model, tokens, tp) * is_last)


def hardware_flops_per_step(
    model: ModelSpec,
    batch: Batch,
    tp: int = 1,
    recompute: str = "none",
    parts: Sequence[str] = ("scores",),
    layers: int | None = None,
) -> float:
    """Return :func:`model_flops_per_step` plus recomputation.
    `full` repeats the forward pass of `layers` layers (None: all), `selective` the `parts` of each layer, by default
    its attention scores (Korthikanti et al. 2022, arXiv 2205.05198)."""
    tokens = batch.global_size * batch.sequence_length
    share = 1.0 if layers is None else layers / model.layers
    part_flops = {
        "scores": model.layers * layer_score_flops(model, tokens, batch.context),
        "norms": 0.0,
        "ffn": 2.0 * tokens * of_layers(model, ffn_matrix),
    }
    recomputed = {
        "none": 0.0,
        "selective": sum(part_flops[part] for part in parts),
        "full": share * of_layers(model, lambda m: layer_flops(m, tokens, batch.context)),
    }
    return model_flops_per_step(model, batch, tp) + recomputed[recompute]
