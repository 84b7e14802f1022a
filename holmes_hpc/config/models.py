"""The named models and batches, for ``model=NAME`` and ``batch=NAME``."""

from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec, RopeScaling
from holmes_hpc.errors import ConfigError, nearest


def gated_ffn(hidden: int) -> int:
    """Return Megatron-LM's default width of a gated feed-forward part: 64 * floor(8h/3/64)."""
    return 8 * hidden // 3 // 64 * 64


def _llama(
    name: str, layers: int, hidden: int, heads: int, vocab: int, *, ffn: int = 0, kv_heads: int = 0, **other_keys: Any
) -> ModelSpec:
    """Return a model like Llama, with rotary positions, a gated feed-forward part and RMSNorm.

    Sources: Llama (arXiv 2307.09288 and 2407.21783), Mistral without a sliding window (arXiv 2310.06825), Qwen2.5
    (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), and the paper (Yang et al., arXiv 2312.03549). For the paper's models,
    `ffn` is :func:`gated_ffn`. They are untied: a tied embedding and head would need an
    all-reduce between the first and last fabric in every step.
    """
    ffn, kv_heads = ffn or gated_ffn(hidden), kv_heads or heads
    return ModelSpec(name, layers, hidden, heads, vocab, ffn=ffn, kv_heads=kv_heads, **other_keys)


_LLAMA2: dict[str, Any] = {"vocab": 32000, "max_positions": 4096}
_LLAMA3: dict[str, Any] = {"vocab": 128256, "kv_heads": 8, "max_positions": 8192, "rope_base": 500000.0}
_LLAMA3_1: dict[str, Any] = {**_LLAMA3, "max_positions": 131072, "rope_scaling": RopeScaling(8.0)}
_LLAMA3_2: dict[str, Any] = {**_LLAMA3_1, "rope_scaling": RopeScaling(32.0), "tied": True}
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope_base": 1000000.0}
_QWEN2_5: dict[str, Any] = {**_QWEN, "vocab": 152064, "max_positions": 131072, "qkv_bias": True}
_QWEN3: dict[str, Any] = {
    **_QWEN,
    "vocab": 151936,
    "kv_heads": 8,
    "max_positions": 40960,
    "head_dim": 128,  # independent of the hidden width
    "qk_norm": True,
}


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, tied: bool, **other_keys: Any
) -> ModelSpec:
    """Return a model like GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020).
    It has GELU, LayerNorm, biases and learned positions, unless `other_keys`, further keys of ModelSpec, change them.
    """
    gpt_keys = {"ffn": 4 * hidden, "kv_heads": heads, "swiglu": False, "rmsnorm": False, "rope": False, "bias": True}
    return ModelSpec(
        name, layers, hidden, heads, vocab, max_positions=positions, tied=tied, **{**gpt_keys, **other_keys}
    )


MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        # Bytes and an end-of-document token; a step takes a CPU seconds at most.
        _llama("gpt_tiny", 8, 256, 8, 257, ffn=640, max_positions=256),
        gpt("gpt_small", 12, 768, 12, 50257, positions=1024, tied=True),
        _llama("gpt_3_6b", 30, 3072, 32, 50304),
        _llama("gpt_7_5b", 36, 4096, 32, 50304),
        _llama("gpt_39b", 48, 8192, 64, 51200),
        gpt("gpt3_175b", 96, 12288, 96, 51200, positions=2048, tied=False),
        _llama("llama2_7b", 32, 4096, 32, ffn=11008, **_LLAMA2),
        _llama("llama2_70b", 80, 8192, 64, ffn=28672, kv_heads=8, **_LLAMA2),
        _llama("llama3_8b", 32, 4096, 32, ffn=14336, **_LLAMA3),
        _llama("llama3_70b", 80, 8192, 64, ffn=28672, **_LLAMA3),
        _llama("llama3_1_8b", 32, 4096, 32, ffn=14336, **_LLAMA3_1),
        _llama("llama3_1_70b", 80, 8192, 64, ffn=28672, **_LLAMA3_1),
        _llama("llama3_1_405b", 126, 16384, 128, ffn=53248, **_LLAMA3_1),
        _llama("llama3_2_1b", 16, 2048, 32, ffn=8192, **_LLAMA3_2),
        _llama("llama3_2_3b", 28, 3072, 24, ffn=8192, **_LLAMA3_2),
        _llama("mistral_7b", 32, 4096, 32, 32768, ffn=14336, kv_heads=8, max_positions=32768, rope_base=1000000.0),
        _llama(
            "qwen2_5_0_5b",
            24,
            896,
            14,
            ffn=4864,
            kv_heads=2,
            **{**_QWEN2_5, "vocab": 151936, "max_positions": 32768, "tied": True},
        ),
        _llama("qwen2_5_7b", 28, 3584, 28, ffn=18944, kv_heads=4, **_QWEN2_5),
        _llama("qwen2_5_14b", 48, 5120, 40, ffn=13824, kv_heads=8, **{**_QWEN2_5, "norm_eps": 1e-5}),
        _llama("qwen2_5_32b", 64, 5120, 40, ffn=27648, kv_heads=8, **{**_QWEN2_5, "norm_eps": 1e-5}),
        _llama("qwen2_5_72b", 80, 8192, 64, ffn=29568, kv_heads=8, **{**_QWEN2_5, "norm_eps": 1e-5}),
        _llama("qwen3_0_6b", 28, 1024, 16, ffn=3072, tied=True, **_QWEN3),
        _llama("qwen3_1_7b", 28, 2048, 16, ffn=6144, tied=True, **_QWEN3),
        _llama("qwen3_4b", 36, 2560, 32, ffn=9728, tied=True, **_QWEN3),
        _llama("qwen3_8b", 36, 4096, 32, ffn=12288, **_QWEN3),
        _llama("qwen3_14b", 40, 5120, 40, ffn=17408, **_QWEN3),
        _llama("qwen3_32b", 64, 5120, 64, ffn=25600, **_QWEN3),
    )
}


TRIAL_MAX_HIDDEN = 512  # wider models need data; these train on random tokens if no data are given


def named(name: str) -> ModelSpec:
    """Return the model called `name`; for an unknown name, raise a ConfigError that suggests the nearest one."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}", where="model", hint=nearest(name, MODELS))
    return MODELS[name]


# Batch(global size in sequences, micro-batch size in sequences, sequence length in tokens). The settings paper_* are
# those of the paper (arXiv 2312.03549).
_PUBLISHED: dict[str, Batch] = {
    "tiny": Batch(16, 2, 64),
    "paper_3_6b": Batch(768, 4, 2048),
    "paper_7_5b": Batch(1536, 4, 2048),
    "paper_39b": Batch(1536, 4, 2048),
}

# The default batch of each named model: its publication's global batch and sequence length. Micro-batches come from the
# paper for its models; other publications do not give them, so they are one sequence.
_DEFAULTS: dict[str, Batch] = {
    "gpt_tiny": _PUBLISHED["tiny"],
    "gpt_small": Batch(512, 8, 1024),  # GPT-2
    "gpt_3_6b": _PUBLISHED["paper_3_6b"],
    "gpt_7_5b": _PUBLISHED["paper_7_5b"],
    "gpt_39b": _PUBLISHED["paper_39b"],
    "gpt3_175b": Batch(1536, 1, 2048),  # 3.2 million tokens; many layouts divide this number of sequences
    "llama2_7b": Batch(1024, 1, 4096),  # 4 million tokens
    "llama2_70b": Batch(1024, 1, 4096),
    "llama3_8b": Batch(512, 1, 8192),  # 4 million tokens, at the start of its training
    "llama3_70b": Batch(512, 1, 8192),
    "llama3_1_405b": Batch(2048, 1, 8192),  # 16 million tokens, during most of its training
    # Global batch not published: 4 million tokens, in sequences of the published length
    **{
        name: Batch(512, 1, 8192)
        for name in ("llama3_1_8b", "llama3_1_70b", "llama3_2_1b", "llama3_2_3b", "mistral_7b")
    },
    **{name: Batch(1024, 1, 4096) for name in MODELS if name.startswith("qwen")},
}

BATCHES: dict[str, Batch] = {**_PUBLISHED, **_DEFAULTS}  # a model's default batch has the model's name
