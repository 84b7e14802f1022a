"""The memory of a node's GPUs, from its GRES type and its features together."""

from __future__ import annotations

import re
from collections.abc import Iterable

from holmes_hpc.fabric.features import Vocabulary
from holmes_hpc.fabric.nodes import SiteNode
from holmes_hpc.fabric.site import Gpu

# A feature with a size only: 80gb, gpu80, hbm80g, gpu_mem:80GB. A plain number or 40g may be anything.
_SIZE = re.compile(r"(?:(?:gpu|hbm|v?ram|mem)[\W_]?)+(\d+)(?:gi?b?)?|(\d+)gi?b", re.IGNORECASE)
_HOST_MEMORY = re.compile(r"(mem|ram)", re.IGNORECASE)
_KIND = re.compile(r"(.*)-(\d+)gb")  # a kind of the table with several sizes


def gpu_with_memory(name: str, node: SiteNode, vocabulary: Vocabulary) -> tuple[Gpu | None, str | None]:
    """Return (the GPU that `name` means on this node, an assumption about its memory); (None, None) if unknown.

    If `name` leaves the memory open, a feature of the same kind or one with a size decides, else the smallest."""
    gpu = vocabulary.gpu(name)
    kind = _KIND.fullmatch(gpu.name) if gpu else None
    if gpu is None or kind is None:
        return gpu, None
    variants = {
        int(match[2]): variant
        for _, variant in reversed(vocabulary.gpus)
        if (match := _KIND.fullmatch(variant.name)) and match[1] == kind[1]
    }
    smallest = min(variants)
    if len(variants) == 1 or int(kind[2]) != smallest or _names_size(name, smallest):
        return gpu, None
    sizes = {size for size in _sizes(node, kind[1], smallest, vocabulary) if size in variants}
    if len(sizes) == 1:
        return variants[sizes.pop()], None
    choice = " or ".join(str(size) for size in sorted(variants))
    return variants[smallest], (
        f"GPU {name} has {choice} GiB, and GRES and features do not show which: {smallest} GiB assumed; "
        f"settle it by a feature such as {kind[1]}-{max(variants)}g, or by memory_gib in a site file"
    )


def _names_size(text: str, size: int) -> bool:
    return bool(re.search(rf"(?<!\d){size}(?!\d)", text))


def _sizes(node: SiteNode, kind: str, smallest: int, vocabulary: Vocabulary) -> Iterable[int]:
    """Yield the GPU memory, in GiB, that the node's features and GRES state."""
    for gres in node.gres:
        if re.fullmatch(r"(gpu[\W_]?)?v(ram|mem)", gres.name, re.IGNORECASE):
            yield gres.count >> 30 or gres.count
    for feature in node.features:
        named = vocabulary.gpu(feature)
        match = _KIND.fullmatch(named.name) if named else None
        if match and match[1].split("-")[0] == kind.split("-")[0]:
            if int(match[2]) != smallest or _names_size(feature, smallest):
                yield int(match[2])
        elif (size := _SIZE.fullmatch(feature)) and not _HOST_MEMORY.match(feature):
            yield int(size[1] or size[2])
