"""The named models and batches, for ``model=NAME`` and ``batch=NAME``, from models.yaml."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.schema import make
from holmes_hpc.tables import read_table

TRIAL_MAX_HIDDEN = 512  # up to this width, models train on random tokens by default; wider ones need data
_TABLE: dict[str, dict[str, Any]] = read_table(__file__)


def gated_ffn(hidden: int) -> int:
    """Return Megatron-LM's default width of a gated feed-forward part: 64 * floor(8h/3/64)."""
    return 8 * hidden // 3 // 64 * 64


MODELS: dict[str, ModelSpec] = {
    name: make(ModelSpec, {"name": name, "ffn": gated_ffn(v["hidden"]), "kv_heads": v["heads"], **v}, f"model {name}")
    for name, v in _TABLE["models"].items()
}
BATCHES: dict[str, Batch] = {name: Batch(*sizes) for name, sizes in _TABLE["batches"].items()}


def named(name: str) -> ModelSpec:
    """Return the model called `name`; for an unknown name, raise a ConfigError that suggests the nearest one."""
    ConfigError.refuse_unknown("no model", [name], MODELS, "model")
    return MODELS[name]


def gpt_of_sizes(data: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the configuration groups model and batch for a GPT whose sizes the user specified.
    `data`: the composed configuration; `keys`: its keys that the user set."""
    set_keys = {".".join(key.split(".")[:2]) for key in keys}  # model.experts.count sets model.experts
    sizes, batch = ({k: v for k, v in data[g].items() if f"{g}.{k}" in set_keys} for g in ("model", "batch"))
    if "batch" in keys:
        batch = data["batch"]
    has_batch = {"global_size", "sequence_length"} <= batch.keys()
    missing = ", ".join(f"--{name}" for name in ("layers", "hidden", "heads") if name not in sizes)
    ConfigError.refuse(
        "model",
        (not has_batch, "a model without a name has no default batch", "give --global-batch and --sequence"),
        (missing, f"the model lacks {missing}", "give --model NAME, or the model's sizes"),
    )
    if sizes.get("swiglu"):
        sizes = {"ffn": gated_ffn(sizes["hidden"]), **sizes}
    nested = {name: sizes.pop(name) for name in ("experts", "rope_scaling") if name in sizes}
    # like GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020): GELU, LayerNorm, biases, learned positions
    gpt: dict[str, Any] = {"name": "gpt", "vocab": 51200, "ffn": 4 * sizes["hidden"], "kv_heads": sizes["heads"]}
    gpt |= {"max_positions": batch["sequence_length"], "tied": True, "bias": True}
    gpt |= dict.fromkeys(("swiglu", "rmsnorm", "rope"), False)
    return {"model": asdict(ModelSpec(**{**gpt, **sizes})) | nested, "batch": {"micro_size": 1, **batch}}
