"""The command options that set a configuration key, with its help, type and range: ``--tp 2`` means ``plan.tp=2``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.errors import ConfigError
from holmes_hpc.schema import Key, allowed, keys, kinds


@dataclass(frozen=True)
class Flag:
    """A command-line option. `name`: with its dashes; `key`: the configuration key that it sets."""

    name: str
    key: str

    @property
    def _declared(self) -> Key:
        group, _, key = self.key.rpartition(".")
        return keys(GROUPS[group] if group else Configuration)[key]

    @property
    def type(self) -> Any:
        """The type of the value: int, float, str, bool, tuple or dict. If the key is a group, str: an option's name."""
        return str if self.key in GROUPS else kinds(self._declared.type)[0]

    @property
    def is_switch(self) -> bool:
        """True if the option is written --NAME or --no-NAME, without a value."""
        return self.type is bool and self.key.startswith(("plan.", "model."))

    @property
    def help(self) -> str:
        """The key, its help, and its allowed values."""
        if self.key in GROUPS:
            return f"{self.key}: a name, see `holmes {self.key}s`"
        text, default = self._declared.spec.help, self._declared.default
        text = text.replace("auto:", "default:") if self.type in (int, bool) else text  # these cannot be `auto`
        allowed_values = allowed(self._declared).removeprefix("use ").removesuffix(", null or auto")
        is_elsewhere = self.key.startswith("model.") or "default:" in text  # models differ
        has_one_default = isinstance(default, bool | int | float) and not is_elsewhere
        allowed_values += f"; default {str(default).lower()}" if has_one_default else ""
        return f"{self.key}: {text} [{allowed_values}]"

    def value(self, text: str) -> Any:
        """Parse the text of an option whose value is a list (26,22), a map (ib-a=4,roce-a=4) or a bool (yes)."""
        parts = text.split(",")
        if self.type is tuple:
            if not all(part.strip().lstrip("-").isdecimal() for part in parts):
                raise ConfigError(f"{text!r} is not whole numbers", where=self.name, hint="write 26,22")
            return parts
        if self.type is bool:
            is_odd = text not in ("yes", "no")
            ConfigError.refuse(self.name, (is_odd, f"{text!r} is neither yes nor no", "write yes or no"))
            return text == "yes"
        if any(part.count("=") != 1 for part in parts):
            raise ConfigError(f"{text!r} is not POOL=NODES,…", where=self.name, hint="write ib-a=4,roce-a=4")
        return dict(part.split("=") for part in parts)

    def override(self, value: Any) -> str:
        """Return the override that sets the key to `value`."""
        return f"{self.key}={to_override_text(value)}"


def to_override_text(value: Any) -> str:
    """Return `value` in Hydra's override syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z]\w*", value) else quoted(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def quoted(text: str) -> str:
    """Quote a text so that Hydra's grammar reads it back unchanged."""
    if text[:1] in "'\"":
        return text
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


_NAMES = {  # options whose name differs from their key's
    "site_file": "--site",
    "batch.global_size": "--global-batch",
    "batch.micro_size": "--micro-batch",
    "batch.sequence_length": "--sequence",
}
_GROUP_KEYS = {
    "model": "layers hidden heads vocab ffn kv_heads head_dim dropout swiglu rmsnorm rope tied bias",
    "batch": "global_size micro_size sequence_length",
    "plan": "strategy nodes gpus_per_node tp pp dp cp ep etp virtual_stages layers_per_stage recompute schedule "
    "transport sequence_parallel distributed_optimizer",
    "train": "steps dtype grad_dtype early_step overlap_grad_reduce overlap_param_gather pace_layer_ms",
}
_KEYS = ["site_file", "model", *(f"{g}.{k}" for g, names in _GROUP_KEYS.items() for k in names.split()), "calibration"]
SWITCH_VALUES = ("yes", "no", "true", "false")  # words that a user may write after a switch, which takes none
_FLAGS = (Flag(_NAMES.get(key, "--" + key.rpartition(".")[2].replace("_", "-")), key) for key in _KEYS)
FLAGS: dict[str, Flag] = {flag.name: flag for flag in _FLAGS}
