"""Whether the Megatron-Core that is installed is one that this package takes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from holmes_hpc.errors import ConfigError


def check_engine() -> None:
    """Raise ConfigError when another Megatron-Core is installed than pyproject.toml asks for; none at all is left to
    who needs it, for a login node may have none."""
    from packaging.requirements import Requirement

    try:
        found = version("megatron-core")
        asked = [Requirement(line) for line in requires("holmes-hpc") or []]
    except PackageNotFoundError:
        return
    for requirement in asked:
        if requirement.name == "megatron-core" and not requirement.specifier.contains(found, prereleases=True):
            taken = ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
            raise ConfigError(f"{found} is installed, this package takes {taken}", where="megatron-core",
                              hint=f"pip install 'megatron-core{taken}'")
