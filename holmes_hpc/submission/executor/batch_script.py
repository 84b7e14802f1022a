"""The batch script of a job: one source for the executor, for ``holmes submit --dry-run`` and for the templates."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from holmes_hpc.errors import SubmissionError
from holmes_hpc.schema import refuse
from holmes_hpc.submission.executor.component import ComponentRequest, Value, as_list, option, sbatch_word, shell_word

USER_SIGNAL = "USR2"  # submitit's; NCCL may catch USR1
SIGNAL_DELAY_S = 90  # submitit's
# In the batch script of a hetjob these describe component 0 only, and srun takes each as an option for all components.
FIRST_COMPONENT_ONLY = (
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
)
_DEPENDENCY = re.compile(r"[\w:,?+]+", re.ASCII)


@dataclass(frozen=True)
class JobRequest:
    """A job of one or more components with one step over all of them.

    `output`, `error`: files of the batch script itself; `rank_output`, `rank_error`: of each task, where ``%j`` is the
    leader's id and ``%t`` the global rank. `directories` are made before the step starts. `exit_record`: the file that
    gets the step's exit status, `step_errors` the one that gets srun's own complaints. `setup`, `teardown`: lines of
    shell, as in submitit, around the step. `signal`: what the tasks listen for, sent `signal_delay_s` before the time
    limit (None: 90, less in short jobs). `max_requeues`: after so many restarts the job ends instead of starting its
    step; 0: it never does. `array`: as sbatch's; ``%j`` is then the array's id and the element's number. `line`: the
    file of a Line (line.py) that the job leaves when it ends. `distribution`: of ranks over nodes and sockets; over
    nodes always block, since component order is rank order.
    """

    components: tuple[ComponentRequest, ...]
    name: str = "holmes"
    timeout_min: Value = 60
    output: str = "slurm-%j.out"
    error: str | None = None
    rank_output: str = "slurm-%j-%t.out"
    rank_error: str | None = None
    directories: tuple[str, ...] = ()
    exit_record: str | None = None
    step_errors: str | None = None
    signal: str = USER_SIGNAL
    signal_delay_s: int | None = None
    requeue: bool | None = None
    dependency: str | None = None
    comment: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    wckey: str | None = None
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    max_requeues: int = 0
    srun_args: tuple[str, ...] = ()
    use_srun: bool = True
    distribution: str = "block:block"
    container: str | None = None
    array: str | None = None
    line: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    additional: tuple[tuple[str, Value], ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        for name in ("setup", "teardown", "srun_args", "directories"):
            object.__setattr__(self, name, as_list(getattr(self, name), name, "job"))
        several = len(self.components) > 1
        named, keys = self.dependency or "", [option(key, "job") for key, _ in self.additional]
        refuse(
            "job",
            (not self.components, "no component", "give at least one"),
            (not self.use_srun and self.ranks > 1, "use_srun=False with more than one task", "leave srun in"),
            (
                isinstance(self.timeout_min, int) and (self.timeout_min is True or self.timeout_min < 1),
                f"timeout_min is {self.timeout_min}",
                "use minutes above 0",
            ),
            (
                self.dependency is not None and not _DEPENDENCY.fullmatch(named),
                f"dependency {self.dependency!r}",
                "write afterany:JOBID,…",
            ),
            (
                several and "singleton" in named,
                "dependency singleton makes a heterogeneous job wait for itself",
                "use afterany:JOBID",
            ),
            (
                several and "array" in keys,
                "a heterogeneous job cannot be an array",
                "use executor.batch() or map_array: a throttled chain of jobs",
            ),
            error=SubmissionError,
        )

    @property
    def ranks(self) -> int:
        return sum(c.ranks for c in self.components)

    @property
    def elements(self) -> int:
        """How many jobs it is."""
        return 1 if self.array is None else int(self.array.partition("%")[0].partition("-")[2]) + 1

    def word(self, text: str) -> str:
        """`text` as one word of the script's shell, with the job's id for ``%j``."""
        own = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if self.array else '"$SLURM_JOB_ID"'
        return shell_word(text, own)

    def _pattern(self, path: str) -> str:
        """A path for sbatch's file name pattern: only ``%j`` is one, every other % is itself."""
        if "\\" in path:  # in a pattern a backslash switches all symbols off
            raise SubmissionError(f"the path {path!r} holds a backslash", where="job", hint="use another directory")
        return ("%A_%a" if self.array else "%j").join(part.replace("%", "%%") for part in path.split("%j"))

    def options(self) -> list[tuple[str, Value]]:
        """The options of the whole job; they stand with the first component."""
        given: list[tuple[str, Value | None]] = [
            ("job-name", self.name),
            ("time", self.timeout_min),
            ("output", self._pattern(self.output)),
            ("error", None if self.error is None else self._pattern(self.error)),
            ("open-mode", "append"),
            ("array", self.array),
            ("signal", self._signal()),
            ("no-requeue" if self.requeue is False else "requeue", True if self.requeue is not None else None),
            ("dependency", self.dependency),
            ("comment", self.comment),
            ("mail-type", self.mail_type),
            ("mail-user", self.mail_user),
            ("wckey", self.wckey),
        ]
        extra = {option(k, "job"): v for k, v in self.additional if v is not None}
        return [
            *((k, v) for k, v in given if v is not None and k not in extra),
            *((k, v) for k, v in extra.items() if v is not False),
        ]

    def _signal(self) -> str | None:
        """When to warn of the end. Slurm may send it a minute early, and a task needs time to be ready for it, so in
        short jobs, where nobody says when, it comes later, or not at all."""
        delay = self.signal_delay_s
        if delay is None:
            latest = 60 * self.timeout_min - 90 if isinstance(self.timeout_min, int) else SIGNAL_DELAY_S
            delay = min(SIGNAL_DELAY_S, latest)
        return f"{self.signal}@{delay}" if delay > 0 else None


def _into_files(job: JobRequest, setup: Sequence[str] = ()) -> str:
    """Words of shell that start a task, after the lines of `setup`, with its output in the files of its rank.

    srun's own patterns will not do: in a step over several components ``%j`` is each component's own id, and ``%t`` is
    the rank plus the component's index (measured on 22.05). The file names are arguments, so no shell parses them.
    """
    patterns = [pattern.split("%t") for pattern in (job.rank_output, job.rank_error) if pattern is not None]
    places = [job.word(part) for parts in patterns for part in parts]
    numbers = count(1)
    files = ['"' + "$SLURM_PROCID".join(f"${{{next(numbers)}}}" for _ in parts) + '"' for parts in patterns]
    redirect = f"exec >>{files[0]} 2>{'&1' if job.rank_error is None else f'>{files[1]}'}; shift {len(places)}"
    lines = ("\n" if setup else "; ").join([redirect, *setup, 'exec "$@"'])
    return " ".join(["bash" if setup else "sh", "-c", shlex.quote(lines), "task", *places])


def directives(job: JobRequest) -> list[str]:
    """The ``#SBATCH`` lines."""
    lines = []
    for index, part in enumerate(job.components):
        if index:
            lines.append("#SBATCH hetjob")
        options = [*(job.options() if not index else []), *part.options()]
        lines += [f"#SBATCH --{k}" if v is True else f"#SBATCH --{k}={sbatch_word(v, k)}" for k, v in options]
    return lines


def _step(job: JobRequest, commands: Sequence[str]) -> str:
    """The srun command: one step over all components, block distribution, so component order is rank order. Components
    whose tasks are started alike share its options."""
    parts = [_task(job, part, command) for part, command in zip(job.components, commands, strict=True)]
    groups = [(str(index), part) for index, part in enumerate(parts)]
    if len(set(parts)) == 1:
        groups = [(",".join(index for index, _ in groups), parts[0])]
    is_het = len(job.components) > 1
    starts = [
        " \\\n  ".join([f"--het-group={group} {options}" if is_het else options, *program])
        for group, (options, *program) in groups
    ]
    return "srun " + " : \\\n  ".join(starts)


def _task(job: JobRequest, part: ComponentRequest, command: str) -> tuple[str, str, str]:
    """srun's options of one component, and the words that start a task of it."""
    options = ["--export=ALL", "--unbuffered", "--kill-on-bad-exit=1", f"--distribution={job.distribution}"]
    image = _image(job, part)
    if image and not is_apptainer(image):
        options.append(f"--container-image={shlex.quote(image)}")
        options += [f"--container-mounts={shlex.quote(','.join(part.mounts))}"] * bool(part.mounts)
    options += [shlex.quote(str(a)) for a in (*job.srun_args, *part.srun_args)]
    if part.cpus_per_task:  # not inherited from sbatch since Slurm 22.05
        options.append(f"--cpus-per-task={part.cpus_per_task}")
    return " ".join(options), *_program(job, part, command)


def _program(job: JobRequest, part: ComponentRequest, command: str) -> tuple[str, str]:
    """The words that start a task of `part`: into its files, with its variables; and those of its container and
    `command`."""
    variables = ["env", *(shlex.quote(f"{k}={v}") for k, v in part.environment)] if part.environment else []
    return " ".join([_into_files(job, part.setup), *variables]), wrap_container(job, part, command)


def _image(job: JobRequest, part: ComponentRequest) -> str | None:
    return job.container if part.container is None else part.container or None


def is_apptainer(image: str) -> bool:
    return image.startswith("apptainer:") or image.endswith(".sif")


def wrap_container(job: JobRequest, part: ComponentRequest, command: str) -> str:
    """`command` inside an apptainer image (pyxis is an option of srun instead)."""
    image = _image(job, part)
    if not image or not is_apptainer(image):
        return command
    gpu = " --nv" if any(c.gpus_per_node or c.gpus_per_task or c.gres for c in job.components) else ""
    mounts = "".join(f" --bind {shlex.quote(m)}" for m in part.mounts)
    return f"apptainer exec{gpu}{mounts} {shlex.quote(image.removeprefix('apptainer:'))} {command}"


def note_exit(record: str, status: str, signal: str = "-") -> str:
    """The line of shell that writes the exit record; all three are words of shell."""
    return f"printf '%s %s %s\\n' {status} \"$(date +%s)\" {signal} > {record}"


def _not_again(most: int, record: str | None) -> list[str]:
    """The lines of shell that end a job which Slurm itself (preemption, a node's failure) requeued too often."""
    lines = [
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {most} ]; then',
        f'  echo "holmes: not started: requeued $SLURM_RESTART_COUNT times, max_requeues is {most}" >&2',
        *([f"  {note_exit(record, '1')}"] if record else []),
        "  exit 1",
        "fi",
    ]
    return lines if most else []


def script_text(
    job: JobRequest,
    command: str | Sequence[str],
    *,
    begin: Sequence[str] = (),
    interrupted: Sequence[str] = (),
    finish: Sequence[str] = (),
) -> str:
    """The whole batch script. `command`: what every task runs, or those of each component, already words of shell (see
    :func:`words`).

    Lines of shell: `begin` before the set-up; `interrupted` for when the job is told to end, while the step still runs;
    `finish` after the step. In the last two ``$status`` is the step's exit status so far and ``$signalled`` the signal
    that the script got.
    """
    commands = [command] * len(job.components) if isinstance(command, str) else command
    step = _step(job, commands) if job.use_srun else " ".join(_program(job, job.components[0], commands[0]))
    record = None if job.exit_record is None else job.word(job.exit_record)
    errors = job.word(job.step_errors) if job.step_errors else ""
    first_only = " \\\n  ".join(textwrap.wrap(" ".join(FIRST_COMPONENT_ONLY), 100))
    leave = f"{shlex.quote(sys.executable)} -m holmes_hpc.submission.executor.throttle"
    lines = [
        "#!/bin/bash",
        *directives(job),
        "",
        *(f"export {key}={job.word(value)}" for key, value in job.environment),
        *(["mkdir -p -- " + " ".join(map(job.word, job.directories))] if job.directories else []),
        *([f"rm -f -- {record}"] if record else []),
        *_not_again(job.max_requeues, record),
        *begin,
        *(["# setup", *job.setup] if job.setup else []),
        *(
            ["# of component 0 only; srun would take them for all", f"unset {first_only}"]
            if len(job.components) > 1
            else []
        ),
        "",
        "# the step over all components; in the background, so that a signal is noticed at once",
        "signalled=",
        "trap 'signalled=TERM' TERM",
        "# shellcheck disable=SC2016 # what sh -c expands in each task must not be expanded here",
        f"{step}{f' 2> {errors}' if errors else ''} &",
        "step=$!",
        "while :; do",
        '  wait "$step"; status=$?',
        '  kill -0 "$step" 2>/dev/null || break',
        *(f"  {line}" for line in interrupted),
        "done",
        "",
        *([f"cat -- {errors} >&2"] if errors else []),
        *([note_exit(record, '"$status"', '"${signalled:--}"')] if record else []),
        *finish,
        *(["# teardown", *job.teardown] if job.teardown else []),
        *([f"{leave} {job.word(job.line)} {job.word('%j')}"] if job.line else []),
        'exit "$status"',
        "",
    ]
    text = "\n".join(lines)
    if "\0" in text:
        raise SubmissionError("the batch script holds a zero byte", where="job", hint="remove it")
    return text


def words(arguments: Iterable[str]) -> str:
    """Arguments as words of shell that reach the command unchanged."""
    return " ".join(shlex.quote(a) for a in arguments)
