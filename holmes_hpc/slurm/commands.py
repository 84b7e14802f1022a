"""Running Slurm's client commands: the one place that starts them. Lists only; no shell reads one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holmes_hpc.errors import SiteError, SubmissionError

AWAY = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Connection refused",
    "Connection timed out",
    "Communication connection failure",
    "Zero Bytes were transmitted",
    "backup controller",
    "slurm_persist_conn",
    "Problem talking to the database",
    "Connection reset",
    "Transport endpoint",
    "Slurm temporarily unable",
    "Unable to connect",
    "Message receive failure",
)
OUTPUT_WAIT_S = 30
TIMED_OUT = 124  # in place of a command's exit code, as timeout(1) has it
WITHOUT = "without Slurm: `plan`, `run` and `submit` take --site FILE or launcher=local"
# sbatch and srun take these as options: from the shell, or from the job in which the submitter itself runs.
_COMPONENT_OPTIONS = (
    "PARTITION",
    "CONSTRAINT",
    "CLUSTER_CONSTRAINT",
    "GPUS",
    "GPUS_PER_NODE",
    "GPUS_PER_TASK",
    "GRES",
    "EXCLUSIVE",
    "MEM_PER_CPU",
    "MEM_PER_GPU",
    "MEM_PER_NODE",
    "ARRAY_INX",
    "CPUS_PER_GPU",
    "DISTRIBUTION",
    "NO_REQUEUE",
    "REQUEUE",
    "TIMELIMIT",
    "JOB_NAME",
    "OPEN_MODE",
    "SIGNAL",
    "WAIT",
    "OVERCOMMIT",
    "HINT",
    "CORE_SPEC",
    "THREAD_SPEC",
    "USE_MIN_NODES",
    "TEST_ONLY",
    "IGNORE_PBS",
    "OUTPUT",
    "ERROR",
    "INPUT",
)
_KEPT = (
    "SLURM_CONF",
    "SLURM_CLUSTERS",
    "SLURM_JWT",
    "SLURM_TIME_FORMAT",
    "SLURM_WORKING_CLUSTER",
    "SLURM_CONF_SERVER",
    "SLURM_SACK_SOCKET",
)  # the last one: where auth/slurm gives credentials


@dataclass(frozen=True)
class Answer:
    """What a command said. `away`: it failed because a daemon did not answer, so asking again later makes sense."""

    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def terminated(self) -> bool:
        """It was told to end before it had said anything: `scontrol requeue` of one's own job ends all that runs in it,
        itself too."""
        return self.code == -signal.SIGTERM

    @property
    def away(self) -> bool:
        return self.code != 0 and any(word in self.err for word in AWAY)

    @property
    def reason(self) -> str:
        """Its complaint in one line, without Slurm's prefixes."""
        kept = list[str]()
        for line in map(str.strip, (self.err or self.out).splitlines()):
            for prefix in (
                "sbatch: ",
                "scontrol: ",
                "squeue: ",
                "sacct: ",
                "srun: ",
                "scancel: ",
                "error: ",
                "allocation failure: ",
                "Batch job submission failed: ",
            ):
                line = line.removeprefix(prefix)
            if line and line not in kept:
                kept.append(line)
        return "; ".join(kept[-2:]) or f"exit code {self.code}"


def clean_environment() -> dict[str, str]:
    """The environment without what would change a job behind its script: options as variables, an outer job's."""
    return {
        k: v
        for k, v in os.environ.items()
        if not (k.startswith("SBATCH_") and k[7:] in _COMPONENT_OPTIONS)
        and not (
            k.startswith(("SLURM_", "SRUN_", "SLURMD_", "HOLMES_LEADER", "HOLMES_MAX_", "HOLMES_TASKS_PER"))
            and k not in _KEPT
        )
    }


_interrupts: list[int] = []  # those that wait


def _keep(number: int, _: object) -> None:
    _interrupts.append(number)
    os.write(2, b"\nholmes: waiting for Slurm's answer\n")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end, so that what Slurm was handed is also recorded."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN, _keep):
        yield
        return
    signal.signal(signal.SIGINT, _keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt_here()


def interrupt_here() -> None:
    """A moment at which nothing is half done: a Ctrl-C that waits takes effect."""
    if _interrupts:
        _interrupts.clear()
        raise KeyboardInterrupt


def _run(words: Sequence[str], timeout_s: float, **more: str) -> Answer:
    """Run the command in a clean environment, with `more` variables. It does not hear Ctrl-C. OSError where it cannot
    be started; TIMED_OUT, with what it has printed, where it takes longer than `timeout_s`."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={"LC_ALL": "C.UTF-8", **clean_environment(), **more},
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # a terminal's Ctrl-C goes to all that was started in it
    except subprocess.TimeoutExpired as e:
        printed = e.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return Answer(TIMED_OUT, text, f"{words[0]}: Socket timed out after {timeout_s:.0f} s")
    return Answer(done.returncode, done.stdout, done.stderr)


def _lost() -> str:
    """What is wrong where SLURM_CONF names a file that is gone, as after `holmes testbed down`: Slurm's commands would
    look for another one for half a minute."""
    conf = os.environ.get("SLURM_CONF")
    return f"SLURM_CONF names {conf}, which is not there" if conf and not os.path.exists(conf) else ""


def slurm(*words: str, timeout_s: float = 60, seconds_as_epoch: bool = False) -> Answer:
    """Run one of Slurm's commands; its failure is an answer, its absence a SubmissionError."""
    if lost := _lost():
        return Answer(1, "", lost)
    more = {"SLURM_TIME_FORMAT": "%s"} if seconds_as_epoch else {}
    try:
        return _run(words, timeout_s, **more)
    except FileNotFoundError as e:
        raise SubmissionError(
            f"no {words[0]} on this machine",
            where="Slurm",
            hint="load Slurm's client commands, or bring the testbed up; " + WITHOUT,
        ) from e


def patient(arguments: Sequence[str], *, patience_s: float = 90, timeout_s: float = 60) -> Answer:
    """A question that may be asked again: while a daemon is away, with growing pauses up to `patience_s` in all."""
    end, pause = time.monotonic() + patience_s, 0.5
    while True:
        answer = slurm(*arguments, timeout_s=timeout_s)
        if not answer.away or time.monotonic() + pause > end:
            return answer
        interrupt_here()
        time.sleep(pause)
        pause = min(2 * pause, 10)


def output(*words: str) -> str:
    """What one of Slurm's commands prints; a SiteError where there is no such command, or it fails or does not
    answer."""
    if lost := _lost():
        raise SiteError(lost, where="Slurm", hint="`holmes testbed up`, or unset SLURM_CONF; " + WITHOUT)
    try:
        answer = _run(words, OUTPUT_WAIT_S)
    except FileNotFoundError as e:
        raise SiteError(f"no command {words[0]}", where="Slurm", hint="load Slurm's client commands; " + WITHOUT) from e
    if answer.code == TIMED_OUT:
        raise SiteError(
            f"no answer to {' '.join(words)} in {OUTPUT_WAIT_S} s",
            where="Slurm",
            hint="see that slurmctld runs (scontrol ping); " + WITHOUT,
        )
    if not answer.ok:
        raise SiteError(
            (answer.err.strip() or answer.out.strip() or f"exit code {answer.code}").splitlines()[-1],
            where=" ".join(words),
            hint="see that slurmctld runs (scontrol ping) and that SLURM_CONF is right; " + WITHOUT,
        )
    return answer.out


def partial_output(*words: str, timeout_s: float) -> tuple[str, str]:
    """What a command printed, whatever became of it; and what went wrong, empty where nothing did. For an srun on many
    nodes, of which some may fail."""
    try:
        answer = _run(words, timeout_s)
    except OSError as e:
        return "", f"{words[0]}: {e.strerror}"
    if answer.code == TIMED_OUT:
        return answer.out, f"no answer in {timeout_s:.0f} s"
    return answer.out, "" if answer.ok else (answer.err.strip() or f"exit code {answer.code}").splitlines()[-1]
