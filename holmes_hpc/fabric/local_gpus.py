"""The GPUs of this machine, as its driver names them: without a GPU library, for planning on the machine itself."""

from __future__ import annotations

import re
from pathlib import Path

from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu

NVIDIA = Path("/proc/driver/nvidia/gpus")


def local_gpus(folder: Path = NVIDIA) -> list[Gpu]:
    """A Gpu each; none where there is no driver, or where a GPU is of an unknown kind."""
    found = []
    for file in sorted(folder.glob("*/information")):
        model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        gpu = read_vocabulary().gpu(model.group(1).lower()) if model else None
        if gpu is None:
            return []
        found.append(gpu)
    return found
