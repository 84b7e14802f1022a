"""Arguments of Python that run a module without code from the working directory, and a check of that directory.

`python -m MODULE` searches the working directory first: in another user's folder, it would run that user's code."""

import os
import sys

from holmes_hpc.errors import ConfigError

# The program for `python -c` that runs the module in its first argument. Pythons before 3.11 have no option -P.
# With -c, the first entry of sys.path is empty: the working directory.
START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import runpy; "
    'runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def module_arguments(module: str, *, any_version: bool = False) -> list[str]:
    """Return the arguments of `python` that run `module` as a program.

    `any_version`: whether `python` may have another version than this Python. Also remove the empty parts of
    PYTHONPATH, which mean the working directory, from the environment of this process and its children."""
    if python_path := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in python_path.split(os.pathsep) if part)
    return ["-c", START, module] if any_version or sys.version_info < (3, 11) else ["-P", "-m", module]


def check_working_directory() -> None:
    """Raise ConfigError if the working directory was removed, because most libraries cannot start there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        directory = os.environ.get("PWD", "working directory")
        raise ConfigError("this working directory was removed", where=directory, hint="`cd` to another one") from None
