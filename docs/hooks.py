"""What mkdocs writes itself: the command reference from `--help`, and the list of links that lead out of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

COMMANDS = "<!-- written from --help when the site is built -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put every verb's help where the page asks for it."""
    return markdown.replace(COMMANDS, _commands()) if COMMANDS in markdown else markdown


def _commands() -> str:
    import typer

    from holmes_hpc.cli import load

    def section(command: Any, path: str) -> list[str]:
        context = command.make_context(path, [], resilient_parsing=True)
        inner = getattr(command, "commands", {})
        if inner and path != "holmes":
            return [text for name, one in inner.items() for text in section(one, f"{path} {name}")]
        if inner:
            return [text for name, one in sorted(inner.items()) for text in section(one, f"{path} {name}")]
        context.info_name = path
        return [f"## {path}\n\n```text\n{command.get_help(context).strip()}\n```\n"]

    return "\n".join(section(typer.main.get_command(load()), "holmes"))


def on_post_build(config: Any, **_: Any) -> None:
    """external-links.txt: what cannot be checked without a network, for whoever has one."""
    site = Path(config["site_dir"])
    found = {link for page in site.rglob("*.html") for link in re.findall(r'href="(https?://[^"#]+)', page.read_text())}
    (site / "external-links.txt").write_text("\n".join(sorted(found)) + "\n")
