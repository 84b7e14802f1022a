"""The configuration group `slurm`: a site's own settings for jobs, for all components or one fabric's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from holmes_hpc.schema import check, key, refuse
from holmes_hpc.slurm.scontrol import minutes


@dataclass(frozen=True)
class ComponentSettings:
    """What a component of the job asks Slurm for besides nodes; null: not said, so Slurm's default."""

    account: Annotated[str | None, key("as sbatch --account")] = None
    qos: Annotated[str | None, key("as sbatch --qos")] = None
    reservation: Annotated[str | None, key("as sbatch --reservation")] = None
    mem: Annotated[
        str | int | None, key("memory of a node, as sbatch --mem: 64G; 0: all of it; null: as share says", ge=0)
    ] = None
    cpus_per_task: Annotated[
        int | None, key("CPUs of a rank, as sbatch --cpus-per-task; null: as share says", ge=1)
    ] = None
    share: Annotated[
        bool | None,
        key(
            "ask for the CPUs and the memory that go with the GPUs: their part of the "
            "node's, all memory of a node taken whole; false: Slurm's defaults; null: true"
        ),
    ] = None
    gres: Annotated[str | None, key("as sbatch --gres, instead of --gpus-per-node")] = None
    exclusive: Annotated[bool | str | None, key("whole nodes, as sbatch --exclusive; or user, mcs")] = None
    nodelist: Annotated[str | tuple[str, ...] | None, key("as sbatch --nodelist")] = None
    exclude: Annotated[str | tuple[str, ...] | None, key("nodes not to be used, as sbatch --exclude")] = None
    additional: Annotated[
        Mapping[str, bool | int | float | str | None] | None, key("any other sbatch option: {switches: 1}")
    ] = None

    def __post_init__(self) -> None:
        check(self, "slurm")

    def given(self) -> dict[str, Any]:
        """Return the settings of components that have a value, but for `share`."""
        own = type(self) if isinstance(self, FabricSettings) else ComponentSettings
        values = {f.name: getattr(self, f.name) for f in fields(own) if f.name != "share"}
        return {name: value for name, value in values.items() if value not in (None, ())}


@dataclass(frozen=True)
class FabricSettings(ComponentSettings):
    """What else may differ for one fabric, where partitions differ in CPU architecture or module trees: what its ranks
    are started with."""

    container: Annotated[str | None, key("as slurm.container, of this fabric's ranks; empty: none")] = None
    mounts: Annotated[tuple[str, ...], key("what the container sees of the node: [HERE:THERE]")] = ()
    environment: Annotated[Mapping[str, str | int | float] | None, key("variables of its ranks: {NAME: value}")] = None
    setup: Annotated[tuple[str, ...], key("lines of shell in each rank before its program: [module load gcc]")] = ()
    python: Annotated[str | None, key("the command that starts Python on its nodes (shell)")] = None
    srun_args: Annotated[tuple[str, ...], key("more arguments of srun for its ranks")] = ()


@dataclass(frozen=True)
class SlurmSettings(ComponentSettings):
    """The site's settings of every component, and those of the job; `fabrics` says more of single fabrics."""

    timeout_min: Annotated[
        int | str, key("the job's time limit: minutes, or as Slurm writes it: 1-12:00:00", unit="min", ge=1)
    ] = 60
    setup: Annotated[tuple[str, ...], key("lines of the batch script before srun, as in submitit")] = ()
    distribution: Annotated[
        str,
        key(
            "as srun --distribution: ranks over nodes (always block), and over the sockets of a node",
            one_of=("block:block", "block:cyclic", "block:fcyclic"),
        ),
    ] = "block:block"
    bind_cpus: Annotated[bool, key("keep each rank on those of its CPUs that are beside its GPU (NUMA)")] = True
    container: Annotated[str | None, key("an image for pyxis' --container-image, or an apptainer .sif")] = None
    fabrics: Annotated[
        Mapping[str, FabricSettings | None] | None, key("{FABRIC: {qos: …}}: settings of one fabric's component")
    ] = None

    def __post_init__(self) -> None:
        check(self, "slurm", dotted=True)
        refuse(
            "",
            (
                isinstance(self.timeout_min, str) and not minutes(self.timeout_min),
                f"slurm.timeout_min is {self.timeout_min!r}",
                "use minutes from 1, or a time as Slurm writes it: 1:30:00, 1-12:00:00",
            ),
        )
