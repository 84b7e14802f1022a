"""The GPUs of this machine, named by their driver, for planning on the machine itself."""

import re
import shutil
from pathlib import Path

from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.slurm.commands import partial_outputs

NVIDIA = Path("/proc/driver/nvidia/gpus")
DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # GPU device files in /dev: NVIDIA, AMD, Windows (WSL)


def has_gpu(folder: Path = Path("/dev")) -> bool:
    """Return whether this machine has a GPU that programs can open."""
    return any(any(folder.glob(pattern)) for pattern in DEVICES)


def local_gpus(folder: Path = NVIDIA) -> list[Gpu]:
    """Return the kind of each GPU of this machine; an empty list without a driver. Raise ConfigError for an unknown
    kind. `folder`: the driver's folder, with a subfolder for each GPU. If a container lacks it, nvidia-smi is asked."""
    gpus = []
    texts = (file.read_text(errors="replace") for file in sorted(folder.glob("*/information")))
    models = (re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts)
    for name in [model[1] for model in models if model] or [name for name, _ in nvidia_smi()]:
        gpu = read_vocabulary().gpu(name.lower().replace(" ", "_"))
        if gpu is None:
            problem = f"the GPU {name!r} is not a known kind, so its speed and memory are unknown"
            hint = "describe it in a site file (`gpu:`), or use train.device=cpu"
            raise ConfigError(problem, where="this machine", hint=hint)
        gpus.append(gpu)
    return gpus


def nvidia_smi() -> list[tuple[str, float]]:
    """Return (name, memory in GiB) of each GPU that nvidia-smi shows; an empty list without nvidia-smi."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    text = partial_outputs([query], timeout_s=20)[0][0] if shutil.which(query[0]) else ""
    rows = (line.rpartition(", ") for line in text.splitlines())
    return [(name, round(float(mib) / 1024, 1)) for name, _, mib in rows if mib.replace(".", "").isdecimal()]
