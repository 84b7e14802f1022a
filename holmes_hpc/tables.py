"""Tables that are data: `NAME.yaml` beside the module `NAME.py` has the lists and texts that the module works with."""

from pathlib import Path
from typing import Any

import yaml


def read_table(module_file: str) -> Any:
    """Return the content of the YAML file beside a module. `module_file`: the `__file__` of that module."""
    text = Path(module_file).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (a safe loader)
