"""The program of a job: the user's own modules that it may import, and the versions of the installed packages.

A repeated sweep reuses the result of a job only if configuration and program are the same.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_PYTHON = tuple({str(Path(sysconfig.get_path(key)).resolve()) + "/" for key in ("stdlib", "platstdlib")})
_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_OURS = ("holmes_hpc", "hydra_plugins")  # loaded in every launch, but part of a program only if it imports them


@dataclass(frozen=True)
class Program:
    """A job's program. `files`: {path: digest} of the user's modules; `packages`: ``name-version``, with Python's."""

    files: dict[str, str]
    packages: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((sorted(self.files.items()), self.packages)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        names = [Path(path).name for path in self.files]
        ellipsis = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{ellipsis}, and the versions of {len(self.packages) - 1} packages and Python"


def describe_changes(old: Any, new: Program) -> str:
    """Return a text on how the program `new` differs from `old`, which is a program as recorded in a manifest."""
    if not isinstance(old, dict):
        return "by an unknown program"
    files, packages = old.get("files") or {}, set(old.get("packages") or ())
    changed = [Path(p).name for p in {**files, **new.files} if files.get(p) != new.files.get(p)]
    changed += sorted(set(new.packages) ^ packages, key=str.lower)
    return "by another program: " + ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" * (len(changed) > 3))


def program_of(function: Callable[..., Any]) -> Program | None:
    """Return the program of a job that calls `function`; None if it has no source file (a notebook, ``python -c``)."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    source_object: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        path = str(Path(inspect.getfile(source_object)).resolve(strict=True))
    except (TypeError, OSError):
        return None
    module = sys.modules.get(getattr(source_object, "__module__", ""))
    return _read_program(path, str(getattr(module, "__package__", None) or ""))


@functools.lru_cache
def _read_program(path: str, package: str) -> Program:
    """Return the program whose task function is in the file `path` of the package `package`. It has this file,
    the user's loaded modules, and all user modules that these import, directly or indirectly, even in functions."""
    files: dict[str, str] = {}
    pending = [(path, package)]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] not in _OURS and isinstance(file, str) and _is_user_file(file):
            pending.append((str(Path(file).resolve()), module.__package__ or ""))
    while pending:
        path, package = pending.pop(0)
        if path in files:
            continue
        try:
            text = Path(path).read_bytes()
        except OSError:
            continue
        files[path] = hashlib.sha256(text).hexdigest()[:16]
        if path.endswith(".py"):
            for name in dict.fromkeys(_imports(text, package)):
                pending += _sources(name)
    folders = [Path(folder) for folder in sys.path if folder]
    versions = {p.stem for folder in folders for suffix in ("dist", "egg") for p in folder.glob(f"*.{suffix}-info")}
    return Program(files, (f"Python-{sys.version.split()[0]}", *sorted(versions)))


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Yield the absolute names of the modules that the source `text` may import; for ``from a import b``, a and a.b.
    `package`: the package of the importing module, for relative imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    nodes: list[ast.AST] = [tree]  # and, while they are read, all statements; expressions have no imports
    for node in nodes:
        nodes += (child for child in ast.iter_child_nodes(node) if isinstance(child, _WITH_STATEMENTS))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


@functools.cache
def _sources(name: str) -> tuple[tuple[str, str], ...]:
    """Return (file, package) of the module `name` and of each parent package that is the user's. Import nothing."""
    sources: list[tuple[str, str]] = []
    search_path: tuple[str, ...] | None = None
    for module in itertools.accumulate(name.split("."), "{}.{}".format):
        spec = _find_spec(module, search_path)
        if spec is None or (spec.origin and not _is_user_file(spec.origin)):
            break  # not found; or installed, so that its version is recorded
        locations = spec.submodule_search_locations
        if spec.origin:  # not a namespace package
            sources.append((str(Path(spec.origin).resolve()), module if locations else module.rpartition(".")[0]))
        if not locations:
            break
        search_path = tuple(locations)
    return tuple(sources)


@functools.cache
def _find_spec(name: str, search_path: tuple[str, ...] | None) -> Any:
    """Return the spec of a module, or None. Its parent packages are not imported. `search_path`: its parent's path."""
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            if (spec := finder.find_spec(name, search_path, None)) is not None:
                return spec
    return None


@functools.cache
def _is_user_file(path: str) -> bool:
    """Return whether `path`, a module's file, belongs neither to Python nor to an installed package."""
    if path in ("built-in", "frozen") or any(part in _INSTALLED for part in Path(path).parts):
        return False
    return not str(Path(path).resolve()).startswith(_PYTHON)
