"""Write the command reference from `--help`, and list the links that leave the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

COMMANDS = "<!-- written from --help when the site is built -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of every command where the page asks for it."""
    return markdown.replace(COMMANDS, _commands()) if COMMANDS in markdown else markdown


def _commands() -> str:
    import typer

    from holmes_hpc.cli import load

    def section(command: Any, path: str) -> list[str]:
        context = command.make_context(path, [], resilient_parsing=True)
        inner = getattr(command, "commands", {})
        if inner:
            commands = inner.items() if path != "holmes" else sorted(inner.items())
            return [text for name, one in commands for text in section(one, f"{path} {name}")]
        context.info_name = path
        return [f"## {path}\n\n```text\n{command.get_help(context).strip()}\n```\n"]

    return "\n".join(section(typer.main.get_command(load()), "holmes"))


def on_post_build(config: Any, **_: Any) -> None:
    """Write external-links.txt, to be checked where there is a network."""
    site = Path(config["site_dir"])
    links = {link for page in site.rglob("*.html") for link in re.findall(r'href="(https?://[^"#]+)', page.read_text())}
    (site / "external-links.txt").write_text("\n".join(sorted(links)) + "\n")
