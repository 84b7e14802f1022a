"""The whole typed configuration of a run: its groups, and the keys outside groups."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Annotated, Any

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.elastic import ElasticConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import TRIAL_MAX_HIDDEN
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import Case, ConfigError, HolmesError, collected, raise_all
from holmes_hpc.records.files import map_leaves
from holmes_hpc.schema import REQUIRED, Checked, key, keys, make


@dataclass(frozen=True)
class LauncherConfig(Checked, where="launcher", dotted=True):
    """The configuration group `launcher`: where to start a run's ranks."""

    kind: Annotated[
        str, key("slurm: one heterogeneous job; local: processes on this machine", one_of=("slurm", "local"))
    ] = "slurm"


@dataclass(frozen=True)
class Configuration(Checked, where="configuration"):
    """All settings of a run. They are checked at construction and need no later check."""

    model: ModelSpec
    batch: Batch
    plan: PlanOptions = field(default_factory=PlanOptions)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    name: Annotated[str | int | float | None, key("name of the run directory; null: from time, model and plan")] = None
    site_file: Annotated[str | None, key("plan for this site file instead of asking Slurm")] = None
    vocabulary: Annotated[str | None, key("file of the site's own feature spellings (slurm/features.site.yaml)")] = None
    partitions: Annotated[
        str | tuple[str, ...] | None, key("use only these partitions: [gpu, gpu-old]; null: those that fit best")
    ] = None
    calibration: Annotated[str | None, key("file of `holmes calibrate`, or a layer profile (docs/planner.md)")] = None
    plan_file: Annotated[str | None, key("run this plan instead of planning")] = None
    checkpoint: Annotated[
        str | None,
        key(
            "initial checkpoint: checkpoints/step-… of any run of the model, a folder of "
            "`holmes import`, or hf:DIR; a run with checkpoints continues from its own"
        ),
    ] = None
    labels: Annotated[
        Mapping[str, Any], key("labels for reports: +labels.system=… +labels.session=… (docs/results.md)")
    ] = field(default_factory=dict)
    run_dir: Annotated[str | None, key("the run directory; null: the run's name under $HOLMES_RUNS or runs/")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.optimizer == "muon" and self.plan.distributed_optimizer is None:
            object.__setattr__(self, "plan", replace(self.plan, distributed_optimizer=False))

    def _mistakes(self) -> Iterator[Case]:
        is_muon, place = self.train.optimizer == "muon", "train.optimizer"
        problem = "Megatron-Core's Muon cannot be sharded over data-parallel ranks"
        yield is_muon and self.plan.distributed_optimizer, problem, "add plan.distributed_optimizer=false", place
        yield is_muon and self.train.dtype == "fp16", "Megatron-Core's Muon lacks fp16", "use train.dtype=bf16", place
        is_local = self.elastic.enabled and self.local
        yield is_local, "one machine has no spare node", "leave out --elastic, or launcher=local", "elastic"

    @property
    def local(self) -> bool:
        """True if the ranks are processes on this machine."""
        return self.launcher.kind == "local"

    def with_data(self) -> "Configuration":
        """Return this configuration with `data.kind` set. For trial models and calibration, null becomes synthetic.
        Raise ConfigError if it is null otherwise, or if `data.prefix` is set but `data.kind` is not indexed."""
        data, is_large = self.data, self.model.hidden > TRIAL_MAX_HIDDEN and not self.train.measure
        problem = f"data.prefix is {data.prefix!r}, data.kind is {data.kind or 'not given'}"
        hint = "add data=indexed, or leave data.prefix out"
        ConfigError.refuse("", (data.prefix and data.kind != "indexed", problem, hint))
        problem = f"data.kind is null: no data are given for {self.model.name}"
        hint = "give data=indexed data.prefix=PREFIX (`holmes data prepare` makes it), or data=synthetic for random"
        hint += " tokens, which measure speed and teach nothing"
        ConfigError.refuse("", (data.kind is None and is_large, problem, hint))
        return self if data.kind is not None else replace(self, data=replace(data, kind="synthetic"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for run.yaml; :func:`from_dict` reads it back."""
        return map_leaves(asdict(self), lambda leaf: leaf)


GROUPS: dict[str, Any] = {name: k.type for name, k in keys(Configuration).items() if is_dataclass(k.type)}


def from_dict(data: Mapping[str, Any]) -> Configuration:
    """Return the configuration with the values in `data`, which were composed from overrides or read from a record.
    Raise ConfigError for unknown keys and wrong values; its `others` has the second and later mistakes."""
    values, errors = dict(data), list[HolmesError]()
    for name in [name for name in data if name in GROUPS]:
        with collected(errors):
            values[name] = make(GROUPS[name], data[name], name)
    raise_all(errors)
    return make(Configuration, values, "configuration")


def recorded(data: Mapping[str, Any]) -> tuple[Configuration, list[str]]:
    """Return (the configuration in a run's record, the names of the keys that it lacks, which get their defaults). Keys
    that no longer exist are dropped. Raise ConfigError if a group without defaults (model, batch) is missing."""
    missing_keys, values = list[str](), dict[str, Any]()
    for name, declared in keys(Configuration).items():
        if name not in data:
            if declared.default is not REQUIRED:
                missing_keys.append(name)
            continue
        value = data[name]
        if name in GROUPS and isinstance(value, Mapping):
            group = keys(GROUPS[name])
            missing_keys += [f"{name}.{k}" for k, d in group.items() if k not in value and d.default is not REQUIRED]
            value = {k: v for k, v in value.items() if k in group}
        values[name] = value
    return from_dict(values), missing_keys
