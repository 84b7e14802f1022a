"""Verbs about detached sweeps: sweep status, sweep collect."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json

group = typer.Typer(no_args_is_help=True, help="Detached sweeps.")
Directory = Annotated[str, typer.Argument(metavar="DIR", help="The sweep's directory.")]


@group.command("status")
def sweep_status(directory: Directory, json: Json = False) -> None:
    """A live table on a terminal, else one table. Example: holmes sweep status runs/sweep-20260101-120000"""
    from holmes_hpc.submission.sweeps import table as sweep

    if sys.stdout.isatty() and not json:
        sweep.live(directory)
        return
    rows = sweep.sweep_status(directory)
    if json:
        console.as_json([r.to_dict() for r in rows])
    else:
        console.table(directory, *sweep.sweep_rows(rows))


@group.command("collect")
def sweep_collect(directory: Directory, json: Json = False) -> None:
    """The results of a sweep's jobs. Example: holmes sweep collect runs/sweep-20260101-120000 --json"""
    from holmes_hpc.submission.sweeps import table as sweep

    found = sweep.collect(directory)
    if json:
        console.as_json(found)
        return
    figures = sorted({k for f in found if isinstance(f["final"], dict) for k in f["final"]})
    same = [o for o in found[0]["overrides"] if all(o in f["overrides"] for f in found)] if len(found) > 1 else []
    console.table(directory, ("job", "overrides", "state", *figures), [
        (f["num"], " ".join(o for o in f["overrides"] if o not in same), f["state"],
         *(_short(f["final"].get(k)) if isinstance(f["final"], dict) else "" for k in figures)) for f in found],
        caption=f"all with {' '.join(same)}" if same else "")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
