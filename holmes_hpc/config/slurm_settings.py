"""The configuration group `slurm`: a site's job settings, for all components or for the components of one pool."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from holmes_hpc.config.renamed_keys import move_renamed
from holmes_hpc.errors import Case
from holmes_hpc.schema import Checked, key
from holmes_hpc.slurm.scontrol import minutes


@dataclass(frozen=True)
class ComponentSettings(Checked, where="slurm"):
    """The resources that a job component requests besides nodes; null: Slurm's default."""

    account: Annotated[str | None, key("as sbatch --account")] = None
    qos: Annotated[str | None, key("as sbatch --qos")] = None
    reservation: Annotated[str | None, key("as sbatch --reservation")] = None
    mem: Annotated[
        str | int | None, key("memory per node, as sbatch --mem: 64G; 0: all of it; null: see `share`", ge=0)
    ] = None
    cpus_per_task: Annotated[int | None, key("CPUs per rank, as sbatch --cpus-per-task; null: see `share`", ge=1)] = (
        None
    )
    share: Annotated[
        bool | None,
        key(
            "request CPUs and memory in proportion to the GPUs, and all memory of a whole "
            "node; false: Slurm's defaults; null: true"
        ),
    ] = None
    gres: Annotated[str | None, key("as sbatch --gres, instead of --gpus-per-node")] = None
    exclusive: Annotated[bool | str | None, key("whole nodes, as sbatch --exclusive; or user, mcs")] = None
    nodelist: Annotated[str | tuple[str, ...] | None, key("as sbatch --nodelist")] = None
    exclude: Annotated[str | tuple[str, ...] | None, key("nodes to avoid, as sbatch --exclude")] = None
    additional: Annotated[
        Mapping[str, bool | int | float | str | None] | None, key("any other sbatch option: {switches: 1}")
    ] = None

    def _mistakes(self) -> Iterator[Case]:
        is_wrong = isinstance(self.mem, str) and not re.fullmatch(r"\d+(\.\d+)?([KMGT]B?)?", self.mem, re.IGNORECASE)
        yield is_wrong, f"slurm.mem is {self.mem!r}", "use megabytes, or a number with K, M, G or T: 64G", ""

    def specified(self) -> dict[str, Any]:
        """Return {name: value} of the component settings that have a value, except `share`."""
        cls = type(self) if isinstance(self, PoolSettings) else ComponentSettings
        values = {f.name: getattr(self, f.name) for f in fields(cls) if f.name != "share"}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def job_options(self) -> tuple[str, ...]:
        """Return srun's options for a job on one node: account, QOS, reservation, GRES, and those in `additional`."""
        values = {name: getattr(self, name) for name in ("account", "qos", "reservation", "gres")}
        values |= self.additional or {}
        words = {str(k).lstrip("-").replace("_", "-"): v for k, v in values.items() if v not in (None, False)}
        return tuple(f"--{name}" if value is True else f"--{name}={value}" for name, value in words.items())


@dataclass(frozen=True)
class PoolSettings(ComponentSettings, where="slurm"):
    """The settings of one pool's components, including settings for the start of their ranks.
    A pool needs its own if it has another CPU architecture or module tree, for example."""

    container: Annotated[str | None, key("as slurm.container, for this pool's ranks; empty: none")] = None
    mounts: Annotated[tuple[str, ...], key("the container's bind mounts: [NODE_PATH:CONTAINER_PATH]")] = ()
    environment: Annotated[
        Mapping[str, str | int | float] | None, key("environment variables of its ranks: {NAME: value}")
    ] = None
    setup: Annotated[tuple[str, ...], key("shell lines that each rank runs before its program: [module load gcc]")] = ()
    python: Annotated[str | None, key("shell command that starts Python on its nodes")] = None
    srun_args: Annotated[tuple[str, ...], key("extra srun arguments for its ranks")] = ()


@dataclass(frozen=True)
class SlurmSettings(ComponentSettings, where="slurm", dotted=True):
    """The site's settings for the job and for all its components. `pools` has settings for single pools."""

    timeout_min: Annotated[
        int | str, key("the job's time limit: minutes, or in Slurm's format: 1-12:00:00", unit="min", ge=1)
    ] = 60
    setup: Annotated[tuple[str, ...], key("shell lines that the batch script runs before Python and srun")] = ()
    distribution: Annotated[
        str,
        key(
            "as srun --distribution: ranks over nodes (always block), and over the sockets of a node",
            one_of=("block:block", "block:cyclic", "block:fcyclic"),
        ),
    ] = "block:block"
    bind_cpus: Annotated[bool, key("pin each rank to those of its CPUs that are near its GPU (NUMA)")] = True
    container: Annotated[str | None, key("image for pyxis' --container-image, or an apptainer .sif")] = None
    pools: Annotated[
        Mapping[str, PoolSettings | None] | None, key("{POOL: {qos: …}}: settings of one pool's components")
    ] = None
    fabrics: Annotated[Mapping[str, PoolSettings | None] | None, key("deprecated: the former name of `pools`")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        move_renamed(self, "slurm", "fabrics", "pools")

    def _mistakes(self) -> Iterator[Case]:
        yield from super()._mistakes()
        is_wrong = isinstance(self.timeout_min, str) and not minutes(self.timeout_min)
        hint = "use minutes (1 or more), or a time in Slurm's format: 1:30:00, 1-12:00:00"
        yield is_wrong, f"slurm.timeout_min is {self.timeout_min!r}", hint
