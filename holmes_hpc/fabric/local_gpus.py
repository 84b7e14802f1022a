"""The GPUs of this machine, named by their driver without a GPU library, for planning on the machine itself."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu

NVIDIA = Path("/proc/driver/nvidia/gpus")
NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE of nvml.h


def local_gpus(folder: Path = NVIDIA) -> list[Gpu]:
    """Return the kind of each GPU of this machine; none without a driver. ConfigError for an unknown kind.
    `folder`: of the driver, with a folder for each GPU."""
    gpus = []
    for name in _names_in_proc(folder) or _names_from_nvml():
        gpu = read_vocabulary().gpu(name.lower().replace(" ", "_"))
        if gpu is None:
            raise ConfigError(
                f"the GPU {name!r} is not a known kind, so its speed and memory are unknown",
                where="this machine",
                hint="describe it in a site file (`gpu:`), or use train.device=cpu",
            )
        gpus.append(gpu)
    return gpus


def _names_in_proc(folder: Path) -> list[str]:
    texts = [file.read_text(errors="replace") for file in sorted(folder.glob("*/information"))]
    return [model[1] for text in texts if (model := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))]


def _names_from_nvml() -> list[str]:
    """Return the GPUs' names by NVML, for containers without the driver's folder; none if NVML is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return []
    except (OSError, AttributeError):
        return []
    try:
        count, names = ctypes.c_uint(), []
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for number in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0 and (
                nvml.nvmlDeviceGetName(device, name, NAME_BYTES) == 0
            ):
                names.append(name.value.decode(errors="replace"))
        return names
    finally:
        nvml.nvmlShutdown()
