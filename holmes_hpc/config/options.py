"""The named options of the configuration's groups (``data=indexed``), and suggestions for mistyped keys."""

from dataclasses import asdict
from typing import Any

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.schema import REQUIRED, keys
from holmes_hpc.tables import read_table

# The default option of each group. That of `batch` is the batch with the model's name, if there is one.
DEFAULTS = {
    "model": "gpt_tiny",
    "optional batch": "${model}",
    "plan": "default",
    "data": "default",
    "train": "default",
    "slurm": "default",
    "launcher": "slurm",
}
# group -> option -> the values that differ from the keys' defaults
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
_OTHER_NAMES: dict[str, str] = read_table(__file__)["other_names"]


def option(group: str, name: str) -> dict[str, Any] | None:
    """Return the values of all keys in a group's option called `name`; None if there is no such option."""
    if group in ("model", "batch"):
        spec: Any = (MODELS if group == "model" else BATCHES).get(name)
        return None if spec is None else asdict(spec)
    changes = OPTIONS[group].get(name)
    defaults = {k: d.default for k, d in keys(GROUPS[group]).items() if d.default is not REQUIRED}
    return None if changes is None else defaults | changes


def named(name: str) -> list[str]:
    """Return the full names of the keys called `name` in any group (``lr`` -> ``train.lr``).
    If `name` is a group, or a key without a group, return only `name`."""
    if name in GROUPS or name in keys(Configuration):
        return [name]
    return [f"{group}.{name}" for group, cls in GROUPS.items() if name in keys(cls)]


def suggested_override(value: str) -> str | None:
    """Return the override that a value without its key can mean, ``model=VALUE`` or ``batch=VALUE``; else None."""
    return next(
        (f"{group}={value}" for group, names in (("model", MODELS), ("batch", BATCHES)) if value in names), None
    )


def unknown_key(unknown: str) -> ConfigError:
    """Return the error for an unknown key, with a suggestion.
    Suggest the key that Megatron-LM, DeepSpeed or transformers calls `unknown`, else the only key of that name in any
    group, else the most similar key."""
    last_part = unknown.rpartition(".")[2]
    same_ending = named(last_part)
    key = _OTHER_NAMES.get(last_part) or (same_ending[0] if len(same_ending) == 1 else None)
    all_keys = [*keys(Configuration), *(f"{group}.{key}" for group, cls in GROUPS.items() for key in keys(cls))]
    hint = f"did you mean {key!r}?" if key else nearest(unknown, all_keys)
    if unknown.partition(".")[0] == "labels":
        hint = "write +labels.NAME=VALUE, with a plus sign"
    return ConfigError(f"unknown key {unknown!r}", where="overrides", hint=hint)
