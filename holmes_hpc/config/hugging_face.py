"""Conversion between the config.json of a Hugging Face folder and a ModelSpec.

Only JSON is read: nothing is downloaded, and no code from a folder is run. hugging_face.yaml lists the supported model
families and their keys, and why others are not supported. training/checkpoint/weight_names.py converts the weights.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from holmes_hpc.config.model import Experts, ModelSpec, RopeScaling
from holmes_hpc.errors import ConfigError, DataError, HolmesError, nearest
from holmes_hpc.records.files import read_json
from holmes_hpc.tables import read_table

PREFIX = "hf:"
CONFIG = "config.json"
_FOLDER_HINT = "give a whole Hugging Face folder on this machine; fetch it again"
_HINT = "give a folder of one of the families in docs/models.md"
_TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}  # keys of rope_scaling


@dataclass(frozen=True)
class Family:
    """A family of models, which has one `model_type` in config.json. `architecture`: the model's class in the package
    `transformers`; other fields: facts about the family that config.json does not contain."""

    architecture: str
    may_have_bias: bool = False
    window_by_default: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None


_TABLE: dict[str, dict[str, Any]] = read_table(__file__)
FAMILIES = {model_type: Family(**facts) for model_type, facts in _TABLE["families"].items()}


def folder_of(text: str | None) -> Path | None:
    """Return DIR of ``hf:DIR``; None for other text."""
    return Path(text.removeprefix(PREFIX)) if text is not None and text.startswith(PREFIX) else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. DataError if it cannot be read."""
    return read_json(folder / CONFIG, DataError, _FOLDER_HINT)


def read_model(path: Path) -> ModelSpec:
    """Return the model that config.json describes, named like its folder. `path`: the Hugging Face folder, or the file.
    Raise DataError if the model has a feature that is not supported."""
    folder, file = (path.parent, path) if path.is_file() else (path, path / CONFIG)
    name = re.sub(r"[^\w.-]+", "_", folder.resolve().name) or "model"
    return model_of(read_json(file, DataError, _FOLDER_HINT), name, str(file))


def model_of(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Return the model that `config`, a config.json's content, describes; dropout is 0. `where`: the file's path."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        reason = _TABLE["not_covered"].get(model_type)
        problem = f"model_type is {model_type!r}" + (f": {reason}" if reason else "")
        raise DataError(problem, where=where, hint=nearest(model_type, FAMILIES) if reason is None else _HINT)
    read = _Config(config, where)
    if config.get("quantization_config"):
        read.refuse("its weights are quantized", "give the folder of the weights before quantization")
    hint, what = "fetch the folder again", "a value is of a wrong type:"
    wrong_type = DataError.instead_of(TypeError, AttributeError, where=where, hint=hint, what=what)
    with wrong_type, DataError.instead_of(HolmesError, where=where):
        model = replace(_read_gpt2(read) if model_type == "gpt2" else _read_llama(read, model_type), name=name)
    return replace(model, head_dim=None) if model.query_width == model.hidden else model


def config_of(spec: ModelSpec, dtype: str, eod: int | None = None) -> dict[str, Any]:
    """Return the content of config.json. `dtype`: torch's name of the weights' type; `eod`: end-of-document id."""
    model_type = family_of(spec)
    names = _TABLE["keys"]["llama" if spec.rope else "gpt2"]
    shared_keys = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), eod),
        **{key: getattr(spec, field) for field, key in names.items()},
    }
    if spec.experts.count:
        routing = asdict(replace(spec.experts, ffn=spec.ffn_width))
        shared_keys |= {key: routing[field] for field, key in _TABLE["experts"][model_type].items()}
        of_family = {"norm_topk_prob": _is_normalised(spec)} if spec.qk_norm else {"intermediate_size": spec.ffn_width}
        shared_keys |= of_family
    if not spec.rope:
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), spec.dropout)
        return {**shared_keys, "activation_function": "gelu_new" if spec.gelu_tanh else "gelu", **dropouts}
    return {
        **shared_keys,
        "head_dim": spec.head_width,
        "hidden_act": "silu",
        "rope_theta": spec.rope_base,
        "rope_scaling": _write_scaling(spec.rope_scaling),
        "attention_dropout": spec.dropout,
        **({"attention_bias": spec.bias, "mlp_bias": spec.bias} if model_type == "llama" else {}),
        **({"attention_bias": False} if spec.qk_norm else {}),
        **({"use_sliding_window": False} if model_type != "llama" else {}),
    }


def family_of(spec: ModelSpec) -> str:
    """Return the `model_type` of the Hugging Face family of this architecture. Raise ConfigError if there is none."""
    if not (spec.rope or spec.swiglu or spec.rmsnorm) and (
        spec.kv_heads == spec.heads and spec.query_width == spec.hidden and not spec.qk_norm
    ):
        return "gpt2"
    experts = spec.experts
    if spec.rope and spec.swiglu and spec.rmsnorm and experts.count:
        routing = Experts(experts.count, experts.top_k, experts.ffn, score=experts.score)
        losses = {name: getattr(routing, name) for name in ("balance", "per_sequence", "z_loss")}  # only for training
        if replace(experts, **losses) == routing and not spec.qkv_bias and (spec.qk_norm or _is_normalised(spec)):
            return "qwen3_moe" if spec.qk_norm else "mixtral"
    elif spec.rope and spec.swiglu and spec.rmsnorm:
        if not (spec.qk_norm or spec.qkv_bias):
            return "llama"
        if spec.qk_norm and not (spec.bias or spec.qkv_bias):
            return "qwen3"
        if not (spec.qk_norm or spec.bias) and spec.query_width == spec.hidden:
            return "qwen2"
    parts = [
        "rotary positions" if spec.rope else "learned positions",
        "SwiGLU" if spec.swiglu else "GELU",
        "RMSNorm" if spec.rmsnorm else "LayerNorm",
        "QK norm" * spec.qk_norm,
        "biases of queries, keys and values" * spec.qkv_bias,
        str(experts) * bool(experts.count),
        f"heads {spec.head_width} wide and {spec.kv_heads} of {spec.heads} heads for keys",
    ]
    problem = f"no supported Hugging Face family has {', '.join(filter(None, parts))}"
    hint = "export models like Llama or Qwen (rope, swiglu, rmsnorm) or like GPT-2 (none of them)"
    raise ConfigError(problem, where=f"model {spec.name}", hint=hint)


def _is_normalised(spec: ModelSpec) -> bool:
    """Return whether the routing weights of a token's `top_k` experts sum to 1."""
    return spec.experts.score == "softmax" and spec.experts.top_k > 1


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return keys
    turns = dict(zip(_TURNS[scaling.kind], (scaling.low_frequency_turns, scaling.high_frequency_turns), strict=True))
    return {**keys, **turns, "original_max_position_embeddings": scaling.original_positions}


class _Config:
    """A reader of the keys of a config.json. It raises DataError if a required key is missing."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = {"num_experts": config.get("num_local_experts"), **config}, where  # as transformers 5

    def __call__(self, name: str, *default: Any) -> Any:
        """Return the value of a key. If it is missing or null, return `default`; without one, raise DataError."""
        value = self.config.get(name)
        if value is None:
            if not default:
                self.refuse(f"{name} is missing", "fetch the folder again")
            return default[0]
        return value

    def require(self, name: str, *supported: Any) -> Any:
        """Return the value of a key (default: the first of `supported`). Raise DataError if it is not supported."""
        value = self(name, supported[0])
        if value not in supported:
            self.refuse(f"{name} is {value!r}, only {' or '.join(map(repr, supported))} is covered", _HINT)
        return value

    def fields(self, family: str, **defaults: Any) -> dict[str, Any]:
        """Return {field: value} of the fields of ModelSpec that are one key each. `defaults`: of missing keys."""
        names = _TABLE["keys"][family]
        return {f: self(key, *([defaults[f]] if f in defaults else [])) for f, key in names.items()}

    def refuse(self, message: str, hint: str) -> NoReturn:
        raise DataError(message, where=self.where, hint=hint)


def _read_llama(read: _Config, model_type: str) -> ModelSpec:
    """Read a Llama, Mistral, Mixtral or Qwen model. It has rotary positions, SwiGLU and RMSNorm."""
    family = FAMILIES[model_type]
    rope = read("rope_parameters", None) or read("rope_scaling", None) or {}
    if not isinstance(rope, Mapping):
        read.refuse(f"rope_scaling is {rope!r}", _HINT)
    read.require("hidden_act", "silu")
    read.require("partial_rotary_factor", 1.0)
    _refuse_window(read, family.window_by_default)
    bias = False
    if family.may_have_bias:
        bias = read("attention_bias", False)
        if read("mlp_bias", False) != bias:
            read.refuse("attention_bias and mlp_bias differ", _HINT)
    elif read("attention_bias", False):
        read.refuse("attention_bias is true", _HINT)
    heads = read("num_attention_heads")
    return ModelSpec(
        "model",
        **read.fields("llama", kv_heads=heads, tied=False, max_positions=2048, norm_eps=1e-6),
        bias=bias,
        rope_base=rope.get("rope_theta") or read("rope_theta", 10000.0),
        head_dim=read("head_dim", family.head_dim),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope_scaling=_read_scaling(read, rope),
        experts=_read_experts(read, model_type) if model_type in _TABLE["experts"] else Experts(),
    )


def _read_experts(read: _Config, family: str) -> Experts:
    """Read the experts of a Mixtral or Qwen3 model. Every layer has experts, and none of them is shared."""
    for name, supported in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("router_jitter_noise", 0.0)):
        read.require(name, supported)
    is_normalised = read("norm_topk_prob", family == "mixtral")
    sizes = {field: read(key) for field, key in _TABLE["experts"][family].items()}
    experts = Experts(**sizes, score="softmax" if is_normalised else "softmax_all")
    if is_normalised and experts.top_k == 1:
        read.refuse("a token has one expert, whose weight is always 1, so the router cannot learn", _HINT)
    return experts


def _refuse_window(read: _Config, by_default: bool) -> None:
    window = read("sliding_window", None) if read("use_sliding_window", by_default) else None
    layers = read("layer_types", [])
    if (window is not None and window < read("max_position_embeddings", 2048)) or "sliding_attention" in layers:
        problem = f"its layers attend to a window of {window} tokens; Megatron-Core's layers have no window"
        hint = f"for sequences up to {window} tokens, set sliding_window to null there; the result is the same"
        read.refuse(problem, hint)


def _read_scaling(read: _Config, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(rope.get("factor", 1.0), "linear")
    if kind not in _TURNS:
        read.refuse(f"rope_scaling is of type {kind!r}, only linear, llama3 and yarn are covered", _HINT)
    for name in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
        if rope.get(name) not in (None, True):
            read.refuse(f"rope_scaling has {name} {rope[name]!r}, only YaRN's default is covered", _HINT)
    is_yarn = kind == "yarn"
    longest = read("max_position_embeddings", 8192) if is_yarn else 8192
    original = rope.get("original_max_position_embeddings") or read("original_max_position_embeddings", longest)
    low, high = (rope.get(name) for name in _TURNS[kind])
    return RopeScaling(rope.get("factor", 8.0), kind, low or 1.0, high or 0.0, original)


def _read_gpt2(read: _Config) -> ModelSpec:
    activation = read.require("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    read.require("scale_attn_weights", True)
    read.require("scale_attn_by_inverse_layer_idx", False)
    read.require("add_cross_attention", False)
    hidden = read("n_embd")
    default_ffn = 4 * hidden if isinstance(hidden, int) else hidden
    fields = read.fields("gpt2", ffn=default_ffn, tied=True, norm_eps=1e-5)
    fields |= dict.fromkeys(("swiglu", "rmsnorm", "rope"), False)
    return ModelSpec("model", **fields, kv_heads=read("n_head"), bias=True, gelu_tanh=activation != "gelu")
