"""Commands for the testbed: testbed up, status, exec, env, down."""

import shlex
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app
from holmes_hpc.cli.options import Json
from holmes_hpc.testbed import testbed

group = typer.Typer(no_args_is_help=True, help="Run a real Slurm with shaped NICs on this machine.")
app.add_typer(group, name="testbed")
_SOURCE = "Source of Slurm, which is built once."


@group.command("up")
def testbed_up(
    topology: Annotated[str | None, typer.Argument(metavar="[FILE]", show_default=False)] = None,
    release: Annotated[str | None, typer.Option(help="Debian release of its Slurm: bookworm or trixie.")] = None,
    slurm: Annotated[str | None, typer.Option(metavar="PREFIX", help="Prefix of an installed Slurm.")] = None,
    slurm_source: Annotated[str | None, typer.Option(metavar="DIR|TARBALL", help=_SOURCE)] = None,
) -> None:
    """Start the testbed, unless it runs already.

    Example: sudo holmes testbed up slurm/testbed/default.yaml"""
    with console.steps("checking the testbed") as report:
        testbed.up(topology, release=release, slurm=slurm, source=slurm_source, progress=report)
    console.note('the testbed runs; to use it in your shell: eval "$(holmes testbed env)"')


@group.command("status")
def testbed_status(json: Json = False) -> None:
    """Show which parts of the testbed run. Exit code 1 if one does not.

    Example: holmes testbed status --json"""
    status = testbed.status()
    if json:
        console.as_json(status)
    elif "nodes" not in status:
        console.text(f"no testbed in {status['state_dir']}")
    else:
        rows = []
        for n in status["nodes"]:
            nics = ", ".join(f"{name} {mbit}" if mbit else name for name, mbit in n["nics"].items())
            rows.append((n["name"], n["partition"], n["state"], nics, " ".join(n["features"])))
        title = f"{status['topology']}: {status['slurm']} ({status['release']}) in {status['state_dir']}"
        stopped = ", ".join(name for name, is_running in status["daemons"].items() if not is_running)
        columns = ("node", "partition", "state", "NICs, Mbit/s", "features")
        console.table(title, columns, rows, f"not running: {stopped}" if stopped else "")
    raise typer.Exit(0 if status["up"] else 1)


@group.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def testbed_exec(node: str, command: Annotated[list[str], typer.Argument(metavar="-- CMD...")]) -> None:
    """Run a command on a node of the testbed.

    Example: holmes testbed exec ib1 -- ip addr"""
    raise typer.Exit(testbed.exec_in(node, command).returncode)


@group.command("env")
def testbed_env() -> None:
    """Print the testbed's environment for a shell.

    Example: eval "$(holmes testbed env)"
    """
    for key, value in testbed.env().items():
        print(f"export {key}={shlex.quote(value)}")


@group.command("down")
def testbed_down() -> None:
    """Stop the testbed and remove its files.

    Example: holmes testbed down"""
    with console.steps("checking the testbed") as report:
        if not testbed.down(progress=report):
            report("no testbed is up")
