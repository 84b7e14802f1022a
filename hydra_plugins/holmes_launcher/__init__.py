"""Registration of the launchers holmes_slurm and holmes_local with Hydra.

Their code is in holmes_hpc/submission/sweeps/launcher.py. Hydra loads all plugins whenever it composes a configuration,
so this module imports that code only when a sweep starts.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from holmes_hpc.submission.sweeps.launcher_settings import LocalLauncherConf, SlurmLauncherConf


class _LazyLauncher(Launcher):
    """A launcher that imports its implementation, which :meth:`load` returns, when it is created."""

    def __init__(self, **params: Any) -> None:
        self._launcher = self.load()(**params)

    @staticmethod
    @abstractmethod
    def load() -> type[Launcher]: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self._launcher.launch(job_overrides, initial_job_idx)


class HolmesSlurmLauncher(_LazyLauncher):
    """The launcher of ``hydra/launcher=holmes_slurm``."""

    @staticmethod
    def load() -> type[Launcher]:
        from holmes_hpc.submission.sweeps.launcher import SlurmLauncher

        return SlurmLauncher


class HolmesLocalLauncher(_LazyLauncher):
    """The launcher of ``hydra/launcher=holmes_local``."""

    @staticmethod
    def load() -> type[Launcher]:
        from holmes_hpc.submission.sweeps.launcher import LocalLauncher

        return LocalLauncher


for _name, _node in (("holmes_slurm", SlurmLauncherConf()), ("holmes_local", LocalLauncherConf())):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="holmes_launcher")
