"""Verbs about the testbed: testbed up, status, exec, env, down."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app
from holmes_hpc.testbed import testbed

group = typer.Typer(no_args_is_help=True, help="A real Slurm with shaped NICs on this machine.")
app.add_typer(group, name="testbed")


@group.command("up")
def testbed_up(
    topology: Annotated[str | None, typer.Argument(metavar="[FILE]", show_default=False)] = None,
    release: Annotated[str | None, typer.Option(help="Debian's, of its Slurm: bookworm or trixie.")] = None,
    slurm: Annotated[str | None, typer.Option(metavar="PREFIX", help="An installed Slurm's folder.")] = None,
    slurm_source: Annotated[
        str | None, typer.Option(metavar="DIR|TARBALL", help="Slurm's source: built, once, and used.")
    ] = None,
) -> None:
    """Bring it up (again: nothing happens). Example: sudo holmes testbed up slurm/testbed/default.yaml"""
    with console.steps("looking at the testbed that is there") as say:
        testbed.up(topology, release=release, slurm=slurm, source=slurm_source, progress=say)
    console.note('up; your shell: eval "$(holmes testbed env)"')


@group.command("status")
def testbed_status(json: Json = False) -> None:
    """What is up: exit code 0, or 1 where something is not. Example: holmes testbed status --json"""
    found = testbed.status()
    if json:
        console.as_json(found)
    elif "nodes" not in found:
        console.text(f"no testbed in {found['state_dir']}")
    else:
        dead = [name for name, lives in found["daemons"].items() if not lives]
        console.table(
            f"{found['topology']}: {found['slurm']} ({found['release']}) in {found['state_dir']}",
            ("node", "partition", "state", "NICs, Mbit/s", "features"),
            [
                (
                    n["name"],
                    n["partition"],
                    n["state"],
                    ", ".join(f"{k} {v}" if v else k for k, v in n["nics"].items()),
                    " ".join(n["features"]),
                )
                for n in found["nodes"]
            ],
            caption=f"not running: {', '.join(dead)}" if dead else "",
        )
    raise typer.Exit(0 if found["up"] else 1)


@group.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def testbed_exec(node: str, command: Annotated[list[str], typer.Argument(metavar="-- CMD...")]) -> None:
    """Run a command on a node. Example: holmes testbed exec ib1 -- ip addr"""
    raise typer.Exit(testbed.exec_in(node, command).returncode)


@group.command("env")
def testbed_env() -> None:
    """Lines for a shell: eval "$(holmes testbed env)" """
    for key, value in testbed.env().items():
        print(f"export {key}={shlex.quote(value)}")


@group.command("down")
def testbed_down() -> None:
    """Remove all that `up` made. Example: holmes testbed down"""
    with console.steps("looking at the testbed that is there") as say:
        testbed.down(progress=say)
