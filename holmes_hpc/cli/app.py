"""The Typer application that all commands belong to, and the steps that many commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from holmes_hpc import console
from holmes_hpc.config.flags import SWITCH_VALUES
from holmes_hpc.errors import ConfigError

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.config.model import Batch
    from holmes_hpc.fabric.site import Site
    from holmes_hpc.planning.cost.costs import Costs
    from holmes_hpc.planning.plan.plan import Plan


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


def requested_steps(
    config: Configuration, overrides: Sequence[str], flags: Mapping[str, Any], tokens: str | None, batch: Batch
) -> int | None:
    """Return the number of steps that the user set by --tokens, --steps or train.steps; None if none of them is given.
    `tokens`: value of --tokens, which may end with K, M, B or T. Raise ConfigError unless it is above 0 and alone."""
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
