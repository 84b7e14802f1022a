"""Checks of a rank's requirements: the version of Megatron-Core, the optimizer, and the number of open files."""

import resource
import socket
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import auto_dtype
from holmes_hpc.fabric.software import installed_version
from holmes_hpc.planning.plan.plan import Plan, early_step_of

MAX_PEERS = 64  # of a rank: larger gloo groups connect only ranks that exchange data
# Since 0.18 Megatron-Core has an option for Muon, whose code is in another package. Before, Muon was a separate module.
MUON = {"megatron-core": ">=0.18", "emerging-optimizers": ">=0.2"}


@cache
def check_megatron_core(optimizer: str = "adam") -> None:
    """Raise ConfigError if the version of Megatron-Core is outside the range in pyproject.toml, or lacks `optimizer`.
    Do nothing if it is not installed, as on some login nodes."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        installed = version("megatron-core")
        requirements = [Requirement(line) for line in requires("holmes-hpc") or []]
    except PackageNotFoundError:
        return
    for requirement in requirements:
        if requirement.name == "megatron-core" and not requirement.specifier.contains(installed, prereleases=True):
            supported = ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
            problem = f"{installed} is installed, holmes_hpc supports {supported}"
            raise ConfigError(problem, where="megatron-core", hint=f"pip install 'megatron-core{supported}'")
    for package, supported in MUON.items() if optimizer == "muon" else ():
        package_version = installed_version(package)
        if package_version is None or not SpecifierSet(supported).contains(package_version, prereleases=True):
            problem = f"muon needs {package}{supported}, {package_version or 'none'} is installed"
            hint = f"pip install '{package}{supported}', which needs Python 3.12, or use train.optimizer=adam"
            raise ConfigError(problem, where="train.optimizer", hint=hint)


def check_training(train: TrainConfig, plan: Plan) -> None:
    """Raise ConfigError if the installed Megatron-Core lacks the optimizer, if Muon would train in fp16, if early steps
    are not planned or cannot be undone, or if a rank to profile does not exist."""
    check_megatron_core(train.optimizer)
    replace(train, early_step=early_step_of(train, plan))
    gpus = [plan.site.pool(c.pool).gpu for c in plan.components]
    lacks_bf16 = train.dtype == "auto" and train.device != "cpu" and auto_dtype(gpus) == "fp16"
    problem = "Megatron-Core's Muon lacks fp16, which train.dtype=auto means on GPUs without bf16"
    hint = "use train.optimizer=adam, or train.dtype=fp32"
    ConfigError.refuse("train.optimizer", (train.optimizer == "muon" and lacks_bf16, problem, hint))
    if train.profile is not None:
        train.profile.check_ranks(plan.world_size)


def allow_open_files(ranks: int, rank: int = 0) -> None:
    """Raise the limit of open files to the need of `rank` of `ranks` ranks. ConfigError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # At least; 8 ranks on one machine opened 101 files each. In large groups, only rank 0 is connected to all ranks.
    needed = 64 + 4 * (min(ranks, MAX_PEERS) if rank else ranks)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            problem = f"a process on {socket.gethostname()} may open {hard} files, rank {rank} needs {needed} or more"
            hint = f"set `ulimit -n {needed}`, or ask for more in /etc/security/limits.conf; Slurm passes the limit on"
            raise ConfigError(problem, where="ulimit -n", hint=hint)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
