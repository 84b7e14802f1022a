"""environment.yml makes the environment that pyproject.toml asks for."""

from pathlib import Path

import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def test_conda_environment_equals_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(d for d in conda if isinstance(d, str) and d.startswith("python"))
    pip = next(d["pip"] for d in conda if isinstance(d, dict))
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["tensorboard"]]
    assert sorted(d for d in pip if not d.startswith("--")) == sorted(wanted)
    assert python == f"python{project['requires-python']}"
