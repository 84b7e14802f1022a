"""The options of the configuration's groups, and the keys that a mistyped word may mean."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.schema import REQUIRED, keys

# the batch of the model's name, where there is one: `batch` of config.yaml itself has no values
DEFAULTS = {
    "model": "gpt_tiny",
    "optional batch": "${model}",
    "plan": "default",
    "data": "default",
    "train": "default",
    "slurm": "default",
    "launcher": "slurm",
}
# group -> option -> the values that differ from the defaults
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "plan": {"default": {}},
    "train": {"default": {}},
    "slurm": {"default": {}},
    "data": {
        "default": {},
        "synthetic": {"kind": "synthetic"},
        "indexed": {"kind": "indexed", "prefix": "???", "split": "90,10"},
    },
    "launcher": {"slurm": {}, "local": {"kind": "local"}},
}
# names of Megatron-LM, DeepSpeed and transformers -> keys
_ELSEWHERE = {
    "learning_rate": "train.lr",
    "batch_size": "batch.global_size",
    "global_batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "micro_batch_size": "batch.micro_size",
    "per_device_train_batch_size": "batch.micro_size",
    "seq_length": "batch.sequence_length",
    "seq_len": "batch.sequence_length",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "data_path": "data.prefix",
    "path": "data.prefix",
    "tensor_model_parallel_size": "plan.tp",
    "pipeline_model_parallel_size": "plan.pp",
    "save_interval": "train.checkpoint_interval",
}


def option(group: str, name: str) -> dict[str, Any] | None:
    """Return all values of a group's option; None where none has that name."""
    if group in ("model", "batch"):
        spec: Any = (MODELS if group == "model" else BATCHES).get(name)
        return None if spec is None else asdict(spec)
    changes = OPTIONS[group].get(name)
    defaults = {k: d.default for k, d in keys(GROUPS[group]).items() if d.default is not REQUIRED}
    return None if changes is None else defaults | changes


def named(word: str) -> list[str]:
    """Return the group of that name, or the keys of any group (``lr`` -> ``train.lr``)."""
    if word in GROUPS or word in keys(Configuration):
        return [word]
    return [f"{name}.{word}" for name, group in GROUPS.items() if word in keys(group)]


def meant(word: str) -> str | None:
    """Return the override that a word without its key stands for: of a named model, or of a batch."""
    return next((f"{group}={word}" for group, known in (("model", MODELS), ("batch", BATCHES)) if word in known), None)


def unknown_key(word: str) -> ConfigError:
    """Return the error for an unknown key, with the key that other programs call so, that ends so, or is nearest."""
    last = word.rpartition(".")[2]
    same = named(last)
    key = _ELSEWHERE.get(last) or (same[0] if len(same) == 1 else None)
    known = [*keys(Configuration), *(f"{group}.{key}" for group, cls in GROUPS.items() for key in keys(cls))]
    hint = f"did you mean {key!r}?" if key else nearest(word, known)
    return ConfigError(f"unknown key {word!r}", where="overrides", hint=hint)
