"""Execution of Slurm's client commands, as lists of arguments without a shell."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from holmes_hpc.errors import SiteError, SubmissionError
from holmes_hpc.tables import read_table
from holmes_hpc.waiting import attempts

_TABLE: dict[str, list[str]] = read_table(__file__)
OUTPUT_WAIT_S = 30
CANCEL_WAIT_S = 5  # from SIGTERM to SIGKILL
TIMED_OUT = 124  # exit code of a command that timed out, as in timeout(1)
NO_SLURM_HINT = "without Slurm: `plan` and `submit --dry-run` take --site FILE, `run` launcher=local"


@dataclass(frozen=True)
class Answer:
    """The result of a command: exit code, stdout and stderr.
    `is_unreachable`: the command failed because a daemon of Slurm did not answer, so a retry may succeed."""

    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def is_unreachable(self) -> bool:
        return self.code != 0 and any(message in self.err for message in _TABLE["unreachable"])

    @property
    def reason(self) -> str:
        """Slurm's last two messages in one line, without its prefixes (``sbatch: error: ``)."""
        messages = list[str]()
        for line in map(str.strip, (self.err or self.out).splitlines()):
            for prefix in _TABLE["prefixes"]:
                line = line.removeprefix(prefix)
            if line and line not in messages:
                messages.append(line)
        return "; ".join(messages[-2:]) or f"exit code {self.code}"


def clean_environment() -> dict[str, str]:
    """Return the environment without sbatch's options and without the variables of this process's job."""
    job_variables = ("SLURM_", "SRUN_", "SLURMD_", "HOLMES_LEADER", "HOLMES_MEMBER", "HOLMES_MAX_", "HOLMES_TASKS_PER")
    options = [f"SBATCH_{name}" for name in _TABLE["component_options"]]
    removed = {k for k in os.environ if k in options or k.startswith(job_variables)} - {*_TABLE["kept_variables"]}
    return {k: v for k, v in os.environ.items() if k not in removed}


_interrupts: list[int] = []  # deferred signals


def _defer_interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, b"\nholmes: waiting for Slurm's answer\n")


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Defer Ctrl-C and a closed terminal to the end of the block, so that a job submitted in it is also recorded."""
    return _handle_interrupts(_defer_interrupt)


def ignore_interrupts() -> contextlib.AbstractContextManager[None]:
    """Make processes that the block starts ignore Ctrl-C and a closed terminal, so that they outlive their command."""
    return _handle_interrupts(signal.SIG_IGN)


@contextlib.contextmanager
def _handle_interrupts(handler: Any) -> Iterator[None]:
    """Handle SIGINT and SIGHUP by `handler` in the block, unless they are ignored; only in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP) if is_main}
    previous = {number: h for number, h in handlers.items() if h not in (None, signal.SIG_IGN, handler)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
        if previous and handler is _defer_interrupt:
            interrupt_here()


def interrupt_here() -> None:
    """Raise KeyboardInterrupt if a Ctrl-C was deferred (:func:`uninterrupted`). Call it where nothing is half done."""
    if _interrupts:
        _interrupts.clear()
        raise KeyboardInterrupt


def _apart(**variables: str) -> dict[str, Any]:
    """Return arguments of subprocess: a clean environment with `variables`, no stdin, and a session of its own.
    Ctrl-C does not reach such a process, because a terminal sends Ctrl-C only to its own session."""
    environment = {"LC_ALL": "C.UTF-8", **clean_environment(), **variables}
    return {"env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}


def _missing_conf() -> str:
    """Return an error message if SLURM_CONF names a missing file, as after `holmes testbed down`; else "". If the file
    is missing, each Slurm command would search for another configuration for half a minute."""
    conf = os.environ.get("SLURM_CONF")
    return f"SLURM_CONF names {conf}, which does not exist" if conf and not os.path.exists(conf) else ""


def slurm(*command: str, timeout_s: float = 60, seconds_as_epoch: bool = False) -> Answer:
    """Run one of Slurm's commands and return its answer, whether it succeeded or not. If the command takes longer than
    `timeout_s`, the answer has the code TIMED_OUT and the output so far. `seconds_as_epoch`: the command prints times
    in Unix seconds. Raise SubmissionError if it is not installed."""
    if error := _missing_conf():
        return Answer(1, "", error)
    variables = {"SLURM_TIME_FORMAT": "%s"} if seconds_as_epoch else {}
    options = {"capture_output": True, "text": True, "errors": "replace", "check": False, **_apart(**variables)}
    try:
        result = subprocess.run(command, timeout=timeout_s, **options)
    except FileNotFoundError as e:
        hint = "load Slurm's client commands, or bring the testbed up; " + NO_SLURM_HINT
        raise SubmissionError(f"no {command[0]} on this machine", where="Slurm", hint=hint) from e
    except subprocess.TimeoutExpired as e:
        text = (e.stdout or b"").decode(errors="replace")  # bytes, even in text mode
        return Answer(TIMED_OUT, text, f"{command[0]}: Socket timed out after {timeout_s:.0f} s")
    return Answer(result.returncode, result.stdout, result.stderr)


def slurm_with_retries(arguments: Sequence[str], *, patience_s: float = 90, timeout_s: float = 60) -> Answer:
    """Run a command that may run twice. While a daemon does not answer, retry with growing pauses for `patience_s`."""
    for _ in attempts(patience_s, 0.5, longest_pause_s=10):
        answer = slurm(*arguments, timeout_s=timeout_s)
        if not answer.is_unreachable:
            break
        interrupt_here()
    return answer


def output(*command: str) -> str:
    """Return the stdout of one of Slurm's commands. Raise SiteError if it is missing, fails or does not answer."""
    if error := _missing_conf():
        raise SiteError(error, where="Slurm", hint="`holmes testbed up`, or unset SLURM_CONF; " + NO_SLURM_HINT)
    with SiteError.instead_of(SubmissionError, where="Slurm"):
        answer = slurm(*command, timeout_s=OUTPUT_WAIT_S)
    name, check = " ".join(command), "check that slurmctld runs (scontrol ping)"
    error = (answer.err.strip() or answer.out.strip() or f"exit code {answer.code}").splitlines()[-1]
    late = f"no answer to {name} in {OUTPUT_WAIT_S} s"
    SiteError.refuse(
        "Slurm",
        (answer.code == TIMED_OUT, late, f"{check}; {NO_SLURM_HINT}"),
        (not answer.ok, error, f"{check} and that SLURM_CONF is right; {NO_SLURM_HINT}", name),
    )
    return answer.out


def partial_outputs(commands: Sequence[Sequence[str]], timeout_s: float) -> list[tuple[str, str]]:
    """Run the commands at the same time. Return (stdout, error message; empty on success) for each. One may fail in
    part, such as an srun on many nodes. After `timeout_s`, or at Ctrl-C, they get SIGTERM: srun cancels its job."""
    deadline, started = time.monotonic() + timeout_s, []
    with contextlib.ExitStack() as files:
        try:
            for command in commands:
                out, error = (files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
                try:
                    process = subprocess.Popen(command, stdout=out, stderr=error, **_apart())
                except OSError as e:
                    process = None
                    error.write(f"{command[0]}: {e.strerror}")
                started.append((process, out, error))
            for process, _, _ in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if process is not None:
                        process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            late = [process for process, _, _ in started if process is not None and process.poll() is None]
            for process in late:
                process.terminate()
            for process in late:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CANCEL_WAIT_S)
                process.kill()
        return [
            (_whole(out), f"no answer in {timeout_s:.0f} s" if process in late else _last_line(process, _whole(error)))
            for process, out, error in started
        ]


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_line(process: subprocess.Popen[bytes] | None, error: str) -> str:
    """Return the last line of a command's stderr; empty if it succeeded. `process`: None if it did not start."""
    code = process.returncode if process is not None else None
    return "" if code == 0 else (error.strip() or f"exit code {code}").splitlines()[-1]
