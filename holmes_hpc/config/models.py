"""The named models and batches, for ``model=NAME`` and ``batch=NAME``, from models.yaml."""

from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.schema import make
from holmes_hpc.tables import read_table

TRIAL_MAX_HIDDEN = 512  # wider models need data; these train on random tokens if no data are given
_TABLE: dict[str, dict[str, Any]] = read_table(__file__)


def gated_ffn(hidden: int) -> int:
    """Return Megatron-LM's default width of a gated feed-forward part: 64 * floor(8h/3/64)."""
    return 8 * hidden // 3 // 64 * 64


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


def _model(name: str, values: dict[str, Any]) -> ModelSpec:
    defaults = {"name": name, "ffn": gated_ffn(values["hidden"]), "kv_heads": values["heads"]}
    return make(ModelSpec, {**defaults, **values}, f"model {name}")


MODELS: dict[str, ModelSpec] = {name: _model(name, values) for name, values in _TABLE["models"].items()}
BATCHES: dict[str, Batch] = {name: Batch(*sizes) for name, sizes in _TABLE["batches"].items()}


def named(name: str) -> ModelSpec:
    """Return the model called `name`; for an unknown name, raise a ConfigError that suggests the nearest one."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}", where="model", hint=nearest(name, MODELS))
    return MODELS[name]
