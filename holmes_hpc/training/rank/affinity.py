"""CPU binding: keep a rank in its GPU's NUMA domain, because memory and PCIe are slower from other domains."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holmes_hpc.slurm.hostlist import compress, expand

MIN_CPUS = 4  # Python, autograd and NCCL's two threads; with fewer local CPUs, remote ones are better than none


def cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in a kernel CPU list such as ``0-3,8``; none if the text is not such a list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text.strip()):
        return frozenset()
    return frozenset(int(name.removeprefix("c")) for name in expand(f"c[{text.strip()}]"))


def local_cpus(device: Path) -> frozenset[int]:
    """Return the CPUs of a PCI device's NUMA domain; none if the kernel lists none. `device`: its sysfs directory."""
    try:
        return cpu_list((device / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return frozenset()


def choose(allowed: Iterable[int], near: Iterable[int]) -> tuple[frozenset[int], str]:
    """Return the CPUs to bind a rank to, and the reason for this choice as text for the record.

    `allowed`: the CPUs that Slurm gave the rank; `near`: the CPUs in its GPU's NUMA domain.
    """
    allowed, near = frozenset(allowed), frozenset(near)
    local = allowed & near
    reasons_to_stay = (
        (not near, "the kernel does not list the CPUs near its GPU"),
        (allowed <= near, "all near its GPU"),
        (not local, f"none near its GPU (its near CPUs are {format_cpus(near)})"),
        (len(local) < MIN_CPUS, f"only {len(local)} near its GPU, too few to bind to"),
    )
    reason = next((text for holds, text in reasons_to_stay if holds), None)
    return (allowed, reason) if reason else (local, f"near its GPU, of {len(allowed)} allocated")


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers as the kernel writes them: ``0-3,8``."""
    return compress(f"c{n}" for n in sorted(cpus)).replace("c", "").strip("[]")


def bind(gpu: Any, sysfs: Path = Path("/sys")) -> str:
    """Bind this process's threads to the CPUs near its GPU. Return text for the record.

    The text names the CPUs, the reason, and the RDMA devices of the same NUMA domain:
    ``0-15: near its GPU, of 64 allocated; HCA mlx5_0``. `gpu`: torch's device properties. Memory needs no binding: the
    kernel allocates it in the domain of the CPU that first touches it.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    near = local_cpus(sysfs / "bus/pci/devices" / address)
    cpus, reason = choose(allowed, near)
    if cpus != allowed:
        for thread in os.listdir("/proc/self/task"):  # torch's and CUDA's threads too
            with contextlib.suppress(OSError):  # the thread has ended, or the container forbids it
                os.sched_setaffinity(int(thread), cpus)
    devices = sorted((sysfs / "class/infiniband").glob("*"))
    hcas = [device.name for device in devices if near and local_cpus(device / "device") == near]
    return f"{format_cpus(cpus)}: {reason}" + (f"; HCA {', '.join(hcas)}" if hcas else "")
