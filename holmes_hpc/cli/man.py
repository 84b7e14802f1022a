"""The manual page holmes(1), written from the verbs' own help and the declared keys.

``python -m holmes_hpc.cli.man`` writes docs/holmes.1; a test holds the one in the repository equal to that. Wheels
bring it as share/man/man1/holmes.1.
"""

from __future__ import annotations

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
_EXIT = (("0", "success"), ("1", "a job that failed"), ("2", "bad input: one line says where, what, and what to do"))
_FILES = (("runs/", "run directories; $HOLMES_RUNS names another place"),)


def page() -> str:
    """The whole page, for man(7)'s macros."""
    root = typer.main.get_command(load())
    what = " ".join((root.help or "").split()).rstrip(".")
    declared = [
        (f"{group}.{key.name}" if group else key.name, f"{key.spec.help} [{allowed(key).removeprefix('use ')}]")
        for group, keys_of in (("", Configuration), *GROUPS.items())
        for key in keys(keys_of).values()
        if group or key.name not in GROUPS
    ]
    lines = [
        f'.TH HOLMES 1 "" "holmes_hpc {__version__}"',
        ".SH NAME",
        f"holmes \\- {_text(what[0].lower() + what[1:])}",
        ".SH SYNOPSIS",
        ".B holmes",
        ".I VERB",
        "[OPTIONS] [ARGUMENTS]",
        ".SH VERBS",
        *(line for name, verb in _verbs(root) for line in _verb(name, verb)),
        ".SH KEYS",
        "KEY=VALUE on the command line of verbs that take OVERRIDES.",
        *_entries(declared),
        ".SH EXIT STATUS",
        *_entries(_EXIT),
        ".SH FILES",
        *_entries(_FILES),
    ]
    return "\n".join(lines) + "\n"


def _entries(entries: Iterable[tuple[str, str]]) -> list[str]:
    """Return names in bold, each with what it is below it."""
    return [line for name, what in entries for line in (".TP", f".B {_text(name)}", _text(what))]


def _verbs(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb with its name, those of groups among them (``data prepare``)."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _verb(name: str, verb: Any) -> list[str]:
    """A verb: what it takes, what it does, an example, its options."""
    arguments = " ".join(_argument(p) for p in verb.params if p.param_type_name == "argument")
    what, _, example = " ".join((verb.help or "").split()).partition("Example: ")
    return [
        f'.SS "{_text(f"holmes {name} [OPTIONS] {arguments}")}"',
        _text(what.strip()),
        *([".PP", ".nf", f".RS\n{_text(example)}\n.RE", ".fi"] if example else []),
        *_entries(_option(p) for p in verb.params if p.param_type_name == "option" and "--help" not in p.opts),
    ]


def _option(param: Any) -> tuple[str, str]:
    """An option's names with its value, and its help with its default."""
    value = "" if param.is_flag or param.count else f" {param.metavar or 'VALUE'}"
    is_shown = param.default not in (None, "") and not param.is_flag and "[" not in (param.help or "")
    default = f" [default: {param.default}]" if is_shown else ""
    return ", ".join([*param.opts, *param.secondary_opts]) + value, f"{param.help or ''}{default}"


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    name += "" if "..." in name or param.nargs == 1 or name.startswith("[") else "..."
    return name if param.required or name.startswith("[") else f"[{name}]"


def _text(text: str) -> str:
    """`text` such that roff prints it as it is."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", plain)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
