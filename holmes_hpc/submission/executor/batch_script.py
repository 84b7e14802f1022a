"""The batch script of a job, for the executor, for ``holmes submit --dry-run`` and for the templates."""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from holmes_hpc.errors import Case, SubmissionError
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.submission.executor import component
from holmes_hpc.submission.executor.component import TABLE, ComponentRequest, Value

USER_SIGNAL = "USR2"  # submitit's; NCCL may catch USR1
SIGNAL_DELAY_S = 90  # submitit's
_DEPENDENCY = re.compile(r"[\w:,?+]+", re.ASCII)


@dataclass(frozen=True)
class JobRequest:
    """A request for a job of one or more components, with one job step over all components.

    `output`, `error`: files for the output of the batch script itself.
    `rank_output`, `rank_error`: files for each task's output; ``%j`` is the leader's job id, ``%t`` the global rank.
    `directories`: directories to create before the step starts.
    `exit_record`, `step_errors`: files for the step's exit status and for srun's own error messages.
    `setup`, `teardown`: shell lines before and after the step, as in submitit.
    `signal`: the warning signal, sent `signal_delay_s` before the time limit (None: 90 s, less in short jobs).
    `max_requeues`: a job that was requeued more often ends without a step; 0: no limit.
    `array`: sbatch's option; with it, ``%j`` is ARRAY-ID_INDEX.
    `throttle_file`: the file of the :class:`Throttle` to which the job reports its end.
    `distribution`: srun's option; over nodes it must be block, so that ranks follow the order of components."""

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
    throttle_file: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    additional: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        for name in ("setup", "teardown", "srun_args", "directories"):
            object.__setattr__(self, name, component.as_list(getattr(self, name), name, "job"))
        SubmissionError.refuse("job", *self._mistakes())

    def _mistakes(self) -> Iterator[Case]:
        """Yield (whether the mistake is there, what it is, a hint)."""
        yield not self.components, "no component", "give at least one"
        yield not self.use_srun and self.ranks > 1, "use_srun=False with more than one task", "use srun"
        limit = self.timeout_min
        has_no_time = isinstance(limit, int) and (limit is True or limit < 1)
        yield has_no_time, f"timeout_min is {limit}", "use minutes above 0"
        is_invalid = self.dependency is not None and not _DEPENDENCY.fullmatch(self.dependency)
        yield is_invalid, f"invalid dependency {self.dependency!r}", "write afterany:JOBID,…"
        is_het, keys = len(self.components) > 1, [component.option_name(key, "job") for key, _ in self.additional]
        problem = "dependency singleton makes a heterogeneous job wait for itself"
        yield is_het and "singleton" in (self.dependency or ""), problem, "use afterany:JOBID"
        hint = "use executor.batch() or map_array, which submit throttled jobs"
        yield is_het and "array" in keys, "a heterogeneous job cannot be an array", hint

    @property
    def ranks(self) -> int:
        return sum(c.ranks for c in self.components)

    def quote(self, text: str) -> str:
        """Return `text` quoted as one word of the batch script, with the job id in place of ``%j``."""
        job_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if self.array else '"$SLURM_JOB_ID"'
        return job_id.join(shlex.quote(part) if part else "" for part in text.split("%j")) or "''"

    def _file_pattern(self, path: str) -> str:
        """Return a path as sbatch's file name pattern, which replaces only ``%j``. Refuse a backslash."""
        if "\\" in path:  # a backslash in a pattern turns off all replacements
            raise SubmissionError(f"path {path!r} contains a backslash", where="job", hint="use another directory")
        return ("%A_%a" if self.array else "%j").join(part.replace("%", "%%") for part in path.split("%j"))

    def options(self) -> list[tuple[str, Value]]:
        """Return (name, value) of the sbatch options of the whole job, which the script sets at the first component."""
        options: list[tuple[str, Value | None]] = [
            ("job-name", self.name),
            ("time", self.timeout_min),
            ("output", self._file_pattern(self.output)),
            ("error", None if self.error is None else self._file_pattern(self.error)),
            ("open-mode", "append"),
            ("array", self.array),
            ("signal", self._signal_option()),
            ("no-requeue" if self.requeue is False else "requeue", True if self.requeue is not None else None),
        ]
        names = ("dependency", "comment", "mail_type", "mail_user", "wckey")
        options += [(name.replace("_", "-"), getattr(self, name)) for name in names]
        extra = {component.option_name(k, "job"): v for k, v in self.additional if v is not None}
        own = {k: v for k, v in options if v is not None and k not in extra}
        return [(k, v) for k, v in {**own, **extra}.items() if v is not False]

    def _signal_option(self) -> str | None:
        """Return the value of ``--signal``; None for no signal. Slurm may send it a minute early, and a task needs time
        to install its handler. So the default delay is shorter in short jobs, and the shortest get no signal."""
        delay = self.signal_delay_s
        if delay is None:
            max_delay = 60 * self.timeout_min - 90 if isinstance(self.timeout_min, int) else SIGNAL_DELAY_S
            delay = min(SIGNAL_DELAY_S, max_delay)
        return f"{self.signal}@{delay}" if delay > 0 else None


def _redirecting_shell(job: JobRequest, setup: Sequence[str] = ()) -> str:
    """Return the shell command that redirects output to the files of the task's rank, then runs `setup` and the task.
    srun's file patterns are wrong in a step over several components (measured on 22.05): ``%j`` becomes the id of the
    component, ``%t`` the rank plus the component's index. File names are arguments, so no shell parses them."""
    patterns = [pattern.split("%t") for pattern in (job.rank_output, job.rank_error) if pattern is not None]
    arguments = [job.quote(part) for parts in patterns for part in parts]
    numbers = count(1)
    files = ['"' + "$SLURM_PROCID".join(f"${{{next(numbers)}}}" for _ in parts) + '"' for parts in patterns]
    # as in: exec >>"${1}$SLURM_PROCID${2}" 2>&1; shift 2
    redirect = f"exec >>{files[0]} 2>{'&1' if job.rank_error is None else f'>{files[1]}'}; shift {len(arguments)}"
    lines = ("\n" if setup else "; ").join([redirect, *setup, 'exec "$@"'])
    return " ".join(["bash" if setup else "sh", "-c", shlex.quote(lines), "task", *arguments])


def directives(job: JobRequest) -> Iterator[str]:
    """Yield the ``#SBATCH`` lines of a job's batch script."""
    for index, part in enumerate(job.components):
        if index:
            yield "#SBATCH hetjob"
        options = [*(job.options() if not index else []), *part.options()]
        for k, v in options:
            yield f"#SBATCH --{k}" if v is True else f"#SBATCH --{k}={component.sbatch_word(v, k)}"


def _step(job: JobRequest, commands: Sequence[str]) -> str:
    """Return the srun command of the step over all components. `commands`: for each component, the command of its
    tasks. Components whose tasks have the same options and command share one ``--het-group``."""
    parts = [_task(job, part, command) for part, command in zip(job.components, commands, strict=True)]
    groups = [(str(index), part) for index, part in enumerate(parts)]
    if len(set(parts)) == 1:
        groups = [(",".join(index for index, _ in groups), parts[0])]
    is_het = len(job.components) > 1
    group_arguments = []
    for group, (options, *program) in groups:
        group_arguments.append(" \\\n  ".join([f"--het-group={group} {options}" if is_het else options, *program]))
    return "srun " + " : \\\n  ".join(group_arguments)


def _task(job: JobRequest, part: ComponentRequest, command: str) -> tuple[str, str, str]:
    """Return srun's options for the tasks of one component, and the two parts of their command (:func:`_program`)."""
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
    """Return the command of a task of `part` in two parts: (redirection and variables, container and `command`).
    The container is an apptainer image. Other images are for pyxis, and are given to srun as an option."""
    variables = ["env", *(shlex.quote(f"{k}={v}") for k, v in part.environment)] if part.environment else []
    image = _image(job, part)
    if image and is_apptainer(image):
        gpu_option = " --nv" if any(c.gpus_per_node or c.gpus_per_task or c.gres for c in job.components) else ""
        mounts = "".join(f" --bind {shlex.quote(m)}" for m in part.mounts)
        command = f"apptainer exec{gpu_option}{mounts} {shlex.quote(image.removeprefix('apptainer:'))} {command}"
    return " ".join([_redirecting_shell(job, part.setup), *variables]), command


def _image(job: JobRequest, part: ComponentRequest) -> str | None:
    return job.container if part.container is None else part.container or None


def is_apptainer(image: str) -> bool:
    return image.startswith("apptainer:") or image.endswith(".sif")


def _exit_record_lines(record: str | None, status: str, signal: str = "-", indent: str = "") -> list[str]:
    """Return the shell line that writes ``STATUS EPOCH SIGNAL`` into the file `record`; no line if `record` is None.
    The arguments are inserted as shell words."""
    return [f"{indent}printf '%s %s %s\\n' {status} \"$(date +%s)\" {signal} > {record}"] if record else []


def script_text(
    job: JobRequest,
    command: str | Sequence[str],
    *,
    mark: str = "",
    begin: Sequence[str] = (),
    monitor: str = "",
    coordinator: str = "",
    on_signal: Sequence[str] = (),
    finish: Sequence[str] = (),
) -> str:
    """Return the batch script. `command`: the shell command of every task, or a list with one for each component. Shell
    lines: `mark` before the set-up, `begin` after it; `on_signal` after a signal, while the step still runs; `finish`
    after the step. In `on_signal` and `finish`, ``$status`` is the step's exit status so far, and ``$signalled`` the
    signal. `monitor`: a command that runs as long as the step; ``$step`` is the step's process id. `coordinator`: a
    command that becomes the parent process of srun; the process id of srun is appended as its last argument."""
    commands = [command] * len(job.components) if isinstance(command, str) else command
    step = _step(job, commands) if job.use_srun else " ".join(_program(job, job.components[0], commands[0]))
    record = None if job.exit_record is None else job.quote(job.exit_record)
    errors = job.quote(job.step_errors) if job.step_errors else ""
    step += f" 2> {errors}" if errors else ""
    step = f"({step} & exec {coordinator} $!)" if coordinator else step
    condition = f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {job.max_requeues} ]; then'
    reason = f"requeued $SLURM_RESTART_COUNT times, max_requeues is {job.max_requeues}"
    limit = [condition, f'  echo "holmes: not started: {reason}" >&2', *_exit_record_lines(record, "1", indent="  ")]
    unset_names = " \\\n  ".join(textwrap.wrap(" ".join(TABLE["first_component_variables"]), 100))
    release = shlex.join([sys.executable, *module_arguments("holmes_hpc.submission.executor.throttle")])
    unset = ["# These describe component 0 only; srun would apply them to all components.", f"unset {unset_names}"]
    monitoring = [f"{monitor} &", "monitor=$!", 'disown "$monitor" # no message when it is killed']
    before = [
        *(f"export {key}={job.quote(value)}" for key, value in job.environment),
        *(["mkdir -p -- " + " ".join(map(job.quote, job.directories))] if job.directories else []),
        *([f"rm -f -- {record}"] if record else []),
        *([*limit, "  exit 1", "fi"] if job.max_requeues else []),
        *([mark] if mark else []),
        *(["# setup", *job.setup] if job.setup else []),
        *begin,
        *(unset if len(job.components) > 1 else []),
    ]
    during = [
        "# Start the step over all components in the background, so that the script can handle signals.",
        "signalled=",
        "trap 'signalled=TERM' TERM",
        "# shellcheck disable=SC2016 # sh -c in each task expands the variables, not this shell",
        f"{step} &",
        "step=$!",
        *(monitoring if monitor else []),
        "while :; do",
        '  wait "$step"; status=$?',
        '  kill -0 "$step" 2>/dev/null || break',
        *(f"  {line}" for line in on_signal),
        "done",
        *(['kill "$monitor" 2>/dev/null'] if monitor else []),
    ]
    after = [
        *([f"cat -- {errors} >&2"] if errors else []),
        *_exit_record_lines(record, '"$status"', '"${signalled:--}"'),
        *finish,
        *(["# teardown", *job.teardown] if job.teardown else []),
        *([f"{release} {job.quote(job.throttle_file)} {job.quote('%j')}"] if job.throttle_file else []),
    ]
    text = "\n".join(["#!/bin/bash", *directives(job), "", *before, "", *during, "", *after, 'exit "$status"', ""])
    if "\0" in text:
        hint = "remove it from setup, teardown, environment or another parameter"
        raise SubmissionError("the batch script contains a zero byte", where="job", hint=hint)
    return text
