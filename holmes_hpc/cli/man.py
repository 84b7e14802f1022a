"""The manual page holmes(1), written from the verbs' own help and the declared keys.

``python -m holmes_hpc.cli.man`` writes docs/holmes.1; a test holds the one in the repository equal to that. Wheels
bring it as share/man/man1/holmes.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    lines = [
        f'.TH HOLMES 1 "" "holmes_hpc {__version__}"',
        ".SH NAME",
        f"holmes \\- {_text(_sentence(root.help)[0].lower() + _sentence(root.help)[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B holmes",
        ".I VERB",
        "[OPTIONS] [ARGUMENTS]",
        ".SH VERBS",
    ]
    for name, verb in _verbs(root):
        lines += _verb(name, verb)
    lines += [".SH KEYS", "KEY=VALUE on the command line of verbs that take OVERRIDES."]
    for group, declared in (("", Configuration), *GROUPS.items()):
        for key in keys(declared).values():
            if group or key.name not in GROUPS:
                lines += [
                    ".TP",
                    f".B {_text(f'{group}.{key.name}' if group else key.name)}",
                    _text(f"{key.says.help} [{allowed(key).removeprefix('use ')}]"),
                ]
    for title, entries in (("EXIT STATUS", _EXIT), ("FILES", _FILES)):
        lines.append(f".SH {title}")
        lines += [line for name, what in entries for line in (".TP", f".B {_text(name)}", _text(what))]
    return "\n".join(lines) + "\n"


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
    lines = [f'.SS "{_text(f"holmes {name} [OPTIONS] {arguments}")}"', _text(what.strip())]
    if example:
        lines += [".PP", ".nf", f".RS\n{_text(example)}\n.RE", ".fi"]
    for p in verb.params:
        if p.param_type_name == "option" and "--help" not in p.opts:
            value = "" if p.is_flag or p.count else f" {p.metavar or 'VALUE'}"
            names = ", ".join([*p.opts, *p.secondary_opts])
            told = p.default not in (None, "") and not p.is_flag and "[" not in (p.help or "")
            default = f" [default: {p.default}]" if told else ""
            lines += [".TP", f".B {_text(names + value)}", _text(f"{p.help or ''}{default}")]
    return lines


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    if name.startswith("["):
        return name
    name = name if "..." in name or param.nargs == 1 else f"{name}..."
    return name if param.required else f"[{name}]"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _text(text: str) -> str:
    """`text` such that roff prints it as it is."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", plain)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
