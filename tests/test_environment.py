"""environment.yml makes the environment that pyproject.toml asks for."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def members(extra, extras):
    """List the packages of an extra and of the extras that it names."""
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


@pytest.mark.parametrize(("python", "engine"), [("3.10", "0.16.1"), ("3.11", "0.16.1"), ("3.12", "0.19.2")])
def test_an_images_wheels_are_those_of_its_python(python, engine):
    wheels = runpy.run_path(str(ROOT / "containers" / "wheels.py"))
    assert wheels["pinned"]("megatron-core", python) == f"megatron-core=={engine}"
    assert wheels["pinned"]("torch", python).startswith("torch==")
    assert wheels["pinned"]("pyyaml", python) == "pyyaml"
