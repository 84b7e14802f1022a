"""Which extra of the distribution brings a package that is not installed (`pip install 'holmes-hpc[train]'`)."""

from __future__ import annotations

import re
from importlib.util import find_spec

from holmes_hpc.errors import ConfigError

DISTRIBUTION = "holmes-hpc"
_OPTIONAL = re.compile(r"(?P<package>[\w.-]+).*extra == [\"'](?P<extra>[\w-]+)[\"']")


def need(module: str) -> None:
    """ConfigError where `module` is not installed: before others are imported for long."""
    if find_spec(module) is None:
        raise missing(ModuleNotFoundError(name=module))


def missing(error: ModuleNotFoundError) -> ConfigError:
    """The one line for a verb whose extra is not installed. A module of our own that is missing is raised again."""
    module = (error.name or "").partition(".")[0]
    if not module or module == "holmes_hpc":
        raise error
    extra = _extra(module)
    wanted = f"{DISTRIBUTION}[{extra}]" if extra else module
    more = " (without a GPU: docs/install.md, torch's CPU build)" if module == "torch" else ""
    return ConfigError(f"the package {module} is not installed", where="Python", hint=f"pip install '{wanted}'{more}")


def _extra(module: str) -> str | None:
    """The smallest extra with a package of that name, or whose name begins so (megatron-core)."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    extras: dict[str, list[str]] = {}
    for found in filter(None, map(_OPTIONAL.match, lines)):
        extras.setdefault(found["extra"], []).append(f"{found['package'].lower()}-")
    have = [extra for extra, packages in extras.items() if any(p.startswith(f"{module}-") for p in packages)]
    return min(have, key=lambda extra: len(extras[extra]), default=None)
