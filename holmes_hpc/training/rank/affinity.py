"""Keeps a rank on the CPUs beside its GPU: from another NUMA domain's, memory and PCIe are slower."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holmes_hpc.slurm.hostlist import compress, expand

LEAST_CPUS = 4  # Python, autograd, and NCCL's two threads: with fewer, far CPUs are better than none


def cpu_list(text: str) -> frozenset[int]:
    """Return the kernel's ``0-3,8`` as numbers; none where it is no such list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text.strip()):
        return frozenset()
    return frozenset(int(name.removeprefix("c")) for name in expand(f"c[{text.strip()}]"))


def local_cpus(device: Path) -> frozenset[int]:
    """Return the CPUs of a PCI function's NUMA domain, by its folder in sysfs; none where that does not tell."""
    try:
        return cpu_list((device / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return frozenset()


def choose(own: Iterable[int], near: Iterable[int]) -> tuple[frozenset[int], str]:
    """The CPUs to keep of a rank's `own`, when those in `near` are beside its GPU; and why, in words for the record."""
    own, near = frozenset(own), frozenset(near)
    both = own & near
    reasons_to_stay = (
        (not near, "the kernel does not tell which CPUs are beside its GPU"),
        (own <= near, "all beside its GPU"),
        (not both, f"none beside its GPU (those are {spell(near)})"),
        (len(both) < LEAST_CPUS, f"{len(both)} beside its GPU, too few to leave the others"),
    )
    why = next((reason for holds, reason in reasons_to_stay if holds), None)
    return (own, why) if why else (both, f"beside its GPU, of {len(own)} that it was given")


def spell(cpus: Iterable[int]) -> str:
    """Return these numbers as the kernel writes them: ``0-3,8``."""
    return compress(f"c{n}" for n in sorted(cpus)).replace("c", "").strip("[]")


def bind(gpu: Any, sysfs: Path = Path("/sys")) -> str:
    """Keep this process's threads on those of its CPUs that are beside the GPU with these properties, torch's; return
    what was done as text, with the RDMA devices of the same NUMA domain, for the record (``0-15: beside its GPU, of 64
    that it was given; HCA mlx5_0``).

    Memory needs no binding of its own: the kernel takes it from the domain of the CPU that first touches it.
    """
    own = frozenset(os.sched_getaffinity(0))
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    near = local_cpus(sysfs / "bus/pci/devices" / address)
    kept, why = choose(own, near)
    if kept != own:
        for thread in os.listdir("/proc/self/task"):  # torch's and CUDA's threads too
            with contextlib.suppress(OSError):  # one that has ended, or a container that forbids it
                os.sched_setaffinity(int(thread), kept)
    devices = sorted((sysfs / "class/infiniband").glob("*"))
    hcas = [device.name for device in devices if near and local_cpus(device / "device") == near]
    return f"{spell(kept)}: {why}" + (f"; HCA {', '.join(hcas)}" if hcas else "")
