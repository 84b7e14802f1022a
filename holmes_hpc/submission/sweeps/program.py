"""What a job's program is made of: the user's own modules that it can import, and the versions of what is installed.

Two jobs of equal configuration and equal program are one measurement; of another program, an old value is no answer.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_PYTHON = tuple({str(Path(sysconfig.get_path(key)).resolve()) + "/" for key in ("stdlib", "platstdlib")})
_OURS = ("holmes_hpc", "hydra_plugins")  # loaded in every launch; part of a program only where it imports them


@dataclass(frozen=True)
class Program:
    """`files`: path -> digest of each module of the user's; `packages`: ``name-version`` of all that is installed, and
    of Python."""

    files: dict[str, str]
    packages: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((sorted(self.files.items()), self.packages)).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        names = [Path(path).name for path in self.files]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}, and the versions of {len(self.packages) - 1} packages and Python"


def changes(before: Any, now: Program) -> str:
    """In words what differs between a program as a manifest holds it and the present one."""
    if not isinstance(before, dict):
        return "by a program that is not known"
    files, packages = before.get("files") or {}, set(before.get("packages") or ())
    changed = [Path(p).name for p in {**files, **now.files} if files.get(p) != now.files.get(p)]
    changed += sorted(set(now.packages) ^ packages, key=str.lower)
    return "by another program: " + ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" * (len(changed) > 3))


def program_of(function: Callable[..., Any]) -> Program | None:
    """The program that a job of `function` runs; None where it has no source file (a notebook, ``python -c``)."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        path = str(Path(inspect.getfile(named)).resolve(strict=True))
    except (TypeError, OSError):
        return None
    module = sys.modules.get(getattr(named, "__module__", ""))
    return _program(path, str(getattr(module, "__package__", None) or ""))


@functools.lru_cache
def _program(path: str, package: str) -> Program:
    """Of the file with the task function. What its modules import is read from their text, in functions too; modules
    that are loaded now are added, for there are other ways to load one."""
    files: dict[str, str] = {}
    waiting = [(path, package)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _OURS and (source := _own_source(module)):
            waiting.append((source, module.__package__ or ""))
    while waiting:
        path, package = waiting.pop(0)
        if path in files:
            continue
        try:
            text = Path(path).read_bytes()
        except OSError:
            continue
        files[path] = hashlib.sha256(text).hexdigest()[:16]
        if path.endswith(".py"):
            for name in dict.fromkeys(_imports(text, package)):
                waiting += _sources(name)
    return Program(files, _packages())


def _packages() -> tuple[str, ...]:
    found = {
        info.name.rpartition(".")[0]
        for place in sys.path
        if place
        for info in Path(place).glob("*.*-info")
        if info.suffix in (".dist-info", ".egg-info")
    }
    return (f"Python-{sys.version.split()[0]}", *sorted(found))


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Absolute names that a module's text imports; of ``from a import b`` both a and a.b, for b may be a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


@functools.cache
def _sources(name: str) -> tuple[tuple[str, str], ...]:
    """(file, package) of a module and of the packages above it, as far as they are the user's. Nothing is imported."""
    found: list[tuple[str, str]] = []
    search, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]), search)
        if spec is None:
            break
        inside = spec.submodule_search_locations
        if spec.origin and _is_own(spec.origin):
            found.append((str(Path(spec.origin).resolve()), spec.name if inside else spec.name.rpartition(".")[0]))
        elif not inside or spec.origin:
            break  # installed: its version says enough
        if inside is None:
            break
        search = tuple(inside)
    return tuple(found)


@functools.cache
def _spec(name: str, search: tuple[str, ...] | None) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, search, None) if find else None
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is not None:
            return spec
    return None


def _own_source(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    return str(Path(path).resolve()) if isinstance(path, str) and _is_own(path) and Path(path).exists() else None


@functools.cache
def _is_own(path: str) -> bool:
    """Whether a module's file is neither Python's nor installed."""
    if path in ("built-in", "frozen") or any(part in _INSTALLED for part in Path(path).parts):
        return False
    return not str(Path(path).resolve()).startswith(_PYTHON)
