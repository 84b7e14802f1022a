"""The Typer application that all commands belong to, and the options that many commands share."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from holmes_hpc import console
from holmes_hpc.config.flags import FLAGS, SWITCH_VALUES, Flag
from holmes_hpc.errors import ConfigError

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.config.model import Batch
    from holmes_hpc.fabric.site import Site
    from holmes_hpc.planning.cost.costs import Costs
    from holmes_hpc.planning.plan.plan import Plan

T = TypeVar("T")


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


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Invoke the command. On Ctrl-C raise Abort, because Typer would exit without a message."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            raise typer.Abort from e


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one large model over clusters that do not share a fast network.",
)

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


def requested_steps(
    config: Configuration, overrides: Sequence[str], flags: Mapping[str, Any], tokens: str | None, batch: Batch
) -> int | None:
    """Return the number of steps that the user set by --tokens, --steps or train.steps; None if none of them is given.
    `tokens`: the value of --tokens, a number that may end with K, M, B or T. Raise ConfigError if it is not a number
    above 0, or if --steps is given too."""
    if tokens is None:
        return config.train.steps if any(o.startswith("train.steps=") for o in overrides) else None
    if "--steps" in flags:
        raise ConfigError("--steps and --tokens are mutually exclusive", where="--tokens", hint="leave one of them out")
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(tokens[-1:].upper())
    try:
        count = float(tokens[:-1]) * scale if scale else float(tokens)
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise ConfigError(f"{tokens!r} is not a number above 0", where="--tokens", hint="write 3e11, or 300B")
    return math.ceil(count / batch.tokens)


def show_plan(plan: Plan, costs: Costs, steps: int | None, explain: bool) -> None:
    """Print the summary of a plan; with `explain`, all details. `steps`: number of training steps, if known."""
    from holmes_hpc.planning import plan_text

    console.text(*(plan_text.explain if explain else plan_text.summary)(plan, costs, steps, console.width()))


def check_output(file: str | None) -> None:
    """Raise ConfigError if the output file `file` cannot be written. Commands call this before they do any work."""
    path = Path(file or os.devnull).absolute()
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    reasons = {"it is a directory": path.is_dir(), "its directory does not exist": not path.parent.is_dir()}
    for reason, applies in {**reasons, "permission denied": not is_writable}.items():
        ConfigError.refuse(str(path), (applies, f"cannot be written: {reason}", "give another FILE"))


def is_file_argument(argument: str) -> bool:
    """Return whether the first argument of a command is the name of a file, not an override KEY=VALUE."""
    return Path(argument).exists() or ("=" not in argument and argument not in SWITCH_VALUES)


def load_site(config: Configuration) -> Site:
    """Return the site of a configuration. If it comes from a site file, print on stderr the file's assumptions and how
    Slurm has changed since the file was written. Raise SiteError if the site file contradicts Slurm."""
    from holmes_hpc.fabric.site_file_check import changes_since_written
    from holmes_hpc.planning.request import site

    with console.waiting("asking Slurm"):
        loaded_site = site(config)
        changes = changes_since_written(config.site_file, loaded_site) if config.site_file else []
    if config.site_file:  # shown early, not only at the plan's end
        console.note(*(f"{config.site_file}: {assumption}" for assumption in loaded_site.assumptions), *changes)
    return loaded_site


def note_partition_limits(plan: Plan, config: Configuration) -> None:
    """Warn on stderr about each partition of `plan` whose time limit is below the job's.
    Do nothing if the site comes from a site file, or with the local launcher."""
    from holmes_hpc.slurm.scontrol import read_partitions
    from holmes_hpc.submission.time_limit import partition_warnings

    if not config.site_file and not config.local:
        console.note(*partition_warnings(plan, config.slurm, read_partitions()))
