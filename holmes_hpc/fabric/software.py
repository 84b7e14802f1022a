"""The software that training needs, as a node's Python has it: versions, read without importing any of it."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holmes_hpc import __version__
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.slurm.hostlist import compress

NEEDED = ("torch", "megatron-core")
PACKAGES = (*NEEDED, "numpy", "transformer-engine")
CUDA = "torch's CUDA"


def software() -> dict[str, str]:
    """Name -> version of Python, this project, the packages that training uses and are installed here, and the CUDA
    that torch was built for (such builds of torch bring NCCL)."""
    found = {"python": platform.python_version(), "holmes-hpc": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        if built := re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", text, re.MULTILINE):
            found[CUDA] = built[1]
    return found


def check_software(
    nodes: Mapping[str, Mapping[str, str]], here: Mapping[str, str], gpu_nodes: Sequence[str] = ()
) -> list[Finding]:
    """What of the `nodes`' software (node -> :func:`software` there) keeps them from training together, or differs from
    what this machine has (`here`; what it lacks it need not have). `gpu_nodes`: those whose torch must know CUDA."""
    found: list[Finding] = []
    for package in NEEDED:
        if lacking := [n for n, has in nodes.items() if package not in has]:
            found.append(
                Finding(
                    "error",
                    f"nodes {compress(lacking)}",
                    f"their Python has no {package}",
                    "pip install 'holmes-hpc[train]' into the environment that they share with this "
                    "machine, or have slurm.setup load the site's own (docs/install.md)",
                )
            )
    if plain := [n for n in gpu_nodes if "torch" in nodes.get(n, {}) and CUDA not in nodes[n]]:
        found.append(
            Finding(
                "error",
                f"nodes {compress(plain)}",
                "have GPUs, and a torch that is built without CUDA",
                "install a CUDA build of torch (docs/install.md)",
            )
        )
    for name in dict.fromkeys(name for has in nodes.values() for name in has):
        usual = here.get(name) or Counter(has[name] for has in nodes.values() if name in has).most_common(1)[0][0]
        where = "this machine has" if name in here else "others have"
        absent = usual if name in NEEDED else "none"
        other = grouped((has.get(name, "none"), n) for n, has in nodes.items() if has.get(name, absent) != usual)
        found += [
            Finding(
                "warning",
                f"nodes {compress(members)}",
                f"{name} {value}, where {where} {usual}",
                "use one environment, on a file system that all of them see (docs/install.md)",
            )
            for value, members in other
        ]
    return found
