"""Generator of the files under generated_conf/, of docs/configuration.md and of the keys in ``--help``.

``python -m holmes_hpc.config.document`` writes the files. A test checks that the repository has the current ones.
"""

import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.group_options import DEFAULTS, NAMED, OPTIONS
from holmes_hpc.config.model import Batch
from holmes_hpc.schema import REQUIRED, Key, allowed, keys

PACKAGE = Path(__file__).parents[1]
PAGE = PACKAGE.parent / "docs" / "configuration.md"
HEAD = "# Written from holmes_hpc/config/{} by `python -m holmes_hpc.config.document`; change it there."
WIDTH = 118
# How the page abbreviates the allowed values of a key.
_SHORT = (
    ("true or false", "bool"),
    ("a whole number|whole numbers", "int"),
    ("a number|numbers", "number"),
    ("texts", "text"),
    (", or null", " or null"),
    ("keys with values", "map"),
    ("keys with", "map of"),
    ("a list of", "list of"),
    (",? from ", " ≥"),
    (",? above ", " >"),
    (",? below ", " <"),
)
_HYDRA = """
hydra:
  run: {dir: "${oc.env:HOLMES_RUNS,runs}/${now:%Y%m%d-%H%M%S}"}
  sweep: {dir: "${oc.env:HOLMES_RUNS,runs}/sweep-${now:%Y%m%d-%H%M%S}", subdir: "${hydra.job.num}"}
"""


def conf_files() -> dict[str, str]:
    """Return {path relative to generated_conf/: text} of the files in that folder."""
    files = {"config.yaml": _main_file()}
    for group, specs in NAMED.items():
        for name, spec in specs.items():
            text = yaml.safe_dump(asdict(spec), sort_keys=False)
            files[f"{group}/{name}.yaml"] = f"{HEAD.format('models.py')}\n{text}"
    for group, options in OPTIONS.items():
        head = HEAD.format(f"{GROUPS[group].__module__.rsplit('.')[-1]}.py")
        for name, changes in options.items():
            lines = [line for k in keys(GROUPS[group]).values() for line in _lines(k, changes.get(k.name, k.default))]
            files[f"{group}/{name}.yaml"] = "\n".join([head, *lines, ""])
    return files


def page() -> str:
    """Return docs/configuration.md: every key with its allowed values."""
    parts = [
        "# Configuration",
        "",
        "<!-- written by `python -m holmes_hpc.config.document` -->",
        "",
        "Give a key as `KEY=VALUE` on the command line (`train.steps=100`, `'plan.nodes={ib-a: 2}'`). Wrong values and "
        "unknown keys are refused before anything is submitted.",
        "",
        "- A *map* is `{NAME: VALUE}`.",
        "- A key whose default is `null` also accepts `null`; `auto` means the same. A named model or batch sets the "
        "keys without a default.",
        "- [Models](models.md) lists the named models. Each has a default batch of the same name.",
        "",
    ]
    for name, cls in (("", Configuration), *GROUPS.items()):
        heading = f"## `{name}`" if name else "## Keys without a group"
        parts += [heading, "", "| Key | Meaning | Values; default |", "|---|---|---|"]
        for k in keys(cls).values():
            if name or k.name not in GROUPS:
                cells = (f"`{name}.{k.name}`" if name else f"`{k.name}`", k.spec.help, _values_and_default(k))
                parts.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _values_and_default(declared: Key) -> str:
    """Return the allowed values of a key, in short form, and its default, as text; a null default only once."""
    values = allowed(declared).removeprefix("use ")
    for pattern, short in _SHORT:
        values = re.sub(pattern, short, values)
    if declared.default is REQUIRED:
        return values
    return f"{values.removesuffix(' or null') if declared.default is None else values}; `{_format(declared.default)}`"


def help_text(*groups: str, without: Collection[str] = (), width: int = 78) -> str:
    """Return a text for the end of ``--help`` with the keys of `groups`, except those in `without`."""
    lines = [f"Keys of {', '.join(groups)} (KEY=VALUE; docs/configuration.md has all):"]
    for group in groups:
        for k in keys(GROUPS[group]).values():
            if (key := f"{group}.{k.name}") not in without:
                text = f"{key}: {k.spec.help} [{allowed(k).removeprefix('use ')}]"
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
    return "\b\n" + "\n".join(lines)  # click does not rewrap lines after \b


def _main_file() -> str:
    lines = [
        HEAD.format("configuration.py"),
        "# Every key can be given on the command line: model=gpt_3_6b train.steps=100 'plan.nodes={ib-a: 2}'",
        "defaults:",
        "  - _self_",
        *(f"  - {group}: {option}" for group, option in DEFAULTS.items()),
        "",
        "# a named model has the batch of its own name; any other needs batch=NAME, or these keys",
        "batch:",
        *(f"  {name}: {1 if name == 'micro_size' else '???'}" for name in keys(Batch)),
        "",
    ]
    lines += [line for k in keys(Configuration).values() if k.name not in GROUPS for line in _lines(k, k.default)]
    return "\n".join(lines) + "\n" + _HYDRA


def _lines(declared: Key, value: Any) -> list[str]:
    """Return the YAML line ``KEY: VALUE`` with the key's help as a comment, beside the line or in lines above it."""
    pair, comment = f"{declared.name}: {_format(value)}", declared.spec.help
    joined_line = f"{pair:<27} # {comment}"
    if len(joined_line) <= WIDTH:
        return [joined_line]
    return [*(f"# {line}" for line in textwrap.wrap(comment, WIDTH - 2)), pair]


def _format(value: Any) -> str:
    value = asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
    plain = [*value] if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    return str(yaml.safe_dump(plain, default_flow_style=True)).removesuffix("\n").removesuffix("\n...")


def write() -> list[Path]:
    """Write all generated files and return their paths."""
    files = {PACKAGE / "generated_conf" / path: text for path, text in conf_files().items()}
    if PAGE.parent.is_dir():
        files[PAGE] = page()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


if __name__ == "__main__":
    for written_path in write():
        print(written_path)
