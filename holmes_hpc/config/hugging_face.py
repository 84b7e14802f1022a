"""A Hugging Face folder's config.json as a model's configuration, and back. JSON alone: nothing is fetched, and no code
of a folder is run.

Each family is in one table, with what of it is not covered. Weights: training/checkpoint/weight_names.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from holmes_hpc.config.model import ModelSpec, RopeScaling
from holmes_hpc.errors import ConfigError, DataError, HolmesError, nearest

PREFIX = "hf:"
CONFIG = "config.json"
_HINT = "give a folder of one of the families in docs/models.md"


@dataclass(frozen=True)
class Family:
    """What one `model_type` is: its class in `transformers`, and how its config.json is read. `set_by_type`: the keys
    of a model that no key of config.json says."""

    architecture: str
    read: Callable[[_Config, Mapping[str, Any]], ModelSpec]
    set_by_type: Mapping[str, Any]


# What people may bring, and why it cannot be trained here.
_ONE_NORM = "Megatron-Core's layers have no norm behind attention and behind the feed-forward part"
NOT_COVERED = {
    "gemma": "Megatron-Core scales no embeddings, and knows norms that multiply by one more than their weight with "
    "Transformer Engine alone",
    "gemma2": f"{_ONE_NORM}, and it caps neither scores nor logits",
    "gemma3": f"{_ONE_NORM}, and one rotary base for all layers",
    "gemma3_text": f"{_ONE_NORM}, and one rotary base for all layers",
    "gpt_neox": "attention and feed-forward part stand side by side in its layers, which Megatron-Core's have in turn",
    "mixtral": "mixtures of experts are not covered yet",
    "qwen2_moe": "mixtures of experts are not covered yet",
    "qwen3_moe": "mixtures of experts are not covered yet",
    "deepseek_v3": "neither mixtures of experts nor latent attention are covered yet",
}


def folder_of(word: str | None) -> Path | None:
    """DIR of ``hf:DIR``; None for any other word."""
    return Path(word.removeprefix(PREFIX)) if word is not None and word.startswith(PREFIX) else None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. DataError where there is none that can be read."""
    path = folder / CONFIG
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(e.strerror or str(e), where=str(path), hint="give a Hugging Face model's folder") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"not JSON: {e}", where=str(path), hint="fetch the folder again") from e
    if not isinstance(read, dict):
        raise DataError("holds no keys", where=str(path), hint="fetch the folder again")
    return read


def read_model(folder: Path) -> ModelSpec:
    """The model that a folder holds, named as the folder. DataError with what is not covered."""
    return model_of(
        read_config(folder), re.sub(r"[^\w.-]+", "_", folder.resolve().name) or "model", str(folder / CONFIG)
    )


def model_of(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """The model that a config.json says. Dropout, a choice of training, is 0."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        why = NOT_COVERED.get(kind)
        raise DataError(
            f"model_type is {kind!r}" + (f": {why}" if why else ""),
            where=where,
            hint=nearest(kind, FAMILIES) if why is None else _HINT,
        )
    family, read = FAMILIES[kind], _Config(config, where)
    if config.get("quantization_config"):
        read.refuse("its weights are quantized", "give the folder of the weights before quantization")
    try:
        made = replace(family.read(read, family.set_by_type), name=name)
    except HolmesError as e:
        raise DataError(e.what, where=where, hint=e.hint) from e
    except (TypeError, AttributeError) as e:
        raise DataError(f"a value is of a wrong type: {e}", where=where, hint="fetch the folder again") from e
    return replace(made, head_dim=None) if made.query_width == made.hidden else made


def config_of(spec: ModelSpec, dtype: str, eod: int | None = None) -> dict[str, Any]:
    """config.json of a model; `dtype`: of its weights, as torch names it; `eod`: the token that ends a document."""
    kind = family_of(spec)
    common = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "bos_token_id": eod,
        "eos_token_id": eod,
    }
    if not spec.rope:
        return {
            **common,
            "n_embd": spec.hidden,
            "n_inner": spec.ffn,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_positions": spec.max_positions,
            "layer_norm_epsilon": spec.norm_eps,
            "activation_function": "gelu_new" if spec.gelu_tanh else "gelu",
            "attn_pdrop": spec.dropout,
            "resid_pdrop": spec.dropout,
            "embd_pdrop": spec.dropout,
        }
    return {
        **common,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_base,
        "rope_scaling": _scaling_of(spec.rope_scaling),
        "attention_dropout": spec.dropout,
        **({"attention_bias": spec.bias, "mlp_bias": spec.bias} if kind == "llama" else {}),
        **({"attention_bias": False} if kind == "qwen3" else {}),
        **({"use_sliding_window": False} if kind != "llama" else {}),
    }


def family_of(spec: ModelSpec) -> str:
    """The `model_type` that computes what this model computes. ConfigError where there is none."""
    if not (spec.rope or spec.swiglu or spec.rmsnorm) and (
        spec.kv_heads == spec.heads and spec.query_width == spec.hidden and not spec.qk_norm
    ):
        return "gpt2"
    if spec.rope and spec.swiglu and spec.rmsnorm:
        if not (spec.qk_norm or spec.qkv_bias):
            return "llama"
        if spec.qk_norm and not (spec.bias or spec.qkv_bias):
            return "qwen3"
        if not (spec.qk_norm or spec.bias) and spec.query_width == spec.hidden:
            return "qwen2"
    parts = [
        "rotary" if spec.rope else "learned",
        "positions,",
        "SwiGLU," if spec.swiglu else "GELU,",
        "RMSNorm," if spec.rmsnorm else "LayerNorm,",
        "QK norm," * spec.qk_norm,
        "biases of queries, keys and values," * spec.qkv_bias,
        f"heads {spec.head_width} wide",
        f"and {spec.kv_heads} of {spec.heads} heads for keys",
    ]
    raise ConfigError(
        f"no Hugging Face model has {' '.join(filter(None, parts))}",
        where=f"model {spec.name}",
        hint="export models like Llama or Qwen (rope, swiglu, rmsnorm) or like GPT-2 (none of them)",
    )


def _scaling_of(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    more = (
        {}
        if scaling.kind == "linear"
        else {
            "low_freq_factor": scaling.low_frequency_turns,
            "high_freq_factor": scaling.high_frequency_turns,
            "original_max_position_embeddings": scaling.original_positions,
        }
    )
    return {"rope_type": scaling.kind, "factor": scaling.factor, **more}


class _Config:
    """Reads keys of a config.json; a missing one is a DataError."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def __call__(self, name: str, *otherwise: Any) -> Any:
        """The value of a key; where it is missing or null, `otherwise` if that is given."""
        value = self.config.get(name)
        if value is None:
            if not otherwise:
                self.refuse(f"{name} is missing", "fetch the folder again")
            return otherwise[0]
        return value

    def wants(self, name: str, *known: Any) -> Any:
        """The value of a key that must be one of those `known`; the first one where it is missing."""
        value = self(name, known[0])
        if value not in known:
            self.refuse(f"{name} is {value!r}, only {' or '.join(map(repr, known))} is covered", _HINT)
        return value

    def refuse(self, what: str, hint: str) -> NoReturn:
        raise DataError(what, where=self.where, hint=hint)


def _llama(read: _Config, more: Mapping[str, Any]) -> ModelSpec:
    """Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3: rotary positions, SwiGLU, RMSNorm, grouped queries."""
    rope = read("rope_parameters", None) or read("rope_scaling", None) or {}
    if not isinstance(rope, Mapping):
        read.refuse(f"rope_scaling is {rope!r}", _HINT)
    read.wants("hidden_act", "silu")
    read.wants("partial_rotary_factor", 1.0)
    _no_window(read, more)
    bias = False
    if more.get("may_have_bias"):
        bias = read("attention_bias", False)
        if read("mlp_bias", False) != bias:
            read.refuse("attention_bias and mlp_bias differ", _HINT)
    elif read("attention_bias", False):
        read.refuse("attention_bias is true", _HINT)
    own = {k: v for k, v in more.items() if k in ("qk_norm", "qkv_bias")}
    return ModelSpec(
        "model",
        read("num_hidden_layers"),
        read("hidden_size"),
        read("num_attention_heads"),
        read("vocab_size"),
        ffn=read("intermediate_size"),
        kv_heads=read("num_key_value_heads", read("num_attention_heads")),
        tied=read("tie_word_embeddings", False),
        bias=bias,
        max_positions=read("max_position_embeddings", 2048),
        norm_eps=read("rms_norm_eps", 1e-6),
        rope_base=rope.get("rope_theta") or read("rope_theta", 10000.0),
        head_dim=read("head_dim", more.get("head_dim")),
        rope_scaling=_scaling(read, rope),
        **own,
    )


def _no_window(read: _Config, more: Mapping[str, Any]) -> None:
    window = read("sliding_window", None) if read("use_sliding_window", more["window_by_itself"]) else None
    layers = read("layer_types", [])
    if (window is not None and window < read("max_position_embeddings", 2048)) or "sliding_attention" in layers:
        read.refuse(
            f"its layers attend to a window of {window} tokens, which Megatron-Core's layers do not",
            f"for sequences up to {window} tokens it is the same without: set sliding_window to null there",
        )


def _scaling(read: _Config, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        read.refuse(f"rope_scaling is of type {kind!r}, only linear and llama3 are covered", _HINT)
    if kind == "linear":
        return RopeScaling(rope.get("factor", 1.0), "linear")
    original = rope.get("original_max_position_embeddings") or read("original_max_position_embeddings", 8192)
    return RopeScaling(
        rope.get("factor", 8.0), kind, rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0), original
    )


def _gpt2(read: _Config, more: Mapping[str, Any]) -> ModelSpec:
    act = read.wants("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    for name, known in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        read.wants(name, known)
    hidden = read("n_embd")
    return ModelSpec(
        "model",
        read("n_layer"),
        hidden,
        read("n_head"),
        read("vocab_size"),
        ffn=read("n_inner", 4 * hidden if isinstance(hidden, int) else hidden),
        kv_heads=read("n_head"),
        swiglu=False,
        rmsnorm=False,
        rope=False,
        tied=read("tie_word_embeddings", True),
        bias=True,
        max_positions=read("n_positions"),
        norm_eps=read("layer_norm_epsilon", 1e-5),
        gelu_tanh=act != "gelu",
    )


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, {"may_have_bias": True, "window_by_itself": False}),
    "mistral": Family("MistralForCausalLM", _llama, {"window_by_itself": True}),
    "qwen2": Family("Qwen2ForCausalLM", _llama, {"qkv_bias": True, "window_by_itself": False}),
    "qwen3": Family("Qwen3ForCausalLM", _llama, {"qk_norm": True, "head_dim": 128, "window_by_itself": False}),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, {}),
}
