"""The extra of the distribution that installs a missing package (`pip install 'holmes-hpc[train]'`)."""

import re
from importlib.util import find_spec

from holmes_hpc.errors import ConfigError

DISTRIBUTION = "holmes-hpc"
_OPTIONAL = re.compile(r"(?P<package>[\w.-]+).*extra == [\"'](?P<extra>[\w-]+)[\"']")


def need(module: str) -> None:
    """Raise ConfigError if `module` is not installed, before slow imports of other packages."""
    if find_spec(module) is None:
        raise missing(ModuleNotFoundError(name=module))


def missing(error: ModuleNotFoundError) -> ConfigError:
    """Return an error with the pip command that installs the missing package.

    If the missing module is part of holmes_hpc, raise `error` instead, because that is a bug."""
    module = (error.name or "").partition(".")[0]
    if not module or module == "holmes_hpc":
        raise error
    extra = _extra(module)
    requirement = f"{DISTRIBUTION}[{extra}]" if extra else module
    torch_note = " (without a GPU: torch's CPU build, see docs/install.md)" if module == "torch" else ""
    return ConfigError(
        f"the package {module} is not installed", where="Python", hint=f"pip install '{requirement}'{torch_note}"
    )


def _extra(module: str) -> str | None:
    """Return the extra for users with the fewest packages that installs `module`; None if no such extra does.

    The package has the module's name, or a longer one (`megatron-core` for `megatron`)."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    extras: dict[str, list[str]] = {}
    for match in filter(None, map(_OPTIONAL.match, requirements)):
        if match["extra"] != "dev":
            extras.setdefault(match["extra"], []).append(f"{match['package'].lower()}-")
    candidates = [extra for extra, packages in extras.items() if any(p.startswith(f"{module}-") for p in packages)]
    return min(candidates, key=lambda extra: len(extras[extra]), default=None)
