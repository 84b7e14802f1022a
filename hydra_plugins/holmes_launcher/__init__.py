"""Registers the launchers holmes_slurm and holmes_local with Hydra (code: holmes_hpc.submission.sweeps.launcher)."""

from hydra.core.config_store import ConfigStore

from holmes_hpc.submission.sweeps.launcher import LocalLauncher, SlurmLauncher
from holmes_hpc.submission.sweeps.launcher_settings import LocalLauncherConf, SlurmLauncherConf


class HolmesSlurmLauncher(SlurmLauncher):
    """hydra/launcher=holmes_slurm"""


class HolmesLocalLauncher(LocalLauncher):
    """hydra/launcher=holmes_local"""


for _name, _node in (("holmes_slurm", SlurmLauncherConf()), ("holmes_local", LocalLauncherConf())):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="holmes_launcher")
