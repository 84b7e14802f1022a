"""environment.yml makes the environment that pyproject.toml asks for."""

import re
from pathlib import Path

import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def members(extra, extras):
    """The packages of an extra, those of the extras that it names included."""
    for one in extras[extra]:
        named = re.fullmatch(r"holmes-hpc\[(.*)\]", one)
        if named:
            for name in named[1].split(","):
                yield from members(name, extras)
        else:
            yield one


def test_conda_environment_equals_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(d for d in conda if isinstance(d, str) and d.startswith("python"))
    pip = next(d["pip"] for d in conda if isinstance(d, dict))
    wanted = {*project["dependencies"], *members("all", project["optional-dependencies"])}
    assert sorted(d for d in pip if not d.startswith("--")) == sorted(wanted)
    assert python == f"python{project['requires-python']}"
