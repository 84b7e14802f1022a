"""What all verbs share: the application they hang on, and the options that many have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from holmes_hpc import console
from holmes_hpc.errors import ConfigError

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.config.model import Batch
    from holmes_hpc.fabric.site import Site


def with_keys(*groups: str) -> type[TyperCommand]:
    """A verb whose ``--help`` ends with the keys of these groups of the configuration, looked up only then."""

    class Verb(TyperCommand):
        def format_epilog(self, ctx: Any, formatter: Any) -> None:
            from holmes_hpc.config.document import help_text

            self.epilog = help_text(*groups)
            super().format_epilog(ctx, formatter)

    return Verb


HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Train one large model over clusters that do not share a fast network.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Configuration overrides, KEY=VALUE.", show_default=False)]
SiteFile = Annotated[str | None, typer.Option("--site", help="A site file, instead of asking Slurm.")]
Earliest = Annotated[
    bool,
    typer.Option(
        "--earliest", help="Of plans for parts of the site, the one that ends first: Slurm says when each could start."
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Steps to train, as train.steps=N.")]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="T", help="How long that many tokens take: 2e12, 300B.")
]
Run = Annotated[str, typer.Argument(help="A run directory, its name under runs/, or the leader's job id.")]


def with_steps(overrides: list[str] | None, steps: int | None) -> list[str]:
    """The overrides, and what --steps says."""
    return [*(overrides or []), *([] if steps is None else [f"train.steps={steps}"])]


def steps_for(tokens: str, batch: Batch, steps: int | None) -> int:
    """The steps that see `tokens`, a number that may end with K, M, B or T."""
    if steps is not None:
        raise ConfigError("--steps and --tokens", where="--tokens", hint="leave one of them out")
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(tokens[-1:].upper())
    try:
        count = float(tokens[:-1]) * scale if scale else float(tokens)
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise ConfigError(f"{tokens!r} is no number above 0", where="--tokens", hint="write 3e11, or 300B")
    return math.ceil(count / batch.tokens)


def check_output(file: str | None) -> None:
    """Refuse, before anything is done, a file that cannot be written."""
    if file is not None and (not Path(file).absolute().parent.is_dir() or Path(file).is_dir()):
        raise ConfigError("not a file in a directory that exists", where=file, hint="give another FILE")


def configuration(overrides: list[str] | None, site: str | None = None, **values: Any) -> Configuration:
    """The composed configuration; `site`: of --site; `values`: other keys that belong to no group."""
    from holmes_hpc.config.composition import load

    made = replace(load(overrides or []), **values)
    return replace(made, site_file=site) if site else made


def asked_site(config: Configuration) -> Site:
    """The site of a configuration; says that Slurm is asked where it takes long to answer."""
    from holmes_hpc.planning.request import site

    with console.waiting("asking Slurm"):
        found = site(config)
    for remark in found.assumptions if config.site_file else ():  # at a plan's end, under Supposed, they come late
        console.note(f"{config.site_file}: {remark}")
    return found
