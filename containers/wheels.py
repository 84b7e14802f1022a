"""Fetch the wheels that an image lacks beside its torch, and build this project's own, into build/container-wheels.

    python containers/wheels.py [--python 3.12] [--torch]

--python: the Python of the base image; --torch: torch itself as well (for a base without it).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "container-wheels"
ENGINE = ("einops", "safetensors")  # beside Megatron-Core, without what it would pull in
LIGHT = ("hydra-core", "hydra-submitit-launcher", "submitit", "msgspec", "numpy", "psutil", "pyyaml", "rich", "typer")


def pinned(name: str, python: str) -> str:
    """Return a package with its version in constraints.txt for a Python ("3.12"); without one, its bare name.
    pip would evaluate the markers for the Python that it runs on, not for the image's."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for line in map(Requirement, (line for line in lines if line.strip() and not line.startswith("#"))):
        if line.name == name and (line.marker is None or line.marker.evaluate({"python_version": python})):
            return f"{name}{line.specifier}"
    return name


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--python", default="3.12")
    options.add_argument("--torch", action="store_true")
    given = options.parse_args()

    def pip(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT, check=True)

    def fetch(*words: str) -> None:
        pip(
            "download",
            "-q",
            "-d",
            str(WHEELS),
            "--find-links",
            str(WHEELS),
            "--python-version",
            given.python,
            "--only-binary=:all:",
            *words,
        )

    shutil.rmtree(WHEELS, ignore_errors=True)
    pip("wheel", "-q", "--no-deps", "-w", str(WHEELS), ".")
    pip("wheel", "-q", "--no-deps", "-w", str(WHEELS), "antlr4-python3-runtime==4.9.*")  # has no wheel; plain Python
    fetch(*(pinned(name, given.python) for name in LIGHT))
    fetch("--no-deps", pinned("megatron-core", given.python), *ENGINE)
    if given.torch:
        fetch(pinned("torch", given.python))
    print(f"{len(list(WHEELS.glob('*.whl')))} wheels in {WHEELS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
