"""The request for one component of a job, and the quoting of values for ``#SBATCH`` lines and for the shell."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from holmes_hpc.errors import SubmissionError
from holmes_hpc.tables import read_table

Value = str | int | bool
_PLAIN = re.compile(r"[\w@%+=:,./\[\]{}()&|*!^~?<>$;-]+", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
TABLE: dict[str, Any] = read_table(__file__)
JOB_OPTIONS, ALIASES = frozenset[str](TABLE["job_options"]), TABLE["aliases"]
TASK_SETTINGS = ("container", "mounts", "environment", "setup", "python", "srun_args")  # not sbatch options
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
MAX_VALUE_BYTES = 4000  # sbatch reads a directive into a buffer of 8 KiB


def sbatch_word(value: object, name: str = "value") -> str:
    """Return `value` as one word of an ``#SBATCH`` line. `name`: the option's name, for error messages.
    sbatch's parser differs from a shell: a backslash escapes everywhere, and ``#`` outside quotes ends the line.
    Raise SubmissionError as :func:`check_value` does."""
    text = str(value)
    check_value(text, name)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def check_value(text: str, name: str) -> None:
    """Raise SubmissionError if no ``#SBATCH`` line can contain `text`, because it has control characters (newlines),
    is not Unicode, or is too long. `name`: the option's name, for error messages."""
    control, size = next((c for c in text if ord(c) < 32 or ord(c) == 127), ""), len(text.encode(errors="replace"))
    excerpt = f"{name} {text[:40]!r}"
    SubmissionError.refuse(
        "sbatch",
        (control, f"{excerpt} contains the control character {control!r}", "remove it"),
        (any(0xD800 <= ord(c) <= 0xDFFF for c in text), f"{excerpt} is not Unicode text", "use UTF-8"),
        (size > MAX_VALUE_BYTES, f"{name} is {size} bytes long, more than sbatch reads", "shorten it"),
    )


def as_list(value: Iterable[object] | None, key: str, where: str) -> tuple[str, ...]:
    """Return a list that the user wrote under `key` as a tuple of strings.
    Raise SubmissionError for a single string, which would become a list of letters."""
    if isinstance(value, str):
        raise SubmissionError(f"{key} is a string, not a list", where=where, hint="write [one, two]")
    return tuple(map(str, value or ()))


def option_name(key: str, where: str) -> str:
    """Return the name of an sbatch option as written after ``--``: ``cpus-per-task`` for ``cpus_per_task``.
    Raise SubmissionError if `key` cannot be such a name."""
    name = str(key).lstrip("-").replace("_", "-")
    if not _OPTION.fullmatch(name):
        raise SubmissionError(f"{key!r} is not an sbatch option", where=where, hint="use a name from `man sbatch`")
    return name


@dataclass(frozen=True)
class ComponentRequest:
    """A request for one component of a job. A field that is None leaves the value to Slurm.

    `exclusive`: True, or a value such as ``user``. `mem`: in Slurm's format (``8GB``). `additional`: sbatch options.

    Settings of its tasks, for sites whose partitions differ: `container` (image; None: the job's; empty: none),
    `mounts` (``HOST:CONTAINER``), `environment` (variables), `setup` (shell lines that each task runs before the
    program), `python` (shell command; None: the job's), `srun_args`."""

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
        checked = {key: as_list(getattr(self, key), key, "component") for key in ("mounts", "setup", "srun_args")} | {
            "additional": tuple((option_name(k, "component"), v) for k, v in additional.items() if v is not None),
            "environment": tuple((str(k), str(v)) for k, v in environment.items()),
            "nodelist": ",".join(self.nodelist) if isinstance(self.nodelist, list | tuple) else self.nodelist,
        }
        for key, value in checked.items():
            object.__setattr__(self, key, value)
        for name in (name for name, _ in self.environment if not _VARIABLE.fullmatch(name)):
            problem = f"environment: {name!r} is not the name of a variable"
            raise SubmissionError(problem, where="component", hint="write {NAME: value}")
        for key, value in self.options():
            check_value(str(value), key)

    @property
    def ranks(self) -> int:
        return self.nodes * self.tasks_per_node

    def options(self) -> list[tuple[str, Value]]:
        """Return (name, value) of this component's sbatch options, in a fixed order. The value of a flag is True."""
        names = [f.name for f in fields(self) if f.name not in (*TASK_SETTINGS, "additional")]
        values = {name.replace("_", "-"): getattr(self, name) for name in names}
        options: dict[str, Value] = {k: v for k, v in values.items() if v is not None and v is not False and v != ""}
        if options.get("gpus-per-node") == 0:
            del options["gpus-per-node"]
        options = {"ntasks-per-node" if k == "tasks-per-node" else k: v for k, v in options.items()}
        first_options = [(k, options.pop(k)) for k in ("partition", "constraint") if k in options]
        extra = dict(self.additional)
        remaining = [(k, v) for k, v in options.items() if k not in extra]
        return [*first_options, *remaining, *((k, v) for k, v in extra.items() if v is not False)]

    def with_defaults(self, options: Mapping[str, Value]) -> "ComponentRequest":
        """Return this request with the job's sbatch `options` added, except those that it sets itself and those of the
        whole job. Slurm resets the options at each component, so that each one must repeat them."""
        set_keys = {key for key, _ in self.options()} | {key for key, _ in self.additional}
        inherited = tuple((k, v) for k, v in options.items() if k not in set_keys and k not in JOB_OPTIONS)
        return replace(self, additional=(*self.additional, *inherited)) if inherited else self

    def arguments(self) -> list[str]:
        """Return the sbatch options of this component as command arguments, without shell quoting."""
        return [f"--{k}" if v is True else f"--{k}={v}" for k, v in self.options()]


COMPONENT_KEYS = frozenset(f.name for f in fields(ComponentRequest))


def format_memory(gigabytes: float) -> str:
    """Return an amount of memory in Slurm's format: 8 is ``8GB``, 0.5 is ``512MB``."""
    return f"{int(gigabytes)}GB" if gigabytes == int(gigabytes) else f"{int(gigabytes * 1024)}MB"


def parse_component(
    values: Mapping[str, Any] | ComponentRequest, index: int = 0, defaults: Mapping[str, Any] | None = None
) -> ComponentRequest:
    """Return the request that a user wrote as a mapping, completed by `defaults`. `index`: its index, for error
    messages. Raise SubmissionError for an unknown key or a wrong value."""
    if isinstance(values, ComponentRequest):
        return values
    where = f"component {index}"
    if not isinstance(values, Mapping):
        hint = "write {partition: …, nodes: …, tasks_per_node: …}"
        raise SubmissionError(f"{values!r} is not a mapping of options", where=where, hint=hint)
    unknown_keys = [key for key in values if ALIASES.get(key, key) not in (*COMPONENT_KEYS, "mem_gb")]
    SubmissionError.refuse_unknown("unknown key", unknown_keys, COMPONENT_KEYS, where)
    settings = {**(defaults or {}), **{ALIASES.get(k, k): v for k, v in values.items() if v is not None}}
    if "mem_gb" in settings:
        settings["mem"] = format_memory(settings.pop("mem_gb"))
    with SubmissionError.instead_of(SubmissionError, where=where):
        return ComponentRequest(**settings)


def node_share(
    gpus: int, gpus_per_node: int, cpus: int | None, memory_gib: float | None, exclusive: bool
) -> dict[str, Value | None]:
    """Return the default `cpus_per_task` and `mem` of a component that uses `gpus` of each node's `gpus_per_node` GPUs.

    The component gets the same share of the node's `cpus` and `memory_gib`. If Slurm does not report one of them
    (None), so is the result. Each GPU has one rank. A component with whole nodes gets all of their memory (--mem=0)."""
    is_whole_node = exclusive or gpus >= gpus_per_node
    cpus_per_rank = (cpus or 0) // (gpus if is_whole_node else gpus_per_node)
    even_cpus = cpus_per_rank - cpus_per_rank % 2 if cpus_per_rank > 1 else 1  # whole cores, if a core has two CPUs
    mem_share = None if memory_gib is None else f"{int(memory_gib * 1024 * gpus / gpus_per_node)}M"
    return {"cpus_per_task": None if cpus is None else even_cpus, "mem": "0" if is_whole_node else mem_share}
