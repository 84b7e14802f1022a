"""Words of Slurm, Hugging Face, Megatron-LM and DeepSpeed: the key here that means the same, or what to do instead."""

import re

from holmes_hpc.tables import read_table

_TABLE: dict[str, dict[str, str]] = read_table(__file__)
_KEYS = {name: key for key, names in _TABLE["synonyms"].items() for name in names.split()}


def key_elsewhere(name: str) -> str | None:
    """Return the key that other programs call `name`, with or without a group; None without one."""
    return _KEYS.get(_plain(name).rpartition(".")[2])


def unsupported_hint(name: str) -> str | None:
    """Return a hint for a word of other programs that has no key or model here; None for any other word."""
    return next((text for pattern, text in _TABLE["advice"].items() if re.fullmatch(pattern, _plain(name))), None)


def _plain(name: str) -> str:
    return name.lower().lstrip("+-").replace("-", "_")
