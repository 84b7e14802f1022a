"""Verbs about sweeps: sweep status, sweep collect, sweep cancel."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app
from holmes_hpc.submission.sweeps import status_table
from holmes_hpc.submission.sweeps.jobs import cancel_sweep
from holmes_hpc.submission.sweeps.manifest import read_manifest

group = typer.Typer(no_args_is_help=True, help="Sweeps, detached ones too.")
app.add_typer(group, name="sweep")
Directory = Annotated[str, typer.Argument(metavar="DIR", help="The sweep's directory.")]


@group.command("status")
def sweep_status(directory: Directory, json: Json = False) -> None:
    """A live table on a terminal, else one table. Example: holmes sweep status runs/sweep-20260101-120000"""

    if sys.stdout.isatty() and not json:
        status_table.live(directory)
        return
    rows = status_table.sweep_status(directory)
    console.output(json, [r.to_dict() for r in rows], (directory, *status_table.sweep_rows(rows)))


@group.command("collect")
def sweep_collect(directory: Directory, json: Json = False) -> None:
    """The results of a sweep's jobs. Example: holmes sweep collect runs/sweep-20260101-120000 --json"""

    found = status_table.collect(directory)
    if json:
        console.as_json(found)
        return
    figures = sorted({k for f in found if isinstance(f["final"], dict) for k in f["final"]})
    same = [o for o in found[0]["overrides"] if all(o in f["overrides"] for f in found)] if len(found) > 1 else []
    rows = []
    for f in found:
        final = f["final"]
        many = final if isinstance(final, dict) else {}
        one = "" if final is None or many is final else _short(final)
        rows.append(
            [
                f["num"],
                " ".join(o for o in f["overrides"] if o not in same),
                f["state"],
                one,
                *(_short(many[k]) if k in many else "" for k in figures),
            ]
        )
    columns = ["job", "overrides", "state", "value", *figures]
    shown = [i for i, name in enumerate(columns) if name != "value" or any(row[i] for row in rows)]
    console.table(
        directory,
        [columns[i] for i in shown],
        [[row[i] for i in shown] for row in rows],
        caption=f"all with {' '.join(same)}" if same else "",
    )


@group.command("cancel")
def sweep_cancel(directory: Directory) -> None:
    """Cancel the jobs of a sweep that have not ended. Example: holmes sweep cancel runs/sweep-20260101-120000"""

    manifest = read_manifest(directory)
    alive = {row.num for row in status_table.sweep_status(directory) if not row.ended}
    jobs = [job for job in manifest.jobs if job.num in alive]
    cancel_sweep(manifest, jobs)
    console.note(f"cancelled {len(jobs)} of {len(manifest.jobs)} jobs" if jobs else "all jobs have ended")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
