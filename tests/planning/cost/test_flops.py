"""Parameters and FLOPs against published counts and formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import MODELS, named
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.cost import flops as counts


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2_7b", 6.738),
        ("llama2_70b", 68.977),
        ("llama3_8b", 8.030),
        ("llama3_70b", 70.554),
        ("gpt_small", 0.1244),
        ("llama3_1_8b", 8.030),
        ("llama3_1_70b", 70.554),
        ("llama3_1_405b", 405.853),
        ("llama3_2_1b", 1.2358),
        ("llama3_2_3b", 3.2127),
        ("mistral_7b", 7.248),
        ("qwen2_5_0_5b", 0.4940),
        ("qwen2_5_7b", 7.6156),
        ("qwen2_5_14b", 14.770),
        ("qwen2_5_32b", 32.764),
        ("qwen2_5_72b", 72.706),
        ("qwen3_0_6b", 0.5960),
        ("qwen3_1_7b", 1.7206),
        ("qwen3_4b", 4.0225),
        ("qwen3_8b", 8.1907),
        ("qwen3_14b", 14.768),
        ("qwen3_32b", 32.762),
    ],
)
def test_parameter_counts_match_published_ones(name: str, billions: float) -> None:
    """Compare with Hugging Face's counts of the released checkpoints. Their vocabularies are unpadded, hence 0.2%."""
    assert counts.parameters(named(name)) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral_8x7b", 46.703, 12.88),
        ("mixtral_8x22b", 140.621, 39.15),
        ("qwen3_30b_a3b", 30.532, 3.345),
        ("qwen3_235b_a22b", 235.094, 22.19),
    ],
)
def test_parameter_counts_of_mixtures_match_published_ones(name: str, total: float, active: float) -> None:
    model = named(name)
    idle = model.layers * (model.experts.count - model.experts.top_k) * counts.ffn_weights(model, model.ffn_width)
    assert counts.parameters(model) / 1e9 == pytest.approx(total, rel=1e-3)
    assert (counts.parameters(model) - idle) / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt_3_6b", 3.6), ("gpt_7_5b", 7.5), ("gpt_39b", 39.1), ("gpt3_175b", 175)]
)
def test_parameter_counts_match_those_of_the_papers(name: str, billions: float) -> None:
    model = named(name)
    untied = model.padded_vocab(1) * model.hidden  # the papers count the embedding once
    assert (counts.parameters(model) - untied) / 1e9 == pytest.approx(billions, rel=0.02)


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        "gpt", layers, hidden, heads, vocab, ffn=4 * hidden, kv_heads=heads, swiglu=False, vocab_multiple=1
    )


@given(st.integers(1, 128), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 100000), st.integers(1, 64))
def test_flops_match_the_formula_with_factor_96(layers: int, width: int, sequence: int, vocab: int, size: int) -> None:
    """Compare with Narayanan et al. 2021, equation of their appendix, with full recomputation."""
    h, s, v, b = 128 * width, sequence, vocab, size
    flops = counts.hardware_flops_per_step(gpt(layers, h, 1, v), Batch(b, 1, s), 1, "full")
    formula = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops == pytest.approx(formula, rel=1e-12)


def test_recomputation_adds_the_repeated_flops() -> None:
    model, batch = gpt(4, 256, 4, 1000), Batch(8, 2, 128)
    tokens = 8 * 128
    plain = counts.hardware_flops_per_step(model, batch)
    assert plain == counts.model_flops_per_step(model, batch)
    assert counts.hardware_flops_per_step(model, batch, 1, "selective") - plain == 4 * 4.0 * tokens * 128 * 256
    assert counts.hardware_flops_per_step(model, batch, 1, "full") - plain == 4 * counts.layer_flops(model, tokens, 128)


@given(st.sampled_from(sorted(MODELS)), st.sampled_from((1, 2, 4, 8)))
def test_tensor_parallel_ranks_share_the_matrices(name: str, tp: int) -> None:
    model = named(name)
    if model.kv_heads % tp or model.ffn % tp or model.experts.count:
        return
    replicated = 2 * counts.norm_parameters(model) + (2 * model.hidden if model.bias else 0)
    replicated += 2 * model.head_width if model.qk_norm else 0
    total = counts.layer_parameters(model)
    assert tp * (counts.layer_parameters(model, tp) - replicated) == total - replicated


def test_grouped_queries_have_smaller_matrices() -> None:
    full, grouped = named("llama2_7b"), named("llama3_8b")  # equal h and heads, 32 and 8 key-value heads
    h = full.hidden
    assert counts.attention_matrix(full) == 4 * h * h
    assert counts.attention_matrix(grouped) == 2.5 * h * h


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    model = named("gpt_small")
    assert [model.padded_vocab(tp) for tp in (1, 8)] == [50304, 51200]


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama2_7b"):
        named("lama2_7b")


def test_head_dim_changes_parameters_and_flops() -> None:
    """A head_dim of twice hidden / heads doubles attention and leaves the FFN. Norms and biases add to it."""
    plain = ModelSpec("m", 2, 64, 4, 128, ffn=96, kv_heads=2)
    wide = replace(plain, head_dim=32)
    assert counts.attention_matrix(wide) == 2 * counts.attention_matrix(plain)
    assert counts.layer_score_flops(wide, 8, 4) == 2 * counts.layer_score_flops(plain, 8, 4)
    assert counts.ffn_matrix(wide) == counts.ffn_matrix(plain)
    both = replace(wide, qk_norm=True, qkv_bias=True)
    assert counts.layer_parameters(both) - counts.layer_parameters(wide) == 2 * 32 + (4 + 2 * 2) * 32
    assert counts.layer_parameters(both, 2) - counts.layer_parameters(wide, 2) == 2 * 32 + (4 + 2 * 2) * 32 // 2
