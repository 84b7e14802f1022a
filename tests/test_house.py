"""What no other tool holds of the house: no circle between files, none over 400 lines, a sentence at each top,
no import of a module that is gone."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "holmes_hpc"


def test_no_circle_between_files() -> None:
    graph = grimp.build_graph("holmes_hpc", cache_dir=None)
    waits = {module: set(graph.find_modules_directly_imported_by(module)) - {module} for module in graph.modules}
    while free := [module for module, on in waits.items() if not on & waits.keys()]:
        for module in free:
            del waits[module]
    assert not waits, f"import each other in a circle: {sorted(waits)}"


def test_files_stay_short_and_say_what_they_are_for() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path
        assert path.name == "__main__.py" or ast.get_docstring(ast.parse(text)), path


def test_programs_and_tests_import_only_modules_that_exist() -> None:
    """Type checks read the package alone, and linters sort the import of a module that has moved among foreign ones."""
    for folder in ("benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holmes_hpc"):
                    assert find_spec(str(node.module)), f"{path}: {node.module}"
