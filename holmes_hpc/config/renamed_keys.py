"""Renamed configuration keys: the former name still works, and a note names the new one."""

from functools import cache
from typing import Any

from holmes_hpc import console
from holmes_hpc.errors import ConfigError

_note_once = cache(console.note)


def move_renamed(instance: Any, group: str, former: str, name: str) -> None:
    """Move the value of the key `former` of a configuration group to the key `name`. Note that `former` is deprecated,
    but only once per process. Raise ConfigError if both keys are set."""
    value = getattr(instance, former)
    if value is None:
        return
    are_both_set, problem = getattr(instance, name) is not None, f"{group}.{name}, its new name, is also set"
    ConfigError.refuse(f"{group}.{former}", (are_both_set, problem, "give only the new name"))
    _note_once(f"{group}.{former} is deprecated; use {group}.{name}")
    object.__setattr__(instance, name, value)
    object.__setattr__(instance, former, None)
