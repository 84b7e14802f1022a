"""Execution of system commands without a shell. An error is one line that names the command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError

# Daemons and network tools are in sbin, which may be missing in a user's PATH.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Show = Callable[[str], None]  # a function that shows a line to the user


def system_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment that does not depend on the user's own, with the variables `extra`."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/root", **(extra or {})}


def is_installed(program: str) -> bool:
    return shutil.which(program, path=SYSTEM_PATH) is not None


def run(
    argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 60, hint: str = ""
) -> str:
    """Run a command and return its stdout. `stdin`: its input; `env`: additional environment variables. Raise
    TestbedError with `hint` if the command is missing, exceeds `timeout_s`, or fails (with a line of its output)."""
    try:
        options: Any = {"capture_output": True, "text": True, "errors": "replace", "start_new_session": True}
        done = subprocess.run(list(argv), input=stdin, env=system_env(env), timeout=timeout_s, check=False, **options)
    except FileNotFoundError:
        raise TestbedError("not installed", where=argv[0], hint=hint or "install it") from None
    except subprocess.TimeoutExpired:
        raise TestbedError(f"no answer within {timeout_s:g} s", where=" ".join(argv), hint=hint) from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        # The last line of `ip -batch` is only the number of the wrong command.
        raise TestbedError(lines[0 if argv[0] == "ip" else -1], where=" ".join(argv), hint=hint)
    return done.stdout


def succeeds(argv: Sequence[str]) -> bool:
    """Run a command and return whether it exits with 0. Discard its output."""
    try:
        run(argv, timeout_s=30)
    except (OSError, TestbedError):
        return False
    return True


def run_showing(
    argv: Sequence[str], env: Mapping[str, str], show: Show, kill: bool = False, cwd: Path | None = None
) -> str | None:
    """Run a long command and call `show` with each line of its output. Return None if it succeeds, else its last error.
    `kill`: kill it and its children if this process is interrupted, as it can be repeated; `cwd`: its folder."""
    error = ""
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options: Any = {"cwd": cwd, "text": True, "errors": "replace", "start_new_session": kill, **streams}
    with subprocess.Popen(list(argv), env=env, **options) as process:
        assert process.stdout is not None
        try:
            for line in map(str.rstrip, process.stdout):
                if line.startswith("E:") or (line and not error.startswith("E:")):
                    error = line
                show(line)
        except BaseException:
            if kill:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return None if process.returncode == 0 else error


def sparsely(show: Show, pause_s: float) -> Show:
    """Return a function that passes a line to `show` every `pause_s` seconds at most, and drops other lines."""
    last_shown = time.monotonic()

    def show_if_due(line: str) -> None:
        nonlocal last_shown
        if time.monotonic() - last_shown > pause_s:
            last_shown = time.monotonic()
            show(line)

    return show_if_due


def require_machine() -> None:
    """Raise TestbedError unless this is Linux and the user is root."""
    TestbedError.refuse(
        "testbed",
        (sys.platform != "linux", f"needs Linux, this is {sys.platform}", "run it on Linux, as root"),
        (os.geteuid() != 0, "needs root (network namespaces, Slurm's daemons)", "run it as root"),
    )
