"""Names that Slurm, Hugging Face, Megatron-LM and DeepSpeed use, with the equivalent configuration key or a hint."""

import re

from holmes_hpc.errors import is_typo
from holmes_hpc.tables import read_table

_TABLE: dict[str, dict[str, str]] = read_table(__file__)
_KEYS = {name: key for key, names in _TABLE["synonyms"].items() for name in names.split()}


def key_elsewhere(name: str, mistyped: bool = False) -> str | None:
    """Return the configuration key that other programs call `name`; None if there is none. `mistyped`: also accept one
    wrong letter. A group in `name` is ignored."""
    plain = _plain(name).rpartition(".")[2]
    others = (key for other, key in _KEYS.items() if mistyped and is_typo(plain, other))
    return _KEYS.get(plain) or next(others, None)


def unsupported_hint(name: str) -> str | None:
    """Return a hint for a name of other programs that has no equivalent key or model here; None for any other name."""
    return next((text for pattern, text in _TABLE["advice"].items() if re.fullmatch(pattern, _plain(name))), None)


def _plain(name: str) -> str:
    return name.lower().lstrip("+-").replace("-", "_")
