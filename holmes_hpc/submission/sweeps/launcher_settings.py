"""The settings of the Hydra launchers holmes_slurm and holmes_local, for plain jobs and for jobs with a plan."""

from dataclasses import dataclass, field, replace
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError
from holmes_hpc.slurm.scontrol import minutes
from holmes_hpc.submission.executor.task import LocalTaskExecutor

# Keys that the launcher uses itself. It passes all other keys on to the executor.
LAUNCHER_KEYS = ("detach", "reuse", "submitit_folder", "max_num_timeout", "array_parallelism")
SIGNAL_DELAY_S = SlurmQueueConf.signal_delay_s
ENVIRONMENT = ("container", "setup")  # launcher keys on which the result of a plain job may depend
# Keys that jobs with a plan may have. The other settings of such jobs come from the plan.
PLAN_JOB_KEYS = ("timeout_min", "account", "qos", "gres", "cpus_per_task", "setup", "container")


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """The settings of hydra/launcher=holmes_slurm: hydra-submitit-launcher's keys, and the components of a job."""

    _target_: str = "hydra_plugins.holmes_launcher.HolmesSlurmLauncher"
    # one mapping per component: {partition, constraint, nodes, tasks_per_node, gpus_per_node, gres, cpus_per_task, …};
    # null: one component from the plain keys. A job with a plan has the plan's components instead.
    components: list[Any] | None = None
    # submit, write sweep.json and return; `holmes sweep status DIR` shows the jobs
    detach: bool = False
    # reuse jobs of an earlier launch into this directory: true, false, ask; null: only with Hydra's basic sweeper
    reuse: Any = None
    container: str | None = None
    dependency: str | None = None
    teardown: list[str] | None = None
    srun_args: list[str] | None = None


@dataclass
class LocalLauncherConf(LocalQueueConf):
    """The settings of hydra/launcher=holmes_local: processes of this machine."""

    _target_: str = "hydra_plugins.holmes_launcher.HolmesLocalLauncher"
    detach: bool = False
    reuse: Any = None
    array_parallelism: int = field(default=0)  # 0: jobs with a plan one at a time, other jobs all at once


def create_executor(config: DictConfig, prefix: str) -> Any:
    """Return submitit's executor for a plain job, with the launcher's parameters from the job's configuration.
    `prefix`: the executor's name, slurmhet or local, which is also the prefix of its own parameters."""
    import submitit

    params: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    del params["_target_"]
    init = {f"{prefix}_max_num_timeout": params["max_num_timeout"]} if "max_num_timeout" in params else {}
    executor = submitit.AutoExecutor(folder=params["submitit_folder"], cluster=prefix, **init)
    if prefix == "local":
        executor._executor = LocalTaskExecutor(params["submitit_folder"], params.get("max_num_timeout", 3))
    generic_keys = set(OmegaConf.structured(BaseQueueConf).keys())
    executor_params = {k: v for k, v in params.items() if k not in LAUNCHER_KEYS}
    is_short = 60 * (minutes(executor_params.get("timeout_min")) or 60) < SIGNAL_DELAY_S + 90
    if executor_params.get("signal_delay_s") == SIGNAL_DELAY_S and is_short:
        # hydra-submitit-launcher's default is too long for so short a job
        del executor_params["signal_delay_s"]
    executor.update_parameters(**{k if k in generic_keys else f"{prefix}_{k}": v for k, v in executor_params.items()})
    return executor


def plan_job_settings(config: DictConfig, settings: SlurmSettings, where: str) -> SlurmSettings:
    """Return the settings of a job with a plan: `settings` (group slurm), overridden by launcher keys that the user
    set. `where`: slurm or local. Raise ConfigError for a launcher key whose value comes from the plan."""
    default = OmegaConf.structured(SlurmLauncherConf if where == "slurm" else LocalLauncherConf)
    keys = {str(k) for k in default} - {*LAUNCHER_KEYS, "name", "_target_", "components"}
    changed = {str(k): v for k, v in config.hydra.launcher.items() if k in keys and v != default[k]}
    for key in changed.keys() - set(PLAN_JOB_KEYS):
        hint = "remove this setting; use keys of the groups plan and slurm instead"
        raise ConfigError(f"{key} comes from the plan", where=f"hydra.launcher.{key}", hint=hint)
    updates = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in changed.items()}
    if config.hydra.launcher.get("components"):
        where = "hydra.launcher.components"
        raise ConfigError("components come from the plan", where=where, hint="remove this setting")
    if where == "slurm" and settings.exclusive is None:  # jobs on shared nodes share NICs, which distorts the figures
        updates["exclusive"] = True
    return replace(settings, **updates)
