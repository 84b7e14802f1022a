"""The options that many commands share, and decorators that add configuration keys to a command."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from holmes_hpc.config.flags import FLAGS, Flag

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Configuration overrides, KEY=VALUE.", show_default=False)]
_EARLIEST = "Plan for parts of the site too, and choose the plan that ends first in Slurm's estimate."
_TOKENS = "Print how long so many tokens take: 2e12, 300B."
_EXPLAIN = "Print the parts of the step, runners-up and assumptions too."
Earliest = Annotated[bool, typer.Option("--earliest", help=_EARLIEST)]
Elastic = Annotated[bool, typer.Option("--elastic", help="Request spare nodes, and continue on one if a node is lost.")]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="T", help=_TOKENS)]
Explain = Annotated[bool, typer.Option("--explain", help=_EXPLAIN)]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, its name under runs/, or its Slurm job id.")]


def command_with_keys(*groups: str) -> type[TyperCommand]:
    """Return a class of Typer commands whose ``--help`` ends with the configuration keys of `groups` (such as train).
    Keys that the command has an option for are left out."""

    class Command(TyperCommand):
        def format_epilog(self, ctx: Any, formatter: Any) -> None:
            from holmes_hpc.config.document import help_text

            keys_with_option = {FLAGS[name].key for param in self.params for name in param.opts if name in FLAGS}
            self.epilog = help_text(*groups, without=keys_with_option)
            super().format_epilog(ctx, formatter)

    return Command


def with_options(
    *names: str, more: Mapping[str, Flag] = MappingProxyType({})
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that adds options to a command: those in `names` from config/flags.py (all if `names` is
    empty), and those in `more`. The command's parameter `flags` gets {name: value} of the options that the user set."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        chosen = {**{name: FLAGS[name] for name in names or FLAGS}, **more}
        flags = {name.strip("-").replace("-", "_"): flag for name, flag in chosen.items()}
        hints = get_type_hints(function, include_extras=True)
        own_parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "flags"]
        parameters = [p.replace(annotation=hints[p.name]) for p in own_parameters]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
            for name, flag in flags.items()
        ]

        @functools.wraps(function)
        def command(**values: Any) -> T:
            flag_values = {flag.name: value for name, flag in flags.items() if (value := values.pop(name)) is not None}
            return function(**values, flags=flag_values)

        command.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*parameters, *options)}
        return command

    return decorate


def _annotation(flag: Flag) -> Any:
    """Return the annotation of the command's parameter for `flag`: its type and a typer.Option."""
    names = f"{flag.name}/--no-{flag.name.strip('-')}" if flag.is_switch else flag.name
    if flag.is_switch or flag.type in (int, float, str):
        return Annotated[flag.type | None, typer.Option(names, help=flag.help, show_default=False)]
    metavar = {bool: "yes|no", tuple: "N,N,…", dict: "POOL=N,…"}[flag.type]
    option = typer.Option(names, help=flag.help, metavar=metavar, parser=flag.value, show_default=False)
    return Annotated[str | None, option]
