"""The named models and batches: what ``model=NAME`` and ``batch=NAME`` mean."""

from __future__ import annotations

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError, nearest


def _paper(name: str, layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    """A model of Yang et al. (arXiv 2312.03549). Megatron-LM gives a SwiGLU model of theirs ffn = 64 * floor(8h/3/64).

    Untied here: a tied pair would be all-reduced between the first and the last fabric in every step.
    """
    return ModelSpec(name, layers, hidden, heads, vocab, ffn=8 * hidden // 3 // 64 * 64, kv_heads=heads)


def _llama(name: str, layers: int, hidden: int, heads: int, vocab: int, ffn: int, kv_heads: int, positions: int,
           rope_base: float = 10000.0) -> ModelSpec:
    """Touvron et al. 2023 (arXiv 2307.09288) and Grattafiori et al. 2024 (arXiv 2407.21783), as they published them."""
    return ModelSpec(name, layers, hidden, heads, vocab, ffn=ffn, kv_heads=kv_heads, max_positions=positions,
                     rope_base=rope_base)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, tied: bool) -> ModelSpec:
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020): GELU, LayerNorm, biases, learned positions."""
    return ModelSpec(name, layers, hidden, heads, vocab, ffn=4 * hidden, kv_heads=heads, swiglu=False, rmsnorm=False,
                     rope=False, tied=tied, bias=True, max_positions=positions)


MODELS: dict[str, ModelSpec] = {m.name: m for m in (
    # Bytes and an end-of-document token; a step takes a CPU seconds at most.
    ModelSpec("gpt_tiny", 8, 256, 8, 257, ffn=640, kv_heads=8, max_positions=256),
    _gpt("gpt_small", 12, 768, 12, 50257, 1024, tied=True),
    _paper("gpt_3_6b", 30, 3072, 32, 50304),
    _paper("gpt_7_5b", 36, 4096, 32, 50304),
    _paper("gpt_39b", 48, 8192, 64, 51200),
    _gpt("gpt3_175b", 96, 12288, 96, 51200, 2048, tied=False),
    _llama("llama2_7b", 32, 4096, 32, 32000, 11008, 32, 4096),
    _llama("llama2_70b", 80, 8192, 64, 32000, 28672, 8, 4096),
    _llama("llama3_8b", 32, 4096, 32, 128256, 14336, 8, 8192, 500000.0),
    _llama("llama3_70b", 80, 8192, 64, 128256, 28672, 8, 8192, 500000.0),
)}


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
}

BATCHES: dict[str, Batch] = {**_PUBLISHED, **_OWN}  # a model's own has the model's name
