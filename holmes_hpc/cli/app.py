"""What all verbs share: the application they hang on, and the options that many have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train one large model over clusters that do not share a fast network.")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Configuration overrides, KEY=VALUE.", show_default=False)]
SiteFile = Annotated[str | None, typer.Option("--site", help="A site file, instead of asking Slurm.")]
Run = Annotated[str, typer.Argument(help="A run directory, its name under runs/, or the leader's job id.")]


def configuration(overrides: list[str] | None, site: str | None = None, **values: Any) -> dict[str, Any]:
    """The composed configuration; `site`: of --site."""
    from holmes_hpc import config

    made = config.load(overrides or [])
    if site:
        made["site_file"] = site
    return {**made, **values}
