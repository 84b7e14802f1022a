"""The named options of the configuration's groups (``data=indexed``), and suggestions for mistyped keys."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.config.other_names import key_elsewhere, unsupported_hint
from holmes_hpc.errors import ConfigError, did_you_mean, is_typo
from holmes_hpc.schema import REQUIRED, keys

NAMED: dict[str, Mapping[str, Any]] = {"model": MODELS, "batch": BATCHES}  # group -> option -> its values
# group -> option -> the values that differ from the keys' defaults
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    **{group: {"default": {}} for group in ("plan", "train", "slurm", "elastic")},
    "data": {
        "default": {},
        "synthetic": {"kind": "synthetic"},
        "indexed": {"kind": "indexed", "prefix": "???", "split": "90,10"},
    },
    "launcher": {"slurm": {}, "local": {"kind": "local"}},
}
# The default option of each group: its first one. For `batch`, it is the batch that has the model's name, if any.
DEFAULTS = {"model": "gpt_tiny", "optional batch": "${model}"}
DEFAULTS |= {group: next(iter(OPTIONS[group])) for group in GROUPS if group in OPTIONS}


def option(group: str, name: str) -> dict[str, Any] | None:
    """Return the values of all keys in a group's option called `name`; None if there is no such option."""
    if group in NAMED:
        spec = NAMED[group].get(name)
        return None if spec is None else asdict(spec)
    changes = OPTIONS[group].get(name)
    defaults = {k: d.default for k, d in keys(GROUPS[group]).items() if d.default is not REQUIRED}
    return None if changes is None else defaults | changes


def named_option_hint(value: str) -> str | None:
    """Return a hint to write ``model=VALUE`` or ``batch=VALUE`` if `value` is such a name; None otherwise."""
    return next((did_you_mean([f"{group}={value}"]) for group, names in NAMED.items() if value in names), None)


def unknown_key(unknown: str) -> ConfigError:
    """Return the error for an unknown key. Its hint says what to do instead, or which keys the user may have meant."""
    hint = unsupported_hint(unknown)
    if unknown.partition(".")[0] == "labels":
        hint = "write +labels.NAME=VALUE, with a plus sign"
    elif hint is None and (meant := meant_keys(unknown)):
        hint = did_you_mean(meant)
    default = "docs/configuration.md lists all keys"
    return ConfigError(f"unknown key {unknown!r}", where="overrides", hint=hint or default)


def meant_keys(unknown: str) -> list[str]:
    """Return the keys that the user may have meant by an unknown key. The first of these rules with a match applies:
    the key that other programs call by this name; the switch of a group; keys with the same name; keys that `unknown`
    may misspell; keys with similar names; the key whose name in other programs `unknown` may misspell."""
    if (key := key_elsewhere(unknown)) is not None:
        return [key]
    group, _, name = unknown.rpartition(".")
    all_keys = [*keys(Configuration), *(f"{group}.{key}" for group, cls in GROUPS.items() for key in keys(cls))]
    if (switch := f"{unknown}.enabled") in all_keys:
        return [switch]
    names = {key: key.rpartition(".")[2] for key in all_keys}
    same_name = [name] if name in all_keys else [key for key in all_keys if names[key] == name]
    mistyped = [key for key in all_keys if is_typo(unknown, key) or (not group and is_typo(name, names[key]))]
    if matches := (group and mistyped) or same_name or mistyped:
        return matches
    candidates = [key for key in all_keys if group not in GROUPS or key.startswith(f"{group}.")]
    similar = difflib.get_close_matches(name, {names[key] for key in candidates}, 3, 0.8)
    key = None if similar else key_elsewhere(unknown, mistyped=True)
    return [key] if key else [key for key in candidates if names[key] in similar]
