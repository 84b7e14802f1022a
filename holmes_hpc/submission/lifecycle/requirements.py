"""Whether the Megatron-Core that is installed is one that this package takes, and has the optimizer asked for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from holmes_hpc.errors import ConfigError

# Megatron-Core's option `muon` (before 0.18 Muon was a module of its own), and the package that it takes Muon from
MUON = {"megatron-core": ">=0.18", "emerging-optimizers": ">=0.2"}


def check_engine(optimizer: str = "adam") -> None:
    """Raise ConfigError when another Megatron-Core is installed than pyproject.toml asks for, or one without
    `optimizer`; none at all is left to who needs it, for a login node may have none."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        found = version("megatron-core")
        asked = [Requirement(line) for line in requires("holmes-hpc") or []]
    except PackageNotFoundError:
        return
    for requirement in asked:
        if requirement.name == "megatron-core" and not requirement.specifier.contains(found, prereleases=True):
            taken = ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
            raise ConfigError(
                f"{found} is installed, this package takes {taken}",
                where="megatron-core",
                hint=f"pip install 'megatron-core{taken}'",
            )
    for package, taken in MUON.items() if optimizer == "muon" else ():
        have = installed_version(package)
        if have is None or not SpecifierSet(taken).contains(have, prereleases=True):
            raise ConfigError(
                f"muon needs {package}{taken}, {'none' if have is None else have} is installed",
                where="train.optimizer",
                hint=f"pip install '{package}{taken}', which needs Python 3.12, or use train.optimizer=adam",
            )


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
