"""The `holmes` command: one thin function a verb. Each calls a room, prints what it returns, ends with its code."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from holmes_hpc import __version__, console
from holmes_hpc.cli.app import app
from holmes_hpc.commit import git_commit
from holmes_hpc.errors import HolmesError
from holmes_hpc.extras import missing
from holmes_hpc.records.ownership import careful_umask

__all__ = ["load", "main"]

# module -> the commands that it adds to `app` when it is imported; others would only slow a command down
MODULES = {
    "data": ("data",),
    "models": ("models", "batches", "import", "export", "generate"),
    "planning": ("plan", "calibrate"),
    "predict": ("predict",),
    "runs": ("submit", "run", "resume", "rm", "report"),
    "site": ("nodes", "probe", "label", "doctor"),
    "testbed": ("testbed",),
    "watch": ("status", "logs", "cancel", "sweep"),
}


def load(command: str = "") -> typer.Typer:
    """Return the application with a command; with all of them where none, or an unknown one, is named."""
    for name in [module for module, commands in MODULES.items() if command in commands] or MODULES:
        importlib.import_module(f"holmes_hpc.cli.{name}")
    return app


UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, which newer typers bring along


def main() -> None:
    """Run the command line; every error of ours is one line on stderr and its exit code."""
    console.substitute_unencodable()
    careful_umask()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # of packages that it can do without
    try:
        code = load(sys.argv[1] if sys.argv[1:] else "")(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):
            _nobody_reads()  # click would have it be a failure
        raise
    except HolmesError as e:
        console.problem(e)
        sys.exit(e.exit_code)
    except ModuleNotFoundError as e:
        refused = missing(e)
        sys.stderr.write(f"holmes: {refused}\n")
        sys.exit(refused.exit_code)
    except BrokenPipeError:
        _nobody_reads()
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        console.problem(f"{where}{e.strerror or e}; see to it and try again")
        sys.exit(1)
    except typer.Exit as e:
        sys.exit(e.exit_code)
    except UsageError as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(f"{e}\n")
            sys.exit(0)
        console.problem(_explained(e))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        console.problem("interrupted")
        sys.exit(130)


def _explained(error: Any) -> str:
    """What is wrong with the words of a command, and what to do; a key of the configuration that was given as an
    option is told as what it is."""
    said, context = " ".join(str(error.format_message()).split()).rstrip("."), error.ctx
    verb = context.command_path if context else "holmes"
    option = str(getattr(error, "option_name", "")).lstrip("-")
    if option and any(p.name == "overrides" for p in context.command.params):
        from holmes_hpc.config.options import named

        if keys := named(option.partition("=")[0].replace("-", "_")):
            said = f"no option --{option}: write {' or '.join(f'{key}=…' for key in keys)}"
    return f"{said}; see `{verb} --help`"


def _nobody_reads() -> NoReturn:
    """`holmes … | head`: whoever read has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", "-V", help="Version and commit.")] = False) -> None:
    if version:
        commit = git_commit()
        console.text(f"holmes_hpc {__version__}" + (f" (commit {commit})" if commit else ""))
        raise typer.Exit
