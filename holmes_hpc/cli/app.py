"""What all verbs share: the application they hang on, and the options that many have."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from holmes_hpc import console
from holmes_hpc.config.flags import FLAGS, Flag
from holmes_hpc.errors import ConfigError

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.config.model import Batch
    from holmes_hpc.fabric.site import Site

T = TypeVar("T")


def with_keys(*groups: str) -> type[TyperCommand]:
    """Return a command whose ``--help`` ends with the keys of these groups that it has no options for."""

    class Command(TyperCommand):
        def format_epilog(self, ctx: Any, formatter: Any) -> None:
            from holmes_hpc.config.document import help_text

            own = {FLAGS[name].key for param in self.params for name in param.opts if name in FLAGS}
            self.epilog = help_text(*groups, without=own)
            super().format_epilog(ctx, formatter)

    return Command


def takes(*names: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a command take these options of config/flags.py, all of them where none is named. The command gets those
    that were given as `flags`: name -> value."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        flags = {name.strip("-").replace("-", "_"): FLAGS[name] for name in names or FLAGS}
        hints = get_type_hints(function, include_extras=True)
        own = [
            p.replace(annotation=hints[name])
            for name, p in inspect.signature(function).parameters.items()
            if name != "flags"
        ]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
            for name, flag in flags.items()
        ]

        @functools.wraps(function)
        def command(**values: Any) -> T:
            given = {name: value for name in flags if (value := values.pop(name)) is not None}
            return function(**values, flags={flags[name].name: value for name, value in given.items()})

        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return command

    return decorate


def _annotation(flag: Flag) -> Any:
    """Return the type and the typer option of a flag."""
    names = f"{flag.name}/--no-{flag.name.strip('-')}" if flag.is_switch else flag.name
    if flag.is_switch or flag.type in (int, float, str):
        return Annotated[flag.type | None, typer.Option(names, help=flag.help, show_default=False)]
    metavar = {bool: "yes|no", tuple: "N,N,…", dict: "FABRIC=N,…"}[flag.type]
    return Annotated[
        str | None, typer.Option(names, help=flag.help, metavar=metavar, parser=flag.value, show_default=False)
    ]


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one large model over clusters that do not share a fast network.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Configuration overrides, KEY=VALUE.", show_default=False)]
Earliest = Annotated[
    bool,
    typer.Option(
        "--earliest", help="Of plans for parts of the site, the one that ends first: Slurm says when each could start."
    ),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="T", help="How long that many tokens take: 2e12, 300B.")
]
Run = Annotated[str, typer.Argument(help="A run directory, its name under runs/, or the leader's job id.")]


def asked_steps(
    config: Configuration, overrides: Sequence[str], flags: Mapping[str, Any], tokens: str | None, batch: Batch
) -> int | None:
    """Return the steps that --tokens (a number that may end with K, M, B or T), --steps or train.steps ask for; None
    where none of them is given."""
    if tokens is None:
        return config.train.steps if any(word.startswith("train.steps=") for word in overrides) else None
    if "--steps" in flags:
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


def is_file_argument(word: str) -> bool:
    """Tell whether the first argument of a command names a file, not KEY=VALUE."""
    return "=" not in word or Path(word).exists()


def asked_site(config: Configuration) -> Site:
    """The site of a configuration; says that Slurm is asked where it takes long to answer."""
    from holmes_hpc.planning.request import site

    with console.waiting("asking Slurm"):
        found = site(config)
    for remark in found.assumptions if config.site_file else ():  # at a plan's end, under Supposed, they come late
        console.note(f"{config.site_file}: {remark}")
    return found
