"""The settings of the Hydra launchers holmes_slurm and holmes_local, and which of them a job with a Plan takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError
from holmes_hpc.slurm.scontrol import minutes

# the launcher's, not the executor's
OWN = ("detach", "reuse", "submitit_folder", "max_num_timeout", "array_parallelism")
SIGNAL_DELAY_S = SlurmQueueConf.signal_delay_s
ENVIRONMENT = ("container", "setup")  # part of what a function's value depends on
OF_A_PLANS_JOB = ("timeout_min", "account", "qos", "gres", "cpus_per_task", "setup", "container")


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """hydra/launcher=holmes_slurm: hydra-submitit-launcher's keys, and the components of a job."""

    _target_: str = "hydra_plugins.holmes_launcher.HolmesSlurmLauncher"
    # one mapping per component: {partition, constraint, nodes, tasks_per_node, gpus_per_node, gres, cpus_per_task, …};
    # null: one component from the plain keys. A job with a Plan has the Plan's components instead.
    components: list[Any] | None = None
    # submit, write sweep.json and return; `holmes sweep status DIR` shows the jobs
    detach: bool = False
    # whether jobs of an earlier launch into this directory count as this one's: true, false, ask; null: true with
    # Hydra's basic sweeper, false with any other
    reuse: Any = None
    container: str | None = None
    dependency: str | None = None
    teardown: list[str] | None = None
    srun_args: list[str] | None = None


@dataclass
class LocalLauncherConf(LocalQueueConf):
    """hydra/launcher=holmes_local: processes of this machine. Jobs with a Plan run one after another."""

    _target_: str = "hydra_plugins.holmes_launcher.HolmesLocalLauncher"
    detach: bool = False
    reuse: Any = None
    array_parallelism: int = field(default=0)  # 0: of jobs with a Plan one at a time, of others all


def executor_of(config: DictConfig, prefix: str) -> Any:
    """A submitit executor (slurmhet, local) with the launcher's parameters, those of this job's own configuration."""
    import submitit

    conf = config.hydra.launcher
    params = {
        str(k): OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v
        for k, v in ((k, conf[k]) for k in conf if k != "_target_")
    }
    init = {f"{prefix}_max_num_timeout": params["max_num_timeout"]} if "max_num_timeout" in params else {}
    executor = submitit.AutoExecutor(folder=params["submitit_folder"], cluster=prefix, **init)
    shared = set(OmegaConf.structured(BaseQueueConf).keys())
    given = {k: v for k, v in params.items() if k not in OWN}
    if given.get("signal_delay_s") == SIGNAL_DELAY_S and 60 * (minutes(given.get("timeout_min")) or 60) < (
        SIGNAL_DELAY_S + 90
    ):  # hydra-submitit-launcher's default: nobody asked for it in so short a job
        del given["signal_delay_s"]
    executor.update_parameters(**{k if k in shared else f"{prefix}_{k}": v for k, v in given.items()})
    return executor


def settings_of_plan(config: DictConfig, settings: SlurmSettings, where: str) -> SlurmSettings:
    """The site's `settings` for a job with a Plan that runs on `where` (slurm, local); launcher keys that were changed
    are taken over or refused."""
    default = OmegaConf.structured(SlurmLauncherConf if where == "slurm" else LocalLauncherConf)
    changed = {
        str(k): v
        for k, v in config.hydra.launcher.items()
        if k in default and k not in (*OWN, "name", "_target_", "components") and v != default[k]
    }
    for key in changed.keys() - set(OF_A_PLANS_JOB):
        raise ConfigError(
            f"{key} is the Plan's to say",
            where=f"hydra.launcher.{key}",
            hint="use the configuration groups plan and slurm",
        )
    taken = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in changed.items()}
    if config.hydra.launcher.get("components"):
        raise ConfigError("components are the Plan's to say", where="hydra.launcher.components", hint="drop it")
    if where == "slurm" and settings.exclusive is None:  # jobs that share nodes share their NICs: no figure is right
        taken["exclusive"] = True
    return replace(settings, **taken)
