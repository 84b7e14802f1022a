"""The named models and batches: what ``model=NAME`` and ``batch=NAME`` mean."""

from __future__ import annotations

from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec, RopeScaling
from holmes_hpc.errors import ConfigError, nearest


def _paper(name: str, layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    """A model of Yang et al. (arXiv 2312.03549). Megatron-LM gives a SwiGLU model of theirs ffn = 64 * floor(8h/3/64).

    Untied here: a tied pair would be all-reduced between the first and the last fabric in every step.
    """
    return ModelSpec(name, layers, hidden, heads, vocab, ffn=8 * hidden // 3 // 64 * 64, kv_heads=heads)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int,
    kv_heads: int,
    positions: int,
    rope_base: float = 10000.0,
    **more: Any,
) -> ModelSpec:
    """Touvron et al. 2023 (arXiv 2307.09288) and Grattafiori et al. 2024 (arXiv 2407.21783), as they published them.
    Mistral's models (arXiv 2310.06825) without a sliding window are the same."""
    return ModelSpec(
        name,
        layers,
        hidden,
        heads,
        vocab,
        ffn=ffn,
        kv_heads=kv_heads,
        max_positions=positions,
        rope_base=rope_base,
        **more,
    )


def _llama3_1(
    name: str, layers: int, hidden: int, heads: int, ffn: int, factor: float = 8.0, tied: bool = False
) -> ModelSpec:
    """Llama 3.1 and 3.2: 128K positions by stretched frequencies."""
    return _llama(
        name, layers, hidden, heads, 128256, ffn, 8, 131072, 500000.0, tied=tied, rope_scaling=RopeScaling(factor)
    )


def _qwen2_5(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    kv_heads: int,
    norm_eps: float,
    vocab: int = 152064,
    positions: int = 131072,
    tied: bool = False,
) -> ModelSpec:
    """Qwen2.5 (arXiv 2412.15115), the base models: biases of queries, keys and values."""
    return ModelSpec(
        name,
        layers,
        hidden,
        heads,
        vocab,
        ffn=ffn,
        kv_heads=kv_heads,
        tied=tied,
        max_positions=positions,
        norm_eps=norm_eps,
        rope_base=1000000.0,
        qkv_bias=True,
    )


def _qwen3(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelSpec:
    """Qwen3 (arXiv 2505.09388): heads 128 wide whatever the hidden width, queries and keys normalised."""
    return ModelSpec(
        name,
        layers,
        hidden,
        heads,
        151936,
        ffn=ffn,
        kv_heads=8,
        tied=tied,
        max_positions=40960,
        norm_eps=1e-6,
        rope_base=1000000.0,
        head_dim=128,
        qk_norm=True,
    )


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, tied: bool, **more: Any
) -> ModelSpec:
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020): GELU, LayerNorm, biases, learned positions. `more`:
    other keys of a model, or `ffn` and `kv_heads` instead of theirs."""
    theirs = {"ffn": 4 * hidden, "kv_heads": heads, "swiglu": False, "rmsnorm": False, "rope": False, "bias": True}
    return ModelSpec(name, layers, hidden, heads, vocab, max_positions=positions, tied=tied, **{**theirs, **more})


MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        # Bytes and an end-of-document token; a step takes a CPU seconds at most.
        ModelSpec("gpt_tiny", 8, 256, 8, 257, ffn=640, kv_heads=8, max_positions=256),
        gpt("gpt_small", 12, 768, 12, 50257, 1024, tied=True),
        _paper("gpt_3_6b", 30, 3072, 32, 50304),
        _paper("gpt_7_5b", 36, 4096, 32, 50304),
        _paper("gpt_39b", 48, 8192, 64, 51200),
        gpt("gpt3_175b", 96, 12288, 96, 51200, 2048, tied=False),
        _llama("llama2_7b", 32, 4096, 32, 32000, 11008, 32, 4096),
        _llama("llama2_70b", 80, 8192, 64, 32000, 28672, 8, 4096),
        _llama("llama3_8b", 32, 4096, 32, 128256, 14336, 8, 8192, 500000.0),
        _llama("llama3_70b", 80, 8192, 64, 128256, 28672, 8, 8192, 500000.0),
        _llama3_1("llama3_1_8b", 32, 4096, 32, 14336),
        _llama3_1("llama3_1_70b", 80, 8192, 64, 28672),
        _llama3_1("llama3_1_405b", 126, 16384, 128, 53248),
        _llama3_1("llama3_2_1b", 16, 2048, 32, 8192, 32.0, tied=True),
        _llama3_1("llama3_2_3b", 28, 3072, 24, 8192, 32.0, tied=True),
        _llama("mistral_7b", 32, 4096, 32, 32768, 14336, 8, 32768, 1000000.0),
        _qwen2_5("qwen2_5_0_5b", 24, 896, 14, 4864, 2, 1e-6, 151936, 32768, tied=True),
        _qwen2_5("qwen2_5_7b", 28, 3584, 28, 18944, 4, 1e-6),
        _qwen2_5("qwen2_5_14b", 48, 5120, 40, 13824, 8, 1e-5),
        _qwen2_5("qwen2_5_32b", 64, 5120, 40, 27648, 8, 1e-5),
        _qwen2_5("qwen2_5_72b", 80, 8192, 64, 29568, 8, 1e-5),
        _qwen3("qwen3_0_6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3_1_7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3_4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3_8b", 36, 4096, 32, 12288),
        _qwen3("qwen3_14b", 40, 5120, 40, 17408),
        _qwen3("qwen3_32b", 64, 5120, 64, 25600),
    )
}


FOR_TRYING = 512  # models no wider than this are for trying: random tokens do where no data are given


def named(name: str) -> ModelSpec:
    """The model of that name; an unknown name is a ConfigError that says the nearest one."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}", where="model", hint=nearest(name, MODELS))
    return MODELS[name]


# Sequences, sequences, tokens. The paper's settings of its models (facts of arXiv 2312.03549).
_PUBLISHED: dict[str, Batch] = {
    "tiny": Batch(16, 2, 64),
    "paper_3_6b": Batch(768, 4, 2048),
    "paper_7_5b": Batch(1536, 4, 2048),
    "paper_39b": Batch(1536, 4, 2048),
}

# What each named model takes when no batch is given: its publication's global batch and sequence length. Micro-batches
# are the paper's for its own models, one sequence for others, whose publications do not say.
_OWN: dict[str, Batch] = {
    "gpt_tiny": _PUBLISHED["tiny"],
    "gpt_small": Batch(512, 8, 1024),  # GPT-2
    "gpt_3_6b": _PUBLISHED["paper_3_6b"],
    "gpt_7_5b": _PUBLISHED["paper_7_5b"],
    "gpt_39b": _PUBLISHED["paper_39b"],
    "gpt3_175b": Batch(1536, 1, 2048),  # 3.2 million tokens, as a number of sequences that many layouts divide
    "llama2_7b": Batch(1024, 1, 4096),  # 4 million tokens
    "llama2_70b": Batch(1024, 1, 4096),
    "llama3_8b": Batch(512, 1, 8192),  # 4 million tokens, with which its training began
    "llama3_70b": Batch(512, 1, 8192),
    "llama3_1_405b": Batch(2048, 1, 8192),  # 16 million tokens, with which most of its training was done
    # Whose global batch nobody published: 4 million tokens, in sequences as long as their publications say
    **{
        name: Batch(512, 1, 8192)
        for name in ("llama3_1_8b", "llama3_1_70b", "llama3_2_1b", "llama3_2_3b", "mistral_7b")
    },
    **{name: Batch(1024, 1, 4096) for name in MODELS if name.startswith("qwen")},
}

BATCHES: dict[str, Batch] = {**_PUBLISHED, **_OWN}  # a model's own has the model's name
