"""The `holmes` command: one thin function per command, which calls a package and prints its result."""

import gc
import importlib
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from holmes_hpc import __version__, console
from holmes_hpc.cli.app import app
from holmes_hpc.commit import git_commit
from holmes_hpc.errors import HolmesError, did_you_mean, is_typo
from holmes_hpc.extras import missing
from holmes_hpc.interpreter import check_working_directory
from holmes_hpc.records.ownership import careful_umask

__all__ = ["load", "main"]

# Module -> the commands that its import adds to `app`. Only the module of the given command is imported, for speed.
MODULES = {
    "data": ("data",),
    "models": ("models", "batches", "import", "export", "generate"),
    "planning": ("plan", "calibrate"),
    "predict": ("predict",),
    "runs": ("submit", "run", "resume", "rm", "report"),
    "site": ("nodes", "site", "probe", "label", "doctor"),
    "testbed": ("testbed",),
    "status": ("status", "logs", "cancel", "sweep"),
}


def load(command: str = "") -> typer.Typer:
    """Return the Typer application after importing the module of `command`.
    If `command` is empty, an option or unknown, import the modules of all commands."""
    for name in [module for module, commands in MODULES.items() if command in commands] or MODULES:
        importlib.import_module(f"holmes_hpc.cli.{name}")
    return app


UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's class; newer versions of typer bundle click


def main() -> None:
    """Run the command line. Print a HolmesError as one line on stderr, and exit with the error's exit code."""
    gc.set_threshold(50_000)  # the default looks for cycles 70 times as often, which takes 6% of a short command
    console.substitute_unencodable()
    careful_umask()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # about optional packages
    try:
        check_working_directory()
        code = load(sys.argv[1] if sys.argv[1:] else "")(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):
            _exit_without_reader()  # click would return an error
        raise
    except HolmesError as e:
        console.problem(e)
        sys.exit(e.exit_code)
    except ModuleNotFoundError as e:
        error = missing(e)
        sys.stderr.write(f"holmes: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _exit_without_reader()
    except OSError as e:
        console.problem(f"{f'{e.filename}: ' if e.filename else ''}{e.strerror or e}; fix this and try again")
        sys.exit(1)
    except typer.Exit as e:
        sys.exit(e.exit_code)
    except UsageError as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(f"{e}\n")
            sys.exit(0)
        console.problem(_usage_message(e))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        console.problem("interrupted")
        sys.exit(130)


def _usage_message(error: Any) -> str:
    """Return the message for wrong arguments of a command, with a hint. `error`: click's UsageError.
    If the command accepts overrides, the hint for an unknown option is a similar option, or a key as KEY=VALUE."""
    message, context = " ".join(str(error.format_message()).split()).rstrip("."), error.ctx
    command = context.command_path if context else "holmes"
    if type(error).__name__ == "NoSuchOption" and any(p.name == "overrides" for p in context.command.params):
        from holmes_hpc.config.group_options import meant_keys
        from holmes_hpc.config.other_names import unsupported_hint

        option = error.option_name.partition("=")[0]
        key = option.lstrip("-").replace("-", "_")
        mistyped = [name for p in context.command.params for name in p.opts if option[2:] and is_typo(option, name)]
        written = " or ".join(f"{meant}=…" for meant in meant_keys(key))
        hint = did_you_mean(mistyped) if mistyped else unsupported_hint(key) or (written and f"write {written}")
        message = f"no option {option}" + (f": {hint}" if hint else "")
    return f"{message}; see `{command} --help`"


def _exit_without_reader() -> NoReturn:
    """Exit without an error when the reader of stdout has closed it, as in `holmes … | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False) -> None:
    if version:
        commit = git_commit()
        console.text(f"holmes_hpc {__version__}" + (f" (commit {commit})" if commit else ""))
        raise typer.Exit
