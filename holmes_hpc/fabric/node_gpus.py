"""The GPUs of a node: their kind, memory and GRES type, from GRES and features together."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holmes_hpc.fabric.features import Vocabulary
from holmes_hpc.fabric.nodes import SiteNode
from holmes_hpc.fabric.site import CPU, Gpu

# A feature that states only a memory size: 80gb, gpu80, hbm80g, gpu_mem:80GB. A plain number, or 40g, may be anything.
_SIZE = re.compile(r"(?:(?:gpu|hbm|v?ram|mem)[\W_]?)+(\d+)(?:gi?b?)?|(\d+)gi?b", re.IGNORECASE)
_HOST_MEMORY = re.compile(r"(mem|ram)", re.IGNORECASE)
_FORM_FACTOR = re.compile("pcie|sxm|nvl|hgx|dgx", re.IGNORECASE)
_KIND = re.compile(r"(.*)-(\d+)gb")  # a GPU kind that exists with several memory sizes: a100-80gb
UNKNOWN_GPU = Gpu("gpu", peak_tflops=100.0, memory_gib=16.0, intra_node_gbps=200.0)


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node. `gpu`: their kind, or CPU; `count`: number of GPUs, or of CPU ranks on a node without GPUs;
    `gres_type`: the GPU type that jobs request, if GRES names exactly one; `assumptions`: lines for the user."""

    gpu: Gpu
    count: int = 0
    gres_type: str | None = None
    assumptions: tuple[str, ...] = ()


def node_gpus(node: SiteNode, vocabulary: Vocabulary) -> NodeGpus:
    """Return the GPUs of a node. If their kinds differ, all count as the slowest kind with the smallest memory."""
    if not node.gpus:
        ranks = next((m.ranks for m in node.reading.meanings if m.ranks), 1)
        return NodeGpus(CPU, ranks, assumptions=(f"no GPU in Slurm's GRES: {ranks} CPU rank(s) per node",))
    gpus, assumptions = [], []
    for name in [t for t in node.gpu_types if t] or [_gpu_feature(node, vocabulary)]:
        gpu, assumption = _gpu_with_memory(name, node, vocabulary)
        if gpu is None:
            gpu = replace(UNKNOWN_GPU, name=name or "gpu")
            figures = f"{gpu.peak_tflops:g} TFLOP/s, {gpu.memory_gib:g} GiB assumed; give its figures in a site file"
            assumption = f"GPU type {name or '(none given)'} is not in the vocabulary: {figures}"
        gpus.append(gpu)
        assumptions += [line for line in (assumption, _form_factor_assumption(gpu, name, node, vocabulary)) if line]
    slowest = min(gpus, key=lambda gpu: gpu.peak_tflops)
    if len({gpu.name for gpu in gpus}) > 1:
        assumptions.append(f"GPU types differ inside a node: all are counted as {slowest.name}")
    gpu = replace(slowest, memory_gib=min(gpu.memory_gib for gpu in gpus))
    gres_type = node.gpu_types[0] or None if len(set(node.gpu_types)) == 1 else None
    return NodeGpus(gpu, node.gpus, gres_type, tuple(dict.fromkeys(assumptions)))


def _form_factor_assumption(gpu: Gpu, name: str, node: SiteNode, vocabulary: Vocabulary) -> str | None:
    """Return a line that assumes the GPU to be SXM; None if nothing is assumed. The line is needed if the GPU kind also
    exists as PCIe, and neither `name` nor the node's features show the form factor."""
    prefix = f"{gpu.name.split('-')[0]}-pcie"
    pcie = next((kind.name for _, kind in vocabulary.gpus if kind.name.startswith(prefix)), "")
    if not pcie or "-pcie" in gpu.name or _FORM_FACTOR.search(" ".join((name, *node.features))):
        return None
    problem = f"GPU {name} may be SXM or PCIe, and GRES and features do not show which: SXM assumed"
    return f"{problem}; PCIe has the kind {pcie} in a site file"


def _gpu_feature(node: SiteNode, vocabulary: Vocabulary) -> str:
    """Return the first feature that means a GPU, or the kind that a rule gives it; empty without such a feature."""
    meaning = next((m for m in node.reading.meanings if m.gpu), None)
    if meaning is None:
        return ""
    return meaning.feature if vocabulary.gpu(meaning.feature) else str(meaning.gpu)


def _gpu_with_memory(name: str, node: SiteNode, vocabulary: Vocabulary) -> tuple[Gpu | None, str | None]:
    """Return (the GPU that `name` means on this node, an assumption about its memory or None). If `name` is unknown,
    the GPU is None. If `name` does not state the memory size, the node's GRES and features decide (`a100-80gb`,
    `80gb`), provided that they state only one size. Otherwise the smallest size is assumed."""
    gpu = vocabulary.gpu(name)
    kind = _KIND.fullmatch(gpu.name) if gpu else None
    if gpu is None or kind is None:
        return gpu, None
    matches = [(_KIND.fullmatch(variant.name), variant) for _, variant in reversed(vocabulary.gpus)]  # the first wins
    variants = {int(match[2]): variant for match, variant in matches if match and match[1] == kind[1]}
    smallest = min(variants)
    if len(variants) == 1 or int(kind[2]) != smallest or _names_size(name, smallest):
        return gpu, None
    sizes = {size for size in _sizes(node, kind[1], smallest, vocabulary) if size in variants}
    if len(sizes) == 1:
        return variants[sizes.pop()], None
    choice = " or ".join(str(size) for size in sorted(variants))
    assumption = f"GPU {name} has {choice} GiB, and GRES and features do not show which: {smallest} GiB assumed"
    advice = f"settle it by a feature such as {kind[1]}-{max(variants)}g, or by memory_gib in a site file"
    return variants[smallest], f"{assumption}; {advice}"


def _names_size(text: str, size: int) -> bool:
    return bool(re.search(rf"(?<!\d){size}(?!\d)", text))


def _sizes(node: SiteNode, kind: str, smallest: int, vocabulary: Vocabulary) -> Iterable[int]:
    """Yield the GPU memory, in GiB, that the node's features and GRES state."""
    for gres in node.gres:
        if re.fullmatch(r"(gpu[\W_]?)?v(ram|mem)", gres.name, re.IGNORECASE):
            yield gres.count >> 30 or gres.count  # in bytes, or already in GiB
    for feature in node.features:
        named = vocabulary.gpu(feature)
        match = _KIND.fullmatch(named.name) if named else None
        if match and match[1].split("-")[0] == kind.split("-")[0]:
            if int(match[2]) != smallest or _names_size(feature, smallest):
                yield int(match[2])
        elif (size := _SIZE.fullmatch(feature)) and not _HOST_MEMORY.match(feature):
            yield int(size[1] or size[2])
