"""One part of a job as Slurm is asked for it, and the words of a batch script that no parser can misread."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from holmes_hpc.errors import SubmissionError, nearest

Value = str | int | bool
_PLAIN = re.compile(r"[\w@%+=:,./\[\]{}()&|*!^~?<>$;-]+", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# Options of sbatch that a job has once, with its first component; all others are a component's own.
OF_THE_JOB = frozenset(
    (
        "array",
        "bb",
        "bbf",
        "begin",
        "chdir",
        "clusters",
        "comment",
        "deadline",
        "delay-boot",
        "dependency",
        "error",
        "export",
        "export-file",
        "get-user-env",
        "gid",
        "hold",
        "input",
        "job-name",
        "kill-on-invalid-dep",
        "licenses",
        "mail-type",
        "mail-user",
        "nice",
        "no-requeue",
        "open-mode",
        "output",
        "parsable",
        "priority",
        "profile",
        "propagate",
        "quiet",
        "requeue",
        "signal",
        "spread-job",
        "time",
        "time-min",
        "uid",
        "verbose",
        "wait",
        "wait-all-nodes",
        "wckey",
    )
)
OF_THE_TASKS = ("container", "mounts", "environment", "setup", "python", "srun_args")  # no options of sbatch
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
LONGEST = 4000  # sbatch reads a directive into a buffer of 8 KiB


def sbatch_word(value: object, what: str = "value") -> str:
    """`value` as one word of an ``#SBATCH`` line. sbatch's own parser is no shell: a backslash escapes everywhere, and
    ``#`` outside quotes ends the line. What cannot be on one line is refused."""
    text = str(value)
    check_line(text, what)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def check_line(text: str, what: str) -> None:
    """Refuse what no directive can hold: control characters (newlines) and very long values."""
    bad = next((c for c in text if ord(c) < 32 or ord(c) == 127), None)
    if bad is not None:
        raise SubmissionError(
            f"{what} {text[:40]!r} holds the control character {bad!r}", where="sbatch", hint="remove it"
        )
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise SubmissionError(f"{what} {text[:40]!r} is not text", where="sbatch", hint="use UTF-8")
    if len(text.encode()) > LONGEST:
        raise SubmissionError(f"{what} is {len(text)} characters long", where="sbatch", hint="shorten it")


def shell_word(text: str, job_id: str = '"$SLURM_JOB_ID"') -> str:
    """`text` as one word for bash, where ``%j`` becomes `job_id`: words of shell for the id that users see, which is
    known only in the batch script."""
    if "\0" in text:
        raise SubmissionError(f"{text[:40]!r} holds a zero byte", where="batch script", hint="remove it")
    parts = [shlex.quote(part) if part else "" for part in text.split("%j")]
    return job_id.join(parts) or "''"


def as_list(value: Iterable[object] | None, key: str, where: str) -> tuple[str, ...]:
    """Return what users write for a list; SubmissionError for a text, whose letters would be its elements."""
    if isinstance(value, str):
        raise SubmissionError(f"{key} is a text, must be a list", where=where, hint="write [one, two]")
    return tuple(map(str, value or ()))


def option(key: str, where: str) -> str:
    """The name of an sbatch option as it is written after ``--``."""
    name = str(key).lstrip("-").replace("_", "-")
    if not _OPTION.fullmatch(name):
        raise SubmissionError(f"{key!r} is no sbatch option", where=where, hint="use a name as in sbatch's manual page")
    return name


@dataclass(frozen=True)
class ComponentRequest:
    """What one component of a job asks for. None: not said, so Slurm's default. `exclusive`: True, or ``user`` and the
    like. `mem` as Slurm reads it (``8GB``). `additional`: any other sbatch option of this component.

    What its tasks are started with, for sites whose partitions differ: `container` (else the job's; empty: none), its
    `mounts` (``HERE:THERE``), `environment` (variables), `setup` (lines of shell before the program, in each task),
    `python` (shell, else the job's), `srun_args`.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    partition: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus_per_node: Value | None = None
    gpus_per_task: Value | None = None
    gres: str | None = None
    mem: str | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool | str | None = None
    additional: tuple[tuple[str, Value], ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    python: str | None = None
    srun_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("nodes", "tasks_per_node", "cpus_per_task", "cpus_per_gpu"):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SubmissionError(f"{key} is {value!r}", where="component", hint="use a whole number above 0")
        additional, environment = (dict(pairs or ()) for pairs in (self.additional, self.environment))
        plain = {key: as_list(getattr(self, key), key, "component") for key in ("mounts", "setup", "srun_args")} | {
            "additional": tuple((option(k, "component"), v) for k, v in additional.items() if v is not None),
            "environment": tuple((str(k), str(v)) for k, v in environment.items()),
            "nodelist": ",".join(self.nodelist) if isinstance(self.nodelist, list | tuple) else self.nodelist,
        }
        for key, value in plain.items():
            object.__setattr__(self, key, value)
        for name, _ in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise SubmissionError(
                    f"{name!r} is no name of a variable", where="component", hint="write {NAME: value}"
                )
        for key, value in self.options():
            check_line(str(value), key)

    @property
    def ranks(self) -> int:
        return self.nodes * self.tasks_per_node

    def options(self) -> list[tuple[str, Value]]:
        """The sbatch options of this component, in one order: (name, value; True for a flag)."""
        given: dict[str, Value] = {
            "ntasks-per-node" if f.name == "tasks_per_node" else f.name.replace("_", "-"): value
            for f in fields(self)
            if f.name not in (*OF_THE_TASKS, "additional")
            and (value := getattr(self, f.name)) is not None
            and value is not False
            and value != ""
        }
        if given.get("gpus-per-node") == 0:
            del given["gpus-per-node"]
        head = [(k, given.pop(k)) for k in ("partition", "constraint") if k in given]
        extra = dict(self.additional)
        return [
            *head,
            *((k, v) for k, v in given.items() if k not in extra),
            *((k, v) for k, v in extra.items() if v is not False),
        ]

    def filled(self, job: Mapping[str, Value]) -> ComponentRequest:
        """With the options that a job gives for all its components (Slurm resets them at each), where this one does
        not say its own."""
        own = {key for key, _ in self.options()} | {key for key, _ in self.additional}
        more = tuple((k, v) for k, v in job.items() if k not in own and k not in OF_THE_JOB)
        return replace(self, additional=(*self.additional, *more)) if more else self

    def arguments(self) -> list[str]:
        """The same options as arguments of a command that no shell reads."""
        return [f"--{k}" if v is True else f"--{k}={v}" for k, v in self.options()]


ALIASES = {
    "ntasks_per_node": "tasks_per_node",
    "additional_parameters": "additional",
    "num_gpus": "gpus_per_node",
    "gpus": "gpus_per_node",
}
COMPONENT_KEYS = frozenset(f.name for f in fields(ComponentRequest))


def memory(gigabytes: float) -> str:
    """Submitit's `mem_gb` as Slurm reads it."""
    return f"{int(gigabytes)}GB" if gigabytes == int(gigabytes) else f"{int(gigabytes * 1024)}MB"


def component(
    values: Mapping[str, Any] | ComponentRequest, index: int = 0, defaults: Mapping[str, Any] | None = None
) -> ComponentRequest:
    """A request from plain data (what users write); `defaults` fill what it does not say, an unknown key is named."""
    if isinstance(values, ComponentRequest):
        return values
    where = f"component {index}"
    if not isinstance(values, Mapping):
        raise SubmissionError(
            f"{values!r} is no mapping of options",
            where=where,
            hint="write {partition: …, nodes: …, tasks_per_node: …}",
        )
    for key in values:
        if ALIASES.get(key, key) not in (*COMPONENT_KEYS, "mem_gb"):
            raise SubmissionError(f"unknown key {key!r}", where=where, hint=nearest(str(key), COMPONENT_KEYS))
    known = {**(defaults or {}), **{ALIASES.get(k, k): v for k, v in values.items() if v is not None}}
    if "mem_gb" in known:
        known["mem"] = memory(known.pop("mem_gb"))
    try:
        return ComponentRequest(**known)
    except SubmissionError as e:
        raise SubmissionError(e.what, where=where, hint=e.hint) from e


def node_share(
    gpus: int, of: int, cpus: int | None, memory_gib: float | None, ranks: int, exclusive: bool = False
) -> dict[str, Value | None]:
    """What a component asks for beside `gpus` of a node's `of` GPUs, where nobody says: for each of its `ranks` there
    an equal part of those CPUs that go with the GPUs, and their part of the memory; all memory of a node that is taken
    whole (Slurm's --mem=0). What Slurm does not tell is not asked for: None."""
    whole = exclusive or gpus >= of
    each = ((cpus or 0) if whole else (cpus or 0) * gpus // of) // ranks
    whole_cores = each - each % 2 if each > 1 else 1  # where a core is two CPUs
    part = None if memory_gib is None else f"{int(memory_gib * 1024 * gpus / of)}M"
    return {"cpus_per_task": None if cpus is None else whole_cores, "mem": "0" if whole else part}
