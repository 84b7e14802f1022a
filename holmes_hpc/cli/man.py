"""The manual page holmes(1), generated from the help of the commands and of the configuration keys.

``python -m holmes_hpc.cli.man`` writes docs/holmes.1, which wheels install. A test checks that it is up to date.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from holmes_hpc import __version__
from holmes_hpc.cli import load
from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.schema import allowed, keys

PAGE = Path(__file__).parents[2] / "docs" / "holmes.1"
_EXIT = (("0", "success"), ("1", "a job that failed"), ("2", "bad input; one line shows where, what and what to do"))
_FILES = (("runs/", "run directories; $HOLMES_RUNS sets another place"),)


def page() -> str:
    """Return the manual page, written in the macros of man(7)."""
    root = typer.main.get_command(load())
    summary = " ".join((root.help or "").split()).rstrip(".")
    named_keys = {name: key for name, key in keys(Configuration).items() if name not in GROUPS}
    named_keys |= {f"{group}.{name}": key for group, cls in GROUPS.items() for name, key in keys(cls).items()}
    key_entries = [(n, f"{key.spec.help} [{allowed(key).removeprefix('use ')}]") for n, key in named_keys.items()]
    sections = {
        "NAME": [f"holmes \\- {_text(summary[0].lower() + summary[1:])}"],
        "SYNOPSIS": [".B holmes", ".I COMMAND", "[OPTIONS] [ARGUMENTS]"],
        "COMMANDS": [line for name, command in _commands(root) for line in _command_lines(name, command)],
        "KEYS": ["Write KEY=VALUE on the command line of commands that accept OVERRIDES.", *_entries(key_entries)],
        "EXIT STATUS": _entries(_EXIT),
        "FILES": _entries(_FILES),
    }
    lines = [line for title, section in sections.items() for line in (f".SH {title}", *section)]
    return "\n".join([f'.TH HOLMES 1 "" "holmes_hpc {__version__}"', *lines, ""])


def _entries(entries: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a list of (name, description): each name in bold, its description below."""
    return [line for name, description in entries for line in (".TP", f".B {_text(name)}", _text(description))]


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, command) of every command, including those of sub-groups (``data prepare``)."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command_lines(name: str, command: Any) -> list[str]:
    """Return the lines of a command's section: arguments, description, example and options."""
    arguments = " ".join(_argument(p) for p in command.params if p.param_type_name == "argument")
    description, _, example = " ".join((command.help or "").split()).partition("Example: ")
    lines = [f'.SS "{_text(f"holmes {name} [OPTIONS] {arguments}")}"', _text(description.strip())]
    lines += [".PP", ".nf", f".RS\n{_text(example)}\n.RE", ".fi"] if example else []
    options = [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]
    return [*lines, *_entries(map(_option, options))]


def _option(param: Any) -> tuple[str, str]:
    """Return (names and value, help and default) of an option: ("-o, --output FILE", "Write the plan here.")."""
    value = "" if param.is_flag or param.count else f" {param.metavar or 'VALUE'}"
    has_default = param.default not in (None, "") and not param.is_flag and "[" not in (param.help or "")
    default = f" [default: {param.default}]" if has_default else ""
    return ", ".join([*param.opts, *param.secondary_opts]) + value, f"{param.help or ''}{default}"


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    name += "" if "..." in name or param.nargs == 1 or name.startswith("[") else "..."
    return name if param.required or name.startswith("[") else f"[{name}]"


def _text(text: str) -> str:
    """Return `text` escaped for roff."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
