"""The options of the configuration's groups, and what plain overrides choose of them without starting Hydra."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.models import BATCHES, MODELS
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
# group -> option -> what it says other than the defaults
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

# What Hydra's grammar reads as a number, and as a word: a part of what it knows. The rest is left to Hydra.
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)\Z")
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
_WORD = re.compile(r"[A-Za-z_/][\w./-]*\Z", re.ASCII)
_NO_WORD = ("inf", "nan")
_MEANT: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def plain(overrides: Sequence[str]) -> dict[str, Any] | None:
    """What Hydra would compose of the files under conf/ and `overrides` that are all ``GROUP=OPTION`` or ``KEY=VALUE``
    with a number or a word, each given once: the same values, without its half a second. None where they are not, or
    where anything is wrong or missing, which Hydra then says."""
    chosen = {group.removeprefix("optional "): option for group, option in DEFAULTS.items()}
    values: dict[str, Any] = {}
    for override in overrides:
        name, given, text = override.partition("=")
        value = _value(text)
        if not given or name in values or value is _Unread:
            return None
        if name in chosen:
            chosen[name] = text
        values[name] = value
    chosen["batch"] = chosen["model"] if "batch" not in values else chosen["batch"]
    made: dict[str, Any] = {k: d.default for k, d in keys(Configuration).items() if k not in GROUPS}
    for group, option in chosen.items():
        found = _option(group, option)
        if found is None:
            return None
        made[group] = found
    for name, value in values.items():
        group, _, key = name.partition(".") if "." in name else ("", "", name)
        into = made if not group else made[group] if group in GROUPS else {}
        if name in GROUPS:
            continue
        if key not in into or isinstance(into[key], Mapping):  # a mapping Hydra would merge
            return None
        into[key] = value
    return None if any("???" in made[group].values() for group in GROUPS) else made


def named(word: str) -> list[str]:
    """What is called so in the configuration: the group, or the keys of any group (``lr`` -> ``train.lr``)."""
    if word in GROUPS or word in keys(Configuration):
        return [word]
    return [f"{name}.{word}" for name, group in GROUPS.items() if word in keys(group)]


def meant(word: str) -> str | None:
    """The override that a word without its key was to be: of a named model, or of a batch."""
    return next((f"{group}={word}" for group, known in (("model", MODELS), ("batch", BATCHES)) if word in known), None)


class _Unread:
    """No value: what is not read here."""


def _value(text: str) -> Any:
    """What a number or a word means; the class `_Unread` for anything else."""
    if text.lower() in _MEANT:
        return _MEANT[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    if _NUMBER.match(text):
        return float(text)
    return text if _WORD.match(text) and text.lower() not in _NO_WORD else _Unread


def _option(group: str, name: str) -> dict[str, Any] | None:
    """All values of a group's option; None where there is none of that name."""
    if group in ("model", "batch"):
        named: Any = (MODELS if group == "model" else BATCHES).get(name)
        return None if named is None else asdict(named)
    more = OPTIONS[group].get(name)
    return (
        None
        if more is None
        else {k: d.default for k, d in keys(GROUPS[group]).items() if d.default is not REQUIRED} | more
    )
