"""The settings of the Hydra launchers holmes_slurm and holmes_local, and which of them a job with a Plan takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError

OWN = ("detach", "submitit_folder", "max_num_timeout", "array_parallelism")  # the launcher's, not the executor's
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
    container: str | None = None
    dependency: str | None = None
    teardown: list[str] | None = None
    srun_args: list[str] | None = None


@dataclass
class LocalLauncherConf(LocalQueueConf):
    """hydra/launcher=holmes_local: processes of this machine. Jobs with a Plan run one after another."""

    _target_: str = "hydra_plugins.holmes_launcher.HolmesLocalLauncher"
    detach: bool = False
    array_parallelism: int = field(default=0)  # 0: of jobs with a Plan one at a time, of others all


def settings_of_plan(config: DictConfig, settings: SlurmSettings, where: str) -> SlurmSettings:
    """The site's `settings` for a job with a Plan that runs on `where` (slurm, local); launcher keys that were changed
    are taken over or refused."""
    default = OmegaConf.structured(SlurmLauncherConf if where == "slurm" else LocalLauncherConf)
    changed = {str(k): v for k, v in config.hydra.launcher.items()
               if k in default and k not in (*OWN, "name", "_target_", "components") and v != default[k]}
    taken: dict[str, Any] = {}
    for key, value in changed.items():
        if key not in OF_A_PLANS_JOB:
            raise ConfigError(f"{key} is the Plan's to say", where=f"hydra.launcher.{key}",
                              hint="use the configuration groups plan and slurm")
        taken[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if config.hydra.launcher.get("components"):
        raise ConfigError("components are the Plan's to say", where="hydra.launcher.components", hint="drop it")
    return replace(settings, **taken)
