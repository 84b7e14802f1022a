"""The whole configuration of a run, typed: its groups, and the keys that belong to none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import FOR_TRYING
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.schema import REQUIRED, check, key, keys, make, refuse


@dataclass(frozen=True)
class LauncherConfig:
    """The configuration group `launcher`: where a run's ranks are started."""

    kind: Annotated[
        str, key("slurm: one heterogeneous job; local: processes on this machine", one_of=("slurm", "local"))
    ] = "slurm"

    def __post_init__(self) -> None:
        check(self, "launcher", dotted=True)


@dataclass(frozen=True)
class Configuration:
    """Everything that can be said of a run. Checked when made; what is inside asks no more."""

    model: ModelSpec
    batch: Batch
    plan: PlanOptions = field(default_factory=PlanOptions)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    name: Annotated[str | int | float | None, key("of the run directory; null: time, model and plan")] = None
    site_file: Annotated[str | None, key("plan for this site file instead of asking Slurm")] = None
    vocabulary: Annotated[str | None, key("the site's own file of node features, see slurm/")] = None
    partitions: Annotated[
        str | tuple[str, ...] | None, key("[gpu, gpu-old]: only these are used; null: those that fit best")
    ] = None
    calibration: Annotated[str | None, key("a file of `holmes calibrate`, or a layer profile (docs/planner.md)")] = None
    plan_file: Annotated[str | None, key("run this plan instead of planning")] = None
    checkpoint: Annotated[
        str | None,
        key(
            "begin with this one: checkpoints/step-… of any run of the model, a folder "
            "of `holmes import`, or hf:DIR, a Hugging Face folder; with its own once the "
            "run has one"
        ),
    ] = None
    labels: Annotated[
        Mapping[str, Any], key("words for reports: +labels.system=… +labels.session=… (docs/results.md)")
    ] = field(default_factory=dict)
    run_dir: Annotated[str | None, key("the run directory; null: $HOLMES_RUNS or runs/, and the run's name")] = None

    def __post_init__(self) -> None:
        check(self, "configuration")
        is_muon = self.train.optimizer == "muon"
        refuse(
            "train.optimizer",
            (
                is_muon and self.plan.distributed_optimizer,
                "Megatron-Core's Muon cannot be shared out over data-parallel ranks",
                "add plan.distributed_optimizer=false",
            ),
            (is_muon and self.train.dtype == "fp16", "Megatron-Core's Muon takes no fp16", "use train.dtype=bf16"),
        )

    @property
    def local(self) -> bool:
        """The ranks are processes of this machine."""
        return self.launcher.kind == "local"

    def with_train(self, **changes: Any) -> Configuration:
        """A copy with other values in the group `train`."""
        return replace(self, train=replace(self.train, **changes))

    def with_data(self) -> Configuration:
        """A copy that says which tokens are trained on. Where nobody said, a model for trying takes random ones, with
        which nothing is learned; ConfigError for any other."""
        data, is_large = self.data, self.model.hidden > FOR_TRYING and not self.train.measure
        refuse(
            "",
            (
                data.prefix and data.kind != "indexed",
                f"data.prefix is {data.prefix!r}, data.kind is {data.kind or 'not given'}",
                "add data=indexed, or leave data.prefix out",
            ),
            (
                data.kind is None and is_large,
                f"data: no data are given for {self.model.name}",
                "give data=indexed data.prefix=PREFIX (`holmes data prepare` makes it), or "
                "data=synthetic for random tokens, which measure speed and teach nothing",
            ),
        )
        return self if data.kind is not None else replace(self, data=replace(data, kind="synthetic"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as run.yaml records it; :func:`from_dict` takes it back."""
        return _plain(asdict(self))


GROUPS: dict[str, type[Any]] = {
    "model": ModelSpec,
    "batch": Batch,
    "plan": PlanOptions,
    "data": DataConfig,
    "train": TrainConfig,
    "slurm": SlurmSettings,
    "launcher": LauncherConfig,
}


def from_dict(data: Mapping[str, Any]) -> Configuration:
    """A composed configuration, checked: one line for the first unknown key, wrong type or range."""
    values = {name: make(GROUPS[name], value, name) if name in GROUPS else value for name, value in data.items()}
    return make(Configuration, values, "configuration")


def recorded(data: Mapping[str, Any]) -> tuple[Configuration, list[str]]:
    """The configuration in a run's record, which an older version may have written: keys that it lacks have their
    defaults, keys that exist no more are left out. And what those are, to be said once. ConfigError where a group that
    has no defaults (model, batch) is missing."""
    said: list[str] = []
    values: dict[str, Any] = {}
    for name, declared in keys(Configuration).items():
        if name not in data:
            if declared.default is not REQUIRED:
                said.append(name)
            continue
        value = data[name]
        if name in GROUPS and isinstance(value, Mapping):
            known = keys(GROUPS[name])
            said += [f"{name}.{k}" for k, d in known.items() if k not in value and d.default is not REQUIRED]
            value = {k: v for k, v in value.items() if k in known}
        values[name] = value
    return from_dict(values), said


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: as YAML has them."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
