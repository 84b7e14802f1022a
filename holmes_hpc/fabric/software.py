"""The versions of the software that training needs, read from a node's Python without importing it."""

import importlib.util
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holmes_hpc import __version__
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.slurm.hostlist import compress

NEEDED = ("torch", "megatron-core")
PACKAGES = (*NEEDED, "numpy", "transformer-engine")
CUDA = "torch's CUDA"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def software() -> dict[str, str]:
    """Return the versions of Python, this project and the installed packages that training uses, by name.
    If torch is built with CUDA (and thus NCCL), the result includes the CUDA version."""
    versions = {"python": platform.python_version(), "holmes-hpc": __version__}
    versions |= {package: text for package in PACKAGES if (text := installed_version(package)) is not None}
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        version_file = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        if cuda := re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", version_file, re.MULTILINE):
            versions[CUDA] = cuda[1]
    return versions


def check_software(
    nodes: Mapping[str, Mapping[str, str]], local: Mapping[str, str], gpu_nodes: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield findings on software that prevents the `nodes` from training together or differs from this machine's.
    `nodes`: node -> the result of :func:`software` on it; `local`: the result on this machine, which may lack packages;
    `gpu_nodes`: the nodes that need a torch with CUDA."""
    for package in NEEDED:
        if nodes_without := [n for n, versions in nodes.items() if package not in versions]:
            hint = "pip install 'holmes-hpc[train]' into the environment that they share with this machine"
            hint += ", or let slurm.setup load the site's own (docs/install.md)"
            problem = f"their Python has no {package}"
            yield Finding("error", f"nodes {compress(nodes_without)}", problem, hint)
    if without_cuda := [n for n in gpu_nodes if "torch" in nodes.get(n, {}) and CUDA not in nodes[n]]:
        problem, hint = "have GPUs, but a torch built without CUDA", "install a CUDA build of torch (docs/install.md)"
        yield Finding("error", f"nodes {compress(without_cuda)}", problem, hint)
    for name in dict.fromkeys(name for versions in nodes.values() for name in versions):
        expected = local.get(name) or Counter(v[name] for v in nodes.values() if name in v).most_common(1)[0][0]
        where = "this machine has" if name in local else "others have"
        default = expected if name in NEEDED else "none"  # a lack of these is reported above
        deviating = grouped((v.get(name, "none"), n) for n, v in nodes.items() if v.get(name, default) != expected)
        hint = "use one environment, on a file system that all nodes share (docs/install.md)"
        for value, members in deviating:
            yield Finding("warning", f"nodes {compress(members)}", f"{name} {value}, where {where} {expected}", hint)
